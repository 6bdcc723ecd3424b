"""What the entropy coder will spend on tokens, estimated so that it has a gradient: for training and refinement."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from coanerv_codec.carriers import mode_of
from coanerv_codec.config import Config

BANK_CELLS = 4  # cells that share a quantizer in training, as those of a 256x256 clip do


def amplitudes_modes(tokens: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Tokens [B,N,d] -> their amplitudes [B,N,A] and modes [B,N,M], one-hot. Switches cost a bit each, whatever their size."""
    amplitudes, switches = tokens.split([config.amplitudes, config.token_dim - config.amplitudes], dim=-1)
    return amplitudes, functional.one_hot(mode_of(switches), config.modes).to(tokens)


def estimated_bits(amplitudes: Tensor, modes: Tensor, step: Tensor) -> Tensor:
    """Amplitudes [B,N,A], modes [B,N,M] (one-hot), quantizer step [B,1,1] -> about what the entropy coder spends, [B].

    Like the coder, it expects a magnitude of what a channel has on average in tokens of this mode, times how lively the token
    is, and spends what a two-sided geometric distribution with that mean does. The gradient passes the rounding in proportion
    to how near a value is to where it would be rounded otherwise: what is zero would save nothing by becoming smaller still.
    """
    scaled = amplitudes.abs() / step.clamp_min(1e-12)
    soft = scaled - torch.sin(2 * math.pi * scaled) / (2 * math.pi)
    size = soft + (scaled.round() - soft).detach()
    banks = math.gcd(BANK_CELLS, len(size))
    of_mode = modes.unflatten(0, (-1, banks)).flatten(1, 2)  # [B/4,4N,M]
    sums = of_mode.mT @ size.unflatten(0, (-1, banks)).flatten(1, 2)  # [B/4,M,A]
    means = (sums + 0.1) / (of_mode.sum(1)[..., None] + 1)
    usual = modes @ means.repeat_interleave(banks, 0)  # [B,N,A]
    lively = ((size / usual).clamp_max(4).sum(-1, keepdim=True) + 2) / (size.shape[-1] + 2)
    expected = (usual * lively).clamp_min(0.01)
    return (torch.log2(1 + 2 * expected) + size * torch.log2(1 + 1 / expected)).sum((1, 2))
