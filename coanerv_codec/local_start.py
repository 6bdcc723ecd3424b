"""Initial values with which the model starts *local*: it learns in minutes where random values show the mean picture.

Nothing here changes the architecture, only where training begins (docs/training.md tells what each part gave):
tokens get anchors on a grid, the paper's decoder starts as kernel interpolation between them, and the encoder's attention
starts at the patches (with carriers, the tokens) around each anchor. With carriers, `lapped_start.py` does the rest.
"""

import math

import torch
from torch import Tensor

from coanerv_codec.attention import Attention
from coanerv_codec.decoder import Decoder
from coanerv_codec.lapped_start import choose_waves, start_carriers, start_encoder_direct
from coanerv_codec.model import CoANeRV, Encoder
from coanerv_codec.positions import encode_axis, frequency_bank

CROSS_GAIN = 4.0  # sharpness of the token former's first attention
PATCH_GAIN = 4.0  # so that content is not drowned by position
DETAIL_DIMS = 6  # high spatial frequencies per axis function in a detail head


def anchors(grid: tuple[int, int, int]) -> Tensor:
    """Return token anchors (x,y,t) [N,3] at the centres of a grid, x fastest."""
    x, y, t = ((torch.arange(n) + 0.5) / n for n in grid)
    t, y, x = torch.meshgrid(t, y, x, indexing="ij")
    return torch.stack([x, y, t], dim=-1).reshape(-1, 3)


@torch.no_grad()
def start_local(model: CoANeRV, generator: torch.Generator) -> None:
    """Overwrite the model's random values with the local start, in place."""
    start_encoder(model.encoder)
    if model.config.carriers:
        waves, sets = choose_waves(model.config)
        start_encoder_direct(model.encoder, waves, sets, generator)
        start_carriers(model.decoder, waves, sets, generator)
    else:
        start_decoder(model.decoder, generator)


# --- encoder ------------------------------------------------------------------------------------------------------


def _encoder_axes(encoder: Encoder) -> list[tuple[float, int]]:
    """Highest frequency and number of frequencies per axis of the features that positions and queries start as."""
    width = encoder.config.width
    spatial, fine = 3 * width // 16, 12.0 * encoder.config.cell / 256
    return [(fine, spatial), (fine, spatial), (4.0, width // 2 - 2 * spatial)]


def _features(points: Tensor, axes: list[tuple[float, int]]) -> Tensor:
    """Points [n,3] -> Fourier features [n,D]."""
    return torch.cat([encode_axis(points[:, i], frequency_bank(*axis)) for i, axis in enumerate(axes)], dim=-1)


def _shift(axes: list[tuple[float, int]], offset: tuple[float, float, float]) -> Tensor:
    """Return R [D,D] with _features(p) @ R.T == _features(p + offset): each sin/cos pair is rotated."""
    blocks = []
    for (sigma, count), delta in zip(axes, offset, strict=True):
        angle = math.pi * frequency_bank(sigma, count) * delta
        cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
        blocks.append(torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)], dim=0))
    return torch.block_diag(*blocks)


def start_encoder(encoder: Encoder) -> None:
    """Let token n look at the patches around its anchor, each head at another neighbour in y and t.

    Without attention to patches it looks at the tokens around it, each head in another direction.
    """
    config, axes = encoder.config, _encoder_axes(encoder)
    encoder.queries.copy_(_features(anchors(config.grid), axes))
    encoder.project.weight.mul_(0.5)
    if config.cross:
        side = config.cell // config.patch
        encoder.patch_position.copy_(_features(anchors((side, side, config.frames)), axes))
        encoder.tokenizer.weight.mul_(PATCH_GAIN)
        offsets = [(0.0, dy / side, dt / config.frames) for dt in (-1.5, -0.5, 0.5, 1.5) for dy in (-0.5, 0.5)]
    else:
        gx, gy, _ = config.grid
        offsets = [(1 / gx, 0.0, 0.0), (-1 / gx, 0.0, 0.0), (0.0, 1 / gy, 0.0), (0.0, -1 / gy, 0.0)]
    for i, block in enumerate(encoder.blocks):
        own = [offsets[(i * config.heads + h) % len(offsets)] for h in range(config.heads)]
        _look_nearby(block.cross if config.cross else block.self_attention, axes, own)


def _look_nearby(
    attention: Attention, axes: list[tuple[float, int]], offsets: list[tuple[float, float, float]]
) -> None:
    """Set K = gain Q, with head h's query shifted, so that its logits peak at what stands at anchor + offset."""
    query = attention.query.weight.view(attention.heads, attention.head_dim, -1) * CROSS_GAIN
    attention.key.weight.copy_(query.flatten(0, 1))
    shifted = [head @ _shift(axes, offset) for head, offset in zip(query, offsets, strict=True)]
    attention.query.weight.copy_(torch.cat(shifted))


# --- decoder ------------------------------------------------------------------------------------------------------


def _gaussian(w: Tensor, sigma: float) -> Tensor:
    """Weights a [k] for which sum a_f^2 cos(pi w_f delta) falls off like -delta^2 / (2 sigma^2) near 0."""
    a = torch.exp(-0.5 * (math.pi * w * sigma) ** 2)
    return a * torch.rsqrt((a**2 * (math.pi * w) ** 2).sum()) / sigma


def _envelope(decoder: Decoder, sigma_s: float, sigma_t: float) -> Tensor:
    """Diagonal [6k] which, as W_Q and W_K, makes logit = -|q - anchor|^2 / (2 sigma^2) near the anchor."""
    s, t = _gaussian(decoder.w_s, sigma_s), _gaussian(decoder.w_t, sigma_t)
    return torch.cat([s, s, s, s, t, t]) * decoder.scale**-0.5


def start_decoder(decoder: Decoder, generator: torch.Generator) -> None:
    """Start as kernel interpolation; half of the heads also carry high frequencies, so that content can write texture."""
    config = decoder.config
    decoder.base.copy_(decoder.gamma(anchors(config.grid)))
    spacing = 1.0 / config.grid[0]  # of the anchors along x: the kernels' unit of width
    detail = config.decoder_heads // 2
    head_dim = config.decoder_head_dim
    for h in range(config.decoder_heads):
        rows = slice(h * head_dim, (h + 1) * head_dim)
        if h < config.decoder_heads - detail:
            a = _envelope(decoder, 0.5625 * spacing * 1.35**h, 0.12 * 1.3**h)
            q, k = _envelope_head(a, head_dim, generator)
        else:
            q, k = _detail_head(
                _envelope(decoder, 0.71875 * spacing, 0.2), config.spatial_frequencies, head_dim, generator
            )
        decoder.query.weight[rows], decoder.key.weight[rows] = q, k


def _envelope_head(a: Tensor, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """W_Q and W_K [d_h,6k] of a head that keeps the d_h strongest features of the envelope a."""
    keep = a.argsort(descending=True)[:head_dim]
    diagonal = torch.zeros(head_dim, len(a))
    diagonal[torch.arange(len(keep)), keep] = a[keep]
    noise = 0.01 * torch.randn(2, *diagonal.shape, generator=generator)
    return diagonal + noise[0], diagonal + noise[1]


def _detail_head(a: Tensor, k_s: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """W_Q and W_K of a head with the envelope in its low frequencies and random keys for the high ones."""
    functions = [i * k_s for i in range(4)]  # where sin x, cos x, sin y, cos y begin
    low = [o + i for o in functions for i in range(k_s // 2)] + list(range(4 * k_s, len(a)))
    high = [o + i for o in functions for i in range(k_s // 2 - 1, k_s // 2 - 1 + DETAIL_DIMS)]
    low, high = low[:head_dim], high[: max(0, head_dim - len(low))]
    q, k = torch.zeros(2, head_dim, len(a))
    q[torch.arange(len(low)), low] = k[torch.arange(len(low)), low] = a[low]
    rows = torch.arange(len(low), len(low) + len(high))
    q[rows, high] = 1.0
    k[rows] = 0.35 * torch.randn(len(high), len(a), generator=generator)
    return q, k
