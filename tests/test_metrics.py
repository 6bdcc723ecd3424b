"""PSNR, SSIM and MS-SSIM against their definitions, written out in numpy."""

import math

import numpy as np
import pytest
import torch

from coanerv_codec.metrics import MS_WEIGHTS, ms_ssim, psnr, ssim


def clips(*shape: int, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth clip and the same with noise."""
    rng = np.random.default_rng(0)
    frames, channels, height, width = shape
    y, x = np.mgrid[:height, :width]
    a = 0.5 + 0.4 * np.sin(x / 5) * np.cos(y / 7) + 0.02 * np.arange(frames * channels).reshape(frames, channels, 1, 1)
    b = a + noise * rng.standard_normal(shape)
    return torch.from_numpy(a.clip(0, 1)).float(), torch.from_numpy(b.clip(0, 1)).float()


def window() -> np.ndarray:
    u = np.arange(11) - 5
    g = np.exp(-(u**2) / (2 * 1.5**2))
    w = np.outer(g, g)
    return w / w.sum()


def plain_maps(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Mean SSIM and contrast-structure of two planes [H,W], position by position (Wang et al. 2004)."""
    w, similarity, structure = window(), [], []
    for i in range(a.shape[0] - 10):
        for j in range(a.shape[1] - 10):
            p, q = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
            mu_p, mu_q = (w * p).sum(), (w * q).sum()
            var_p, var_q = (w * (p - mu_p) ** 2).sum(), (w * (q - mu_q) ** 2).sum()
            cov = (w * (p - mu_p) * (q - mu_q)).sum()
            cs = (2 * cov + 0.03**2) / (var_p + var_q + 0.03**2)
            similarity.append(cs * (2 * mu_p * mu_q + 0.01**2) / (mu_p**2 + mu_q**2 + 0.01**2))
            structure.append(cs)
    return float(np.mean(similarity)), float(np.mean(structure))


def test_psnr():
    a = torch.zeros(2, 3, 4, 4)
    assert psnr(a, a) == math.inf
    assert psnr(a, a + 0.1) == pytest.approx(20.0, abs=1e-4)
    half = a.clone()
    half[0] = 0.1
    assert psnr(a, half) == pytest.approx(20 + 10 * math.log10(2), abs=1e-4)


def test_ssim_is_the_mean_over_all_planes_and_positions():
    a, b = clips(2, 3, 16, 19)
    planes = zip(*(x.flatten(0, 1).double().numpy() for x in (a, b)), strict=True)
    expected = np.mean([plain_maps(p, q)[0] for p, q in planes])
    assert ssim(a, b) == pytest.approx(expected, abs=1e-4)
    assert ssim(a, a) == pytest.approx(1.0)
    assert ssim(a, b) < ssim(a, (a + b) / 2) < 1


def test_ssim_of_a_picture_smaller_than_the_window():
    a, b = clips(1, 3, 5, 5)
    assert ssim(a, a) == pytest.approx(1.0)
    assert 0 < ssim(a, b) <= 1


@pytest.mark.parametrize("size", [(161, 161), (176, 161)])
def test_ms_ssim_is_the_product_over_five_scales(size):
    a, b = clips(1, 1, *size, noise=0.2)
    planes = [x[0, 0].double().numpy() for x in (a, b)]
    expected = 1.0
    for level, weight in enumerate(MS_WEIGHTS):
        similarity, structure = plain_maps(*planes)
        expected *= (similarity if level == 4 else structure) ** weight
        planes = [halve(p) for p in planes]
    assert ms_ssim(a, b) == pytest.approx(expected, abs=1e-3)
    assert ms_ssim(a, a) == pytest.approx(1.0)


def halve(plane: np.ndarray) -> np.ndarray:
    """Means of 2x2 blocks, an odd side padded with zeros at both ends, as the reference implementation pads."""
    pad = [(side % 2, side % 2) for side in plane.shape]
    plane = np.pad(plane, pad)
    h, w = (side // 2 for side in plane.shape)
    return plane[: 2 * h, : 2 * w].reshape(h, 2, w, 2).mean((1, 3))


def test_ms_ssim_averages_over_planes():
    a, b = clips(2, 3, 161, 165)
    each = [ms_ssim(a[f : f + 1, c : c + 1], b[f : f + 1, c : c + 1]) for f in range(2) for c in range(3)]
    assert ms_ssim(a, b) == pytest.approx(np.mean(each), abs=1e-6)


def test_ms_ssim_of_a_small_picture_is_not_a_number():
    a, _ = clips(1, 3, 160, 400)
    assert math.isnan(ms_ssim(a, a))


def test_ms_ssim_of_a_negative_is_zero_rather_than_complex():
    a, _ = clips(1, 1, 161, 161)
    assert ms_ssim(a, 1 - a) == 0.0
