"""One function turns tokens and a grid of coordinates into pixels; two engines evaluate it.

A cell is always asked on a product grid, some x times some y times some t: that covers whole pictures, crops, other
sizes and other frame rates, costs what is asked and no more, and is what the fast engine lives on.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coanerv_codec.config import Config
from coanerv_codec.errors import CoanervError, FormatError
from coanerv_codec.model import AnyDecoder
from coanerv_codec.reference import decode_reference
from coanerv_codec.separable import decode_separable

ENGINES = ("separable", "reference")
LARGEST_TILE = 4096


def tile_within(config: Config, engine: str, budget: int) -> int:
    """Return the largest tile whose working memory is within `budget` bytes: tile^2 positions at the moments of a clip."""
    moments = config.frames + 2  # one beyond each end, to cross-fade clips
    n, heads, inner = config.tokens, config.decoder_heads, config.decoder_heads * config.decoder_head_dim
    if engine == "separable" and config.carriers:
        # Per pixel: the carriers, and the layers' sums per harmonic; per query: the layers. Where a tile has few rows, its
        # memory is that of the sums along x.
        floats = config.carriers * (1 + heads * config.grid[1]) + 2 * moments * (config.mlp_hidden + 3)
    elif engine == "separable" and config.retrieval == "temperature":
        # Per pixel: the factors of all heads and tokens; per query: a head's product, the sum, a layer's output, 1/den.
        floats = heads * n + moments * (3 * (config.mlp_hidden + 1) + heads)
    elif config.carriers:
        # Per query: the weights of all heads and tokens, carriers and waves, the MLP; gamma of both axes in double precision.
        floats = moments * (heads * n + 4 * config.carriers + 2 * config.mlp_hidden + 8 * config.spatial_frequencies)
    else:
        # Per query: gamma, the query, the attended feature twice, the MLP; LAL also keeps the attention itself, twice.
        attention = 2 * heads * n if config.retrieval == "lal" else 0
        floats = moments * (config.gamma_dim + 3 * inner + 2 * config.mlp_hidden + attention)
    least = 4 * floats
    tile = math.isqrt(budget // least)
    if tile < 1:
        raise CoanervError(f"decoding needs at least {least} bytes of working memory; raise --max-memory")
    return min(tile, LARGEST_TILE)


@torch.no_grad()
def decode_grid(
    decoder: AnyDecoder,
    tokens: Tensor,
    x: Tensor,
    y: Tensor,
    t: Tensor,
    *,
    engine: str = "separable",
    tile: int = 64,
    precision: str = "fp32",
) -> Tensor:
    """Tokens [B,N,d] of B cells, their coordinates x [B,W], y [B,H] and t [T] in [0,1] -> pixels [B,T,H,W,3], float32.

    `tile` sets the working memory: at most T * tile^2 pixels are evaluated at a time, whatever the grid. The cells are
    decoded one after the other, so a caller gains nothing by collecting them.
    """
    options = {"engine": engine, "tile": tile, "precision": precision}
    cells = [decode_grids(decoder, cell, [(x[b], y[b], t)], **options)[0] for b, cell in enumerate(tokens)]
    out = cells[0][None] if len(cells) == 1 else torch.stack(cells)
    return out.permute(0, 1, 3, 4, 2)


@torch.no_grad()
def decode_grids(
    decoder: AnyDecoder,
    tokens: Tensor,
    grids: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    engine: str = "separable",
    tile: int = 64,
    precision: str = "fp32",
) -> list[Tensor]:
    """Tokens [N,d] of one cell, grids of coordinates x [W], y [H], t [T] -> planes [T,3,H,W] of each; see `decode_grid`.

    What depends on the tokens alone is computed once for all grids.
    """
    if engine not in ENGINES or precision not in ("fp32", "bf16"):
        raise ValueError(f"no engine {engine!r} in {precision!r}")
    if engine == "reference" or decoder.config.retrieval == "lal":
        planes = [decode_reference(decoder, tokens, *grid, tile) for grid in grids]
    else:
        dtype = torch.bfloat16 if precision == "bf16" else tokens.dtype
        planes = decode_separable(decoder, tokens, grids, tile, dtype)
    for part in planes:
        if not torch.stack(part.aminmax()).isfinite().all():
            raise FormatError("the tokens are beyond what the decoder can compute with; the file is damaged")
    return planes
