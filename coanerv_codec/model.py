"""CoANeRV: a feed-forward encoder from clips to tokens, and a shared decoder from coordinates and tokens to pixels.

Shapes: B cells, F frames, S side of a cell, N tokens, N_p patches, D encoder width, d token width.
Values are full-range BT.601 YUV 4:4:4 in [0, 1]; coordinates are (x, y, t) in [0, 1]. See docs/model.md.
"""

import torch
from torch import Tensor, nn

from coanerv_codec.analysis import Analysis
from coanerv_codec.attention import TokenFormerBlock
from coanerv_codec.carriers import GAIN_RATE, CarrierDecoder, switches_of
from coanerv_codec.config import Config
from coanerv_codec.decoder import Decoder


class Encoder(nn.Module):
    """Tokenizer (patches, or a linear analysis), token former, projection: a clip becomes N x d tokens in one pass."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        if config.cross:
            self.tokenizer = nn.Conv2d(3, config.width, config.patch, config.patch)
            self.patch_position = nn.Parameter(torch.randn(config.patches, config.width) * 0.02)
        self.queries = nn.Parameter(torch.randn(config.tokens, config.width) * 0.02)
        self.blocks = nn.ModuleList(TokenFormerBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.project = nn.Linear(config.width, config.carriers or config.token_dim)
        if config.carriers:
            self.analysis = Analysis(config)
            self.see = nn.Linear(config.carriers, config.width)
            self.mode_base = nn.Parameter(torch.randn(config.modes, config.width) * 0.02)
            self.gain = nn.Parameter(torch.zeros(config.modes, config.amplitudes))  # the decoder's (carriers.py)

    def forward(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] in [0,1] -> tokens [B,N,d]."""
        patches = self._tokenize(clips) if self.config.cross else None
        r = self.queries.expand(len(clips), -1, -1)
        if not self.config.carriers:
            return self._form(r, patches)
        amplitudes = self.analysis(clips)
        mode = self.analysis.choose(amplitudes)
        amplitudes = amplitudes + self._form(r + self.see(amplitudes) + self.mode_base[mode], patches)
        stored = self.analysis.pick(amplitudes, mode) * torch.exp(GAIN_RATE * self.gain)[mode]
        return torch.cat([stored, switches_of(mode, self.config.switches)], dim=-1)

    def _tokenize(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] -> patches [B,N_p,D]."""
        patches = self.tokenizer(clips.flatten(0, 1) - 0.5)  # [B*F,D,S/P,S/P]
        return patches.flatten(2).transpose(1, 2).reshape(len(clips), -1, self.config.width) + self.patch_position

    def _form(self, r: Tensor, patches: Tensor | None) -> Tensor:
        """Queries [B,N,D], patches [B,N_p,D] -> what the token former makes of them, projected [B,N,d or C]."""
        for block in self.blocks:
            r = block(r, patches)
        return self.project(self.norm(r))


AnyDecoder = Decoder | CarrierDecoder


class CoANeRV(nn.Module):
    """Encoder and decoder together, as they are trained and stored."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = CarrierDecoder(config) if config.carriers else Decoder(config)
        if config.carriers:
            self.encoder.gain = self.decoder.gain  # one parameter: what the one multiplies with, the other divides by
