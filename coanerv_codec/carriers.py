"""The decoder of `base`: attention decides *where* a token's values count, carrier waves decide *what they draw*.

The paper's decoder has to learn its texture from attention profiles. Here a token holds amplitudes of C carrier waves:

    u_c(x,y)   = sum_h sum_n softmax_n(q_h(x,y) . k_hn / (tau sqrt(d_h))) v_hnc      temperature-modulated attention in space
    m_c(x,y,t) = u_c(x,y) cos(pi j_cx X) cos(pi j_cy Y) cos(pi j_ct T)      X, Y, T: the coordinate in units of the token grid
    pixel      = W m + MLP(m) + 1/2

With narrow attention this contains the lapped cosine transforms that classical codecs are built on, and it starts as one
(`lapped_start.py`); from there keys, values and MLP learn. All of time is in the carriers, so retrieval is done once for
all frames.

A wave's phase is the same at every token but for its sign, which is folded into the values, so that equal content gives equal
tokens wherever it stands. The signs of a token's last values, its switches, say which set of waves the others stand for: from
many waves in space (what is still) to coarse ones at every rate of change (what moves). Before keys and values are read, a
small mixer lets the tokens see each other: it costs nothing per pixel.

Shapes: B cells, N tokens, d token width, M modes, C carriers, H heads, Q positions, T times.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.attention import MixerBlock
from coanerv_codec.config import Config
from coanerv_codec.positions import encode_axis, frequency_bank

SWITCH_GAIN = 60.0  # turns a switch, about 0.1 or -0.1 (`analysis.SWITCH`), into a choice


class CarrierDecoder(nn.Module):
    """The coordinate decoder that all videos share, with carriers. `engine` evaluates the same function faster."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        d, waves, width = config.token_dim, config.carriers, config.mixer_width
        inner = config.decoder_heads * config.decoder_head_dim
        self.mix = nn.Linear(d, width)
        self.base = nn.Parameter(torch.randn(config.tokens, width) * 0.02)
        self.mixer = nn.ModuleList(MixerBlock(width) for _ in range(config.mixer_depth))
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(4 * config.spatial_frequencies, inner, bias=False)
        self.key_base = nn.Parameter(torch.randn(config.tokens, inner) * 0.02)  # where token n is read
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(d, config.modes * config.decoder_heads * waves, bias=False)
        self.switch_gain = nn.Parameter(torch.tensor(SWITCH_GAIN))
        self.mixed_value = nn.Linear(width, config.decoder_heads * waves)
        self.linear = nn.Linear(waves, 3)
        widths = [waves] + [config.mlp_hidden] * (config.mlp_depth - 1) + [3]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        # Which waves there are is part of the weights: a checkpoint must not depend on how a later version would choose.
        self.register_buffer("harmonics", torch.zeros(waves, 3))
        self.register_buffer("w_s", frequency_bank(2.0 * config.cell, config.spatial_frequencies), persistent=False)

    @property
    def scale(self) -> float:
        """The factor on the logits, 1/(tau sqrt(d_h))."""
        return 1.0 / (self.config.temperature * math.sqrt(self.config.decoder_head_dim))

    def gamma(self, xy: Tensor) -> Tensor:
        """Positional encoding of positions [...,2] -> [...,4k_s]."""
        return torch.cat([encode_axis(u, self.w_s) for u in xy.unbind(-1)], dim=-1)

    def wave(self, axis: int, u: Tensor) -> Tensor:
        """Values of all carriers' factors along an axis (0 x, 1 y, 2 t): coordinates [...] -> [...,C]."""
        size = self.config.frames if axis == 2 else self.config.cell
        pixels = u * (size if axis == 2 else size - 1) + 0.5  # of the cell, counted from its edge
        cells = pixels * (self.config.grid[axis] / size)  # in units of the token grid
        return torch.cos(math.pi * cells[..., None] * self.harmonics[:, axis])

    def signs(self) -> Tensor:
        """Return the carriers' signs at each token [N,C], +1 or -1: odd harmonics flip from token to token."""
        counts = [torch.arange(n, device=self.harmonics.device) for n in self.config.grid]
        t, y, x = torch.meshgrid(*reversed(counts), indexing="ij")
        steps = torch.stack([x, y, t], dim=-1).reshape(-1, 3).to(self.harmonics) @ self.harmonics.T
        return 1 - 2 * (steps % 2)

    def mode_weights(self, tokens: Tensor) -> Tensor:
        """Tokens [B,N,d] -> how much each mode counts [B,N,M], adding up to one: nearly one for the mode that is meant."""
        weights = tokens.new_ones(*tokens.shape[:-1], 1)
        for up in torch.sigmoid(self.switch_gain * tokens[..., self.config.amplitudes :]).unbind(-1):
            up = up[..., None]
            weights = torch.cat([weights * (1 - up), weights * up], dim=-1)
        return weights

    def keys_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B,N,d] -> keys [B,H,N,d_h], values [B,H,N,C]."""
        x = self.mix(tokens) + self.base
        for block in self.mixer:
            x = block(x)
        x = self.norm(x)
        heads = self.config.decoder_heads
        key = (self.key_base + self.key(x)).unflatten(-1, (heads, -1)).transpose(1, 2)
        value = self.value(tokens).unflatten(-1, (self.config.modes, -1))  # [B,N,M,H*C]
        value = (self.mode_weights(tokens)[..., None] * value).sum(-2) + self.mixed_value(x)
        return key, value.unflatten(-1, (heads, -1)).transpose(1, 2) * self.signs()

    def retrieve(self, tokens: Tensor, xy: Tensor) -> Tensor:
        """Tokens [B,N,d], positions [B,Q,2] or [Q,2] -> amplitudes u [B,Q,C]."""
        key, value = self.keys_values(tokens)
        # Logits of a narrow window are large numbers that nearly cancel, so bf16 would not do here.
        with torch.autocast(tokens.device.type, enabled=False):
            query = self.query(self.gamma(xy)).unflatten(-1, (self.config.decoder_heads, -1)).transpose(-3, -2)
            query = query.expand(len(tokens), -1, -1, -1)
            return functional.scaled_dot_product_attention(
                query, key.to(query.dtype), value.to(query.dtype), scale=self.scale
            ).sum(1)

    def paint(self, m: Tensor) -> Tensor:
        """Modulated carriers [...,C] -> pixels [...,3]."""
        h = self.mlp[0](m)
        for layer in self.mlp[1:]:
            h = layer(functional.silu(h))
        return self.linear(m) + h + 0.5

    def forward(self, tokens: Tensor, q: Tensor) -> Tensor:
        """Tokens [B,N,d], coordinates [B,Q,3] or [Q,3] -> pixels [B,Q,3]."""
        m = self.retrieve(tokens, q[..., :2])
        for axis, u in enumerate(q.unbind(-1)):
            m = m * self.wave(axis, u)
        return self.paint(m)

    def at(self, tokens: Tensor, xy: Tensor, t: Tensor) -> Tensor:
        """Tokens [B,N,d], positions [B,Q,2], times [T] -> pixels [B,T,Q,3], every position at every time."""
        u = self.retrieve(tokens, xy) * self.wave(0, xy[..., 0]) * self.wave(1, xy[..., 1])
        return self.paint(u[:, None] * self.wave(2, t)[:, None])
