"""The paper's decoding engine: fused attention, tile by tile. Slow, plain, and what `separable` is measured against."""

import torch
from torch import Tensor

from coanerv_codec.model import AnyDecoder


def decode_reference(decoder: AnyDecoder, tokens: Tensor, x: Tensor, y: Tensor, t: Tensor, tile: int) -> Tensor:
    """Tokens [N,d] of a cell, x [W], y [H], t [T] -> planes [T,3,H,W]; at most tile x tile pixels x T at a time."""
    out = tokens.new_empty(len(t), 3, len(y), len(x))
    for top in range(0, len(y), tile):
        for left in range(0, len(x), tile):
            rows, columns = slice(top, top + tile), slice(left, left + tile)
            block = decode_block(decoder, tokens, x[columns], y[rows], t)
            out[:, :, rows, columns] = block.permute(0, 3, 1, 2)
    return out


def decode_block(decoder: AnyDecoder, tokens: Tensor, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Tokens [N,d] of one cell, x [w], y [h], t [T] -> pixels [T,h,w,3], all queries at once."""
    grid_t, grid_y, grid_x = torch.meshgrid(t, y, x, indexing="ij")
    q = torch.stack([grid_x, grid_y, grid_t], dim=-1)
    return decoder(tokens[None], q.reshape(1, -1, 3)).view(*q.shape)
