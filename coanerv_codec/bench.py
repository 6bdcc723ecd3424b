"""The measurements behind `coanerv bench` and docs/performance.md, all taken in one run on one machine.

What is compared is timed in turns, round after round, because a machine's speed drifts; a figure is the median over the
rounds after a warm-up. The fast engine is timed on whole cells, slower ones on full-width rows. What works on files runs in
processes of its own (`bench_files.py`), so that their peak memory, threads and priorities are their own.
"""

import contextlib
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from coanerv_codec import bench_files, separable_carriers
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.cells import Layout, plan_layout
from coanerv_codec.checkpoint import Checkpoint, load_checkpoint
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.decoder import Decoder
from coanerv_codec.device import has_bf16, has_fast_bf16, keep_freed_memory, pick_device
from coanerv_codec.encoding import EncodeOptions, choose_layout, encode_clip, encode_moving, encode_video
from coanerv_codec.engine import decode_grid, tile_within
from coanerv_codec.errors import InputError
from coanerv_codec.model import AnyDecoder
from coanerv_codec.version import __version__
from coanerv_codec.video import Frame, VideoInfo, open_video

T = TypeVar("T")

WARMUP, REPEATS = 1, 5
SAMPLE = (
    2**17
)  # pixels on which an engine is timed, a cell of `base`; CELLS of them where it is fast, half where it is slow
CELLS = 4
PRODUCTS = 2  # matrix products timed together for the peak
PAPER = "paper-s"
CODECS = {
    "libx264": {"preset": "medium", "crf": "23"},
    # It takes all cores at real-time priority when run by root, unless told how many.
    "libsvtav1": {"preset": "8", "crf": "35", "svtav1-params": "lp=2"},
}
MEMORY_SIZES = {"1080p": (1920, 1080), "4K": (3840, 2160)}


def run(
    checkpoint_path: Path,
    size: tuple[int, int],
    frames: int,
    *,
    source: Path | None = None,
    engines: tuple[str, ...] = ("separable", "reference"),
    tile: int = 64,
    max_memory: int | None = None,
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Measure everything on `frames` pictures of `source`, or of a moving test picture of `size` (width, height)."""
    keep_freed_memory()
    checkpoint = load_checkpoint(checkpoint_path)
    chosen = pick_device(device)
    checkpoint.model.to(chosen)
    if max_memory:
        tile = tile_within(checkpoint.model.config, "separable", max_memory)
    pictures = _read(source, frames) if source else moving_picture(*size, frames)
    height, width = pictures.shape[2:]
    info = VideoInfo(width, height, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    layout = choose_layout(info, checkpoint.model.config, EncodeOptions())
    result = {
        "version": __version__,
        "machine": machine(chosen),
        "settings": {
            **{"width": width, "height": height, "frames": len(pictures), "tile": tile},
            **{"source": source.name if source else "moving test picture", "checkpoint": checkpoint.name},
            **{"cells": layout.cells, "warmup": WARMUP, "repeats": REPEATS, "time": "median of the repeats"},
        },
    }
    with tempfile.TemporaryDirectory(prefix="coanerv-bench-") as folder:
        coa = Path(folder) / "bench.coa"
        note(f"encoding {len(pictures)} pictures of {width}x{height}")
        result["encode"], tokens = bench_encode(checkpoint, pictures, info, layout, coa)
        note("engines")
        result["decode"], result["gemm_peak"] = bench_engines(checkpoint, tokens, (width, height), engines, tile)
        result["bf16_error"] = bf16_error(checkpoint.model.decoder, tokens)
        common = (checkpoint_path, tile, device, torch.get_num_threads())
        note("decoding the file, end to end")
        result["end_to_end"] = _in_child(bench_files.end_to_end, coa, Path(folder), WARMUP, REPEATS, *common)
        memory = {"tile": tile}
        for name, extent in MEMORY_SIZES.items():
            note(f"peak memory at {name}")
            # First what the pictures on their way to the encoder take by themselves, then with decoding.
            in_flight, whole = (
                _in_child(bench_files.peak_memory, extent, Path(folder), decode, *common) for decode in (False, True)
            )
            memory[name] = memory_apart(in_flight, whole)
        result["memory"] = memory
        note("x264 and SVT-AV1")
        result["codecs"] = _in_child(bench_files.time_codecs, CODECS, pictures)
    result["ratios"] = _ratios(result)
    return result


def _in_child(work: Callable[..., T], *arguments: object) -> T:
    """Call a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def memory_apart(in_flight: dict, whole: dict) -> dict:
    """Split a decoding process's peak memory (MiB): frames in flight, all else."""
    frames = in_flight["peak"] - in_flight["loaded"]
    return {"peak_rss_mb": whole["peak"], "frames_in_flight_mb": frames, "apart_mb": whole["peak"] - frames}


def _read(source: Path, frames: int) -> np.ndarray:
    """Read the first pictures of a video file, [frames,3,H,W] uint8."""
    with open_video(source, audio=False) as video:
        pictures = [frame.yuv for frame in islice((item for item in video if isinstance(item, Frame)), frames)]
    if not pictures:
        raise InputError(f"{source}: the source has no video frames")
    return np.stack(pictures)


def moving_picture(width: int, height: int, frames: int) -> np.ndarray:
    """Return a test picture [frames,3,height,width] uint8: rings, a gradient and a disc, all moving."""
    y, x = np.mgrid[:height, :width].astype(np.float32) / height
    pictures = np.empty((frames, 3, height, width), np.uint8)
    for i in range(frames):
        phase = 0.02 * i
        rings = np.sin(60 * ((x - 0.5 - phase) ** 2 + (y - 0.5) ** 2))
        disc = (x - 0.3 - phase) ** 2 + (y - 0.4) ** 2 < 0.02
        pictures[i, 0] = 128 + 60 * rings + 50 * disc
        pictures[i, 1] = 128 + 60 * np.sin(3 * x + phase)
        pictures[i, 2] = 128 + 60 * np.cos(3 * y - phase) - 40 * disc
    return pictures


def median_times(works: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Run pieces of work in turns and return the median seconds of each, after the warm-up."""
    times: list[list[float]] = [[] for _ in works]
    for i in range(WARMUP + REPEATS):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i >= WARMUP:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def machine(device: torch.device) -> dict:
    """Say what the numbers were measured on, and how busy it was with other things."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        **{"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_before": os.getloadavg()[0]},
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "bf16_instructions": has_bf16(device),
        "fast_bf16": has_fast_bf16(device),
        **{"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
    }


# --- engines ------------------------------------------------------------------------------------------------------


def flop_per_pixel(decoder: AnyDecoder, engine: str, tile: int = 64) -> float:
    """Count the floating-point operations in the matrix products of one pixel of one frame, small tables left out."""
    config = decoder.config
    n, heads, hidden, frames = config.tokens, config.decoder_heads, config.mlp_hidden, config.frames
    inner, carriers, harmonics = heads * config.decoder_head_dim, config.carriers, 0
    later = hidden * (hidden * (config.mlp_depth - 2) + 3)
    # Keys and values are made once per cell by the fast engine and once per tile by the reference.
    shared = cell_flop(decoder) / (frames * (config.cell**2 if engine == "separable" else tile**2))
    if not carriers and engine == "separable":  # values and denominator; the rest is in tables
        return 2 * (heads * n * (hidden + 1) + later) + shared
    if not carriers:
        projections = config.gamma_dim * inner + inner * config.token_dim + config.token_dim * hidden
        return 2 * (projections + 2 * n * inner + later) + shared
    gx, gy, _ = config.grid
    if engine == "separable":  # sums along x and y and the first layers once for all frames
        harmonics = len(torch.cat([decoder.harmonics[:, 2].abs(), decoder.harmonics.new_zeros(1)]).unique())
        along = heads * gy * (gx / config.cell + rows_summed(decoder)) + hidden + 3
        return 2 * (along * carriers / frames + harmonics * (hidden + 3) + later) + shared
    retrieval = heads * (2 * config.spatial_frequencies * (gx + gy) + n * (carriers + 1))
    return 2 * (retrieval + carriers * (hidden + 3) + later) + shared


def cell_flop(decoder: AnyDecoder) -> int:
    """Count the operations that turn one cell's tokens into keys and values."""
    config = decoder.config
    per_pixel = ("query", "out", "linear", "mlp")
    layers = [
        m for name, m in decoder.named_modules() if isinstance(m, nn.Linear) and name.split(".")[0] not in per_pixel
    ]
    mixing = 2 * config.tokens * config.mixer_width * config.mixer_depth if config.carriers else 0
    return 2 * config.tokens * (sum(layer.weight.numel() for layer in layers) + mixing)


def rows_summed(decoder: CarrierDecoder) -> float:
    """Return the share of the rows of tokens that the fast engine sums in a pass, on average, in cells of native size."""
    line = torch.arange(decoder.config.cell, device=decoder.base.device) / (decoder.config.cell - 1)
    along_y = separable_carriers.attention(decoder, 1, line)
    passes = separable_carriers.rows_needed(along_y, max(1, separable_carriers.CPU_PASS // len(line)))
    return statistics.mean((last - first) / along_y.shape[2] for first, last in passes)


def bench_engines(
    checkpoint: Checkpoint, tokens: Tensor, size: tuple[int, int], engines: tuple[str, ...], tile: int
) -> tuple[list[dict], dict]:
    """Time the engines in turns: the checkpoint on its tokens [cells,N,d], and the paper's model with random weights.

    Also returns what the machine's matrix products reach on large squares, in GFLOPS, measured in the same rounds.
    """
    device = tokens.device
    torch.manual_seed(0)
    paper = Decoder(PRESETS[PAPER]).to(device).requires_grad_(False)
    paper_tokens = torch.randn(1, PRESETS[PAPER].tokens, PRESETS[PAPER].token_dim, device=device)
    ours = checkpoint.name.rpartition("-")[0]
    peaks = _products(device)
    works, entries = list(peaks.values()), []
    for preset, decoder, bank in ((ours, checkpoint.model.decoder, tokens), (PAPER, paper, paper_tokens)):
        for engine, precision in _variants(engines, device):
            fast = engine == "separable" and preset != PAPER
            grid = _sample_grid(decoder.config, device, SAMPLE if fast else SAMPLE // 2)
            pieces = CELLS if fast else 1
            options = {"engine": engine, "precision": precision, "tile": tile}
            works.append(lambda d=decoder, b=bank, g=grid, o=options, n=pieces: _decode_cells(d, b, g, o, n))
            pixels = pieces * grid[0].numel() * grid[1].numel() * grid[2].numel()
            exact, decoded = (decode_grid(decoder, bank[:1], *grid, **o) for o in (options | REFERENCE, options))
            entries.append(
                {
                    **{"preset": preset, "engine": engine, "precision": precision, "pixels_timed": pixels},
                    "flop_per_pixel": flop_per_pixel(decoder, engine, tile),
                    **{"tokens": decoder.config.tokens, "cell": decoder.config.cell},
                    "max_abs_diff": (decoded - exact).abs().max().item(),
                }
            )
    times = median_times(works, device)
    peak = {"size": _side(device)}
    peak |= {name: 2 * _side(device) ** 3 * PRODUCTS / s / 1e9 for name, s in zip(peaks, times, strict=False)}
    for entry, seconds in zip(entries, times[len(peaks) :], strict=True):
        speed = entry["pixels_timed"] / seconds
        config = checkpoint.model.config if entry["preset"] == ours else PRESETS[PAPER]
        entry["fps"], entry["kpx_per_s"] = speed / _decoded_pixels(*size, config), speed / 1e3
        entry["gflops"] = speed * entry["flop_per_pixel"] / 1e9
        entry["share_of_gemm_peak"] = entry["gflops"] / peak[entry["precision"]]
    return entries, peak


REFERENCE = {"engine": "reference", "precision": "fp32"}


def _products(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return matrix products per precision, to be timed."""
    works = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "fp32" or has_bf16(device):
            a, out = (torch.randn(_side(device), _side(device), device=device).to(dtype) for _ in range(2))
            works[name] = lambda a=a, out=out: [torch.mm(a, a, out=out) for _ in range(PRODUCTS)]
    return works


def _side(device: torch.device) -> int:
    return 4096 if device.type == "cuda" else 2048


def _decode_cells(decoder: AnyDecoder, tokens: Tensor, grid: tuple[Tensor, ...], options: dict, count: int) -> None:
    """Decode cells without doing anything with the pixels."""
    for i in range(count):
        decode_grid(decoder, tokens[i % len(tokens)][None], *grid, **options)


def _decoded_pixels(width: int, height: int, config: Config) -> int:
    """Count the pixels that are decoded for one picture; those where cells overlap count for each."""
    layout = plan_layout(width, height, config.cell)
    across, down = (axis.length + (axis.count - 1) * axis.overlap for axis in (layout.x, layout.y))
    return across * down


def _variants(engines: tuple[str, ...], device: torch.device) -> list[tuple[str, str]]:
    """Engine and precision; bf16 only where the machine has instructions for it (elsewhere it is 100 times slower)."""
    variants = [(engine, "fp32") for engine in engines]
    if "separable" in engines and has_bf16(device):
        variants.append(("separable", "bf16"))
    return variants


def _sample_grid(config: Config, device: torch.device, pixels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Full-width rows of one cell, all frames, `pixels` of them or the cell's."""
    rows = max(1, min(config.cell, pixels // (config.frames * config.cell)))
    line = torch.arange(config.cell, device=device) / max(config.cell - 1, 1)
    return line[None], line[None, :rows], torch.arange(config.frames, device=device) / config.frames


def bf16_error(decoder: AnyDecoder, tokens: Tensor) -> dict:
    """Compare bf16 with fp32 on a few pixels of one cell (few, because without instructions for it bf16 is slow)."""
    line = torch.linspace(0, 1, 16, device=tokens.device)[None]
    t = torch.tensor([0.0, 0.5], device=tokens.device)
    exact, rough = (decode_grid(decoder, tokens[:1], line, line, t, precision=p) for p in ("fp32", "bf16"))
    return {"max_abs_diff": (exact - rough).abs().max().item(), "pixels": rough[..., 0].numel()}


# --- encoding -----------------------------------------------------------------------------------------------------


def bench_encode(
    checkpoint: Checkpoint, pictures: np.ndarray, info: VideoInfo, layout: Layout, coa: Path
) -> tuple[dict, Tensor]:
    """Time the encoder network alone, then the whole of encoding into the file `coa`; also return the first clip's tokens."""
    encoder, device = checkpoint.model.encoder, checkpoint.model.decoder.base.device
    frames = encoder.config.frames
    clip = pictures[np.minimum(np.arange(frames), len(pictures) - 1)]
    small, small_layout = moving_picture(256, 256, frames), plan_layout(256, 256, encoder.config.cell)

    def encode() -> None:
        items = (Frame(i, 1, picture) for i, picture in enumerate(pictures))
        with coa.open("wb") as file:
            encode_video(info, items, file, checkpoint)

    tokens, _ = encode_moving(encoder, clip, layout)
    works = [
        lambda: encode_moving(encoder, clip, layout),
        encode,
        lambda: encode_moving(encoder, small, small_layout),
        lambda: encode_clip(encoder, small, small_layout),
    ]
    extraction, full, of_small, without_motion = median_times(works, device)
    size = coa.stat().st_size
    measured = {
        "token_extraction_fps": frames / extraction,
        "full_fps": len(pictures) / full,
        "clip_256_ms": 1e3 * of_small,
        "clip_256_without_motion_ms": 1e3 * without_motion,
        "bytes": size,
        "bits_per_pixel": 8 * size / pictures[:, 0].size,
    }
    return measured, torch.from_numpy(tokens).to(device)


def _ratios(result: dict) -> dict:
    """Put what was measured in relation, as the targets are stated."""
    ours, paper = ([e for e in result["decode"] if (e["preset"] == PAPER) is of] for of in (False, True))
    reference, paper_reference = (next((e for e in es if e["engine"] == "reference"), None) for es in (ours, paper))
    ratios = {}
    for entry in ours:
        if entry["engine"] == "separable" and reference:
            name = f"separable {entry['precision']}"
            ratios[f"{name} to reference"] = entry["fps"] / reference["fps"]
            ratios[f"{name} to {PAPER} reference"] = entry["fps"] / paper_reference["fps"]
    ratios["end-to-end decode to engine"] = result["end_to_end"]["fps"] / result["end_to_end"]["engine_fps"]
    sizes = [result["memory"][name]["apart_mb"] for name in MEMORY_SIZES]
    ratios["memory at 4K to 1080p, without frames in flight"] = sizes[1] / sizes[0]
    return ratios
