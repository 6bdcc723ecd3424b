"""How a picture is covered by cells: counts, positions, cross-fades, and cutting cells out of frames.

Both axes are treated alike and apart. Along an axis of `length` pixels stand `count` cells of real-valued `extent` pixels,
evenly spaced, neighbours sharing `overlap` pixels; cell i begins at i * (extent - overlap). Pixel p (its centre) has the
coordinate (p - start) / (extent - 1) in a cell, so a single cell gives the paper's x / (W - 1). In an overlap the cells are
cross-faded with weights that add up to one everywhere.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from coanerv_codec.errors import InputError
from coanerv_codec.motion import FINEST, MOST_SHAKE, PARTS, STEPS, find_half_path, halve, reach

DEFAULT_OVERLAP = 4  # pixels: the smallest that leaves no seam (docs/cells.md)


@dataclass(frozen=True)
class Axis:
    """One axis of a cell layout."""

    length: int
    count: int
    overlap: int

    def __post_init__(self) -> None:
        if not (self.length >= 1 and 1 <= self.count <= self.length and self.overlap >= 0):
            raise ValueError(f"impossible cell layout: {self}")
        if self.count > 1 and self.extent < 2 * self.overlap:
            raise ValueError(f"cells of {self.extent:.1f} pixels cannot overlap by {self.overlap}")

    @property
    def extent(self) -> float:
        """Pixels that a cell covers."""
        return (self.length + (self.count - 1) * self.overlap) / self.count

    def start(self, i: int) -> float:
        """Return the position of cell i's first sample."""
        return i * (self.extent - self.overlap)

    def canvas(self, i: int, reach: float = 0.0) -> tuple[float, float]:
        """Return where the part of the picture that cell i describes begins, and its extent: one that moves reaches further."""
        return self.start(i) - reach, self.extent + 2 * reach

    def coordinates(self, i: int, positions: np.ndarray, reach: float = 0.0) -> np.ndarray:
        """Turn positions (pixels, any real numbers) into coordinates of cell i, float32."""
        start, extent = self.canvas(i, reach)
        return ((positions - start) / max(extent - 1.0, 1.0)).astype(np.float32)

    def weights(self, i: int, positions: np.ndarray) -> np.ndarray:
        """Return the share of cell i at each position: float32 in [0, 1], adding up to one over all cells."""
        return (self._rise(i, positions) - self._rise(i + 1, positions)).astype(np.float32)

    def _rise(self, i: int, positions: np.ndarray) -> np.ndarray:
        """0 before cell i begins, 1 after its overlap with cell i - 1."""
        if i <= 0:
            return np.ones(len(positions))
        if i >= self.count:
            return np.zeros(len(positions))
        edge = positions - (self.start(i) - 0.5)
        if self.overlap == 0:
            return (edge >= 0).astype(np.float64)
        return np.clip(edge / self.overlap, 0.0, 1.0)


def plan_axis(length: int, cell: int, overlap: int = DEFAULT_OVERLAP) -> Axis:
    """Choose the count for which a cell covers about its native size (256 pixels are 2 cells of 128, not 3)."""
    if overlap >= cell:
        raise ValueError(f"cells of {cell} pixels cannot overlap by {overlap}")
    count = max(1, round((length - overlap) / (cell - overlap)))
    return Axis(length, count, overlap if count > 1 else 0)


def _catmull_rom(x: np.ndarray) -> np.ndarray:
    """Evaluate the Catmull-Rom kernel: interpolating, support [-2, 2]."""
    x = np.abs(x)
    inner = 1.5 * x**3 - 2.5 * x**2 + 1.0
    outer = -0.5 * x**3 + 2.5 * x**2 - 4.0 * x + 2.0
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


@lru_cache(maxsize=64)
def still_matrix(axis: Axis, i: int, side: int) -> tuple[int, np.ndarray]:
    """Return `sampling_matrix` of a cell that stands still: the same in every clip, so kept, and not to be changed."""
    return sampling_matrix(axis, i, side)


def sampling_matrix(axis: Axis, i: int, side: int, reach: float = 0.0, shift: float = 0.0) -> tuple[int, np.ndarray]:
    """Return (first, R): cell i's `side` samples are R [side, n] times the n pixels from `first` on.

    The kernel widens where the cell is shrunk, against aliasing; at native size R is the identity. Pixels beyond the
    picture's edge repeat it. A cell that moves has its samples `shift` pixels further on in this frame.
    """
    start, extent = axis.canvas(i, reach)
    pitch = (extent - 1.0) / max(side - 1, 1)
    positions = start + shift + np.arange(side) * pitch
    widen = max(1.0, pitch)
    first = min(max(0, math.ceil(positions[0] - 2 * widen)), axis.length - 1)
    last = max(min(axis.length - 1, math.floor(positions[-1] + 2 * widen)), first)
    taps = np.arange(math.floor(-2 * widen), math.ceil(2 * widen) + 1)
    pixels = np.floor(positions)[:, None] + taps  # [side, taps]
    weights = _catmull_rom((pixels - positions[:, None]) / widen)
    weights /= weights.sum(1, keepdims=True)
    matrix = np.zeros((side, last - first + 1))
    columns = np.clip(pixels, 0, axis.length - 1).astype(int) - first
    # A tap outside [first, last] has weight zero, so where it lands does not matter.
    np.add.at(matrix, (np.arange(side)[:, None], np.clip(columns, 0, last - first)), weights)
    return first, matrix.astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """The cells of a picture: columns along x, rows along y; cell number = row * columns + column.

    In a clip where something moves, each cell has a velocity (vx, vy) in 1/STEPS pixel per frame, and those that
    shake are listed by number, with how far they are from there in each frame, (x, y) in 1/PARTS pixel, packed (`motion.py`).
    """

    x: Axis
    y: Axis
    velocities: tuple[tuple[int, int], ...] = ()
    shakes: tuple[tuple[int, bytes], ...] = ()

    @property
    def cells(self) -> int:
        """Cells per picture."""
        return self.x.count * self.y.count

    def moves(self, number: int) -> bool:
        """Tell whether a cell moves at all."""
        return bool(self.velocities and any(self.velocities[number])) or self._shake(number) is not None

    def _shake(self, number: int) -> np.ndarray | None:
        """Return the shake of a cell, pixels [F,2]."""
        at = bisect_left(self.shakes, (number,))
        if at == len(self.shakes) or self.shakes[at][0] != number:
            return None
        return unpack_shake(self.shakes[at][1]) / PARTS

    def path(self, number: int, time: np.ndarray, frames: int) -> np.ndarray:
        """Return how far a cell is from where it stands: times [T] in frames of a clip of `frames` -> pixels float64 [T,2]."""
        velocity = np.array(self.velocities[number] if self.velocities else (0, 0)) / STEPS
        path = np.outer(time - (frames - 1) / 2, velocity)
        if (shake := self._shake(number)) is not None:
            path += np.stack([np.interp(time, np.arange(frames), axis) for axis in shake.T], axis=1)
        return path

    def reach(self, number: int, frames: int) -> np.ndarray:
        """Return how far a cell moves at most along x and y in a clip of `frames`: pixels [2]."""
        return reach(self.path(number, np.arange(frames), frames))


def pack_shake(steps: np.ndarray) -> bytes:
    """Steps (x, y) of a shake [F,2], whole numbers from -8 to 7 -> a byte per frame, x in its low half."""
    x, y = steps.T & 15
    return (x | y << 4).astype(np.uint8).tobytes()


def unpack_shake(shake: bytes) -> np.ndarray:
    """Undo `pack_shake`: [F,2]."""
    both = np.frombuffer(shake, np.uint8).astype(int)[:, None] >> (0, 4) & 15
    return both - 2 * (both & 8)


def plan_layout(width: int, height: int, cell: int, overlap: int = DEFAULT_OVERLAP) -> Layout:
    """Cover a picture with cells of about their native size."""
    try:
        return Layout(plan_axis(width, cell, overlap), plan_axis(height, cell, overlap))
    except ValueError as error:
        raise InputError(f"a {width}x{height} picture: {error}; use a smaller --overlap") from error


def fixed_layout(width: int, height: int, columns: int, rows: int, overlap: int) -> Layout:
    """Cover a picture with a given number of cells (1 x 1 is `--fit`)."""
    return Layout(Axis(width, columns, overlap if columns > 1 else 0), Axis(height, rows, overlap if rows > 1 else 0))


def _multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Set out to a @ b, with torch's threads: NumPy's would be a second set of them that wait for each other."""
    torch.matmul(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(out))


def cut_row(frames: np.ndarray, layout: Layout, row: int, side: int) -> np.ndarray:
    """Cut one row of cells out of a clip: frames [F,3,H,W] uint8 -> [columns,F,3,side,side] float32 in [0, 1]."""
    top, vertical = still_matrix(layout.y, row, side)
    rows = slice(top, top + vertical.shape[1])
    vertical = vertical * np.float32(1 / 255)
    strip = np.empty((*frames.shape[:2], side, frames.shape[3]), np.float32)
    for frame, out in zip(frames, strip, strict=True):  # one by one, since a row of cells may be as high as the picture
        _multiply(vertical, frame[:, rows].astype(np.float32), out)
    cells = np.empty((layout.x.count, *frames.shape[:2], side, side), np.float32)
    for column, out in enumerate(cells):
        if layout.moves(row * layout.x.count + column):
            _cut_moving(frames, layout, row, column, out)
            continue
        left, horizontal = still_matrix(layout.x, column, side)
        pixels = strip.reshape(-1, strip.shape[3])[:, left : left + horizontal.shape[1]]
        _multiply(pixels, horizontal.T, out.reshape(-1, side))
    return cells


def _cut_moving(frames: np.ndarray, layout: Layout, row: int, column: int, out: np.ndarray) -> None:
    """Cut a cell along its path out of frames [F,3,H,W] into out [F,3,side,side]."""
    path = layout.path(row * layout.x.count + column, np.arange(len(frames)), len(frames))
    reach_x, reach_y = reach(path)
    for frame, (x, y), cell in zip(frames, path, out, strict=True):
        top, vertical = sampling_matrix(layout.y, row, out.shape[-1], reach_y, y)
        left, horizontal = sampling_matrix(layout.x, column, out.shape[-1], reach_x, x)
        pixels = frame[:, top : top + vertical.shape[1], left : left + horizontal.shape[1]]
        strip = np.empty((3, len(vertical), pixels.shape[2]), np.float32)
        _multiply(vertical * np.float32(1 / 255), pixels.astype(np.float32), strip)
        _multiply(strip, horizontal.T, cell)


def find_motion(frames: np.ndarray, layout: Layout, side: int) -> Layout:
    """Return the layout in which each cell of a clip [F,3,H,W] uint8 moves with what it shows, as far as that pays."""
    pitch_x, pitch_y = ((axis.extent - 1) / max(side - 1, 1) for axis in (layout.x, layout.y))  # pixels per sample
    velocities, shakes = [], []
    for row in range(layout.y.count):
        for luma in _cut_half_luma(frames[:, 0], layout, row, side):
            (vx, vy), shake = find_half_path(luma)
            # To the steps of the search again: what lies between them would be decoded frame by frame.
            velocities.append((FINEST * round(vx * pitch_x / FINEST), FINEST * round(vy * pitch_y / FINEST)))
            steps = np.rint(shake * (pitch_x, pitch_y)).astype(int)
            if steps.any() and np.abs(steps).max() <= MOST_SHAKE:
                shakes.append((len(velocities) - 1, pack_shake(steps)))
    return replace(
        layout,
        velocities=tuple(velocities) if any(map(any, velocities)) else (),
        shakes=tuple(shakes),
    )


def _cut_half_luma(luma: np.ndarray, layout: Layout, row: int, side: int) -> Iterator[np.ndarray]:
    """Cut one row of cells that stand still out of luma [F,H,W] uint8, in half size: [F,side/2,side/2] float32 in [0, 1]."""
    top, vertical = still_matrix(layout.y, row, side)
    vertical = halve(vertical, 0) * np.float32(1 / 255)
    strip = np.empty((len(luma), side // 2, luma.shape[2]), np.float32)
    for frame, out in zip(luma, strip, strict=True):
        _multiply(vertical, frame[top : top + vertical.shape[1]].astype(np.float32), out)
    for column in range(layout.x.count):
        left, horizontal = still_matrix(layout.x, column, side)
        cell = np.empty((len(luma), side // 2, side // 2), np.float32)
        _multiply(strip[:, :, left : left + horizontal.shape[1]], halve(horizontal, 0).T, cell)
        yield cell
