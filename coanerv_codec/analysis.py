"""Linear analysis: the amplitude of every carrier in the pixels around each token's anchor, and the choice of a token's mode.

A carrier's amplitude is found in two steps: a function of space, shared by all carriers of the same waves in x and y, is taken
in every frame of a window about the token (luma in full, chroma in half resolution); then a function of time over what that
gave. Tokens need not stand a whole number of pixels apart (128 pixels hold 12 rows of 10 2/3), so there is one set of
functions of space for each phase in which a token may stand to the pixels.

A token stores the amplitudes of one set of carriers, that which holds most of what is worth coding. Tokens stand in pairs, and
of a pair one may lend half of its room to the other (`carriers.py`); that, too, is chosen here.

Shapes: B cells, F frames, S side of a cell, N tokens on a grid gx x gy x 1, C carriers, A amplitudes of a token, M sets,
P phases.
"""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from coanerv_codec.carriers import pair_up, partner
from coanerv_codec.config import Config

# Of the functions of space: sums of a thousand pixels must not jump when an optimizer moves every weight by its rate.
SCALE = 0.004
MARGIN = 8  # pixels that a window reaches beyond a token's own part of the cell; even, for chroma
FAINT = 0.004  # amplitudes below this are mostly lost in quantization, so they do not speak for a mode


def window_starts(count: int, cell: int) -> tuple[list[int], int, int]:
    """Where the windows of `count` tokens along `cell` samples begin, their width, and the number of phases."""
    starts = [i * cell // count for i in range(count)]
    return starts, -(-cell // count), count // math.gcd(count, cell)


def window_size(config: Config, chroma: bool) -> tuple[int, int]:
    """Height and width of a token's window, in samples of luma or of chroma in half resolution."""
    cell, margin = (config.cell // 2, MARGIN // 2) if chroma else (config.cell, MARGIN)
    gx, gy, _ = config.grid
    height, width = (window_starts(count, cell)[1] + 2 * margin for count in (gy, gx))
    return height, width


def _halve(planes: Tensor) -> Tensor:
    """Planes [...,h,w] of even sides -> the means of 2x2 samples [...,h/2,w/2]; faster than avg_pool2d on a CPU."""
    rows = planes[..., ::2, :] + planes[..., 1::2, :]
    return (rows[..., ::2] + rows[..., 1::2]) / 4


class Analysis(nn.Module):
    """Clips to amplitudes, linear."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        gx, gy, _ = config.grid
        # Chroma's samples are the coarser ones, so that its phases tell apart all that luma's do.
        self.phases = (window_starts(gy, config.cell // 2)[2], window_starts(gx, config.cell // 2)[2])
        phases = math.prod(self.phases)
        luma, chroma = (math.prod(window_size(config, half)) for half in (False, True))
        self.luma = nn.Parameter(torch.zeros(phases, luma, config.luma_functions))
        self.chroma = nn.Parameter(torch.zeros(phases, 2 * chroma, config.chroma_functions))
        self.time = nn.Parameter(torch.zeros(config.carriers, config.frames))
        # Whole numbers, as the decoder's: which function of space each carrier has, and which carriers each set.
        self.register_buffer("space_of", torch.zeros(config.carriers))
        self.register_buffer("sets", torch.zeros(config.sets, 3, config.amplitudes // 2))

    def forward(self, clips: Tensor) -> Tensor:
        """Clips [B,F,3,S,S] in [0,1] -> amplitudes of all carriers [B,N,C]."""
        with torch.autocast(clips.device.type, enabled=False):
            clips = clips.float() - 0.5
            half = _halve(clips[:, :, 1:])
            found = [self._in_space(clips[:, :, :1], self.luma), self._in_space(half, self.chroma)]
            found = torch.cat(found, dim=-1).index_select(-1, self.space_of.long())  # [B,N,F,C]
            return (found * self.time.T).sum(2)

    def _in_space(self, planes: Tensor, functions: Tensor) -> Tensor:
        """Planes [B,F,ch,h,w], functions [P,ch*height*width,K] -> [B,N,F,K]."""
        py, px = self.phases
        seen = self.windows(planes)
        found = SCALE * torch.bmm(seen.view(py * px, -1, seen.shape[-1]), functions)
        found = found.view(*seen.shape[:-1], -1).permute(2, 3, 0, 4, 1, 5, 6)  # [B,gy/py,py,gx/px,px,F,K]
        return found.reshape(len(planes), self.config.tokens, *found.shape[-2:])

    def windows(self, planes: Tensor) -> Tensor:
        """Planes [B,F,ch,h,w] -> windows [py,px,B,gy/py,gx/px,F,ch*height*width]: tokens of one phase stand together."""
        (gx, gy, _), (py, px) = self.config.grid, self.phases
        chroma = planes.shape[2] > 1
        height, width = window_size(self.config, chroma)
        margin = MARGIN // 2 if chroma else MARGIN
        out = planes.new_empty(py, px, len(planes), gy // py, gx // px, *planes.shape[1:3], height, width)
        ys, xs = (window_starts(count, planes.shape[-1])[0] for count in (gy, gx))
        # Beyond the cell its edge is repeated. The last window ends at most a margin and a pixel behind it.
        padded = functional.pad(planes.flatten(0, 1), (margin, margin + 1) * 2, mode="replicate")
        padded = padded.unflatten(0, planes.shape[:2])
        # Tokens of one phase stand a whole number of pixels apart: their windows are a view, copied in long strokes.
        side = planes.shape[-1]
        for i, j in product(range(py), range(px)):
            seen = padded[..., ys[i] :, xs[j] :].unfold(-2, height, py * side // gy).unfold(-2, width, px * side // gx)
            out[i, j] = seen[..., : gy // py, : gx // px, :, :].permute(0, 3, 4, 1, 2, 5, 6)
        return out.flatten(-3)

    def choose(self, amplitudes: Tensor) -> Tensor:
        """Amplitudes of all carriers [B,N,C] -> the mode of each token [B,N]: its set, plus M if it lends."""
        worth = (amplitudes.detach().square() - FAINT**2).clamp_min(0)
        members = functional.one_hot(self.sets.long(), self.config.carriers).sum(2).to(worth)  # [M,3,C]
        worth = torch.einsum("bnc,mpc->bnpm", worth, members).cumsum(2)  # of the first, the first two, all three parts
        least, usual, most = (pair_up(part) for part in worth.amax(-1).unbind(-1))  # [B,2,N/2] each
        gain = torch.stack([usual.sum(1), least[:, 0] + most[:, 1], most[:, 0] + least[:, 1]]).argmax(0)  # [B,N/2]
        lends = torch.stack([gain == 1, gain == 2], 1)
        parts = 1 + lends.flip(1).long() - lends.long()  # the last part of its set that a token has room for
        index = parts.flatten(1)[..., None, None].expand(-1, -1, 1, worth.shape[-1])
        return worth.gather(2, index)[:, :, 0].argmax(-1) + self.config.sets * lends.flatten(1)

    def pick(self, amplitudes: Tensor, mode: Tensor) -> Tensor:
        """Amplitudes of all carriers [B,N,C], modes [B,N] -> those that the tokens store [B,N,A]."""
        low, high, more = amplitudes.gather(-1, self.sets.long()[mode % self.config.sets].flatten(2)).chunk(3, dim=-1)
        lends = (mode >= self.config.sets)[..., None]
        return torch.cat([low, torch.where(lends, partner(more), high)], dim=-1)
