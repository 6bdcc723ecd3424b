"""Pictures for people: source and result side by side."""

import numpy as np

from coanerv_codec.color import yuv_to_rgb


def side_by_side(source: np.ndarray, result: np.ndarray, gap: int = 4) -> np.ndarray:
    """Two frames in model YUV [3,H,W] -> one RGB picture: source left, result right."""
    left, right = yuv_to_rgb(source), yuv_to_rgb(result)
    return np.concatenate([left, np.full((left.shape[0], gap, 3), 255, np.uint8), right], axis=1)
