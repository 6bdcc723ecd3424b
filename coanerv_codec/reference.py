"""The paper's decoding engine: fused attention, tile by tile. Slow, plain, and what `separable` is measured against."""

import torch
from torch import Tensor

from coanerv_codec.model import AnyDecoder


def decode_reference(decoder: AnyDecoder, tokens: Tensor, x: Tensor, y: Tensor, t: Tensor, tile: int) -> Tensor:
    """Tokens [B,N,d], x [B,W], y [B,H], t [T] -> pixels [B,T,H,W,3]; at most tile x tile pixels x T at a time."""
    out = tokens.new_empty(len(tokens), len(t), y.shape[1], x.shape[1], 3)
    for b in range(len(tokens)):
        for top in range(0, y.shape[1], tile):
            for left in range(0, x.shape[1], tile):
                rows, columns = slice(top, top + tile), slice(left, left + tile)
                out[b, :, rows, columns] = decode_block(decoder, tokens[b], x[b, columns], y[b, rows], t)
    return out


def decode_block(decoder: AnyDecoder, tokens: Tensor, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Tokens [N,d] of one cell, x [w], y [h], t [T] -> pixels [T,h,w,3], all queries at once."""
    grid_t, grid_y, grid_x = torch.meshgrid(t, y, x, indexing="ij")
    q = torch.stack([grid_x, grid_y, grid_t], dim=-1)
    return decoder(tokens[None], q.reshape(1, -1, 3)).view(*q.shape)
