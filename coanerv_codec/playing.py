"""Playing a file: clips -> frames in order, cross-faded where clips meet, with the packets of other streams between them."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, takewhile
from types import MappingProxyType

import numpy as np

from coanerv_codec.checkpoint import Checkpoint
from coanerv_codec.color import ColorTags
from coanerv_codec.container import DEFAULT_LIMITS, Reader
from coanerv_codec.decoding import EngineOptions, View, check_checkpoint, clip_tokens, decode_clip, layout_of
from coanerv_codec.errors import CoanervError, FormatError
from coanerv_codec.fade import mix, shares
from coanerv_codec.moments import Moment, Timing, clip_moments, meet, packets_in_time
from coanerv_codec.records import SCOPES, ClipRecord, Header, Limits, Metadata, Packet, StreamInfo
from coanerv_codec.video import Frame, VideoInfo

PACKET_BYTES = 512  # that a packet takes beside its data


class Player:
    """Decodes the clips of a file one after the other, each once: with what its neighbours need of it to be cross-faded."""

    def __init__(
        self,
        header: Header,
        checkpoint: Checkpoint,
        view: View,
        timing: Timing = Timing(),
        options: EngineOptions = EngineOptions(),
        limits: Limits = DEFAULT_LIMITS,
    ):
        check_checkpoint(header, checkpoint)
        layout_of(header)  # refused at once if it is impossible
        self.header, self.decoder, self.view = header, checkpoint.model.decoder, view
        self.timing, self.options, self.limits = timing, options, limits
        self.origin: int | None = None  # pts of the first frame
        self._next = 0  # the number of the clip that what is held back is for
        self._waiting: deque[tuple[Moment, np.ndarray]] = (
            deque()
        )  # the end of the clip before, until that one is decoded
        self._ahead: dict[float, np.ndarray] = {}  # by place in that clip: what the one before shows there

    def play(self, clip: ClipRecord, following: ClipRecord | None) -> Iterator[Frame]:
        """Decode a clip whose next is `following`; where the two are cross-faded, its end is held back until that is played."""
        if clip.number != self._next:
            yield from self.flush()
        self.origin = clip.pts[0] if self.origin is None else self.origin
        frames, waiting, ahead = self.header.frames_per_clip, self._waiting, self._ahead
        self._next, self._waiting, self._ahead = clip.number + 1, deque(), {}
        try:
            faded, tokens = meet(clip, following, self.header, self.timing), None
            asked = self._asked(clip, following, faded, list(waiting))
            # A clip's worth at a time, and a frame beyond each end: a high frame rate may ask for any number.
            while batch := list(islice(asked, frames + 2)):
                tokens = clip_tokens(clip, self.header) if tokens is None else tokens
                pictures = self._decode(clip, tokens, [place for place, _, _ in batch])
                for (place, m, beginning), picture in zip(batch, pictures, strict=True):
                    before, after = map(float, shares(place, frames))
                    if beginning is not None:
                        self._ahead[beginning] = picture.copy()  # a part of an array keeps all of it in memory
                    elif m is None:
                        m, own = waiting.popleft()
                        yield Frame(m.pts, m.duration, mix(own, picture, float(shares(m.place, frames)[1])))
                    else:
                        if before and place in ahead:
                            picture = mix(picture, ahead[place], before)
                        if after and faded:
                            self._waiting.append((m, picture.copy()))
                        else:
                            yield Frame(m.pts, m.duration, picture)
        except CoanervError:
            yield from _alone(waiting)
            raise

    def _asked(
        self, clip: ClipRecord, following: ClipRecord | None, faded: bool, waiting: list[tuple[Moment, np.ndarray]]
    ) -> Iterator[tuple[float, Moment | None, float | None]]:
        """Yield the places at which a clip is asked: for frames of the one before that wait, for its own, for the next one's.

        With them come the frame of its own that it is for, or the place in the next clip.
        """
        frames = self.header.frames_per_clip
        yield from ((m.place - frames, None, None) for m, _ in waiting)
        yield from ((m.place, m, None) for m in self._moments(clip, following, faded))
        if faded:
            yield from ((place + frames, None, place) for place in self._beginning(following))

    def flush(self) -> Iterator[Frame]:
        """Yield what is held back as its own clip has it: the next one will not be played."""
        waiting, self._waiting, self._ahead = self._waiting, deque(), {}
        yield from _alone(waiting)

    def _moments(self, clip: ClipRecord, following: ClipRecord | None, faded: bool) -> Iterator[Moment]:
        """Yield the frames that a clip is shown in."""
        if following is None:
            end, lost = clip.pts[-1] + clip.last_duration, 0
        else:
            end, lost = following.pts[0], following.first_frame - clip.first_frame - len(clip.pts)
        return clip_moments(clip, end, self.header, self.timing, self.origin, lost, faded, self.limits)

    def _beginning(self, clip: ClipRecord) -> list[float]:
        """Return the places in a clip at which the one before is to be continued."""
        early = takewhile(lambda m: m.place < 1, self._moments(clip, None, False))
        return list(dict.fromkeys(m.place for m in early))

    def _decode(self, clip: ClipRecord, tokens: np.ndarray, places: list[float]) -> np.ndarray:
        """Decode a clip at some places: [n,3,H',W'] uint8."""
        t = np.array(places, np.float64) / self.header.frames_per_clip
        return decode_clip(self.decoder, tokens, layout_of(self.header, clip), self.view, t, self.options)


def _alone(waiting: deque[tuple[Moment, np.ndarray]]) -> Iterator[Frame]:
    while waiting:
        m, picture = waiting.popleft()
        yield Frame(m.pts, m.duration, picture)


def decode_items(
    items: Iterable[ClipRecord | list[Packet]],
    header: Header,
    checkpoint: Checkpoint,
    view: View,
    timing: Timing = Timing(),
    options: EngineOptions = EngineOptions(),
    streams: Mapping[int, StreamInfo] = MappingProxyType({}),
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Frame | Packet]:
    """Decode clips into frames [3,H',W'] uint8, passing on the packets of `streams` between them, all in file order."""
    player = Player(header, checkpoint, view, timing, options, limits)
    held: ClipRecord | None = None  # until the next clip tells how long its last frame is shown, and how it goes on
    waiting: list[Packet] = []  # until the first clip tells when the video begins
    waiting_bytes = 0
    for item in items:
        if isinstance(item, ClipRecord):
            if held is None:
                player.origin = item.pts[0]
            else:
                yield from player.play(held, item)
            held = item
        elif isinstance(item, list):
            waiting += [p for p in item if p.stream in streams]
            waiting_bytes += sum(PACKET_BYTES + len(p.data) for p in item)
            if held is None and waiting_bytes > limits.memory:
                raise FormatError(f"packets of more than {limits.memory} bytes before the first clip (limit memory)")
        if held is not None:
            yield from packets_in_time(waiting, streams, header, timing, player.origin)
            waiting = []
    if held is not None:
        yield from player.play(held, None)


def read_preamble(
    reader: Reader,
) -> tuple[dict[int, StreamInfo], dict[str, dict[str, str]], Iterator[ClipRecord | list[Packet]]]:
    """Read what comes before the first clip: the streams, the metadata by scope, and an iterator over the rest."""
    metadata: dict[str, dict[str, str]] = {scope: {} for scope in SCOPES}
    items = iter(reader)
    for item in items:
        if isinstance(item, Metadata):
            metadata[item.scope] |= dict(item.pairs)
        elif not isinstance(item, StreamInfo):
            return dict(reader.streams), metadata, chain([item], items)
    raise FormatError("the file holds no clip")


def describe_output(
    header: Header, streams: Iterable[StreamInfo], metadata: dict[str, dict[str, str]], view: View, timing: Timing
) -> VideoInfo:
    """Return the description of the decoded video: the source's, at the size and rate asked."""
    return VideoInfo(
        width=len(view.x),
        height=len(view.y),
        time_base=timing.time_base(header),
        frame_duration=1 if timing.rate else header.frame_duration,
        rate=timing.rate or header.frame_rate or None,
        sample_aspect_ratio=header.sample_aspect_ratio or None,
        rotation=header.rotation,
        flip=header.flip,
        chroma=header.chroma,
        bit_depth=header.bit_depth,
        alpha=header.alpha,
        scan=header.scan,
        color=ColorTags(header.color_range, header.matrix, header.primaries, header.transfer, header.chroma_location),
        metadata=metadata["file"],
        track=metadata["video"],
        streams=tuple(streams),
    )
