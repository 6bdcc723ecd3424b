"""Linear analysis: what each token reads from the pixels around its anchor, before the token former improves on it.

The counterpart of the carriers: amplitudes for each mode, from still to moving, and the choice of the set that holds most of
the window's energy, which becomes the token's last values, the switches. A window of pixels about each token, luma
in full and chroma in half resolution, all frames, times one matrix. Tokens need not stand a whole number of pixels apart
(128 pixels hold 12 rows of 10 2/3), so there is one matrix for each phase in which a token may stand to the pixels.

Shapes: B cells, F frames, S side of a cell, N tokens on a grid gx x gy x 1, d token width, A amplitudes, M modes, P phases.
"""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.config import Config

# Of the matrix: sums of ten thousand pixels must not jump when an optimizer moves every weight by its rate.
SCALE = 5e-3
SWITCH = 0.1  # size of a token's switches, which say one bit of its mode each: +SWITCH for 1, -SWITCH for 0
MARGIN = 8  # pixels that a window reaches beyond a token's own part of the cell; even, for chroma


def window_starts(count: int, cell: int) -> tuple[list[int], int, int]:
    """Where the windows of `count` tokens along `cell` samples begin, their width, and the number of phases."""
    starts = [i * cell // count for i in range(count)]
    return starts, -(-cell // count), count // math.gcd(count, cell)


class Analysis(nn.Module):
    """Clips to tokens, linear."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        gx, gy, _ = config.grid
        # Chroma's samples are the coarser ones, so that its phases tell apart all that luma's do.
        self.phases = (window_starts(gy, config.cell // 2)[2], window_starts(gx, config.cell // 2)[2])
        sizes = [
            [width + 2 * margin for _, width, _ in (window_starts(count, cell) for count in (gy, gx))]
            for cell, margin in ((config.cell, MARGIN), (config.cell // 2, MARGIN // 2))
        ]
        inputs = config.frames * sum(channels * math.prod(size) for channels, size in zip((1, 2), sizes, strict=True))
        self.weight = nn.Parameter(torch.zeros(math.prod(self.phases), inputs, config.modes * config.amplitudes))

    def windows(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] -> what each token sees, [py,px,B,gy/py,gx/px,inputs]: tokens of one phase stand together."""
        (gx, gy, _), (py, px) = self.config.grid, self.phases
        clips = clips - 0.5
        half = functional.avg_pool2d(clips[:, :, 1:].flatten(0, 1), 2).unflatten(0, (-1, self.config.frames))
        out = clips.new_empty(py, px, len(clips), gy // py, gx // px, self.weight.shape[1])
        done = 0
        for planes, margin in ((clips[:, :, :1], MARGIN), (half, MARGIN // 2)):
            (ys, height, _), (xs, width, _) = (window_starts(count, planes.shape[-1]) for count in (gy, gx))
            height, width = height + 2 * margin, width + 2 * margin
            # Beyond the cell its edge is repeated. The last window ends at most a margin and a pixel behind it.
            edge = (margin, margin + 1) * 2
            planes = functional.pad(planes.flatten(0, 1), edge, mode="replicate").unflatten(0, planes.shape[:2])
            size = planes[0, :, :, 0, 0].numel() * height * width
            target = out[..., done : done + size].unflatten(-1, (*planes.shape[1:3], height, width))
            # Plain copies of rows of pixels: an index for each pixel would cost several times the time.
            for (i, y), (j, x) in product(enumerate(ys), enumerate(xs)):
                window = planes[..., y : y + height, x : x + width]
                target[i % py, j % px, :, i // py, j // px] = window
            done += size
        return out

    def forward(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] in [0,1] -> tokens [B,N,d]."""
        py, px = self.phases
        with torch.autocast(clips.device.type, enabled=False):
            v = self.windows(clips.float())
            out = SCALE * torch.bmm(v.view(py * px, -1, v.shape[-1]), self.weight)  # [P,B*gy/py*gx/px,MA]
            out = out.view(*v.shape[:-1], -1).permute(2, 3, 0, 4, 1, 5)  # [B,gy/py,py,gx/px,px,MA]
            out = out.reshape(len(clips), self.config.tokens, self.config.modes, -1)  # [B,N,M,A]
            mode = out.detach().square().sum(-1).argmax(-1, keepdim=True)  # [B,N,1]
            chosen = out.gather(2, mode[..., None].expand(-1, -1, -1, out.shape[-1]))[:, :, 0]
            bits = mode >> torch.arange(self.config.switches, device=mode.device) & 1
            return torch.cat([chosen, SWITCH * (2 * bits - 1)], dim=-1)
