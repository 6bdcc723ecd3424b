"""PSNR, SSIM and MS-SSIM on normalised YUV tensors, as the paper's appendix defines them.

The paper evaluates SSIM on the five-dimensional clip tensor: every plane of every frame is filtered on its own and all
positions are averaged. Windows are Gaussian, 11 x 11, sigma 1.5, without padding; the data range is 1.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2
MS_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def psnr(a: Tensor, b: Tensor) -> float:
    """PSNR in dB of tensors of one shape in [0, 1]; equal tensors give infinity."""
    mse = (a - b).square().mean(dtype=torch.float64).item()
    return -10 * math.log10(mse) if mse else math.inf


def _blur(x: Tensor) -> Tensor:
    """Filter planes [n,1,H,W] with the Gaussian window, without padding; a side shorter than it is left as it is."""
    u = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    g = torch.exp(-(u**2) / (2 * SIGMA**2))
    g = g / g.sum()
    if x.shape[-2] >= WINDOW:
        x = functional.conv2d(x, g.view(1, 1, -1, 1))
    if x.shape[-1] >= WINDOW:
        x = functional.conv2d(x, g.view(1, 1, 1, -1))
    return x


def _similarity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Planes [n,1,H,W] -> mean SSIM and mean contrast-structure of each, [n]."""
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    contrast = (2 * covariance + C2) / (var_a + var_b + C2)
    luminance = (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
    return (luminance * contrast).flatten(1).mean(1), contrast.flatten(1).mean(1)


def ssim(a: Tensor, b: Tensor) -> float:
    """SSIM of clips [F,3,H,W] in [0, 1]."""
    planes_a, planes_b = (x.flatten(0, 1)[:, None] for x in (a, b))
    return _similarity(planes_a, planes_b)[0].mean().item()


def ms_ssim(a: Tensor, b: Tensor) -> float:
    """MS-SSIM of clips [F,3,H,W] in [0, 1], averaged over planes; needs sides over 160 pixels (NaN otherwise)."""
    if min(a.shape[-2:]) <= (WINDOW - 1) * 2 ** (len(MS_WEIGHTS) - 1):
        return math.nan
    planes = [x.flatten(0, 1)[:, None] for x in (a, b)]
    product = torch.ones(len(planes[0]), device=a.device)
    for level, weight in enumerate(MS_WEIGHTS):
        similarity, contrast = _similarity(*planes)
        last = level == len(MS_WEIGHTS) - 1
        product = product * (similarity if last else contrast).clamp_min(0) ** weight
        # An odd side is padded, as the reference implementation does.
        pad = [side % 2 for side in planes[0].shape[-2:]]
        planes = [functional.avg_pool2d(p, 2, padding=pad) for p in planes]
    return product.mean().item()
