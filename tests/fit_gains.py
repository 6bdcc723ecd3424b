"""What are the best shares of the bits? Fit the gains of a checkpoint's modes and channels, with all else as it is.

    python tests/fit_gains.py --data DATA --valid VALID --cache CACHE --lambdas 0.015,0.06,0.2 [--per channel] [--out FOLDER]

Tokens are multiplied by the gains before they are quantized and divided by them after, so a channel with more gain is coded
more finely. The gains are fitted on cells of DATA to the loss of training, error plus lambda times rate. Printed are dB and
bytes of the token banks of VALID: cells that stand still, a part of the pixels. `--out` keeps a checkpoint with the gains of
the last lambda, to train on from. Not part of the suite.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from coanerv_codec.bank import encode_bank
from coanerv_codec.carriers import GAIN_RATE, mode_of
from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from coanerv_codec.corpus import build_cache, list_media
from coanerv_codec.encoding import widen_switches
from coanerv_codec.loss import RATE_BITS, pixels_at, quantizer_range
from coanerv_codec.model import CoANeRV
from coanerv_codec.positions import cell_positions, frame_times
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.rate import BANK_CELLS, amplitudes_modes, estimated_bits
from coanerv_codec.rounding import quantized
from coanerv_codec.training_cells import centre_cells

VIDEOS, STEPS, BANKS, POSITIONS, RATE = 160, 160, 2, 384, 0.04


def gains(logarithms: Tensor, tokens: Tensor) -> Tensor:
    """Logarithms of gains [modes,A] or [1,A], tokens [n,N,d] -> the gains of all their values; switches have none."""
    switches = tokens[..., logarithms.shape[1] :]
    of_mode = logarithms.exp()[mode_of(switches) % len(logarithms)]
    return torch.cat([of_mode, torch.ones_like(switches)], dim=-1)


def fit(model: CoANeRV, clips: Tensor, tokens: Tensor, rate_lambda: float, modes: int) -> Tensor:
    """Clips [n,F,3,S,S] uint8 and their tokens [n,N,d] -> logarithms of the gains [modes,A]."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    xy, t = cell_positions(config.cell), frame_times(config.frames)
    logarithms = torch.zeros(modes, config.amplitudes, requires_grad=True)
    optimizer = torch.optim.Adam([logarithms], lr=RATE, betas=(0.9, 0.95))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, 2 * (STEPS - step) / STEPS)
        banks = torch.randint(len(clips) // BANK_CELLS, (BANKS,), generator=generator)
        chosen = (BANK_CELLS * banks[:, None] + torch.arange(BANK_CELLS)).flatten()
        factors = gains(logarithms, tokens[chosen])
        scaled = tokens[chosen] * factors
        step_size = quantizer_range(scaled) / (2.0**RATE_BITS - 2)
        asked = torch.randint(config.cell**2, (len(chosen), POSITIONS), generator=generator)
        stored, switches = quantized(scaled, step_size) / factors, tokens[chosen][..., config.amplitudes :]
        stored = torch.cat([stored[..., : config.amplitudes], switches], dim=-1)
        predicted = model.decoder.at(stored, xy[asked], t)
        mse = (predicted - pixels_at(clips[chosen].float() / 255, asked)).square().mean((1, 2, 3))
        bits = estimated_bits(*amplitudes_modes(scaled, config), step_size) / (len(xy) * len(t))
        optimizer.zero_grad()
        (mse.add(1e-8).sqrt().mean() + rate_lambda * bits.mean()).backward()
        optimizer.step()
    return logarithms.detach()


@torch.no_grad()
def measure(model: CoANeRV, clips: Tensor, tokens: Tensor, owners: list[int], logarithms: Tensor, bits: int):
    """Return the mean PSNR of the videos and the mean bytes of their banks."""
    config = model.config
    asked = torch.randint(config.cell**2, (1024,), generator=torch.Generator().manual_seed(0))
    xy, t = cell_positions(config.cell)[asked], frame_times(config.frames)
    psnr = size = 0.0
    for owner in (videos := sorted(set(owners))):
        own = [i for i, o in enumerate(owners) if o == owner]
        factors = gains(logarithms, tokens[own])
        symbols, z, s = quantize(widen_switches((tokens[own] * factors).numpy(), config.amplitudes), bits)
        stored = torch.from_numpy(dequantize(symbols, z, s)) / factors
        predicted = model.decoder.at(stored, xy.expand(len(own), -1, -1), t).clamp(0, 1)
        wanted = pixels_at(clips[own].float() / 255, asked.expand(len(own), -1))
        psnr -= 10 * math.log10((predicted - wanted).square().mean().item())
        size += len(encode_bank(symbols, bits, z, s, hints=config.hints))
    return psnr / len(videos), size / len(videos)


def main() -> None:
    """Fit and print, first as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "valid", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--lambdas", default="0.015,0.06,0.2")
    parser.add_argument("--per", choices=("mode", "channel"), default="mode")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load_checkpoint(find_checkpoint(options.checkpoint)).model.requires_grad_(False)
    config, cells = model.config, {}
    for name, files in (("data", list_media(options.data)), ("valid", list_media(options.valid))):
        files = files[:: max(1, len(files) // VIDEOS)][:VIDEOS]
        clips, owners = centre_cells(build_cache(files, options.cache / name, config.frames, config.cell), config)
        tokens = torch.cat([model.encoder(part.float() / 255) for part in clips.split(BANK_CELLS)])
        cells[name] = clips, tokens, owners
    modes = config.modes if options.per == "mode" else 1
    logarithms = torch.zeros(modes, config.amplitudes)
    for rate_lambda in [None, *map(float, options.lambdas.split(","))]:
        if rate_lambda is not None:
            logarithms = fit(model, *cells["data"][:2], rate_lambda, modes)
        for bits in (4, 5, 6, 7):
            psnr, size = measure(model, *cells["valid"], logarithms, bits)
            print(f"lambda {rate_lambda}, {bits} bits: {psnr:.2f} dB, {size:,.0f} bytes", flush=True)
    if options.out:
        model.decoder.gain += logarithms / GAIN_RATE
        print(save_checkpoint(model, options.out, "base"))


if __name__ == "__main__":
    main()
