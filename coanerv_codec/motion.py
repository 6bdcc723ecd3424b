"""Motion of a cell: one velocity, found by the encoder, so that tokens describe what moves as if it stood still.

A cell that moves with (vx, vy) pixels per frame is asked at x - vx (f - c), y - vy (f - c) in frame f, where c is the middle of
the clip: the decoder is a function of coordinates, so it needs nothing new. The encoder sees the clip along the same path.

Shapes: F frames, S side of a square of samples, K frequencies.
"""

from functools import lru_cache

import numpy as np

STEPS = 8  # velocities are counted in 1/STEPS pixel per frame, in the file too
FINEST = 2  # steps between the velocities that are tried: frames that differ by whole pixels are decoded together
FASTEST = 8  # pixels per frame that the search goes up to
PAYS = 0.6  # a velocity is used if it leaves at most so much of the change from frame to frame
SMALLEST = 16  # samples along a side, below which there is nothing to go by
VISIBLE = 0.5 / 255  # standard deviation over time below which nothing is to be gained
COARSE, FINE = 8, 20  # cycles per square that the first and the second look go up to


def offsets(frames: int) -> np.ndarray:
    """Return the time of each frame from the middle of the clip, in frames: [F], float64."""
    return np.arange(frames) - (frames - 1) / 2


def reach(velocity: np.ndarray, frames: int) -> np.ndarray:
    """Return how far (x, y) a cell with a velocity [2] in pixels per frame moves from the middle of the clip: [2], pixels."""
    return np.abs(velocity) * (frames - 1) / 2


def halve(samples: np.ndarray, axis: int) -> np.ndarray:
    """Return the means of pairs along an axis; an odd last sample is left out."""
    samples = np.moveaxis(samples, axis, 0)
    last = len(samples) // 2 * 2
    return np.moveaxis((samples[:last:2] + samples[1:last:2]) / 2, 0, axis)


def find_velocity(luma: np.ndarray) -> tuple[int, int]:
    """Luma [F,S,S] of a cell in [0, 1] -> (vx, vy) in 1/STEPS pixel per frame; (0, 0) where motion would not pay."""
    return find_half_velocity(halve(halve(luma, 1), 2))


def find_half_velocity(luma: np.ndarray) -> tuple[int, int]:
    """Do what `find_velocity` does with luma [F,S/2,S/2] of half size, which is fine enough.

    Looks for the velocity along which the frames agree best: their spectra, turned by the phase of the shift, add up to the
    most energy. The window that hides the edges stands still and pulls the answer towards zero, so there is a second look at
    squares that already move with the first answer.
    """
    side, unit = luma.shape[-1], STEPS // 2  # in this function a velocity of STEPS is half a sample
    if 2 * side < SMALLEST or luma.var(0).mean() < VISIBLE**2:
        return 0, 0
    first, _ = _search(luma, ((2 * STEPS, FASTEST // 2), (STEPS, 1), (unit, 1)), COARSE)
    shifts = np.rint(np.outer(offsets(len(luma)), first) / (2 * STEPS)).astype(int)  # [F,2], whole samples
    margin = int(np.abs(shifts).max())
    if side - 2 * margin < side // 4:
        return 0, 0
    inner = slice(margin, side - margin)
    squares = [
        f[y + margin : y - margin + side, x + margin : x - margin + side]
        for f, (x, y) in zip(luma, shifts, strict=True)
    ]
    steps = ((unit, 2), (FINEST, unit // FINEST))
    best, left = _search(np.stack(squares), steps, FINE, first, shifts * (2.0 * STEPS))
    if best == (0, 0):
        return best
    _, change = _search(luma[:, inner, inner], ((1, 0),), FINE)
    return best if left <= PAYS * change else (0, 0)


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
