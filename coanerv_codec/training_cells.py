"""Cells to train on, cut at random from a corpus, and the cells to validate on.

Cell number i of a run is a pure function of (seed, i): which clip, which crop, which positions are asked. A resumed
run therefore needs no sampler state, and any number of processes together see the same cells as one.
"""

import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from coanerv_codec.config import Config
from coanerv_codec.corpus import Corpus, Item
from coanerv_codec.errors import CoanervError, InputError
from coanerv_codec.motion import find_path, reach

PHOTO_SHARE = 0.1  # of the cells, where there are both
NATIVE_SHARE = 0.75  # of the crops taken at native resolution, as most video is coded
STRATUM = 8  # one position is asked in each STRATUM x STRATUM block, per draw


@dataclass
class Batch:
    """What one training step sees: B cells, the positions asked of each, and how finely its tokens are quantized."""

    clips: Tensor  # [B,F,3,S,S] uint8
    positions: Tensor  # [B,Q] index into S*S, asked in every frame
    bits: Tensor  # [B] of the quantizer that its tokens go through

    def to(self, device: torch.device) -> "Batch":
        """Move everything to a device."""
        return Batch(*(t.to(device, non_blocking=True) for t in (self.clips, self.positions, self.bits)))


def _resize(planes: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize [n,h,w] uint8 to a size (height, width), float, with a filter against aliasing where it shrinks."""
    x = torch.from_numpy(np.array(planes)).float()[:, None]  # a copy: the cache is mapped read-only
    if x.shape[-2:] != size:
        x = functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
    return x[:, 0]


def _crop(y: np.ndarray, uv: np.ndarray, top: int, left: int, side: int, out: int) -> Tensor:
    """Cut a square from frames y [n,H,W], uv [2,n,h,w] -> [n,3,out,out] float. Even numbers keep chroma aligned."""
    luma = _resize(y[:, top : top + side, left : left + side], (out, out))
    half = uv[:, :, top // 2 : (top + side) // 2, left // 2 : (left + side) // 2]
    chroma = [_resize(plane, (out, out)) for plane in half]
    return torch.stack([luma, *chroma], dim=1)


def _even(value: float) -> int:
    return 2 * int(value / 2)


def _square(item: Item, rng: np.random.Generator, cell: int) -> tuple[int, int, int]:
    """Choose top, left, side: most at native resolution, the others up to the whole scene made small."""
    short = min(item.height, item.width)
    side = _even(min(short, cell if rng.random() < NATIVE_SHARE else cell * (short / cell) ** rng.random()))
    return _even(rng.integers(item.height - side + 1)), _even(rng.integers(item.width - side + 1)), side


def cut_clip(corpus: Corpus, item: Item, rng: np.random.Generator, config: Config) -> Tensor:
    """One training cell [F,3,S,S] uint8 from a video: random window, speed, direction, crop and flip."""
    y, uv = corpus.planes(item)
    span = config.frames
    stride = 2 if rng.random() < 0.15 and item.frames >= 2 * span else 1
    start = int(rng.integers(item.frames - stride * (span - 1)))
    window = slice(start, start + stride * (span - 1) + 1, stride)
    square = _square(item, rng, config.cell)
    clip = _crop(y[window], uv[:, window], *square, config.cell)
    path = find_path(clip[:, 0].numpy() / 255)
    if path.any():
        clip = _crop_along(y[window], uv[:, window], *square, config.cell, path)
    if rng.random() < 0.5:
        clip = clip.flip(0)
    return _to_uint8(clip, rng)


def _crop_along(y: np.ndarray, uv: np.ndarray, top: int, left: int, side: int, out: int, path: np.ndarray) -> Tensor:
    """Cut a square that moves along a path [F,2], (x, y) in pixels of the result, as the encoder would see it."""
    _, height, width = y.shape
    scale = side / out
    reaches = reach(path)
    margin = 2 * math.ceil((2 * reaches.max() * scale + 4) / 2)
    y0, y1 = max(0, top - margin), min(_even(height), top + side + margin)
    x0, x1 = max(0, left - margin), min(_even(width), left + side + margin)
    size = round((y1 - y0) / scale), round((x1 - x0) / scale)
    luma = _resize(y[:, y0:y1, x0:x1], size)
    whole = torch.stack([luma, *(_resize(p[:, y0 // 2 : y1 // 2, x0 // 2 : x1 // 2], size) for p in uv)], dim=1)
    axes = []
    for axis, (start, first, length) in enumerate(((left, x0, size[1]), (top, y0, size[0]))):
        u = (start - first) / scale - reaches[axis] + np.arange(out) * (out - 1 + 2 * reaches[axis]) / (out - 1)
        moved = u + path[:, axis, None]  # [F,out]
        axes.append(torch.from_numpy((2 * moved + 1) / length - 1).float())
    grid = torch.stack([axes[0][:, None].expand(-1, out, -1), axes[1][:, :, None].expand(-1, -1, out)], dim=-1)
    return functional.grid_sample(whole, grid, mode="bicubic", padding_mode="border", align_corners=False)


def pan_photo(corpus: Corpus, item: Item, rng: np.random.Generator, config: Config) -> Tensor:
    """One training cell [F,3,S,S] uint8 from a photo: the crop glides and zooms."""
    y, uv = corpus.planes(item)
    top, left, side = _square(item, rng, config.cell)
    whole = _crop(y, uv, top, left, side, max(side, config.cell))
    zoom = 1 - 0.3 * rng.random(2)  # side of the view at the start and at the end, as a share of the crop
    centre = rng.uniform(-1, 1, (2, 2)) * (1 - zoom)[:, None]
    theta = torch.zeros(config.frames, 2, 3)
    for f, u in enumerate(np.linspace(0, 1, config.frames)):
        z, c = zoom[0] + u * (zoom[1] - zoom[0]), centre[0] + u * (centre[1] - centre[0])
        theta[f] = torch.tensor([[z, 0, c[0]], [0, z, c[1]]])
    grid = functional.affine_grid(theta, [config.frames, 3, config.cell, config.cell], align_corners=False)
    clip = functional.grid_sample(
        whole.expand(config.frames, -1, -1, -1), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return _to_uint8(clip, rng)


def _to_uint8(clip: Tensor, rng: np.random.Generator) -> Tensor:
    if rng.random() < 0.5:
        clip = clip.flip(-1)
    return clip.round().clamp(0, 255).to(torch.uint8)


def _ask(rng: np.random.Generator, side: int, draws: int) -> np.ndarray:
    """Choose positions [Q]: `draws` random ones in each block (stratified: unbiased, less noise)."""
    blocks = side // STRATUM
    by, bx = np.meshgrid(np.arange(blocks), np.arange(blocks), indexing="ij")
    dy, dx = rng.integers(STRATUM, size=(2, draws, *by.shape))
    return ((by * STRATUM + dy) * side + bx * STRATUM + dx).reshape(-1)


class Cells(IterableDataset):
    """Batches of one process, step after step from `first_step`; rank r of n takes its slice of each step's cells."""

    def __init__(self, corpus: Corpus, config: Config, seed: int, batch: int, bits: tuple[int, ...], draws: int):
        super().__init__()
        self.corpus, self.config, self.seed, self.batch, self.bits, self.draws = (
            corpus,
            config,
            seed,
            batch,
            bits,
            draws,
        )
        self.videos = [i for i in corpus.items if i.frames >= config.frames]
        self.photos = [i for i in corpus.items if i.frames < config.frames]
        if not corpus.items:
            raise InputError(
                f"nothing to train on: no file has {config.frames} frames of {config.cell}x{config.cell} pixels or more"
            )
        self.first_step, self.rank, self.world = 0, 0, 1

    def cell(self, number: int) -> tuple[Tensor, Tensor, int]:
        """Return cell `number` of the run: clip, positions, bits."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        photo = self.photos and (not self.videos or rng.random() < PHOTO_SHARE)
        source, cut = (self.photos, pan_photo) if photo else (self.videos, cut_clip)
        clip = cut(self.corpus, source[rng.integers(len(source))], rng, self.config)
        positions = torch.from_numpy(_ask(rng, self.config.cell, self.draws))
        return clip, positions, int(rng.choice(self.bits))

    def step(self, step: int) -> Batch:
        """Return this rank's part of a step."""
        share = self.batch // self.world
        first = step * self.batch + self.rank * share
        clips, positions, bits = zip(*(self.cell(n) for n in range(first, first + share)), strict=True)
        return Batch(torch.stack(clips), torch.stack(positions), torch.tensor(bits))

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        start, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        step = self.first_step + start
        while True:
            yield self.step(step)
            step += stride


def load_steps(cells: Cells, first_step: int, rank: int, world: int, workers: int) -> Iterator[Batch]:
    """Iterate over a rank's batches from `first_step` on, made ahead of time in worker processes."""
    cells.first_step, cells.rank, cells.world = first_step, rank, world
    if not workers:
        return iter(DataLoader(cells, batch_size=None))
    # Spawned, since a forked process hangs when it frees what FFmpeg's threads of its parent had in hand.
    handler = signal.getsignal(signal.SIGCHLD)
    loader = DataLoader(
        cells,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4,
        multiprocessing_context="spawn",
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    batches = iter(loader)
    if threading.current_thread() is threading.main_thread():
        # torch's would raise when a worker dies, wherever the trainer is; so it notices when it asks for the next batch.
        signal.signal(signal.SIGCHLD, handler)
    return _explained(batches)


def _explained(batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except Exception as error:  # the worker's own, with its traceback as text, or that it is gone
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CoanervError(
            f"a worker process that cuts cells failed ({reason}), perhaps for want of memory; --resume goes on from the "
            "last state, --workers 0 does without such processes"
        ) from error


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore Ctrl-C in a worker: the trainer ends it, after it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def centre_cells(corpus: Corpus, config: Config, side: int = 256) -> tuple[Tensor, list[int]]:
    """Cut the validation cells: first F frames, centre side x side (shrunk to fit), split into whole cells.

    Returns clips [n,F,3,S,S] uint8 and for each the number of its video.
    """
    clips, owners = [], []
    per_axis = max(1, side // config.cell)
    for number, item in enumerate(corpus.items):
        if item.frames < config.frames:
            continue
        y, uv = corpus.planes(item)
        window = slice(0, config.frames)
        square = _even(min(item.height, item.width, per_axis * config.cell))
        top, left = _even((item.height - square) / 2), _even((item.width - square) / 2)
        clip = _crop(y[window], uv[:, window], top, left, square, per_axis * config.cell)
        clip = clip.round().clamp(0, 255).to(torch.uint8)
        for j in range(per_axis):
            for i in range(per_axis):
                s = config.cell
                clips.append(clip[:, :, j * s : (j + 1) * s, i * s : (i + 1) * s])
                owners.append(number)
    if not clips:
        raise InputError(f"no video of {config.frames} frames to validate on; name a folder that has one with --valid")
    return torch.stack(clips), owners
