"""Where two clips meet they are cross-faded, as cells are where they overlap, but without tokens for it.

A clip is coded alone, and worst at its ends. But the decoder is a function of time: asked a little beyond a clip's end, it
continues what is there. So a clip's weight falls from one, at its last frame but one, to zero at the second frame of the next
clip, evenly. Pixels on which the two disagree are not two estimates of one thing (something has appeared, or the scene was
cut): the more they disagree, the less counts the clip that is further away.

A place is a time in a clip, in frames from its first one.
"""

import numpy as np

SPAN = 3  # frame steps from one clip alone to the other alone
LEAST = 3  # frames of a clip, below which its two ends would overlap
ALIKE = 24.0  # code values; clips that differ by so much count the further one half


def shares(place: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Places [...] in a clip of `frames` frames -> the weights there of the clip before it and of the one after it."""
    return np.clip(1 - place, 0, 1) / SPAN, np.clip(place - (frames - 2), 0, 2) / SPAN


def weight(share: np.ndarray | float, distance: np.ndarray) -> np.ndarray:
    """Return what is left of a share, at most a half, where the two clips differ by `distance` code values."""
    return share / (1 + (distance / ALIKE) ** 2)


def mix(own: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    """Mix a picture [3,H,W] uint8 with another clip's picture of the same moment, which has this share. Integers throughout."""
    if share > 0.5:
        own, other, share = other, own, 1 - share
    step = other.astype(np.int16) - own
    weights = np.rint(256 * weight(share, np.arange(256))).astype(np.int16)  # times a difference it stays below 2^15
    step *= weights[np.abs(step).max(0)]
    step += 128
    step >>= 8
    step += own
    return step.astype(np.uint8)


def mix_points(own: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Do the same for single points: values [Q,3] in [0, 1], shares [Q]."""
    swap = share > 0.5
    near, far = np.where(swap[:, None], other, own), np.where(swap[:, None], own, other)
    step = far - near
    left = weight(np.where(swap, 1 - share, share), 255 * np.abs(step).max(-1))
    return near + left[:, None].astype(np.float32) * step
