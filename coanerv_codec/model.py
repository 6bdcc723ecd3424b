"""CoANeRV: a feed-forward encoder from clips to tokens, and a shared decoder from coordinates and tokens to pixels.

Shapes: B cells, F frames, S side of a cell, N tokens, N_p patches, D encoder width, d token width, Q coordinates, H heads.
Values are full-range BT.601 YUV 4:4:4 in [0, 1]; coordinates are (x, y, t) in [0, 1]. See docs/model.md.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.config import Config


def frequency_bank(sigma: float, count: int) -> Tensor:
    """Return w [count]: geometric frequencies from 1 to sigma, in float64 rounded once to float32."""
    exponents = torch.arange(count, dtype=torch.float64) / max(count - 1, 1)
    return (sigma**exponents).float()


def encode_axis(u: Tensor, w: Tensor) -> Tensor:
    """Encode coordinates of one axis: u [...], w [k] -> [..., 2k], sines then cosines of pi*u*w."""
    angle = math.pi * u[..., None] * w
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def pixel_grid(frames: int, height: int, width: int) -> Tensor:
    """Return the paper's grid Omega as [frames*height*width, 3]: x/(W-1), y/(H-1), t/T, x fastest."""
    x = torch.arange(width) / max(width - 1, 1)
    y = torch.arange(height) / max(height - 1, 1)
    t = torch.arange(frames) / frames
    t, y, x = torch.meshgrid(t, y, x, indexing="ij")
    return torch.stack([x, y, t], dim=-1).reshape(-1, 3)


class Attention(nn.Module):
    """Multi-head attention from x to memory (the same tensor for self-attention)."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, heads * head_dim, bias=False)
        self.value = nn.Linear(width, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x [B,n,D], memory [B,m,D] -> [B,n,D]."""
        q, k, v = (
            u.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for u in (self.query(x), self.key(memory), self.value(memory))
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TokenFormerBlock(nn.Module):
    """One pre-norm block: queries attend to the patches, then to each other, then a feed-forward network."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        self.cross_norm, self.self_norm, self.ff_norm = (nn.LayerNorm(width) for _ in range(3))
        self.cross = Attention(width, config.heads, config.head_dim)
        self.self_attention = Attention(width, config.heads, config.head_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, config.feed_forward), nn.GELU(), nn.Linear(config.feed_forward, width)
        )

    def forward(self, r: Tensor, patches: Tensor) -> Tensor:
        """r [B,N,D], patches [B,N_p,D] -> [B,N,D]."""
        r = r + self.cross(self.cross_norm(r), patches)
        s = self.self_norm(r)
        r = r + self.self_attention(s, s)
        return r + self.feed_forward(self.ff_norm(r))


class Encoder(nn.Module):
    """Convolutional tokenizer, token former, projection to d: a clip becomes N x d tokens in one pass."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenizer = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.patch_position = nn.Parameter(torch.randn(config.patches, config.width) * 0.02)
        self.queries = nn.Parameter(torch.randn(config.tokens, config.width) * 0.02)
        self.blocks = nn.ModuleList(TokenFormerBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.project = nn.Linear(config.width, config.token_dim)

    def forward(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] in [0,1] -> tokens [B,N,d]."""
        patches = self.tokenizer(clips.flatten(0, 1) - 0.5)  # [B*F,D,S/P,S/P]
        patches = patches.flatten(2).transpose(1, 2).reshape(len(clips), -1, self.config.width) + self.patch_position
        r = self.queries.expand(len(clips), -1, -1)
        for block in self.blocks:
            r = block(r, patches)
        return self.project(self.norm(r))


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
        self.skip = nn.Linear(config.gamma_dim, hidden, bias=False) if config.gamma_skip else None
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
        if self.skip is not None:
            h = h + self.skip(gamma)
        for layer in self.mlp[1:]:
            h = layer(functional.silu(h))
        return h + 0.5


def localized_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, threshold: float) -> Tensor:
    """ANR's localized attention: softmax, subtract m, ReLU, renormalise. Shapes as in SDPA."""
    p = torch.softmax(query @ key.transpose(-1, -2) * scale, dim=-1)
    p = torch.relu(p - threshold)
    # A query whose every weight is under m would divide by zero; it then retrieves nothing.
    return (p / p.sum(-1, keepdim=True).clamp_min(1e-12)) @ value


class CoANeRV(nn.Module):
    """Encoder and decoder together, as they are trained and stored."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
