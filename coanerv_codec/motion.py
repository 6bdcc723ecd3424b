"""Motion of a cell: its path, found by the encoder, so that tokens describe what moves as if it stood still.

A cell that moves with (vx, vy) pixels per frame is asked at x - vx (f - c), y - vy (f - c) in frame f, where c is the middle of
the clip: the decoder is a function of coordinates, so it needs nothing new. The encoder sees the clip along the same path.
Where a hand holds the camera the path is not straight: then the cell also shakes, by up to two pixels in each frame.

Shapes: F frames, S side of a square of samples, K frequencies.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

STEPS = 8  # velocities are counted in 1/STEPS pixel per frame, in the file too
FINEST = 2  # steps between the velocities that are tried: frames that differ by whole pixels are decoded together
PARTS = 4  # shakes are counted in 1/PARTS pixel
MOST_SHAKE = 7  # in 1/PARTS pixel, on either side
FASTEST = 8  # pixels per frame that the search goes up to
PAYS = 0.6  # a path is used if it leaves at most so much of the change from frame to frame
SHAKE_PAYS = 0.85  # and one that is not straight if it leaves at most so much of what the straight one does
SMALLEST = 16  # samples along a side, below which there is nothing to go by
VISIBLE = 0.5 / 255  # standard deviation over time below which nothing is to be gained
NEARER = 0.001  # of the best agreement, that it must be worth to move a frame as far as the search goes
COARSE, FINE = 8, 20  # cycles per square that the first and the second look go up to


def offsets(frames: int) -> np.ndarray:
    """Return the time of each frame from the middle of the clip, in frames: [F], float64."""
    return np.arange(frames) - (frames - 1) / 2


def reach(path: np.ndarray) -> np.ndarray:
    """Return how far (x, y) a path [F,2] leads away at most: [2]."""
    return np.abs(path).max(0)


def halve(samples: np.ndarray, axis: int) -> np.ndarray:
    """Return the means of pairs along an axis; an odd last sample is left out."""
    samples = np.moveaxis(samples, axis, 0)
    last = len(samples) // 2 * 2
    return np.moveaxis((samples[:last:2] + samples[1:last:2]) / 2, 0, axis)


def find_path(luma: np.ndarray) -> np.ndarray:
    """Luma [F,S,S] of a cell in [0, 1] -> where it is in each frame, (x, y) in pixels from the middle: float64 [F,2]."""
    velocity, shake = find_half_path(halve(halve(luma, 1), 2))
    return np.outer(offsets(len(luma)), velocity) / STEPS + shake / PARTS


def find_half_path(luma: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """Luma [F,S/2,S/2] of a cell in half size, which is fine enough -> its velocity and its shake [F,2], in steps of a pixel.

    Looks for the velocity along which the frames agree best: their spectra, turned by the phase of the shift, add up to the
    most energy. The window that hides the edges stands still and pulls the answer towards zero, so there is a second look at
    squares that already move with the first answer. From there each frame is moved by itself to where it agrees best with the
    others. Both are zero where they would not pay.
    """
    frames, side, unit = len(luma), luma.shape[-1], STEPS // 2  # in this function a velocity of STEPS is half a sample
    still = (0, 0), np.zeros((frames, 2))
    if 2 * side < SMALLEST or luma.var(0).mean() < VISIBLE**2:
        return still
    first, _ = _search(luma, ((2 * STEPS, FASTEST // 2), (STEPS, 1), (unit, 1)), COARSE)
    shifts = np.rint(np.outer(offsets(frames), first) / (2 * STEPS)).astype(int)  # [F,2], whole samples
    squares = _squares(luma, shifts)
    if squares is None:
        return still
    steps = ((unit, 2), (FINEST, unit // FINEST))
    best, left = _search(squares, steps, FINE, first, shifts * (2.0 * STEPS))
    margin = int(np.abs(shifts).max())
    inner = slice(margin, side - margin)
    _, change = _search(luma[:, inner, inner], ((1, 0),), FINE)
    velocity = best if left <= PAYS * change else (0, 0)
    return velocity, _find_shake(luma, np.outer(offsets(frames), best) / STEPS, velocity)


def _squares(planes: np.ndarray, shifts: np.ndarray) -> np.ndarray | None:
    """Cut a square out of each plane [F,S,S], moved by whole samples [F,2]: [F,S',S'], or None where too little is left."""
    side, margin = planes.shape[-1], int(np.abs(shifts).max())
    if side - 2 * margin < side // 4:
        return None
    first, last = margin, side - margin
    return np.stack([f[first + y : last + y, first + x : last + x] for f, (x, y) in zip(planes, shifts, strict=True)])


class _Look(NamedTuple):
    """Squares of half size that have moved along a path in whole samples, as spectra."""

    spectra: np.ndarray  # [F,K,K']
    kx: np.ndarray  # [K'], in turns per pixel
    ky: np.ndarray  # [K]
    moved: np.ndarray  # [F,2], pixels

    def along(self, path: np.ndarray) -> np.ndarray:
        """Return the spectra of squares that moved along a path [F,2] in pixels."""
        x, y = (path - self.moved).T
        along_x, along_y = np.exp(x[:, None] * self.kx), np.exp(y[:, None] * self.ky)
        return self.spectra * along_y[..., None] * along_x[:, None]

    def left(self, path: np.ndarray) -> float:
        """Return the energy of what changes from frame to frame along a path."""
        return _energy(self.spectra) - _energy(self.along(path).sum(0)) / len(path)

    def follow(self, path: np.ndarray, steps: Sequence[tuple[float, int]]) -> np.ndarray:
        """Move every frame to where it agrees best with the others: by steps of so many pixels, so many on either side."""
        for step, count in steps:
            turned = self.along(path)
            agree = (turned.sum(0) - turned).conj() * turned  # [F,K,K']
            tries = step * np.arange(-count, count + 1)
            found = (np.exp(tries[:, None] * self.ky) @ agree @ np.exp(tries[:, None] * self.kx).T).real  # [F,y,x]
            # What is as good nearby is better: along an edge nothing tells where a frame belongs.
            found -= NEARER * found.max() * (tries[:, None] ** 2 + tries**2) / (2 * tries[-1] ** 2)
            y, x = np.unravel_index(found.reshape(len(found), -1).argmax(1), found.shape[1:])
            path = path + np.stack([tries[x], tries[y]], axis=1)
        return path


def _look(luma: np.ndarray, path: np.ndarray, cutoff: int) -> _Look | None:
    """Luma [F,S/2,S/2] of half size, seen along a path [F,2] in pixels."""
    shifts = np.rint(path / 2).astype(int)
    squares = _squares(luma, shifts)
    if squares is None:
        return None
    side = squares.shape[-1]
    kx, ky, window, weight = _frequencies(side, cutoff)
    spectra = _spectra((squares - squares.mean()) * window, kx[-1]) * weight
    turn = 1j * np.pi / side
    return _Look(spectra, turn * kx, turn * ky, 2.0 * shifts)


def _find_shake(luma: np.ndarray, straight: np.ndarray, velocity: tuple[int, int]) -> np.ndarray:
    """Luma of half size, the path [F,2] from which to look -> the shake [F,2] that is added to a velocity, in 1/PARTS pixel."""
    along = np.outer(offsets(len(luma)), velocity) / STEPS
    none, part = np.zeros_like(straight), 1 / PARTS
    if (look := _look(luma, straight, COARSE)) is None:
        return none
    path = look.follow(straight, ((1.0, 4), (0.5, 2)))
    if (look := _look(luma, path, FINE)) is None:
        return none
    path = look.follow(path, ((0.5, 3), (part, 2), (part, 2)))
    shake = np.rint(PARTS * (path - path.mean(0) - along)).clip(-MOST_SHAKE, MOST_SHAKE)
    left = look.left(along + shake / PARTS)
    return shake if left < min(SHAKE_PAYS * look.left(along), PAYS * look.left(none)) else none


def _search(
    planes: np.ndarray,
    steps: tuple[tuple[int, int], ...],
    cutoff: int,
    best: tuple[int, int] = (0, 0),
    path: np.ndarray | None = None,
) -> tuple[tuple[int, int], float]:
    """Planes [F,S,S] of half size -> the best velocity, and the energy of what changes from frame to frame along it.

    Each of `steps` is a distance of velocities to try and how many there are on either side. `path` [F,2] are the shifts
    that the planes had already, in 1/STEPS pixel.
    """
    frames, side, _ = planes.shape
    kx, ky, window, weight = _frequencies(side, cutoff)
    spectra = _spectra((planes - planes.mean()) * window, kx[-1]) * weight
    turns = 2j * np.pi / (side * 2 * STEPS)
    path = np.zeros((frames, 2)) if path is None else path
    total = _energy(spectra)

    def change(vx: np.ndarray, vy: np.ndarray) -> np.ndarray:
        """Energy that does not agree, for every vy and vx: [len(vy),len(vx)]."""
        x, y = (v[:, None] * offsets(frames) - path[:, axis] for axis, v in enumerate((vx, vy)))  # [v,F]
        along_x = np.exp(turns * x[..., None] * kx).astype(np.complex64)  # [vx,F,K']
        along_y = np.exp(turns * y[..., None] * ky).astype(np.complex64)  # [vy,F,K]
        # For each frequency along x a product over frames: [K',vy*K,F] @ [K',F,vx].
        turned = (spectra * along_y[..., None]).transpose(3, 0, 2, 1).reshape(len(kx), -1, frames)
        sums = (turned @ along_x.transpose(2, 1, 0)).reshape(len(kx), len(vy), len(ky), len(vx))
        return total - (sums.real**2 + sums.imag**2).sum((0, 2)) / frames

    for step, count in steps:
        around = step * np.arange(-count, count + 1)
        found = change(best[0] + around, best[1] + around)
        j, i = np.unravel_index(found.argmin(), found.shape)
        best, left = (best[0] + int(around[i]), best[1] + int(around[j])), found[j, i]
    return best, float(left)


@lru_cache
def _fourier(side: int, highest: int) -> np.ndarray:
    """Return exp(-2 pi i k x / side) for k from -highest to highest: complex64 [side,2 highest + 1]."""
    angles = np.outer(np.arange(side), np.arange(-highest, highest + 1)) * (2 * np.pi / side)
    return (np.cos(angles) - 1j * np.sin(angles)).astype(np.complex64)


def _spectra(planes: np.ndarray, highest: int) -> np.ndarray:
    """Planes [F,S,S] -> Fourier coefficients [F,K,K'], ky from -highest on, kx from 0 on: few, so by plain products."""
    waves = _fourier(planes.shape[-1], highest)
    real, imaginary = (planes @ part for part in (waves.real[:, highest:], waves.imag[:, highest:]))
    return waves.T @ (real + 1j * imaginary)


def _energy(spectrum: np.ndarray) -> float:
    return float((spectrum.real**2 + spectrum.imag**2).sum())


@lru_cache
def _frequencies(side: int, cutoff: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return kx [K'] and ky [K] (half of the plane is enough), a window [S,S] that hides the edges, weights [K,K']."""
    most = min(cutoff, side // 2 - 1)
    kx, ky = np.arange(0, most + 1), np.arange(-most, most + 1)
    hann = np.sin(np.pi * (np.arange(side) + 0.5) / side).astype(np.float32) ** 2
    # Natural pictures have ever less energy at fine frequencies, which tell position best.
    weight = np.hypot(ky[:, None], kx)
    weight[weight > most] = 0
    weight[:, 0] *= np.sqrt(0.5)  # kx = 0 stands for itself, the others for their mirror images too
    return kx, ky, np.outer(hann, hann), weight.astype(np.float32)
