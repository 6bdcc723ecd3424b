"""Coordinates: the grid they lie on and the Fourier features they are encoded with (the paper's gamma)."""

import math

import torch
from torch import Tensor


def frequency_bank(sigma: float, count: int) -> Tensor:
    """Return w [count]: geometric frequencies from 1 to sigma, in float64 rounded once to float32."""
    exponents = torch.arange(count, dtype=torch.float64) / max(count - 1, 1)
    return (sigma**exponents).float()


def encode_axis(u: Tensor, w: Tensor) -> Tensor:
    """Encode coordinates of one axis: u [...], w [k] -> [..., 2k], sines then cosines of pi*u*w."""
    angle = math.pi * u[..., None] * w
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def cell_positions(side: int) -> Tensor:
    """Return the pixels' coordinates (x, y) of a cell, [side*side,2] in [0, 1], x fastest."""
    u = torch.arange(side) / max(side - 1, 1)
    y, x = torch.meshgrid(u, u, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def frame_times(frames: int) -> Tensor:
    """Return the frames' coordinates t [frames]: half-open, as in the paper."""
    return torch.arange(frames) / frames
