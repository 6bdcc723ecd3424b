"""The transformer blocks: attention, the token former's block and the decoder's mixer block.

Shapes: B cells, n and m rows, N tokens, N_p patches, D the width.
"""

from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.config import MIXER_HEAD_DIM, Config


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
    """One pre-norm block: queries attend to the patches if there are any, then to each other, then a feed-forward network."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        self.self_norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.cross = None
        if config.cross:
            self.cross_norm = nn.LayerNorm(width)
            self.cross = Attention(width, config.heads, config.head_dim)
        self.self_attention = Attention(width, config.heads, config.head_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, config.feed_forward), nn.GELU(), nn.Linear(config.feed_forward, width)
        )

    def forward(self, r: Tensor, patches: Tensor | None) -> Tensor:
        """r [B,N,D], patches [B,N_p,D] -> [B,N,D]."""
        if self.cross is not None:
            r = r + self.cross(self.cross_norm(r), patches)
        s = self.self_norm(r)
        r = r + self.self_attention(s, s)
        return r + self.feed_forward(self.ff_norm(r))


class MixerBlock(nn.Module):
    """One pre-norm block in which tokens attend to each other, then a feed-forward network of four times the width."""

    def __init__(self, width: int):
        super().__init__()
        self.self_norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = Attention(width, width // MIXER_HEAD_DIM, MIXER_HEAD_DIM)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x [B,N,D] -> [B,N,D]."""
        s = self.self_norm(x)
        x = x + self.self_attention(s, s)
        return x + self.feed_forward(self.ff_norm(x))
