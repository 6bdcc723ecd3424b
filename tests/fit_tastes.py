"""Where the start of `base` gets its waves: how much 1, 2, 3, ... sets of waves keep of real video, and formulas for the sets.

    python tests/fit_tastes.py --data VIDEOS --cache CACHE

Cuts random cells as training does (along their motion), transforms blocks of 16x11x8 pixels with a cosine transform, and splits
the blocks into M sets so that the best waves of each keep most. Prints the PSNR if everything else were lost and nothing
quantized, the same with lending (`carriers.py`), and for each set the `lapped_start.Taste` that comes closest to its choice of
waves.
"""

import argparse
from pathlib import Path

import numpy as np

from coanerv_codec import corpus
from coanerv_codec.config import PRESETS
from coanerv_codec.lapped_start import Taste, Wave
from coanerv_codec.training_cells import cut_clip

BLOCK = (16, 11, 8)  # x, y, t: about what a token of `base` covers
LUMA, CHROMA = (14, 9, 8), (7, 5, 8)  # harmonics considered
WAVES = [Wave(0, *j) for j in np.ndindex(LUMA)] + [Wave(c, *j) for c in (1, 2) for j in np.ndindex(CHROMA)]


def cosines(size: int, count: int) -> np.ndarray:
    """Return an orthonormal cosine transform's first rows, [count,size]."""
    rows = np.cos(np.pi * np.arange(count)[:, None] * (np.arange(size) + 0.5) / size) * np.sqrt(2 / size)
    rows[0] /= np.sqrt(2)
    return rows


def energies(clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clip [8,3,128,128] -> squared coefficients of its 88 blocks [88,waves], and their whole energy [88]."""
    blocks = (clip[:, :, :121] - 0.5).reshape(8, 3, 11, 11, 8, 16)
    found = []
    for channel, counts in enumerate((LUMA, CHROMA, CHROMA)):
        x, y, t = (cosines(size, count) for size, count in zip(BLOCK, counts, strict=True))
        found.append(np.einsum("tf,yj,xi,fajbi->abxyt", t, y, x, blocks[:, channel], optimize=True).reshape(88, -1))
    return np.concatenate(found, 1).astype(np.float32) ** 2, np.square(blocks).sum((0, 1, 3, 5)).ravel()


def psnrs(sets: list[np.ndarray], energy: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the best set of each block, the error of each cell [cells], and the mean PSNR."""
    kept = np.stack([energy[:, waves].sum(1) for waves in sets], 1)
    error = np.maximum(whole - kept.max(1), 1e-9).reshape(-1, 88).sum(1) / (88 * 3 * np.prod(BLOCK)) + 1e-5
    return kept.argmax(1), error, float(-10 * np.log10(error).mean())


def split(
    modes: int, size: int, energy: np.ndarray, whole: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Return `modes` sets of `size` waves, the weighted energies each was chosen by, and what they keep, in dB."""
    luma = energy[:, : np.prod(LUMA)].reshape(-1, *LUMA)
    changing = luma[..., 1:].sum((1, 2, 3)) / (luma.sum((1, 2, 3)) - luma[:, 0, 0, 0] + 1e-6)
    of = np.argsort(np.argsort(changing)) * modes // len(energy)  # from still to moving
    weight = np.ones(len(energy))
    for _ in range(12):
        sums = [(energy[of == m] * weight[of == m, None]).sum(0) for m in range(modes)]
        sets = [np.argsort(-s)[:size] for s in sums]
        of, error, psnr = psnrs(sets, energy, whole)
        weight = np.repeat(error**-0.5, 88)  # easy and hard cells count alike, as in training
    return sets, sums, psnr


def lend(sums: list[np.ndarray], half: int, energy: np.ndarray, whole: np.ndarray) -> float:
    """Return what is kept, in dB, if of two blocks one may give up `half` of its waves so that the other has as many more."""
    orders = [np.argsort(-s) for s in sums]
    least, usual, most = (
        np.stack([energy[:, order[: parts * half]].sum(1) for order in orders], 1).max(1).reshape(-1, 2, 44)
        for parts in (1, 2, 3)
    )
    kept = np.stack([usual.sum(1), least[:, 0] + most[:, 1], most[:, 0] + least[:, 1]]).max(0).sum(1)  # [cells]
    error = (whole.reshape(-1, 88).sum(1) - kept).clip(1e-9) / (88 * 3 * np.prod(BLOCK)) + 1e-5
    return float(-10 * np.log10(error).mean())


def fit(sums: np.ndarray, size: int, start: Taste) -> Taste:
    """Look for the taste whose first `size` waves hold most of the energies [waves]."""
    rng, best, most = np.random.default_rng(0), start, -1.0
    for trial in range(1500):
        spread = 0.0 if trial == 0 else 0.3 if trial < 500 else 0.1
        taste = Taste(*(v * np.exp(spread * rng.normal()) for v in best))
        order = sorted(range(len(WAVES)), key=lambda i, taste=taste: taste.cost(WAVES[i], BLOCK))[:size]
        if sums[order].sum() > most:
            best, most = taste, sums[order].sum()
    return Taste(*(round(float(v), 2) for v in best))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--cells", type=int, default=700)
    parser.add_argument("--fit", type=int, default=8, help="sets to fit tastes for")
    arguments = parser.parse_args()
    config = PRESETS["base"]
    files = corpus.list_media(arguments.data)
    cached = corpus.build_cache(files, arguments.cache, config.frames, config.cell)
    videos = [item for item in cached.items if item.frames >= config.frames]
    rng = np.random.default_rng(1)
    clips = (cut_clip(cached, videos[rng.integers(len(videos))], rng, config) for _ in range(arguments.cells))
    parts = [energies(clip.numpy() / np.float32(255)) for clip in clips]
    energy, whole = (np.concatenate(part) for part in zip(*parts, strict=True))
    for modes in (1, 2, 4, 8, 16, 32):
        size = config.token_dim - (modes - 1).bit_length()
        sets, _, psnr = split(modes, size, energy, whole)
        print(f"{modes} sets of {size} waves: {psnr:.2f} dB, {len(np.unique(sets))} waves in all")
    for modes in (4, 8):
        half = (config.token_dim - modes.bit_length()) // 2
        _, sums, _ = split(modes, 2 * half, energy, whole)
        print(f"{modes} sets of {2 * half} waves, of which half are lent: {lend(sums, half, energy, whole):.2f} dB")
    size = config.token_dim - (arguments.fit - 1).bit_length()
    _, sums, _ = split(arguments.fit, size, energy, whole)
    tastes = [
        fit(s, size, Taste(0.9, 1.0, 40 / 5 ** (4 * m / arguments.fit), 0.5, 4.0, 4.0)) for m, s in enumerate(sums)
    ]
    chosen = [np.argsort([taste.cost(wave, BLOCK) for wave in WAVES], kind="stable")[:size] for taste in tastes]
    print(f"{arguments.fit} tastes: {psnrs(chosen, energy, whole)[2]:.2f} dB, {len(np.unique(chosen))} waves in all")
    for taste in tastes:
        print(f"  {taste}")


if __name__ == "__main__":
    main()
