"""The Python interface: `encode`, `decode` and `open`, re-exported by the package."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from coanerv_codec.atomic import atomic_path
from coanerv_codec.bank import DEFAULT_CODER
from coanerv_codec.cells import DEFAULT_OVERLAP
from coanerv_codec.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from coanerv_codec.color import ColorTags, to_model, yuv_to_rgb
from coanerv_codec.container import DEFAULT_LIMITS, Reader
from coanerv_codec.decoding import (
    EngineOptions,
    check_checkpoint,
    clip_tokens,
    layout_of,
    make_view,
    query_points,
)
from coanerv_codec.device import pick_device
from coanerv_codec.encoding import EncodeOptions, encode_video
from coanerv_codec.errors import FormatError, InputError
from coanerv_codec.fade import mix_points, shares
from coanerv_codec.files import encode_file
from coanerv_codec.moments import Timing, meet
from coanerv_codec.playing import decode_items
from coanerv_codec.records import ClipRecord, Header, Limits
from coanerv_codec.video import Frame, VideoInfo


def encode(
    source: str | Path | Iterable[np.ndarray],
    output: str | Path,
    *,
    bits: int = 6,
    fit: bool = False,
    overlap: int = DEFAULT_OVERLAP,
    motion: bool = True,
    coder: str = DEFAULT_CODER,
    fps: Fraction | int = 25,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> None:
    """Encode a video file, or RGB pictures (uint8 [H, W, 3], shown at `fps`), into a `.coa` file."""
    options = EncodeOptions(bits=bits, cells=(1, 1) if fit else None, overlap=overlap, motion=motion, coder=coder)
    loaded = _load(checkpoint, None, device)
    if isinstance(source, str | Path):
        encode_file(source, output, lambda: loaded, options, overwrite=overwrite)
        return
    with atomic_path(output, overwrite) as path, path.open("wb") as file:
        encode_video(*_from_pictures(source, Fraction(fps)), file, loaded, options)


def _from_pictures(pictures: Iterable[np.ndarray], fps: Fraction) -> tuple[VideoInfo, Iterator[Frame]]:
    pictures = iter(pictures)
    first = next(pictures, None)
    if first is None:
        raise InputError("there are no pictures to encode")
    if first.ndim != 3:
        raise InputError(f"picture 0 is {first.dtype} {first.shape}, not uint8 (height, width, 3)")
    height, width = first.shape[:2]
    info = VideoInfo(width, height, 1 / fps, frame_duration=1, rate=fps, chroma="444")

    def frames() -> Iterator[Frame]:
        picture, pts = first, 0
        while picture is not None:
            if picture.dtype != np.uint8 or picture.shape != (height, width, 3):
                raise InputError(f"picture {pts} is {picture.dtype} {picture.shape}, not uint8 {(height, width, 3)}")
            planes = [np.ascontiguousarray(picture[..., c]) for c in range(3)]
            yield Frame(pts, 1, to_model(planes, "rgb", ColorTags()))
            picture, pts = next(pictures, None), pts + 1

    return info, frames()


def decode(
    source: str | Path,
    *,
    size: tuple[int, int] | None = None,
    crop: tuple[int, int, int, int] | None = None,
    fps: Fraction | int | None = None,
    start: Fraction | float = 0,
    duration: Fraction | float | None = None,
    tile: int = 64,
    engine: str = "separable",
    checkpoint: str | Path | None = None,
    device: str = "auto",
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[np.ndarray]:
    """Decode a `.coa` file into RGB pictures, uint8 [H, W, 3]; size is (width, height), crop (left, top, width, height)."""
    # Through its text, as 0.1 is meant to be a tenth and not the float nearest to it.
    timing = Timing(*(None if v is None else Fraction(str(v)) for v in (start, duration, fps)))
    options = EngineOptions(engine, tile)
    with open(source, checkpoint=checkpoint, device=device, limits=limits) as coa:
        view = make_view(coa.header.width, coa.header.height, size, crop, limits)
        clips = (item for item in coa.reader if isinstance(item, ClipRecord))
        for frame in decode_items(clips, coa.header, coa.checkpoint, view, timing, options, limits=limits):
            yield yuv_to_rgb(frame.yuv)


def open(
    source: str | Path,
    *,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    limits: Limits = DEFAULT_LIMITS,
) -> "CoaFile":
    """Open a `.coa` file for random access to its tokens and to any coordinate."""
    try:
        file = Path(source).open("rb")  # noqa: SIM115 (CoaFile closes it)
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        return CoaFile(file, checkpoint, device, limits)
    except BaseException:
        file.close()
        raise


class CoaFile:
    """An open `.coa` file. `checkpoint` is loaded when first needed."""

    def __init__(self, file: BinaryIO, checkpoint: str | Path | None, device: str, limits: Limits):
        self._file, self._path, self._device = file, checkpoint, device
        self._loaded: Checkpoint | None = None
        self.reader = Reader(file, limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def header(self) -> Header:
        """What the file says about its video and its decoder."""
        return self.reader.header

    @property
    def checkpoint(self) -> Checkpoint:
        """The model that this file names."""
        if self._loaded is None:
            loaded = _load(self._path, self.header.checkpoint, self._device)
            check_checkpoint(self.header, loaded)
            self._loaded = loaded
        return self._loaded

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.reader.index())

    def tokens(self, clip: int) -> np.ndarray:
        """Return the tokens of a clip, float32 [cells, N, d], the same on every machine."""
        return clip_tokens(self.reader.clip(clip), self.header)

    def query(self, x: np.ndarray | float, y: np.ndarray | float, t: np.ndarray | float) -> np.ndarray:
        """Ask any points: x and y in [0, 1] across the picture, t in seconds from the first frame, broadcast together.

        Returns full-range BT.601 YUV in [0, 1], float32 [..., 3].
        """
        x, y, t = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (x, y, t)))
        index = self.reader.index()
        ticks = index[0].pts + t.ravel() / float(self.header.time_base)
        clip_of = np.clip(np.searchsorted([e.pts for e in index], ticks, side="right") - 1, 0, len(index) - 1)
        out = np.empty((x.size, 3), np.float32)
        for number in np.unique(clip_of):
            here = clip_of == number
            place = x.ravel()[here] * (self.header.width - 1), y.ravel()[here] * (self.header.height - 1)
            out[here] = self._query_clip(int(number), *place, ticks[here])
        return out.reshape(*x.shape, 3)

    def _query_clip(self, number: int, x: np.ndarray, y: np.ndarray, ticks: np.ndarray) -> np.ndarray:
        """Ask points [Q] of a clip at times in ticks, cross-faded with the clips beside it: [Q,3]."""
        clip, frames, decoder = self.reader.clip(number), self.header.frames_per_clip, self.checkpoint.model.decoder
        before = self._neighbour(number - 1) if ticks.min() < (clip.pts[1] if len(clip.pts) > 1 else np.inf) else None
        after = self._neighbour(number + 1) if len(clip.pts) == frames > 1 and ticks.max() > clip.pts[-2] else None
        before = before if before and meet(before[0], clip, self.header) else None
        after = after if after and meet(clip, after[0], self.header) else None
        times = [*clip.pts, after[0].pts[0]] if after else clip.pts
        place = np.interp(ticks, times, np.arange(len(times)))

        def ask(record: ClipRecord, tokens: np.ndarray, some: np.ndarray, place: np.ndarray) -> np.ndarray:
            """The points `some` as a clip shows them at places of its own."""
            return query_points(decoder, tokens, layout_of(self.header, record), x[some], y[some], place / frames)

        out = ask(clip, clip_tokens(clip, self.header), np.arange(len(place)), place)
        for other, share, shift in zip((before, after), shares(place, frames), (frames, -frames), strict=True):
            some = np.flatnonzero(share)
            if other and len(some):
                out[some] = mix_points(out[some], ask(*other, some, place[some] + shift), share[some])
        return out

    def _neighbour(self, number: int) -> tuple[ClipRecord, np.ndarray] | None:
        """Return a clip and its tokens; None if there is none or it is damaged."""
        if not 0 <= number < len(self):
            return None
        try:
            clip = self.reader.clip(number)
            return clip, clip_tokens(clip, self.header)
        except FormatError:  # its own points will say so
            return None


def _load(checkpoint: str | Path | None, wanted: str | None, device: str) -> Checkpoint:
    loaded = load_checkpoint(find_checkpoint(None if checkpoint is None else Path(checkpoint), wanted))
    loaded.model.to(pick_device(device))
    return loaded
