"""Where to compute and in which precision: the one place that asks what the machine can do."""

import ctypes
import functools
import platform
import time

import torch

from coanerv_codec.errors import CoanervError


def pick_device(name: str) -> torch.device:
    """Return the device for auto|cpu|cuda; asking for CUDA where there is none is an error, not a slow surprise."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CoanervError("--device cuda: no CUDA device is available here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def has_bf16(device: torch.device) -> bool:
    """Tell whether the machine has instructions for bf16 matrix products; without them they are a hundred times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # AVX-512 BF16 or AMX, as oneDNN sees it. Both queries are underscored in torch but the only ones there are.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def has_fast_bf16(device: torch.device) -> bool:
    """Tell whether bf16 matrix products are faster than fp32 here: timed, since CPUs with bf16 instructions can be slower."""
    if device.type == "cuda" or not has_bf16(device):
        return has_bf16(device)
    return _product_seconds(torch.bfloat16) < 0.8 * _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype) -> float:
    """Return the best time of a 512x512 matrix product in a few tries."""
    a = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return min(times)


def pick_precision(name: str) -> str:
    """Return fp32 or bf16 for auto|fp32|bf16: bf16 only where asked for, as its error is close to a code value."""
    return "fp32" if name == "auto" else name


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next tensor instead of giving it back to the kernel.

    Otherwise every large temporary is paid for in page faults: a quarter of a training step, measured.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, 32 * 2**20)  # the most that glibc takes
    libc.mallopt(m_trim_threshold, 2**30)
    # Not M_TOP_PAD: with it the threads of FFmpeg's decoder lose 1.8 KB a frame, 160 MB in an hour of video.
