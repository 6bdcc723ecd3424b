"""The decoder of `base`: attention decides *where* a token's values count, carrier waves decide *what they draw*.

The paper's decoder has to learn its texture from attention profiles. Here a token holds amplitudes of C carrier waves:

    a_h(n; x,y) = softmax_i(g(x).k_hi / (tau sqrt(d_h))) softmax_j(g(y).l_hj / (tau sqrt(d_h)))  token n in column i, row j
    u_c(x,y)    = sum_h sum_n a_h(n; x,y) v_hnc
    m_c(x,y,t)  = u_c(x,y) cos(pi j_cx X) cos(pi j_cy Y) cos(pi j_ct T)     X, Y, T: the coordinate in units of the token grid
    pixel       = W m + MLP(m) + 1/2

Attention is modulated by a temperature as in the paper, over the columns and over the rows of the token grid: the keys of
tokens are where they stand, not what they hold, which makes it a product and the decoder cheap (`separable_carriers.py`).
With narrow attention this contains the lapped cosine transforms that classical codecs are built on, and it starts as one
(`lapped_start.py`); from there keys, values and MLP learn. All of time is in the carriers, so retrieval is done once for
all frames.

A wave's phase is the same at every token but for its sign, which is folded into the values, so that equal content gives equal
tokens wherever it stands. The signs of a token's last values, its switches, say which set of waves the others stand for: from
many waves in space (what is still) to coarse ones at every rate of change (what moves). The last switch says that the token
lends: a set has three parts of A/2 waves each, in the order of their importance; a token stores the first two of its set, but
one that lends stores only the first, and in place of its second the third part of its partner, half the grid away. So a
detailed place can have thrice the waves of a flat one at the same number of values.

Before values are read, a small mixer lets the tokens see each other: it costs nothing per pixel.

Shapes: B cells, N tokens, d token width, A amplitudes, M sets, C carriers, H heads, Q positions, T times.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.attention import MixerBlock
from coanerv_codec.config import Config
from coanerv_codec.positions import encode_axis, frequency_bank

GAIN_RATE = (
    3.0  # of the logarithms of the gains: what an optimizer moves them by is this many times what it moves weights by
)
MOST_GAIN = 5.0  # in size, before GAIN_RATE: e^15 and its inverse can be computed with, training stays far below
SWITCH = 0.1  # size of a token's switches, which say one bit of its mode each: +SWITCH for 1, -SWITCH for 0


def switches_of(mode: Tensor, count: int) -> Tensor:
    """Modes [...] -> the switches that say so [...,count]."""
    bits = mode[..., None] >> torch.arange(count, device=mode.device) & 1
    return SWITCH * (2.0 * bits - 1)


def mode_of(switches: Tensor) -> Tensor:
    """Switches [...,count], whose signs count -> modes [...]."""
    return ((switches > 0).long() << torch.arange(switches.shape[-1], device=switches.device)).sum(-1)


def pair_up(tokens: Tensor) -> Tensor:
    """Something of N tokens [B,N,...] -> of the partners in each pair [B,2,N/2,...]."""
    return tokens.unflatten(1, (2, -1))


def partner(tokens: Tensor) -> Tensor:
    """Something of N tokens [B,N,...] -> the same of each token's partner."""
    return pair_up(tokens).flip(1).flatten(1, 2)


class CarrierDecoder(nn.Module):
    """The coordinate decoder that all videos share, with carriers. `engine` evaluates the same function faster."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        waves, width = config.carriers, config.mixer_width
        self.mix = nn.Linear(waves, width)
        self.mode_base = nn.Parameter(torch.randn(config.modes, width) * 0.02)
        self.base = nn.Parameter(torch.randn(config.tokens, width) * 0.02)
        self.mixer = nn.ModuleList(MixerBlock(width) for _ in range(config.mixer_depth))
        self.norm = nn.LayerNorm(width)
        gx, gy, _ = config.grid
        self.key_x = nn.Parameter(torch.randn(config.decoder_heads, gx, 2 * config.spatial_frequencies) * 0.02)
        self.key_y = nn.Parameter(torch.randn(config.decoder_heads, gy, 2 * config.spatial_frequencies) * 0.02)
        self.value = nn.Linear(waves, config.decoder_heads * waves, bias=False)
        self.mixed_value = nn.Linear(width, config.decoder_heads * waves)
        self.linear = nn.Linear(waves, 3)
        widths = [waves] + [config.mlp_hidden] * (config.mlp_depth - 1) + [3]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        # Logarithms of what the amplitudes are multiplied with before they are quantized: each channel's share of the bits,
        # in tokens of each mode.
        self.gain = nn.Parameter(torch.zeros(config.modes, config.amplitudes))
        # Which waves there are is part of the weights: a checkpoint must not depend on how a later version would choose.
        self.register_buffer("harmonics", torch.zeros(waves, 3))
        self.register_buffer("sets", torch.zeros(config.sets, 3, config.amplitudes // 2))  # numbers of carriers
        self.register_buffer("w_s", frequency_bank(2.0 * config.cell, config.spatial_frequencies), persistent=False)

    @property
    def scale(self) -> float:
        """The factor on the logits, 1/(tau sqrt(d_h))."""
        return 1.0 / (self.config.temperature * math.sqrt(self.key_x.shape[-1]))

    def attend(self, axis: int, u: Tensor) -> Tensor:
        """Attention along an axis (0 x, 1 y): coordinates [...] -> what each column or row counts [...,H,count], sum 1."""
        key = self.key_y if axis else self.key_x
        # Logits of a narrow window are large numbers that nearly cancel: in double precision up to their exponential.
        with torch.autocast(u.device.type, enabled=False):
            encoded = encode_axis(u.double(), self.w_s)
            logits = torch.einsum("...g,hng->...hn", encoded, key.double() * self.scale)
            return torch.softmax(logits, dim=-1).to(u.dtype)

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

    def spread(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B,N,d] -> their modes [B,N], and their amplitudes, each at the carrier it stands for [B,N,C]."""
        stored, switches = tokens.split([self.config.amplitudes, self.config.switches], dim=-1)
        mode = mode_of(switches)
        stored = stored * torch.exp(-GAIN_RATE * self.gain)[mode]
        low, high = stored.chunk(2, dim=-1)
        lends = (mode >= self.config.sets)[..., None]
        own, lent = torch.where(lends, 0.0, high), partner(torch.where(lends, high, 0.0))
        where = self.sets.long()[mode % self.config.sets].flatten(2)
        nothing = tokens.new_zeros(*tokens.shape[:-1], self.config.carriers)
        return mode, nothing.scatter(-1, where, torch.cat([low, own, lent], dim=-1))

    def values(self, tokens: Tensor) -> Tensor:
        """Tokens [B,N,d] -> values [B,H,N,C]."""
        mode, amplitudes = self.spread(tokens)
        x = self.mix(amplitudes) + self.mode_base[mode] + self.base
        for block in self.mixer:
            x = block(x)
        values = self.value(amplitudes) + self.mixed_value(self.norm(x))
        return values.unflatten(-1, (self.config.decoder_heads, -1)).transpose(1, 2) * self.signs()

    def retrieve(self, tokens: Tensor, xy: Tensor) -> Tensor:
        """Tokens [B,N,d], positions [B,Q,2] or [Q,2] -> amplitudes u [B,Q,C]."""
        values = self.values(tokens).flatten(1, 2)  # [B,HN,C]
        x, y = (self.attend(axis, u) for axis, u in enumerate(xy.unbind(-1)))
        weights = (y[..., :, None] * x[..., None, :]).flatten(-3)  # [...,Q,HN]
        return weights.expand(len(tokens), -1, -1) @ values

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
        """Tokens [B,N,d], positions [B,Q,2], times [T] -> pixels [B,T,Q,3], every position at every time.

        Carriers of one harmonic in t share their factor in time, so the first layers are applied once for all times.
        """
        u = self.retrieve(tokens, xy) * self.wave(0, xy[..., 0]) * self.wave(1, xy[..., 1])
        first = torch.cat([self.mlp[0].weight, self.linear.weight])  # [hidden+3,C]
        groups = [(self.harmonics[:, 2] == j).nonzero()[:, 0] for j in self.harmonics[:, 2].unique()]
        sums = torch.stack([u[..., group] @ first[:, group].T.to(u) for group in groups], dim=-1)  # [B,Q,hidden+3,J]
        factors = self.wave(2, t)[:, [group[0] for group in groups]]  # [T,J]
        z = torch.einsum("bqoj,tj->btqo", sums, factors) + torch.cat([self.mlp[0].bias, self.linear.bias])
        h, linear = z[..., :-3], z[..., -3:]
        for layer in self.mlp[1:]:
            h = layer(functional.silu(h))
        return linear + h + 0.5
