"""The demonstration: encode and decode a clip, and measure what came back."""

import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from coanerv_codec.atomic import make_folder, write_whole
from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.decoding import make_view
from coanerv_codec.encoding import EncodeOptions
from coanerv_codec.files import decode_file, encode_file, open_coa
from coanerv_codec.metrics import psnr, ssim
from coanerv_codec.pictures import side_by_side
from coanerv_codec.raw_video import png_bytes
from coanerv_codec.video import Frame, open_video


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration measured, and the files it wrote."""

    frames: int
    width: int
    height: int
    source_bytes: int
    coa_bytes: int
    psnr: float
    ssim: float
    encode_fps: float
    decode_fps: float
    coa: Path
    video: Path
    picture: Path


def bundled_clip() -> Path:
    """Return the path of the clip that ships with the package."""
    return Path(str(resources.files("coanerv_codec.assets") / "bunny.mp4"))


def run_demo(source: Path, folder: Path, checkpoint: Checkpoint, bits: int) -> DemoResult:
    """Encode `source` into folder/demo.coa, decode that into demo.mp4, and compare frame by frame."""
    make_folder(folder)
    coa, video, picture = folder / "demo.coa", folder / "demo.mp4", folder / "side-by-side.png"
    with open_video(source) as reader:
        frames = [item for item in reader if isinstance(item, Frame)]
    began = time.perf_counter()
    encode_file(source, coa, lambda: checkpoint, EncodeOptions(bits=bits), overwrite=True)
    encoded = time.perf_counter()
    decoded: list[np.ndarray] = []
    with open_coa(coa) as reader:
        view = make_view(reader.header.width, reader.header.height)
        done = decode_file(
            reader, video, checkpoint, view, overwrite=True, progress=lambda frame: decoded.append(frame.yuv)
        )
    finished = time.perf_counter()
    middle = len(frames) // 2
    write_whole(picture, png_bytes(side_by_side(frames[middle].yuv, decoded[middle])))
    a, b = (torch.from_numpy(np.stack(x)).float() / 255 for x in ([f.yuv for f in frames], decoded))
    return DemoResult(
        len(frames),
        done.info.width,
        done.info.height,
        source.stat().st_size,
        coa.stat().st_size,
        psnr(a, b),
        ssim(a, b),
        len(frames) / (encoded - began),
        len(frames) / (finished - encoded),
        coa,
        video,
        picture,
    )
