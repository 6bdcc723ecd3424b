"""Playing a file: clips -> frames in order, cross-faded where clips meet, with the packets of other streams between them."""

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
        self._waiting: list[tuple[Moment, np.ndarray]] = []  # the end of the clip before, until this one is decoded
        self._ahead: dict[float, np.ndarray] = {}  # by place in this clip: what the clip before shows there

    def play(self, clip: ClipRecord, following: ClipRecord | None) -> Iterator[Frame]:
        """Decode a clip whose next is `following`; where the two are cross-faded, its end is held back until that is played."""
        self.origin = clip.pts[0] if self.origin is None else self.origin
        frames = self.header.frames_per_clip
        faded = meet(clip, following, self.header, self.timing)
        moments = self._moments(clip, following, faded)
        beginning = self._beginning(following) if faded else []
        (waiting, ahead), (self._waiting, self._ahead) = (self._waiting, self._ahead), ([], {})
        some = list(islice(moments, frames))  # a clip's worth at a time: a high frame rate may ask for any number
        if not (waiting or some or beginning):
            return
        try:
            tokens = clip_tokens(clip, self.header)
        except CoanervError:
            yield from (Frame(m.pts, m.duration, picture) for m, picture in waiting)
            raise
        before, after = [m.place - frames for m, _ in waiting], [place + frames for place in beginning]
        pictures = self._decode(clip, tokens, [*before, *(m.place for m in some), *after])
        for (m, picture), other in zip(waiting, pictures, strict=False):
            yield Frame(m.pts, m.duration, mix(picture, other, float(shares(m.place, frames)[1])))
        pictures = pictures[len(waiting) :]
        # Copies, since parts of an array keep all of it in memory.
        self._ahead = {place: p.copy() for place, p in zip(beginning, pictures[len(some) :], strict=True)}
        while some:
            for m, picture in zip(some, pictures, strict=False):
                share_before, share_after = shares(m.place, frames)
                if share_before and m.place in ahead:
                    picture = mix(picture, ahead[m.place], float(share_before))
                if share_after and faded:
                    self._waiting.append((m, picture.copy()))
                else:
                    yield Frame(m.pts, m.duration, picture)
            if some := list(islice(moments, frames)):
                pictures = self._decode(clip, tokens, [m.place for m in some])

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
