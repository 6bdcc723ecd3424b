"""The loss of training, error plus lambda times rate, and its guide: the quality of a few cells while training."""

import math

import torch
from torch import Tensor, nn

from coanerv_codec.bank import encode_bank
from coanerv_codec.encoding import widen_switches
from coanerv_codec.errors import CoanervError
from coanerv_codec.model import CoANeRV
from coanerv_codec.positions import cell_positions, frame_times
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.rate import BANK_CELLS, amplitudes_modes, estimated_bits
from coanerv_codec.recipe import Recipe
from coanerv_codec.rounding import quantized
from coanerv_codec.training_cells import Batch

VALID_POSITIONS = 1024  # per cell, each in all frames
RATE_BITS = 6  # the default --bits, at which the rate is counted


def quantizer_range(tokens: Tensor) -> Tensor:
    """Tokens [B,N,d] -> max - min over each bank of BANK_CELLS cells, [B,1,1], with its gradient.

    The gradient matters: it teaches the encoder not to buy one extreme value with a coarser step for all others.
    """
    size = math.gcd(BANK_CELLS, len(tokens))
    banks = tokens.unflatten(0, (-1, size)).flatten(1)
    return (banks.amax(1) - banks.amin(1)).repeat_interleave(size)[:, None, None]


class TrainingLoss(nn.Module):
    """The model and its loss as one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(self, model: CoANeRV, recipe: Recipe):
        super().__init__()
        self.model, self.recipe = model, recipe
        self.register_buffer("xy", cell_positions(model.config.cell), persistent=False)
        self.register_buffer("t", frame_times(model.config.frames), persistent=False)

    def forward(self, batch: Batch, rate_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, mean squared error per cell [B] and bits per pixel per cell [B]."""
        clips, c = batch.clips.float() / 255, self.model.config
        tokens = self.model.encoder(clips).float()
        extent = quantizer_range(tokens)
        amplitudes, switches = tokens.split([c.amplitudes, c.token_dim - c.amplitudes], dim=-1)
        # `widen_switches` sees to it that those of a file are never rounded to another sign.
        stored = torch.cat([quantized(amplitudes, extent / (2.0 ** batch.bits[:, None, None] - 2)), switches], dim=-1)
        predicted = self.model.decoder.at(stored, self.xy[batch.positions], self.t)  # [B,F,Q,3]
        mse = (predicted - pixels_at(clips, batch.positions)).square().mean((1, 2, 3))
        bits = estimated_bits(*amplitudes_modes(tokens, c), extent / (2.0**RATE_BITS - 2))
        bits_per_pixel = bits / (len(self.xy) * len(self.t))
        # The root weighs easy and hard cells more evenly, which is what a mean of PSNRs asks for.
        distortion = mse.mean() if self.recipe.loss == "mse" else mse.add(1e-8).sqrt().mean()
        return distortion + rate_weight * bits_per_pixel.mean(), mse.detach(), bits_per_pixel.detach()


def pixels_at(clips: Tensor, positions: Tensor) -> Tensor:
    """Clips [B,F,3,S,S], positions [B,Q] into S*S -> their pixels [B,F,Q,3]."""
    index = positions[:, None, None].expand(-1, *clips.shape[1:3], -1)
    return clips.flatten(3).gather(3, index).transpose(2, 3)


@torch.no_grad()
def validate(model: CoANeRV, clips: Tensor, owners: list[int]) -> tuple[float, float]:
    """Sum over videos of PSNR (a fixed part of the pixels, tokens quantized to RATE_BITS) and of the token bank in kilobytes.

    clips [n,F,3,S,S] uint8, owners [n] names the video of each. A guide while training; `evaluate` measures real files.
    """
    c, device = model.config, model.decoder.base.device
    asked = torch.randint(c.cell**2, (VALID_POSITIONS,), generator=torch.Generator().manual_seed(0))
    xy, t = cell_positions(c.cell)[asked].to(device), frame_times(c.frames).to(device)
    total_psnr = total_kilobytes = 0.0
    for owner in dict.fromkeys(owners):
        cells = clips[[i for i, o in enumerate(owners) if o == owner]].float() / 255
        found = model.encoder(cells.to(device)).cpu()
        if not found.isfinite().all():
            raise CoanervError("the run has diverged: its tokens are not finite; start it again with a smaller rate")
        symbols, z, s = quantize(widen_switches(found.numpy(), c.amplitudes), RATE_BITS)
        tokens = torch.from_numpy(dequantize(symbols, z, s)).to(device)
        predicted = model.decoder.at(tokens, xy.expand(len(cells), -1, -1), t).clamp(0, 1).cpu()
        mse = (predicted - pixels_at(cells, asked.expand(len(cells), -1))).square().mean().item()
        total_psnr -= 10 * math.log10(max(mse, 1e-10))
        total_kilobytes += len(encode_bank(symbols, RATE_BITS, z, s, hints=c.hints)) / 1000
    return total_psnr, total_kilobytes
