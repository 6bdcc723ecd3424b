"""Colour: between a source's own samples and the YUV the model sees.

The model works on full-range BT.601 YUV 4:4:4 with the paper's rounded coefficients, carried here as uint8 [3, H, W].
A source has its own matrix, range, bit depth, chroma format and chroma location. Both directions are one affine map of
the three components plus chroma resampling, done here in float32 rather than by swscale, so that each step is the exact
inverse of its counterpart:

    source samples --(affine)--> model --(inverse affine)--> source samples
    subsampled chroma --(linear interpolation)--> 4:4:4 --(its left inverse)--> subsampled chroma

Tags are the integer code points of ISO/IEC 23091-2 as FFmpeg spells them; 0 (range, location) and 2 (the rest) mean
unspecified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LIMITED, FULL = 1, 2
UNSPECIFIED = 2
PQ, HLG = 16, 18
BT709, BT601 = 1, 6
IDENTITY = 0

# Kr, Kb of each matrix code point: BT.709, FCC, BT.601 (twice), SMPTE 240M, BT.2020 (twice).
LUMA_WEIGHTS = {
    1: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
    10: (0.2627, 0.0593),
}

# log2 of the horizontal and vertical chroma subsampling.
SUBSAMPLING = {"420": (1, 1), "422": (1, 0), "444": (0, 0), "rgb": (0, 0)}

# Where a chroma sample lies between the two luma samples it covers, (across, down): 0 on the first, 1 on the second.
# Unspecified (and reserved) is taken as "left", the default of MPEG-2, H.264 and everything after.
CHROMA_PHASE = {0: (0, 0.5), 1: (0, 0.5), 2: (0.5, 0.5), 3: (0, 0), 4: (0.5, 0), 5: (0, 1), 6: (0.5, 1)}

# RGB in [0, 1] to the model's YUV in [0, 1] (chroma before its +0.5), from the paper's appendix.
MODEL_MATRIX = np.array([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.500], [0.500, -0.419, -0.081]])
MODEL_OFFSET = np.array([0.0, 0.5, 0.5])


@dataclass(frozen=True)
class ColorTags:
    """What a stream says about its colour; the defaults say nothing."""

    range: int = 0
    matrix: int = UNSPECIFIED
    primaries: int = UNSPECIFIED
    transfer: int = UNSPECIFIED
    chroma_location: int = 0


def effective_matrix(tags: ColorTags, height: int) -> int:
    """The matrix to calculate with: the tagged one, or by the usual rule BT.709 from 720 lines up and BT.601 below."""
    if tags.matrix in LUMA_WEIGHTS:
        return tags.matrix
    return BT709 if height >= 720 else BT601


def color_warnings(tags: ColorTags, chroma: str, depth: int) -> list[str]:
    """What the 8-bit model colour space cannot hold of a source with these tags."""
    warnings = []
    if depth > 8:
        warnings.append(f"{depth}-bit video is reduced to 8 bit")
    if tags.transfer in (PQ, HLG):
        warnings.append("HDR video (PQ or HLG) is coded as it is, at 8 bit; its tags are kept, dark gradients may band")
    if chroma in ("420", "422", "444") and tags.matrix not in (*LUMA_WEIGHTS, UNSPECIFIED):
        warnings.append(f"colour matrix {tags.matrix} is not known; its samples are treated as BT.709 or BT.601")
    if tags.matrix == 10:
        warnings.append("constant-luminance BT.2020 is treated as the common non-constant one")
    return warnings


def to_model(planes: Sequence[np.ndarray], chroma: str, tags: ColorTags, depth: int = 8) -> np.ndarray:
    """Source planes to model YUV, uint8 [3, H, W].

    `planes` are Y [H, W] for "gray"; Y [H, W], Cb, Cr [H', W'] for "420", "422", "444"; R, G, B [H, W] for "rgb".
    """
    height, width = planes[0].shape
    out = np.empty((3, height, width), np.uint8)
    matrix, offset = _source_to_model(chroma, tags, depth, height)
    if chroma == "gray":
        _store(planes[0] * matrix[0, 0] + (offset[0] + HALF_UP), out[0])
        out[1:] = 128
        return out
    for row in range(3):
        mixed = _mix(planes[1:], matrix[row, 1:])
        mixed = 0 if mixed is None else _upsample(mixed, chroma, tags.chroma_location, (height, width))
        if matrix[row, 0]:
            mixed = mixed + planes[0] * matrix[row, 0]
        _store(mixed + (offset[row] + HALF_UP), out[row])
    return out


def from_model(yuv: np.ndarray, chroma: str, tags: ColorTags) -> list[np.ndarray]:
    """Model YUV, uint8 [3, H, W], to 8-bit planes of the source's kind (as `to_model` takes them)."""
    height, width = yuv.shape[1:]
    matrix, offset = _source_to_model(chroma, tags, 8, height)
    inverse = np.linalg.inv(matrix.astype(np.float64))
    shift = (-inverse @ offset).astype(np.float32)
    inverse = _without_crosstalk_noise(inverse)
    if chroma == "gray":
        return [_store(yuv[0] * inverse[0, 0] + (shift[0] + HALF_DOWN), np.empty((height, width), np.uint8))]
    small = [_downsample(plane, chroma, tags.chroma_location) for plane in yuv[1:]]
    planes = []
    for row, (luma, *chroma_planes) in enumerate((yuv, (yuv[0], *small), (yuv[0], *small))):
        plane = np.empty((luma if inverse[row, 0] else chroma_planes[0]).shape, np.uint8)
        for top in range(0, len(plane), BAND):
            band = slice(top, top + BAND)
            mixed = _mix([p[band] for p in chroma_planes], inverse[row, 1:])
            mixed = 0 if mixed is None else mixed
            if inverse[row, 0]:
                mixed = mixed + luma[band] * inverse[row, 0]
            _store(mixed + (shift[row] + HALF_DOWN), plane[band])
        planes.append(plane)
    return planes


def yuv_to_rgb(yuv: np.ndarray) -> np.ndarray:
    """Model YUV, uint8 [3, H, W], to RGB, uint8 [H, W, 3]."""
    return np.stack(from_model(yuv, "rgb", ColorTags()), axis=-1)


BAND = 32  # rows converted at a time: what lies between fits into the caches

# Storing truncates, so these round. Neutral chroma, 128 in a full-range source, is 127.5 in the model: ties go up on
# the way in and down on the way out, by more than what float32 loses, which brings it back to itself.
HALF_UP, HALF_DOWN = np.float32(0.51), np.float32(0.49)


def _source_to_model(chroma: str, tags: ColorTags, depth: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """The affine map from source code values to model code values: float32 [3, 3] and [3]."""
    top = 2**depth - 1
    if chroma == "rgb":
        to_rgb = np.eye(3)
        zero, span = np.zeros(3), np.full(3, top)
    else:
        # Grey has no chroma to be mixed into its luma; with the model's own matrix nothing is.
        to_rgb = _ycc_to_rgb(*LUMA_WEIGHTS[BT601 if chroma == "gray" else effective_matrix(tags, height)])
        step = 2 ** (depth - 8)
        if tags.range == FULL:
            zero, span = np.array([0, 128 * step, 128 * step]), np.full(3, top)
        else:
            zero, span = np.array([16, 128, 128]) * step, np.array([219, 224, 224]) * step
    matrix = 255 * MODEL_MATRIX @ to_rgb / span
    offset = 255 * MODEL_OFFSET - matrix @ zero
    return _without_crosstalk_noise(matrix), offset.astype(np.float32)


def _ycc_to_rgb(kr: float, kb: float) -> np.ndarray:
    """Y' in [0, 1], Cb and Cr in [-0.5, 0.5] to RGB in [0, 1], float64 [3, 3]."""
    luma = np.array([kr, 1 - kr - kb, kb])
    cb = (np.array([0, 0, 1]) - luma) / (2 * (1 - kb))
    cr = (np.array([1, 0, 0]) - luma) / (2 * (1 - kr))
    return np.linalg.inv(np.stack([luma, cb, cr]))


def _without_crosstalk_noise(matrix: np.ndarray) -> np.ndarray:
    """Entries that are zero but for rounding become zero, so that their passes over the picture are skipped."""
    return np.where(np.abs(matrix) < 1e-9, 0, matrix).astype(np.float32)


def _mix(planes: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray | None:
    """Weighted sum of two planes in float32; None if both weights are zero."""
    terms = [plane * weight for plane, weight in zip(planes, weights, strict=True) if weight]
    if len(terms) == 2:
        terms[0] += terms[1]
    return terms[0] if terms else None


def _store(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Clip float32 `values` (which it may destroy) to a byte and truncate into `out`."""
    np.clip(values, 0, 255, out=values)
    np.copyto(out, values, casting="unsafe")
    return out


def _upsample(plane: np.ndarray, chroma: str, location: int, shape: tuple[int, int]) -> np.ndarray:
    """Subsampled chroma [H', W'] to the luma grid [H, W] by linear interpolation from where its samples lie."""
    across, down = CHROMA_PHASE.get(location, CHROMA_PHASE[0])
    log2_width, log2_height = SUBSAMPLING[chroma]
    if log2_height:
        plane = _double(plane, down)[: shape[0]]
    if log2_width:
        plane = _double(plane.T, across).T[:, : shape[1]]
    return plane


def _downsample(plane: np.ndarray, chroma: str, location: int) -> np.ndarray:
    """The left inverse of `_upsample`: [H, W] to [H', W']."""
    across, down = CHROMA_PHASE.get(location, CHROMA_PHASE[0])
    log2_width, log2_height = SUBSAMPLING[chroma]
    if log2_width:
        plane = _halve(plane.T, across).T
    if log2_height:
        plane = _halve(plane, down)
    return plane


def _double(x: np.ndarray, phase: float) -> np.ndarray:
    """[n, ...] to [2n, ...]: output k lies at (k - phase) / 2 in units of the input; edges are held."""
    # Fortran order for a transposed input, so that memory is walked in order either way.
    out = np.empty((2 * len(x), *x.shape[1:]), np.float32, order="C" if x.flags.c_contiguous else "F")
    even, odd = out[0::2], out[1::2]
    step = np.diff(x, axis=0)
    even[:] = x
    odd[:] = x
    even[1:] -= step * np.float32(phase / 2)
    odd[:-1] += step * np.float32((1 - phase) / 2)
    return out


def _halve(x: np.ndarray, phase: float) -> np.ndarray:
    """[n, ...] to [ceil(n / 2), ...], undoing `_double` exactly.

    On a sample, that is dropping the others (phase 1 of an odd length has no last sample to keep: the one before it is
    held). Half-way, the filter (-1, 3, 3, -1) / 4 undoes linear interpolation, with the edges mirrored.
    """
    if phase == 0:
        return x[0::2]
    if phase == 1:
        return x[np.minimum(np.arange(1, len(x) + 1, 2), len(x) - 1)]
    edges = [(1, 1 + len(x) % 2)] + [(0, 0)] * (x.ndim - 1)
    padded = np.pad(x, edges, mode="symmetric").astype(np.float32)
    outer = padded[0:-3:2] + padded[3::2]
    inner = padded[1:-2:2] + padded[2:-1:2]
    inner *= np.float32(0.75)
    outer *= np.float32(0.25)
    inner -= outer
    return inner
