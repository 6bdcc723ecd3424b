"""Training material: a folder of videos and photos, decoded once into a memory-mapped cache."""

import hashlib
import json
import logging
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coanerv_codec.atomic import atomic_path, make_folder, write_whole
from coanerv_codec.errors import InputError
from coanerv_codec.video import Frame, open_video

log = logging.getLogger(__name__)

VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v", ".ts", ".y4m", ".mpg"}
PHOTO_SUFFIXES = {".jpg", ".jpeg", ".png"}
MAX_FRAMES = 256  # cached per video: enough variety from one scene, and a film does not fill the disk
VALID_SHARE = 0.05  # held out by file name where no folder for validation is given


@dataclass(frozen=True)
class Item:
    """One cached file: planes Y [T,H,W], then U and V [T,ceil(H/2),ceil(W/2)], uint8, at `offset` of the cache."""

    name: str
    offset: int
    frames: int
    height: int
    width: int

    @property
    def chroma(self) -> tuple[int, int, int]:
        """Shape of each chroma plane."""
        return self.frames, -(-self.height // 2), -(-self.width // 2)


@dataclass(frozen=True)
class Corpus:
    """The cached items, and how many files were left out as too short or too small."""

    path: Path
    items: tuple[Item, ...]
    excluded: int

    def planes(self, item: Item) -> tuple[np.ndarray, np.ndarray]:
        """Return memory-mapped luma [T,H,W] and chroma [2,T,h,w] of an item."""
        luma = (item.frames, item.height, item.width)
        y = np.memmap(self.path, np.uint8, "r", item.offset, luma)
        uv = np.memmap(self.path, np.uint8, "r", item.offset + int(np.prod(luma)), (2, *item.chroma))
        return y, uv


def held_out(name: str) -> bool:
    """Tell whether a file belongs to the validation part of its folder: by its name alone, so that it never moves."""
    return zlib.crc32(name.encode()) % 1000 < VALID_SHARE * 1000


def list_media(folder: Path) -> list[Path]:
    """Return all videos and photos below a folder, sorted by name."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; --data needs a folder of videos")
    found = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in VIDEO_SUFFIXES | PHOTO_SUFFIXES]
    if not found:
        raise InputError(f"no videos or photos below {folder}")
    return found


def build_cache(files: list[Path], cache: Path, min_frames: int, min_side: int) -> Corpus:
    """Decode files into `cache` (once: the name depends on the files), leaving out what is too short or too small."""
    identity = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in files] + [min_frames, min_side]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    index_path, data_path = cache / f"{key}.json", cache / f"{key}.yuv"
    if not index_path.exists() or not data_path.exists():
        make_folder(cache)
        with atomic_path(data_path, overwrite=True) as path, path.open("wb") as out:
            items, excluded = _decode_all(files, out, min_frames, min_side)
        write_whole(index_path, json.dumps({"excluded": excluded, "items": [vars(i) for i in items]}))
    index = json.loads(index_path.read_text())
    items = tuple(Item(**i) for i in index["items"])
    needed = max((i.offset + i.frames * i.height * i.width + 2 * int(np.prod(i.chroma)) for i in items), default=0)
    if data_path.stat().st_size < needed:  # what is mapped but not there would end the process
        raise InputError(f"{data_path} is shorter than the {needed} bytes it should have; delete it to make it anew")
    return Corpus(data_path, items, index["excluded"])


def _decode_all(files: list[Path], out, min_frames: int, min_side: int) -> tuple[list[Item], int]:
    items, excluded, offset = [], 0, 0
    for number, path in enumerate(files):
        if number % 100 == 0:
            log.info("decoding %d of %d files", number, len(files))
        frames = _read_frames(path)
        photo = path.suffix.lower() in PHOTO_SUFFIXES
        if len(frames) < (1 if photo else min_frames) or min(frames[0][0].shape) < min_side:
            excluded += 1
            continue
        item = Item(path.name, offset, len(frames), *frames[0][0].shape)
        for plane in (luma for luma, _ in frames):
            out.write(plane.tobytes())
        for plane in (chroma[channel] for channel in (0, 1) for _, chroma in frames):
            out.write(plane.tobytes())
        offset += len(frames) * item.height * item.width + 2 * int(np.prod(item.chroma))
        items.append(item)
    return items, excluded


def _read_frames(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Up to MAX_FRAMES frames, luma [H,W] and chroma [2,h,w]; a file that cannot be read counts as empty, with a warning."""
    frames: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        with open_video(str(path), audio=False) as video:
            for frame in video:
                if isinstance(frame, Frame):
                    frames.append((frame.yuv[0].copy(), _halve(frame.yuv[1:])))
                if len(frames) == MAX_FRAMES:
                    break
    except InputError as error:
        log.warning("left out: %s", error)
        return []
    return frames


def _halve(x: np.ndarray) -> np.ndarray:
    """Average 2x2 blocks of [...,H,W] uint8, an odd last row or column repeated."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, x.shape[-2] % 2), (0, x.shape[-1] % 2)], mode="edge").astype(np.uint16)
    return ((x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2] + 2) // 4).astype(np.uint8)
