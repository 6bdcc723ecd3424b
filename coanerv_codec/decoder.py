"""The paper's coordinate decoder: queries made of encoded coordinates attend to the tokens, an MLP gives the pixel.

Shapes: B cells, N tokens, d token width, Q coordinates, H heads, d_h width of a head, k frequencies per axis.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.config import Config
from coanerv_codec.positions import encode_axis, frequency_bank


class Decoder(nn.Module):
    """The coordinate decoder that all videos share. `engine` evaluates the same function faster."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        d, inner, hidden = config.token_dim, config.decoder_heads * config.decoder_head_dim, config.mlp_hidden
        # What every video's token n has in common, so that the stored tokens carry only what is particular to a video.
        self.base = nn.Parameter(torch.randn(config.tokens, d) * 0.02)
        self.query = nn.Linear(config.gamma_dim, inner, bias=False)
        self.key = nn.Linear(d, inner, bias=False)
        self.value = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d)
        widths = [d] + [hidden] * (config.mlp_depth - 1) + [3]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        # Fixed by the configuration, hence not in a checkpoint.
        self.register_buffer("w_s", frequency_bank(2.0 * config.cell, config.spatial_frequencies), persistent=False)
        self.register_buffer("w_t", frequency_bank(2.0 * config.frames, config.temporal_frequencies), persistent=False)

    @property
    def scale(self) -> float:
        """The factor on the logits, 1/(tau sqrt(d_h)) (LAL has no temperature)."""
        tau = self.config.temperature if self.config.retrieval == "temperature" else 1.0
        return 1.0 / (tau * math.sqrt(self.config.decoder_head_dim))

    def gamma(self, q: Tensor) -> Tensor:
        """Axis-adaptive positional encoding: coordinates [...,3] -> [...,6k]."""
        x, y, t = q.unbind(-1)
        return torch.cat([encode_axis(x, self.w_s), encode_axis(y, self.w_s), encode_axis(t, self.w_t)], dim=-1)

    def keys_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B,N,d] -> K, V, each [B,H,N,d_h]."""
        memory = tokens + self.base
        heads = (self.config.decoder_heads, self.config.decoder_head_dim)
        key, value = (u.unflatten(-1, heads).transpose(1, 2) for u in (self.key(memory), self.value(memory)))
        return key, value

    def forward(self, tokens: Tensor, q: Tensor) -> Tensor:
        """Tokens [B,N,d], coordinates [B,Q,3] or [Q,3] -> pixels [B,Q,3]."""
        gamma = self.gamma(q)
        heads = (self.config.decoder_heads, self.config.decoder_head_dim)
        query = self.query(gamma).unflatten(-1, heads).transpose(-3, -2).expand(len(tokens), -1, -1, -1)
        key, value = self.keys_values(tokens)
        if self.config.retrieval == "temperature":
            feature = functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
        else:
            feature = localized_attention(query, key, value, self.scale, self.config.lal_threshold)
        h = self.mlp[0](self.out(feature.transpose(1, 2).flatten(2)))
        for layer in self.mlp[1:]:
            h = layer(functional.silu(h))
        return h + 0.5

    def at(self, tokens: Tensor, xy: Tensor, t: Tensor) -> Tensor:
        """Tokens [B,N,d], positions [B,Q,2], times [T] -> pixels [B,T,Q,3], every position at every time."""
        xy = xy[:, None].expand(-1, len(t), -1, -1)
        q = torch.cat([xy, t[:, None, None].expand(*xy.shape[:-1], 1)], dim=-1)
        return self(tokens, q.flatten(1, 2)).unflatten(1, (len(t), -1))


def localized_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, threshold: float) -> Tensor:
    """ANR's localized attention: softmax, subtract m, ReLU, renormalise. Shapes as in SDPA."""
    p = torch.softmax(query @ key.transpose(-1, -2) * scale, dim=-1)
    p = torch.relu(p - threshold)
    # A query whose every weight is under m would divide by zero; it then retrieves nothing.
    return (p / p.sum(-1, keepdim=True).clamp_min(1e-12)) @ value
