"""Checking a `.coa` file: what `coanerv verify` does.

Structure, CRCs, index and symbols are checked without torch; the checkpoint's identity and the pictures (`deep`, `source`) need
it. Two clips are in memory at a time, and the file is read once, whatever is asked.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from coanerv_codec.bank import decode_bank
from coanerv_codec.container import DEFAULT_LIMITS, Reader
from coanerv_codec.errors import CheckpointError, CoanervError, FormatError, InputError
from coanerv_codec.records import ClipRecord, Header, Limits

if TYPE_CHECKING:
    from coanerv_codec.checkpoint import Checkpoint
    from coanerv_codec.playing import Player
    from coanerv_codec.video import Frame

WORST_FIRST = (FormatError, InputError, CheckpointError, CoanervError)
MAX_PSNR = 100.0  # what equal pictures count as, so that a mean stays finite


@dataclass(frozen=True)
class Finding:
    """Something wrong: which kind (an exit code), what, and which frames it costs (None: unknown, up to the end)."""

    code: int
    problem: str
    clips: range | None = range(0)
    frames: range | None = range(0)


@dataclass
class Verdict:
    """What was found in one file; `psnr` has a value per frame of the source that the file holds."""

    header: Header | None = None
    clips: int = 0
    frames: int = 0
    decoded: int = 0  # frames that were decoded to pictures
    findings: list[Finding] = field(default_factory=list)
    psnr: dict[int, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, or the worst finding's: damage before an unreadable file or source before a checkpoint."""
        codes = {finding.code for finding in self.findings}
        return next((error.exit_code for error in WORST_FIRST if error.exit_code in codes), 0)

    @property
    def mean_psnr(self) -> float | None:
        """The mean of the frames' PSNRs."""
        return sum(self.psnr.values()) / len(self.psnr) if self.psnr else None


def verify(
    path: Path,
    *,
    load: "Callable[[Header], Checkpoint] | None" = None,
    deep: bool = False,
    source: Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[int], None] = lambda frames: None,
) -> Verdict:
    """Check a file. `load` gives the checkpoint that a header names (None: do not check it); `progress` is told frames done.

    `deep` decodes every picture; `source`, a video, is compared with them frame by frame.
    """
    verdict = Verdict()
    try:
        with path.open("rb") as file:
            _verify(verdict, file, load, deep, source, limits, progress)
    except OSError as error:
        verdict.findings.append(Finding(InputError.exit_code, f"cannot be read: {error.strerror or error}"))
    return verdict


def _verify(verdict, file: BinaryIO, load, deep: bool, source: Path | None, limits: Limits, progress) -> None:
    try:
        reader = Reader(file, limits, on_damage="skip")
    except FormatError as error:
        verdict.findings.append(_finding(error))
        return
    verdict.header = reader.header
    with ExitStack() as stack:
        checkpoint = compare = None
        try:
            checkpoint = load(reader.header) if load else None
            if source is not None and checkpoint:
                compare = stack.enter_context(_Comparison(source, verdict))
        except CoanervError as error:
            verdict.findings.append(_finding(error))
        try:
            player = _player(reader.header, checkpoint) if checkpoint and (deep or compare) else None
            for clip, following in _clips(reader):
                verdict.clips, verdict.frames = verdict.clips + 1, verdict.frames + len(clip.pts)
                _check_clip(verdict, clip, following, reader.header, player, compare)
                progress(verdict.frames)
                if len(verdict.findings) > limits.damages:
                    raise FormatError(f"more than {limits.damages} clips are damaged (limit damages): given up")
            if compare:
                compare.end(verdict.frames)
        except (
            FormatError,
            CheckpointError,
        ) as error:  # such as a critical chunk of another version: the rest cannot be told
            verdict.findings.append(_finding(error))
    verdict.findings[:0] = [
        Finding(FormatError.exit_code, _with_frames(d.reason, d.frames), d.clips, d.frames)
        for d in sorted(reader.damage, key=lambda damage: damage.offset)
    ]


def _clips(reader: Reader) -> Iterator[tuple[ClipRecord, ClipRecord | None]]:
    """Each clip that can be read, and the one that it meets."""
    held = None
    try:
        for item in reader:
            if isinstance(item, ClipRecord):
                if held:
                    yield held, item if item.number == held.number + 1 else None
                held = item
    except FormatError:  # the rest cannot be read
        if held:
            yield held, None
        raise
    if held:
        yield held, None


def _check_clip(
    verdict: Verdict, clip: ClipRecord, following: ClipRecord | None, header: Header, player, compare
) -> None:
    """Decode a clip's symbols, and its pictures with a `Player`."""
    shown: Iterator[Frame] = iter(())
    try:
        if not player:
            decode_bank(clip.bank, header.bank_shape)
            return
        if compare:
            compare.expect(clip)
        shown = player.flush()  # of the clip before, if this one is not played
        _check_times(clip, header)
        shown = player.play(clip, following)
        for frame in shown:
            _check_frame(verdict, frame, compare)
    except CoanervError as error:
        for frame in shown:
            _check_frame(verdict, frame, compare)
        verdict.findings.append(_clip_finding(error, clip))


def _check_frame(verdict: Verdict, frame: "Frame", compare) -> None:
    verdict.decoded += 1
    if compare:
        compare.frame(frame)


def _clip_finding(error: CoanervError, clip: ClipRecord) -> Finding:
    frames = range(clip.first_frame, clip.first_frame + len(clip.pts))
    problem = _with_frames(f"clip {clip.number}: {error}", frames)
    return Finding(error.exit_code, problem, range(clip.number, clip.number + 1), frames)


def _check_times(clip: ClipRecord, header: Header) -> None:
    """Refuse times that no player can hold: FFmpeg counts microseconds in 64 bits."""
    for tick in (clip.pts[0], clip.pts[-1] + clip.last_duration):
        if abs(tick * header.time_base * 10**6) >= 2**63:
            raise FormatError(f"its time of {float(tick * header.time_base):g} s is beyond what a player can show")


def _player(header: Header, checkpoint: "Checkpoint") -> "Player":
    """Return what decodes a file's clips to pictures of its own size."""
    from coanerv_codec.decoding import make_view
    from coanerv_codec.playing import Player

    # The file's own size is within the limits that its header was read with.
    return Player(header, checkpoint, make_view(header.width, header.height, limits=Limits(side=2**62, pixels=2**62)))


class _Comparison:
    """Reads a source video beside the file, frame by frame."""

    def __init__(self, source: Path, verdict: Verdict):
        from coanerv_codec.video import open_video

        self._name, self._verdict, self._at = source, verdict, 0
        self._video = open_video(source, audio=False)
        self._frames = iter(self._video)
        self._failed = False
        self._numbers: dict[int, tuple[int, ClipRecord]] = {}  # of the frames to come, and their clips, by their times
        header = verdict.header
        size = self._video.info.width, self._video.info.height
        if size != (header.width, header.height):
            self._video.close()
            raise InputError(
                f"{source} is {size[0]}x{size[1]}, the file {header.width}x{header.height}: not its source"
            )

    def __enter__(self) -> "_Comparison":
        return self

    def __exit__(self, *_: object) -> None:
        self._video.close()

    def expect(self, clip: ClipRecord) -> None:
        """Take note of which frames a clip holds."""
        self._numbers |= {pts: (number, clip) for number, pts in enumerate(clip.pts, clip.first_frame)}

    def frame(self, shown: "Frame") -> None:
        """Compare a frame with the source's of the same number."""
        number, clip = self._numbers.pop(shown.pts)
        try:
            self._compare(shown, number)
        except CoanervError as error:
            self._verdict.findings.append(_clip_finding(error, clip))

    def _compare(self, shown: "Frame", number: int) -> None:
        import torch

        from coanerv_codec.metrics import psnr

        frame = self._frame(number)
        if frame is None:
            return
        times = shown.pts * self._verdict.header.time_base, frame.pts * self._video.info.time_base
        if times[0] != times[1] and not self._failed:
            self._failed = True  # said once: a shifted file would say it for every frame
            time, expected = map(float, times)
            raise InputError(f"frame {number} is at {time:g} s, but at {expected:g} s in {self._name}: not its source")
        a, b = (torch.from_numpy(x).float() / 255 for x in (frame.yuv, shown.yuv))
        self._verdict.psnr[number] = min(psnr(a, b), MAX_PSNR)

    def end(self, frames: int) -> None:
        """Check that the source ends where the file does."""
        if not self._failed and self._at == frames and next(self._frames, None) is not None:
            self._verdict.findings.append(
                Finding(InputError.exit_code, f"{self._name} goes on after the file's last frame, number {frames - 1}")
            )

    def _frame(self, number: int):
        """The source's frame of this number; None after the source's end, which is said once."""
        frame = None
        while self._at <= number and not self._failed:
            frame = next(self._frames, None)
            if frame is None:
                self._failed = True
                raise InputError(f"{self._name} ends after {self._at} frames: not its source")
            self._at += 1
        return frame


def _finding(error: CoanervError) -> Finding:
    return Finding(error.exit_code, str(error))


def _with_frames(problem: str, frames: range | None) -> str:
    if frames is None:
        return f"{problem} (all frames from there on)"
    return f"{problem} (frames {frames.start}-{frames.stop - 1})" if frames else problem
