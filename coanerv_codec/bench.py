"""The measurements behind `coanerv bench` and docs/performance.md, all taken in one run on one machine.

Each time is the best of several after a warm-up. An engine is timed on one cell, whose pixels cost what all others
cost, and its frames per second count the pixels that overlapping cells decode twice; encoding and end-to-end decoding run
the whole pictures. The end-to-end decode has a process of its own, so that its peak memory is its own.
"""

import contextlib
import io
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from coanerv_codec.cells import Layout, plan_layout
from coanerv_codec.checkpoint import Checkpoint, load_checkpoint
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.container import Reader
from coanerv_codec.decoder import Decoder
from coanerv_codec.decoding import (
    EngineOptions,
    Timing,
    clip_tokens,
    decode_items,
    describe_output,
    make_view,
    read_preamble,
)
from coanerv_codec.device import has_fast_bf16, keep_freed_memory, pick_device
from coanerv_codec.encoding import EncodeOptions, choose_layout, encode_clip, encode_video
from coanerv_codec.engine import decode_grid
from coanerv_codec.errors import InputError
from coanerv_codec.model import AnyDecoder
from coanerv_codec.records import ClipRecord
from coanerv_codec.version import __version__
from coanerv_codec.video import Frame, VideoInfo, open_video
from coanerv_codec.writer import open_output

WARMUP, REPEATS, LONG = 1, 3, 5.0  # a measurement that has taken LONG seconds is not repeated again
SAMPLE = 2**17  # pixels on which an engine is timed: 8 frames of 128x128
PRODUCTS = 20  # matrix products timed together for the peak
PAPER = "paper-s"
CODECS = {
    "libx264": {"preset": "medium", "crf": "23"},
    "libsvtav1": {"preset": "8", "crf": "35"},
}


def run(
    checkpoint_path: Path,
    size: tuple[int, int],
    frames: int,
    *,
    source: Path | None = None,
    engines: tuple[str, ...] = ("separable", "reference"),
    tile: int = 64,
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Measure everything on `frames` pictures of `source`, or of a moving test picture of `size` (width, height)."""
    keep_freed_memory()
    checkpoint = load_checkpoint(checkpoint_path)
    chosen = pick_device(device)
    checkpoint.model.to(chosen)
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
            **{"cells": layout.cells, "warmup": WARMUP, "repeats": REPEATS, "time": "best of the repeats"},
        },
    }
    note("matrix products")
    result["gemm_peak"] = gemm_peak(chosen)
    with tempfile.TemporaryDirectory(prefix="coanerv-bench-") as folder:
        coa = Path(folder) / "bench.coa"
        note(f"encoding {len(pictures)} pictures of {width}x{height}")
        result["encode"], tokens = bench_encode(checkpoint, pictures, info, layout, coa)
        note("engines")
        result["decode"] = bench_engines(checkpoint, tokens, (width, height), engines, tile, result["gemm_peak"])
        result["bf16_error"] = bf16_error(checkpoint.model.decoder, tokens)
        note("decoding the file, end to end")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            threads = torch.get_num_threads()
            child = pool.submit(decode_file, coa, Path(folder), checkpoint_path, tile, device, threads).result()
    result["end_to_end"], result["memory"] = child
    result["ratios"] = _ratios(result)
    note("x264 and SVT-AV1")
    result["codecs"] = [bench_codec(name, options, pictures) for name, options in CODECS.items()]
    return result


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


def best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs after a warm-up."""
    times = []
    for i in range(WARMUP + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARMUP:
            times.append(time.perf_counter() - began)
        if times and sum(times) > LONG:
            break
    return min(times)


# --- the machine --------------------------------------------------------------------------------------------------


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
        "fast_bf16": has_fast_bf16(device),
        **{"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
    }


def gemm_peak(device: torch.device) -> dict:
    """Measure what the machine's matrix products reach on a square of 1024 (4096 on a GPU), in GFLOPS."""
    n = 4096 if device.type == "cuda" else 1024
    peak = {"size": n}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "bf16" and not has_fast_bf16(device):
            continue
        a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
        seconds = best_time(lambda a=a, b=b, out=out: [torch.mm(a, b, out=out) for _ in range(PRODUCTS)], device)
        peak[name] = 2 * n**3 * PRODUCTS / seconds / 1e9
    return peak


# --- engines ------------------------------------------------------------------------------------------------------


def flop_per_pixel(config: Config, engine: str) -> int:
    """Count the floating-point operations in the matrix products of one pixel."""
    n, inner, hidden = config.tokens, config.decoder_heads * config.decoder_head_dim, config.mlp_hidden
    layers = 2 * hidden * (hidden * (config.mlp_depth - 2) + 3)
    skip = 2 * config.gamma_dim * hidden if config.gamma_skip else 0
    if engine == "separable":  # values and denominator; the rest is in tables
        return 2 * config.decoder_heads * n * (hidden + 1) + layers
    projections = 2 * (config.gamma_dim * inner + inner * config.token_dim + config.token_dim * hidden) + skip
    return projections + 4 * n * inner + layers


def bench_engines(
    checkpoint: Checkpoint, tokens: Tensor, size: tuple[int, int], engines: tuple[str, ...], tile: int, peak: dict
) -> list[dict]:
    """Time the engines on one cell: the checkpoint's own tokens [cells,N,d], and the paper's model with random weights."""
    device = tokens.device
    torch.manual_seed(0)
    paper = Decoder(PRESETS[PAPER]).to(device)
    paper_tokens = torch.randn(1, PRESETS[PAPER].tokens, PRESETS[PAPER].token_dim, device=device)
    ours = checkpoint.name.rpartition("-")[0]
    entries = []
    for preset, decoder, one in ((ours, checkpoint.model.decoder, tokens[:1]), (PAPER, paper, paper_tokens)):
        config = decoder.config
        grid = _sample_grid(config, device)
        exact = decode_grid(decoder, one, *grid, engine="reference", tile=tile)
        pixels = _decoded_pixels(*size, config)
        for engine, precision in _variants(engines, device):
            options = {"engine": engine, "precision": precision, "tile": tile}
            seconds = best_time(lambda d=decoder, o=one, g=grid, k=options: decode_grid(d, o, *g, **k), device)
            difference = (decode_grid(decoder, one, *grid, **options) - exact).abs().max().item()
            speed = exact[..., 0].numel() / seconds
            flop = flop_per_pixel(config, engine)
            entries.append(
                {
                    **{"preset": preset, "engine": engine, "precision": precision},
                    **{"fps": speed / pixels, "kpx_per_s": speed / 1e3},
                    **{"flop_per_pixel": flop, "gflops": speed * flop / 1e9},
                    **{"share_of_gemm_peak": speed * flop / 1e9 / peak[precision], "max_abs_diff": difference},
                    **{"tokens": config.tokens, "cell": config.cell, "pixels_timed": exact[..., 0].numel()},
                }
            )
    return entries


def _decoded_pixels(width: int, height: int, config: Config) -> int:
    """Count the pixels that are decoded for one picture; those where cells overlap count for each."""
    layout = plan_layout(width, height, config.cell)
    across, down = (axis.length + (axis.count - 1) * axis.overlap for axis in (layout.x, layout.y))
    return across * down


def _variants(engines: tuple[str, ...], device: torch.device) -> list[tuple[str, str]]:
    """Engine and precision; bf16 only where the machine has instructions for it (elsewhere it is 100 times slower)."""
    variants = [(engine, "fp32") for engine in engines]
    if "separable" in engines and has_fast_bf16(device):
        variants.append(("separable", "bf16"))
    return variants


def _sample_grid(config: Config, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Full-width rows of one cell, all frames, SAMPLE pixels or the cell's."""
    rows = max(1, min(config.cell, SAMPLE // (config.frames * config.cell)))
    line = torch.arange(config.cell, device=device) / max(config.cell - 1, 1)
    return line[None], line[None, :rows], torch.arange(config.frames, device=device) / config.frames


def bf16_error(decoder: AnyDecoder, tokens: Tensor) -> dict:
    """Compare bf16 with fp32 on a few pixels of one cell (few, because without instructions for it bf16 is slow)."""
    line = torch.linspace(0, 1, 16, device=tokens.device)[None]
    t = torch.tensor([0.0, 0.5], device=tokens.device)
    exact, rough = (decode_grid(decoder, tokens[:1], line, line, t, precision=p) for p in ("fp32", "bf16"))
    return {"max_abs_diff": (exact - rough).abs().max().item(), "pixels": rough[..., 0].numel()}


# --- files --------------------------------------------------------------------------------------------------------


def bench_encode(
    checkpoint: Checkpoint, pictures: np.ndarray, info: VideoInfo, layout: Layout, coa: Path
) -> tuple[dict, Tensor]:
    """Time the encoder network alone, then the whole of encoding into the file `coa`; also return the first clip's tokens."""
    encoder, device = checkpoint.model.encoder, checkpoint.model.decoder.base.device
    frames = encoder.config.frames
    clip = pictures[np.minimum(np.arange(frames), len(pictures) - 1)]

    def encode() -> None:
        items = (Frame(i, 1, picture) for i, picture in enumerate(pictures))
        with coa.open("wb") as file:
            encode_video(info, items, file, checkpoint)

    tokens = encode_clip(encoder, clip, layout)
    extraction = best_time(lambda: encode_clip(encoder, clip, layout), device)
    full = best_time(encode, device)
    size = coa.stat().st_size
    measured = {
        "token_extraction_fps": frames / extraction,
        "full_fps": len(pictures) / full,
        "bytes": size,
        "bits_per_pixel": 8 * size / pictures[:, 0].size,
    }
    return measured, torch.from_numpy(tokens).to(device)


def decode_file(
    coa: Path, folder: Path, checkpoint_path: Path, tile: int, device: str, threads: int
) -> tuple[dict, dict]:
    """Decode `coa` into an H.264 file in `folder`: times, and this process's peak memory."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    checkpoint = load_checkpoint(checkpoint_path)
    checkpoint.model.to(pick_device(device))
    baseline = peak_rss()

    def read() -> None:
        with coa.open("rb") as file:
            reader = Reader(file)
            for item in reader:
                if isinstance(item, ClipRecord):
                    clip_tokens(item, reader.header)

    def decode() -> int:
        frames = 0
        with coa.open("rb") as file:
            reader = Reader(file)
            view = make_view(reader.header.width, reader.header.height)
            streams, metadata, items = read_preamble(reader)
            info = describe_output(reader.header, streams.values(), metadata, view, Timing())
            with open_output(folder / "bench.mp4", info, overwrite=True) as out:
                for frame in decode_items(items, reader.header, checkpoint, view, options=EngineOptions(tile=tile)):
                    out.write(frame)
                    frames += 1
        return frames

    began = time.perf_counter()
    frames = decode()
    seconds = time.perf_counter() - began
    memory = {"peak_rss_mb": peak_rss(), "loaded_rss_mb": baseline, "tile": tile}
    chosen = pick_device(device)
    if seconds < LONG:
        seconds = best_time(decode, chosen)
    return {"fps": frames / seconds, "reading_share": best_time(read, chosen) / seconds}, memory


def peak_rss() -> float:
    """Return the largest memory this process has held, in MiB."""
    # ru_maxrss would do, but Linux carries it over from the parent at exec; VmHWM starts anew.
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) / 2**10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2 ** (20 if sys.platform == "darwin" else 10)


def _ratios(result: dict) -> dict:
    """Put what was measured in relation, as the targets of docs/performance.md are stated."""
    ours, paper = ([e for e in result["decode"] if (e["preset"] == PAPER) is of] for of in (False, True))
    reference, paper_reference, separable = (
        next((e for e in entries if e["engine"] == engine), None)
        for entries, engine in ((ours, "reference"), (paper, "reference"), (ours, "separable"))
    )
    ratios = {}
    for entry in ours:
        if entry["engine"] == "separable" and reference:
            name = f"separable {entry['precision']}"
            ratios[f"{name} to reference"] = entry["kpx_per_s"] / reference["kpx_per_s"]
            ratios[f"{name} to {PAPER} reference"] = entry["kpx_per_s"] / paper_reference["kpx_per_s"]
    if separable:
        ratios["end-to-end decode to engine"] = result["end_to_end"]["fps"] / separable["fps"]
    return ratios


def bench_codec(name: str, options: dict[str, str], pictures: np.ndarray) -> dict:
    """Time another codec through PyAV on the same pictures, in memory."""
    entry: dict = {"codec": name, "settings": ", ".join(f"{k} {v}" for k, v in options.items())}
    try:
        av.codec.Codec(name, "w")
    except av.codec.codec.UnknownCodecError:
        return entry | {"missing": "not in this build of PyAV"}
    height, width = (n - n % 2 for n in pictures.shape[2:])  # 4:2:0 needs even sides
    planes = np.ascontiguousarray(pictures[:, :, :height, :width])
    frames = [av.VideoFrame.from_ndarray(p, format="yuv444p").reformat(format="yuv420p") for p in planes]
    os.environ.setdefault("SVT_LOG", "1")  # errors only
    file = io.BytesIO()
    began = time.perf_counter()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream(name, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in [*frames, None]:
            container.mux(stream.encode(frame))
    encoded = time.perf_counter()
    file.seek(0)
    with av.open(file) as container:
        count = sum(1 for _ in container.decode(video=0))
    decoded = time.perf_counter()
    return entry | {
        "encode_fps": len(frames) / (encoded - began),
        "decode_fps": count / (decoded - encoded),
        "bytes": file.getbuffer().nbytes,
    }


# --- for people ---------------------------------------------------------------------------------------------------

Rows = list[tuple[str, ...]]


def tables(result: dict) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Render a result as tables: title, headings, rows of text."""
    s, m = result["settings"], result["machine"]
    engines = [
        (
            *(e["preset"], str(e["tokens"]), f"{e['engine']} {e['precision']}"),
            *(f"{e['fps']:.3g}", f"{e['kpx_per_s']:,.0f}", f"{e['flop_per_pixel'] / 1e3:.0f}"),
            *(f"{e['share_of_gemm_peak']:.0%}", f"{e['max_abs_diff']:.1e}"),
        )
        for e in result["decode"]
    ]
    codecs = [
        (f"{c['codec']} ({c['settings']})", c["missing"], "", "")
        if "missing" in c
        else (
            f"{c['codec']} ({c['settings']})",
            *(f"{c[k]:.3g}" for k in ("encode_fps", "decode_fps")),
            f"{c['bytes']:,}",
        )
        for c in result["codecs"]
    ]
    ours = ("coanerv, file to file", f"{result['encode']['full_fps']:.3g}", f"{result['end_to_end']['fps']:.3g}")
    memory, ratios = result["memory"], result["ratios"]
    facts = [
        (
            "pictures",
            f"{s['frames']} of {s['width']}x{s['height']} ({s['source']}), {s['cells']} cells, tile {s['tile']}",
        ),
        ("machine", f"{m['cpu']}, {m['threads']} of {m['cores']} cores, {m['instructions']}, torch {m['torch']}"),
        ("load before the run", f"{m['load_before']:.1f}"),
        *(
            (f"GEMM peak, {p}", f"{result['gemm_peak'][p]:.0f} GFLOPS")
            for p in ("fp32", "bf16")
            if p in result["gemm_peak"]
        ),
        ("times", f"best of up to {s['repeats']} after {s['warmup']} warm-up"),
        *((name, f"{ratio:.2f}") for name, ratio in ratios.items()),
        ("reading and entropy decoding", f"{result['end_to_end']['reading_share']:.1%} of decoding"),
        ("token extraction", f"{result['encode']['token_extraction_fps']:.3g} fps"),
        ("bf16, largest error", f"{result['bf16_error']['max_abs_diff'] * 255:.2f}/255"),
        (
            "peak memory of decoding",
            f"{memory['peak_rss_mb']:.0f} MiB, of which {memory['loaded_rss_mb']:.0f} loaded before it began",
        ),
    ]
    return [
        ("Run", ("", ""), facts),
        (
            "Decoding engines",
            ("model", "N", "engine", "fps", "kpx/s", "kFLOP/px", "of peak", "max diff"),
            engines,
        ),
        (
            "Codecs",
            ("codec", "encode fps", "decode fps", "bytes"),
            [(*ours, f"{result['encode']['bytes']:,}"), *codecs],
        ),
    ]


def markdown(result: dict) -> str:
    """Render a result as Markdown tables, as docs/performance.md holds them."""
    parts = []
    for title, headings, rows in tables(result):
        lines = [f"### {title}", "", "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        parts.append("\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]))
    return "\n\n".join(parts) + "\n"
