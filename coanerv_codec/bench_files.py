"""What `coanerv bench` measures in processes of their own: decoding files, peak memory, and other codecs."""

import contextlib
import io
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

from coanerv_codec.cells import plan_layout
from coanerv_codec.checkpoint import Checkpoint, load_checkpoint
from coanerv_codec.container import Reader
from coanerv_codec.decoding import (
    EngineOptions,
    View,
    check_checkpoint,
    clip_tokens,
    decode_cells,
    decode_clip,
    layout_of,
    make_view,
)
from coanerv_codec.device import keep_freed_memory, pick_device
from coanerv_codec.moments import Timing
from coanerv_codec.playing import decode_items, describe_output, read_preamble
from coanerv_codec.records import ClipRecord
from coanerv_codec.video import Frame, VideoInfo
from coanerv_codec.writer import open_output

CLIPS = 2  # decoded for peak memory: while the second is, the first is on its way out
SHORT = 60.0  # seconds after which no further round begins


def _load(checkpoint_path: Path, device: str, threads: int) -> Checkpoint:
    torch.set_num_threads(threads)
    keep_freed_memory()
    checkpoint = load_checkpoint(checkpoint_path)
    checkpoint.model.to(pick_device(device))
    return checkpoint


def end_to_end(
    coa: Path, folder: Path, warmup: int, repeats: int, checkpoint_path: Path, tile: int, device: str, threads: int
) -> dict:
    """Time, in turns: decoding all cells of a file without a use for the pixels; the file into H.264; only reading it."""
    checkpoint = _load(checkpoint_path, device, threads)
    options = EngineOptions(tile=tile)

    def clips() -> Iterator[tuple[np.ndarray, ClipRecord, Reader]]:
        with coa.open("rb") as file:
            reader = Reader(file)
            for item in reader:
                if isinstance(item, ClipRecord):
                    yield clip_tokens(item, reader.header), item, reader

    def read() -> int:
        return sum(len(clip.pts) for _, clip, _ in clips())

    def engine() -> int:
        count = 0
        for tokens, clip, reader in clips():
            header = reader.header
            check_checkpoint(header, checkpoint)
            # A frame beyond each end that meets another clip, as for cross-fading.
            places = np.arange(-(clip.number > 0), len(clip.pts) + (clip.number + 1 < len(reader.index())))
            view, layout = make_view(header.width, header.height), layout_of(header, clip)
            t = places.astype(np.float32) / header.frames_per_clip
            for _ in decode_cells(checkpoint.model.decoder, tokens, layout, view, t, options):
                pass
            count += len(clip.pts)
        return count

    def decode() -> int:
        count = 0
        with coa.open("rb") as file:
            reader = Reader(file)
            view = make_view(reader.header.width, reader.header.height)
            streams, metadata, items = read_preamble(reader)
            info = describe_output(reader.header, streams.values(), metadata, view, Timing())
            with open_output(folder / "bench.mp4", info, overwrite=True) as out:
                for frame in decode_items(items, reader.header, checkpoint, view, options=options):
                    out.write(frame)
                    count += 1
        return count

    times: dict[str, list[float]] = {"read": [], "engine": [], "decode": []}
    began = time.perf_counter()
    for i in range(warmup + repeats):
        for name, work in (("read", read), ("engine", engine), ("decode", decode)):
            start = time.perf_counter()
            frames = work()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
        if times["read"] and time.perf_counter() - began > SHORT:
            break
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "fps": frames / seconds["decode"],
        "engine_fps": frames / seconds["engine"],
        "reading_share": seconds["read"] / seconds["decode"],
        "repeats": len(times["read"]),
        "output": "H.264 as `coanerv decode` writes it",
    }


def peak_memory(
    size: tuple[int, int], folder: Path, decode: bool, checkpoint_path: Path, tile: int, device: str, threads: int
) -> dict:
    """Write two clips of `size` as H.264, decoded from random tokens or made of nothing; return memory in MiB."""
    checkpoint = _load(checkpoint_path, device, threads)
    config = checkpoint.model.config
    layout, view = plan_layout(*size, config.cell), make_view(*size)
    random = np.random.default_rng(0)
    tokens = random.normal(scale=0.02, size=(layout.cells, config.tokens, config.token_dim)).astype(np.float32)
    t = (
        np.arange(-1, config.frames + 1, dtype=np.float32) / config.frames
    )  # as where clips are cross-faded at both ends
    # The first call of everything loads code; that is neither the frames' nor the engine's.
    decode_clip(checkpoint.model.decoder, tokens, layout, View(view.x[:64], view.y[:64]), t, EngineOptions(tile=tile))
    loaded = peak_rss()
    info = VideoInfo(*size, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    with open_output(folder / "memory.mp4", info, overwrite=True) as out:
        for clip in range(CLIPS):
            if decode:
                pictures = decode_clip(checkpoint.model.decoder, tokens, layout, view, t, EngineOptions(tile=tile))
            else:
                pictures = random.integers(120, 136, (len(t), 3, *reversed(size)), np.uint8)
            for i, picture in enumerate(pictures[1:-1]):
                out.write(Frame(clip * config.frames + i, 1, picture))
    return {"peak": peak_rss(), "loaded": loaded}


def peak_rss() -> float:
    """Return the largest memory this process has held, in MiB."""
    # ru_maxrss would do, but Linux carries it over from the parent at exec; VmHWM starts anew.
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) / 2**10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2 ** (20 if sys.platform == "darwin" else 10)


def time_codecs(codecs: dict[str, dict[str, str]], pictures: np.ndarray) -> list[dict]:
    """Time other codecs, one after the other."""
    return [time_codec(name, options, pictures) for name, options in codecs.items()]


def time_codec(name: str, options: dict[str, str], pictures: np.ndarray) -> dict:
    """Time another codec through PyAV on the same pictures, in memory, once."""
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
