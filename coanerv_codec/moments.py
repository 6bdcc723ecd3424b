"""When frames are shown: the moments at which clips are asked, and the packets of the other streams that go with them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

from coanerv_codec.container import DEFAULT_LIMITS
from coanerv_codec.errors import FormatError
from coanerv_codec.fade import LEAST
from coanerv_codec.records import ClipRecord, Header, Limits, Packet, StreamInfo


@dataclass(frozen=True)
class Timing:
    """Which moments are asked: seconds from the first frame, and a frame rate (None: the source's own frames)."""

    start: Fraction = Fraction(0)
    duration: Fraction | None = None
    rate: Fraction | None = None

    def window(self, header: Header, origin: int) -> tuple[Fraction, Fraction | None]:
        """Return begin and end (None: open) in source ticks; `origin` is the pts of the video's first frame."""
        begin = origin + self.start / header.time_base
        return begin, None if self.duration is None else begin + self.duration / header.time_base

    def time_base(self, header: Header) -> Fraction:
        """Return the seconds per tick of the output's timestamps."""
        return 1 / self.rate if self.rate else header.time_base


@dataclass(frozen=True)
class Moment:
    """An output frame: shown from `pts` for `duration` ticks of the output, asked at a place in its clip (`fade.py`)."""

    pts: int
    duration: int
    place: float


def meet(clip: ClipRecord, following: ClipRecord | None, header: Header, timing: Timing = Timing()) -> bool:
    """Tell whether a clip is cross-faded with the one that follows in the file.

    Not across what is lost, nor behind a clip that was cut short; and not at rates at which more pictures than a clip's would
    have to wait.
    """
    frames = header.frames_per_clip
    if following is None or following.number != clip.number + 1 or len(clip.pts) < max(frames, LEAST):
        return False
    if timing.rate is None:
        return True
    second = following.pts[1] if len(following.pts) > 1 else following.pts[0] + following.last_duration
    return (second - clip.pts[-2]) * header.time_base * timing.rate <= frames


def clip_moments(
    clip: ClipRecord,
    end: int,
    header: Header,
    timing: Timing,
    origin: int,
    lost: int = 0,
    faded: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Moment]:
    """Yield the output frames that fall into a clip whose last frame is shown until `end`, in order.

    With a rate, a time between two frames asks the decoder between them; a clip's last frame stands until the next clip,
    unless the two are cross-faded (`faded`). The last frame is repeated for frames `lost` after it.
    """
    begin, stop = timing.window(header, origin)
    shift = begin - origin  # what starts later than the source is moved to where the source began
    if timing.rate is None:
        last, gap = clip.pts[-1], end - clip.pts[-1]
        if lost > limits.concealed:
            raise FormatError(f"{lost} frames are lost, more than {limits.concealed} to make up for (limit concealed)")
        times = [*clip.pts, *(last + gap * k // (lost + 1) for k in range(1, lost + 1)), end]
        for i, (pts, until) in enumerate(pairwise(times)):
            if (until > begin or pts >= begin) and (stop is None or pts < stop):
                yield Moment(pts - floor(shift), until - pts, min(i, len(clip.pts) - 1))
        return
    tick = 1 / (timing.rate * header.time_base)  # source ticks per output frame
    first = max(0, ceil((clip.pts[0] - begin) / tick))
    last = ceil((min(end, stop if stop is not None else end) - begin) / tick)
    if last > limits.frames:  # a time stamp may be years away
        raise FormatError(
            f"at {timing.rate} frames per second there are {last}, more than {limits.frames} (limit frames)"
        )
    offset, known = round(origin / tick), [*clip.pts, end] if faded else clip.pts
    for number in range(first, last):
        at = begin + number * tick
        i = bisect_right(clip.pts, at) - 1
        between = (at - known[i]) / (known[i + 1] - known[i]) if i + 1 < len(known) else 0
        yield Moment(offset + number, 1, float(i + between))


def packets_in_time(
    packets: Iterable[Packet], streams: Mapping[int, StreamInfo], header: Header, timing: Timing, origin: int
) -> Iterator[Packet]:
    """Leave out packets outside of the window and move the others with the frames; untouched without a window."""
    if not timing.start and timing.duration is None:
        yield from packets
        return
    begin, stop = timing.window(header, origin)
    for packet in packets:
        tick = streams[packet.stream].time_base / header.time_base  # in the video's ticks
        if packet.pts is None or (packet.pts + packet.duration) * tick <= begin:
            continue
        if stop is None or packet.pts * tick < stop:
            shift = round((begin - origin) / tick)
            dts = None if packet.dts is None else packet.dts - shift
            yield replace(packet, pts=packet.pts - shift, dts=dts)
