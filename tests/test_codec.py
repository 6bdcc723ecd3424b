"""The pipeline without files and terminals: frames to bytes, bytes to frames, at any size, length, view and time."""

import io
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import local_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coanerv_codec import decoding, encoding, playing
from coanerv_codec.bank import encode_bank
from coanerv_codec.cells import Layout, plan_layout
from coanerv_codec.checkpoint import load_checkpoint
from coanerv_codec.color import ColorTags
from coanerv_codec.config import PRESETS
from coanerv_codec.container import Reader
from coanerv_codec.decoding import (
    EngineOptions,
    View,
    clip_tokens,
    decode_clip,
    layout_of,
    make_view,
    query_points,
)
from coanerv_codec.encoding import (
    EncodeOptions,
    encode_cells,
    encode_clip,
    encode_moving,
    encode_video,
    widen_switches,
)
from coanerv_codec.errors import CheckpointError, CoanervError, FormatError, InputError
from coanerv_codec.moments import Timing, clip_moments
from coanerv_codec.playing import decode_items, describe_output, read_preamble
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.records import ClipRecord, Header, Limits, Packet, StreamInfo
from coanerv_codec.refine import quantized_error, refine_clip
from coanerv_codec.video import Frame, VideoInfo

INFO = VideoInfo(40, 36, Fraction(1, 600), frame_duration=20, rate=Fraction(30))


def pictures(count: int, width: int = 40, height: int = 36) -> list[np.ndarray]:
    """Smooth moving pictures in model YUV, uint8 [3,H,W]."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / 9 + i / 3 + c) * np.cos(y / 7 - i / 5) for i in range(count) for c in range(3)]
    return list(np.array(waves).astype(np.uint8).reshape(count, 3, height, width))


def video(count: int, info: VideoInfo = INFO, first: int = 0) -> list[Frame]:
    return [Frame(first + 20 * i, 20, picture) for i, picture in enumerate(pictures(count, info.width, info.height))]


def encoded(items, checkpoint, info: VideoInfo = INFO, **options) -> bytes:
    file = io.BytesIO()
    encode_video(info, items, file, checkpoint, EncodeOptions(**options))
    return file.getvalue()


def decoded(data: bytes, checkpoint, view: View | None = None, **options) -> list[Frame]:
    reader = Reader(io.BytesIO(data))
    view = view or make_view(reader.header.width, reader.header.height)
    return list(decode_items(reader, reader.header, checkpoint, view, **options))


# --- encoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 17])
def test_any_number_of_frames_comes_back(checkpoint, count):
    frames = decoded(encoded(video(count, first=-40), checkpoint), checkpoint)
    assert [(f.pts, f.duration) for f in frames] == [(20 * i - 40, 20) for i in range(count)]
    assert {f.yuv.shape for f in frames} == {(3, 36, 40)}
    assert {f.yuv.dtype for f in frames} == {np.dtype(np.uint8)}


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 50), (17, 200), (31, 33), (64, 2), (100, 70)])
def test_any_size_comes_back(checkpoint, width, height):
    info = replace(INFO, width=width, height=height)
    (frame,) = decoded(encoded(video(1, info), checkpoint, info), checkpoint)
    assert frame.yuv.shape == (3, height, width)


def test_nothing_is_refused(checkpoint):
    with pytest.raises(InputError, match="no video frames"):
        encoded([], checkpoint)


def test_the_last_clip_is_padded_with_its_last_frame(checkpoint):
    """A clip of three frames has the tokens of those three followed by the third, five times."""
    short, repeated = video(3), video(3)
    repeated += [replace(short[2], pts=20 * i) for i in range(3, 8)]
    banks = [Reader(io.BytesIO(encoded(v, checkpoint))).clip(0) for v in (short, repeated)]
    assert banks[0].bank == banks[1].bank
    assert [len(b.pts) for b in banks] == [3, 8]


def test_variable_frame_times_are_kept(checkpoint):
    times = [5, 6, 50, 51, 1000, 1001, 1003, 1010, 1011, 2000]
    ends = [*times[1:], 2100]
    frames = [Frame(t, e - t, p) for t, e, p in zip(times, ends, pictures(10), strict=True)]
    result = decoded(encoded(frames, checkpoint), checkpoint)
    assert [(f.pts, f.duration) for f in result] == [(f.pts, f.duration) for f in frames]


def test_encoding_reads_one_clip_ahead_and_no_more(checkpoint):
    """Memory does not grow with the length: when a clip is written, only its frames have been taken."""
    taken, seen = [], []

    def source():
        for frame in video(20):
            taken.append(frame)
            yield frame

    encode_video(INFO, source(), io.BytesIO(), checkpoint, progress=lambda p: seen.append((p.frames, len(taken))))
    assert seen == [(8, 8), (16, 16), (20, 20), (20, 20)]


def test_progress_tells_what_is_in_the_file(checkpoint):
    file, told = io.BytesIO(), []
    encode_video(INFO, video(11), file, checkpoint, progress=told.append)
    assert (told[-1].frames, told[-1].bytes) == (11, len(file.getvalue()))
    assert told[-1].seconds_of_video == pytest.approx(11 / 30)
    assert [p.bytes for p in told] == sorted(p.bytes for p in told)


def test_frames_limit_stops_reading(checkpoint):
    endless = (Frame(20 * i, 20, pictures(1)[0]) for i in iter(int, 1))
    frames = decoded(
        encoded((replace(f, pts=20 * i) for i, f in enumerate(endless)), checkpoint, frames=10), checkpoint
    )
    assert len(frames) == 10


def test_the_same_video_gives_the_same_bytes(checkpoint, checkpoint_path):
    first = encoded(video(9), checkpoint)
    assert encoded(video(9), checkpoint) == first
    assert encoded(iter(video(9)), load_checkpoint(checkpoint_path)) == first


def test_cells_do_not_depend_on_how_many_go_through_the_encoder_together(checkpoint):
    """Bit by bit: the encoder always runs on batches of one size."""
    cells = np.random.default_rng(0).random((7, 8, 3, 32, 32), np.float32)
    sizes = []
    hook = checkpoint.model.encoder.register_forward_pre_hook(lambda module, clips: sizes.append(len(clips[0])))
    together = encode_cells(checkpoint.model.encoder, cells)
    alone = np.concatenate([encode_cells(checkpoint.model.encoder, cells[i : i + 1]) for i in range(7)])
    hook.remove()
    assert set(sizes) == {encoding.CELL_BATCH}
    assert together.shape == (7, 6, 72)
    assert np.array_equal(together, alone)


def test_tokens_stand_in_the_order_of_the_cells(checkpoint):
    layout = plan_layout(100, 60, 32, 8)
    assert (layout.x.count, layout.y.count) == (4, 2)
    clip = np.stack(pictures(8, 100, 60))
    tokens = encode_clip(checkpoint.model.encoder, clip, layout)
    assert tokens.shape == (8, 6, 72)
    changed = clip.copy()
    changed[:, :, 40:, 80:] = 0  # inside the last cell of the last row only
    # Switches are left out: how large they are depends on the range of all tokens.
    different = (encode_clip(checkpoint.model.encoder, changed, layout) != tokens)[..., :-2].any(axis=(1, 2))
    assert np.flatnonzero(different).tolist() == [7]


def test_an_encoder_that_gives_no_numbers_is_blamed():
    encoder = local_model(PRESETS["tiny"]).encoder.requires_grad_(False)
    encoder.project.bias.fill_(3e38)  # finite, as a checkpoint must be
    encoder.gain.fill_(1.0)
    with pytest.raises(CheckpointError, match="not finite"):
        encode_clip(encoder, np.stack(pictures(8)), plan_layout(40, 36, 32))


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_switches_are_told_whatever_the_amplitudes(bits, one_sided):
    """They must not be rounded to zero, also where they themselves make the range larger."""
    generator = np.random.default_rng(bits)
    stored = generator.random((2, 6, 70), np.float32) - (0.0 if one_sided else 0.5)
    switches = np.float32(0.001) * generator.choice([-1, 1], (2, 6, 2)).astype(np.float32)
    tokens = widen_switches(np.concatenate([stored, switches], axis=-1), 70)
    assert np.array_equal(np.sign(dequantize(*quantize(tokens, bits))[..., 70:]), np.sign(switches))


@pytest.mark.parametrize("bits", range(2, 9))
def test_stored_tokens_are_within_half_a_step(checkpoint, bits):
    data = encoded(video(8), checkpoint, bits=bits)
    reader = Reader(io.BytesIO(data))
    tokens, _ = encode_moving(checkpoint.model.encoder, np.stack(pictures(8)), plan_layout(40, 36, 32))
    stored = clip_tokens(reader.clip(0), reader.header)
    half_step = (tokens.max() - tokens.min()) / (2**bits - 2) / 2  # zero is a level
    assert np.abs(stored - tokens).max() <= half_step * (1 + 1e-4)
    assert len(np.unique(stored)) <= 2**bits


def test_header_says_what_the_source_was(checkpoint):
    info = VideoInfo(
        40, 36, Fraction(1, 600), 20, Fraction(30000, 1001), Fraction(4, 3), 90, True, "422", 10, True, "tff",
        ColorTags(1, 9, 9, 16, 2), metadata={"title": "a", "artist": "b"},
    )  # fmt: skip
    reader = Reader(io.BytesIO(encoded(video(1), checkpoint, info)))
    streams, metadata, _ = read_preamble(reader)
    result = describe_output(reader.header, streams.values(), metadata, make_view(40, 36), Timing())
    assert result == info
    assert reader.header.checkpoint == checkpoint.name
    assert reader.header.checkpoint_sha256 == checkpoint.decoder_sha256


def test_fit_and_cells_fix_the_layout(checkpoint):
    for cells in [(1, 1), (2, 1), (3, 2)]:
        reader = Reader(io.BytesIO(encoded(video(1), checkpoint, cells=cells, overlap=4)))
        assert (reader.header.columns, reader.header.rows) == cells
        assert reader.header.overlap == (0 if cells == (1, 1) else 4)
        assert layout_of(reader.header).cells == cells[0] * cells[1]


@pytest.mark.parametrize(
    "options", [{"overlap": 32}, {"overlap": 200}, {"overlap": 20}, {"cells": (41, 1)}, {"cells": (4, 4), "overlap": 9}]
)
def test_cells_that_cannot_be_are_refused(checkpoint, options):
    info = replace(INFO, width=100)
    with pytest.raises(InputError, match=r"use (fewer cells or )?a smaller --overlap"):
        encoded(video(1, info), checkpoint, info if "cells" not in options else INFO, **options)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(checkpoint) -> np.ndarray:
    """Tokens of a clip of 100 x 70 pixels."""
    return encode_clip(checkpoint.model.encoder, np.stack(pictures(8, 100, 70)), LAYOUT)


LAYOUT: Layout = plan_layout(100, 70, 32)
WHOLE = make_view(100, 70)
MOMENTS = np.arange(8) / 8


def test_every_pixel_is_the_decoder_at_its_coordinate(checkpoint, tokens):
    """Rows of cells, carried strips and cross-fades against asking every pixel on its own."""
    frames = decode_clip(checkpoint.model.decoder, tokens, LAYOUT, WHOLE, MOMENTS)
    t, y, x = (
        v.ravel().astype(float) for v in np.meshgrid(np.arange(8) / 8, np.arange(70), np.arange(100), indexing="ij")
    )
    points = query_points(checkpoint.model.decoder, tokens, LAYOUT, x, y, t)
    expected = points.reshape(8, 70, 100, 3).transpose(0, 3, 1, 2).clip(0, 1) * 255
    assert np.abs(frames - expected).max() <= 0.501


def test_one_cell_is_the_paper(checkpoint):
    """In a single cell the grid is the paper's, so the model itself gives the picture."""
    clip = np.stack(pictures(8, 32, 32))
    layout = plan_layout(32, 32, 32)
    tokens = encode_clip(checkpoint.model.encoder, clip, layout)
    with torch.inference_mode():
        grid = torch.stack(torch.meshgrid(torch.arange(8) / 8, *[torch.arange(32) / 31] * 2, indexing="ij"), -1)
        expected = checkpoint.model.decoder(torch.from_numpy(tokens), grid.flip(-1).reshape(-1, 3)).clamp(0, 1)
    frames = decode_clip(checkpoint.model.decoder, tokens, layout, make_view(32, 32), MOMENTS)
    assert np.abs(frames - expected.reshape(8, 32, 32, 3).permute(0, 3, 1, 2).numpy() * 255).max() <= 0.501


@pytest.mark.parametrize(
    "options",
    [EngineOptions(engine, tile) for engine in ("separable", "reference") for tile in (1, 16, 64, 256)],
    ids=lambda o: f"{o.engine}-{o.tile}",
)
def test_engine_and_tile_change_no_pixel_by_more_than_one(checkpoint, tokens, options):
    view = make_view(100, 70, crop=(22, 22, 9, 9)) if options.tile == 1 else WHOLE
    expected = decode_clip(checkpoint.model.decoder, tokens, LAYOUT, view, MOMENTS)
    frames = decode_clip(checkpoint.model.decoder, tokens, LAYOUT, view, MOMENTS, options)
    assert np.abs(frames.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("crop", [(0, 0, 1, 1), (99, 69, 1, 1), (30, 20, 41, 37), (0, 50, 100, 20), (28, 0, 2, 70)])
def test_a_crop_is_that_part_of_the_picture(checkpoint, tokens, crop):
    left, top, width, height = crop
    whole = decode_clip(checkpoint.model.decoder, tokens, LAYOUT, WHOLE, MOMENTS)
    part = decode_clip(checkpoint.model.decoder, tokens, LAYOUT, make_view(100, 70, crop=crop), MOMENTS)
    assert np.abs(part.astype(int) - whole[:, :, top : top + height, left : left + width]).max() <= 1


def test_work_is_proportional_to_what_is_asked(checkpoint, tokens, monkeypatch):
    asked = []
    original = decoding.decode_grids

    def counted(decoder, tokens, grids, **options):
        asked.extend(len(x) * len(y) * len(t) for x, y, t in grids)
        return original(decoder, tokens, grids, **options)

    monkeypatch.setattr(decoding, "decode_grids", counted)

    def queries(t=MOMENTS, **view) -> int:
        asked.clear()
        decode_clip(checkpoint.model.decoder, tokens, LAYOUT, make_view(100, 70, **view), t)
        return sum(asked)

    # Pixels where cells overlap are asked of each of them.
    shared = 100 + (LAYOUT.x.count - 1) * LAYOUT.x.overlap, 70 + (LAYOUT.y.count - 1) * LAYOUT.y.overlap
    assert 8 * 100 * 70 <= queries() <= 8 * shared[0] * shared[1]
    assert queries(crop=(0, 0, 10, 10)) == 8 * 100  # inside one cell
    assert queries(t=[0.5], crop=(0, 0, 10, 10)) == 100
    assert queries(t=[0.5], crop=(0, 0, 10, 10), size=(40, 40)) == 1600
    assert queries(size=(50, 35)) < queries() / 3


def test_a_view_at_another_size_asks_the_centres_of_its_pixels():
    assert make_view(8, 4).x.tolist() == list(range(8))
    assert make_view(8, 4, size=(4, 2)).x.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert make_view(8, 4, size=(16, 4)).x[:3].tolist() == [-0.25, 0.25, 0.75]
    assert make_view(8, 4, size=(2, 1), crop=(4, 1, 4, 2)).x.tolist() == [4.5, 6.5]
    assert make_view(8, 4, size=(2, 1), crop=(4, 1, 4, 2)).y.tolist() == [1.5]


@pytest.mark.parametrize(
    "view",
    [
        {"crop": (0, 0, 9, 4)},
        {"crop": (-1, 0, 4, 4)},
        {"crop": (0, 4, 1, 1)},
        {"crop": (0, 0, 0, 1)},
        {"size": (10**6, 10**6)},
    ],
    ids=str,
)
def test_impossible_views_are_refused(view):
    with pytest.raises(CoanervError, match=r"is not inside|too large"):
        make_view(8, 4, **view)


def test_another_checkpoint_is_refused(checkpoint, other_checkpoint_path):
    other = load_checkpoint(other_checkpoint_path)
    data = encoded(video(1), checkpoint)
    with pytest.raises(CheckpointError) as caught:
        decoded(data, other)
    assert repr(checkpoint.name) in str(caught.value)
    assert repr(other.name) in str(caught.value)
    assert "--checkpoint" in str(caught.value)


def test_a_better_encoder_for_the_same_decoder_is_accepted(checkpoint):
    improved = replace(checkpoint, name="tiny-ffffffff")
    assert len(decoded(encoded(video(1), checkpoint), improved)) == 1


def test_a_header_that_lies_about_the_tokens_is_refused(checkpoint):
    header = Reader(io.BytesIO(encoded(video(1), checkpoint))).header
    with pytest.raises(FormatError, match="token geometry"):
        decoding.check_checkpoint(replace(header, tokens=5), checkpoint)
    with pytest.raises(FormatError, match="cells do not fit"):
        layout_of(replace(header, columns=7, overlap=40))


def test_tokens_beyond_the_decoder_are_refused(checkpoint):
    """A bank whose scale is absurd but finite must not become garbage pictures or a crash."""
    data = encoded(video(1), checkpoint)
    reader = Reader(io.BytesIO(data))
    symbols, _, _ = quantize(np.random.default_rng(0).standard_normal(reader.header.bank_shape).astype(np.float32), 6)
    clip = replace(reader.clip(0), bank=encode_bank(symbols, 6, -1e38, 3e36))
    with pytest.raises(FormatError, match="damaged"):
        list(decode_items([clip], reader.header, checkpoint, make_view(40, 36)))


# --- time ---------------------------------------------------------------------------------------------------------


HEADER = Header(
    checkpoint="x", checkpoint_sha256=bytes(32), frames_per_clip=8, tokens=4, token_dim=72, cell_size=32, width=40,
    height=36, time_base=Fraction(1, 600),
)  # fmt: skip


@st.composite
def records(draw) -> tuple[list[ClipRecord], int]:
    """Clips of a video with any frame times, and when its last frame ends."""
    steps = draw(st.lists(st.integers(1, 100), min_size=1, max_size=30))
    pts = [draw(st.integers(-1000, 1000))]
    for step in steps[:-1]:
        pts.append(pts[-1] + step)
    clips = [ClipRecord(i // 8, i, tuple(pts[i : i + 8]), 0, b"") for i in range(0, len(pts), 8)]
    return clips, pts[-1] + steps[-1]


def moments_of(clips: list[ClipRecord], end: int, timing: Timing):
    ends = [*(c.pts[0] for c in clips[1:]), end]
    return [m for c, e in zip(clips, ends, strict=True) for m in clip_moments(c, e, HEADER, timing, clips[0].pts[0])]


@given(records(), st.fractions(Fraction(1), Fraction(1000), max_denominator=1001))
@settings(max_examples=100, deadline=None)
def test_a_rate_gives_evenly_spaced_frames_for_the_whole_duration(video, rate):
    clips, end = video
    moments = moments_of(clips, end, Timing(rate=rate))
    seconds = (end - clips[0].pts[0]) * HEADER.time_base
    assert len(moments) == -(-seconds * rate // 1)  # as many as begin before the end
    assert [m.pts - moments[0].pts for m in moments] == list(range(len(moments)))
    assert all(m.duration == 1 and 0 <= m.place <= 7 for m in moments)


@given(records(), st.fractions(0, 6, max_denominator=600), st.fractions(0, 6, max_denominator=600))
@settings(max_examples=100, deadline=None)
def test_a_window_holds_the_frames_shown_in_it(video, start, duration):
    clips, end = video
    pts = [p for c in clips for p in c.pts]
    begin = pts[0] + start * 600
    shown = [p for p, e in zip(pts, [*pts[1:], end], strict=True) if e > begin and p < begin + duration * 600]
    assume(duration)
    moments = moments_of(clips, end, Timing(start, duration))
    assert [m.pts + int(start * 600) for m in moments] == shown


@given(records())
@settings(max_examples=50, deadline=None)
def test_without_a_rate_the_frames_are_the_sources(video):
    clips, end = video
    moments = moments_of(clips, end, Timing())
    pts = [p for c in clips for p in c.pts]
    assert [m.pts for m in moments] == pts
    assert [m.pts + m.duration for m in moments] == [*pts[1:], end]
    assert [m.place for m in moments] == [i for c in clips for i in range(len(c.pts))]


def test_between_two_frames_the_decoder_is_asked_between_them():
    clip = ClipRecord(0, 0, (0, 10, 30), 10, b"")
    moments = list(clip_moments(clip, 40, HEADER, Timing(rate=Fraction(120)), 0))  # every 5 ticks
    assert [m.place for m in moments] == [0, 0.5, 1, 1.25, 1.5, 1.75, 2, 2]
    faded = list(clip_moments(clip, 40, HEADER, Timing(rate=Fraction(120)), 0, faded=True))
    assert [m.place for m in faded] == [0, 0.5, 1, 1.25, 1.5, 1.75, 2, 2.5]


def test_decoding_a_window_decodes_no_other_clip(checkpoint, monkeypatch):
    data = encoded(video(40), checkpoint)
    read = []
    original = playing.clip_tokens
    monkeypatch.setattr(playing, "clip_tokens", lambda clip, header: read.append(clip.number) or original(clip, header))
    frames = decoded(data, checkpoint, timing=Timing(Fraction(17, 30), Fraction(3, 30)))
    assert [f.pts for f in frames] == [0, 20, 40]
    assert read == [2]


def test_a_high_rate_is_decoded_a_clips_worth_at_a_time(checkpoint, monkeypatch):
    sizes = []
    original = playing.decode_clip

    def counted(decoder, tokens, layout, view, t, options):
        sizes.append(len(t))
        return original(decoder, tokens, layout, view, t, options)

    monkeypatch.setattr(playing, "decode_clip", counted)
    view = make_view(40, 36, crop=(0, 0, 2, 2))
    frames = decoded(encoded(video(8), checkpoint), checkpoint, view, timing=Timing(rate=Fraction(600)))
    assert len(frames) == 160
    assert max(sizes) <= 8 + 2


def test_the_highest_rate_begins_at_once_and_fills_no_memory(checkpoint):
    """266 million frames, of which ten are taken."""
    reader = Reader(io.BytesIO(encoded(video(8), checkpoint)))
    view, timing = make_view(40, 36, crop=(0, 0, 1, 1)), Timing(rate=Fraction(10**9))
    clips = (item for item in reader if isinstance(item, ClipRecord))
    frames = decode_items(clips, reader.header, checkpoint, view, timing, limits=Limits(frames=10**9))
    assert [frame.pts for frame in islice(frames, 10)] == list(range(10))


# --- packets ------------------------------------------------------------------------------------------------------


SOUND = StreamInfo(index=0, kind="audio", codec="opus", time_base=Fraction(1, 100))


def packet(pts: int) -> Packet:
    return Packet(stream=0, pts=pts, dts=pts, duration=5, data=bytes([pts]))


def interleaved() -> list[Frame | Packet]:
    """Eleven frames over 0.367 s, and a packet of 0.05 s before each frame that one falls on."""
    items: list[Frame | Packet] = []
    for frame in video(11):
        items += [packet(p) for p in range(0, 40, 5) if p * 6 // 20 * 20 == frame.pts]
        items.append(frame)
    return items


def packets(checkpoint, timing: Timing = Timing(), **options) -> list[Packet]:
    data = encoded(interleaved(), checkpoint, replace(INFO, streams=(SOUND,)), **options)
    items = decoded(data, checkpoint, make_view(40, 36, crop=(0, 0, 1, 1)), timing=timing, streams={0: SOUND})
    return [i for i in items if isinstance(i, Packet)]


def test_packets_come_back_as_they_were(checkpoint):
    expected = [i for i in interleaved() if isinstance(i, Packet)]
    assert len(expected) == 8
    assert packets(checkpoint) == expected
    data = encoded(interleaved(), checkpoint, replace(INFO, streams=(SOUND,)))
    assert [i for i in decoded(data, checkpoint) if isinstance(i, Packet)] == []  # no stream asked for


def test_packets_are_cut_and_moved_with_the_window(checkpoint):
    found = packets(checkpoint, Timing(Fraction(1, 10), Fraction(1, 10)))
    assert [(p.pts, p.dts, p.data) for p in found] == [(0, 0, b"\x0a"), (5, 5, b"\x0f")]


def test_many_packets_before_a_clip_is_complete_are_written_on(checkpoint, monkeypatch):
    monkeypatch.setattr(encoding, "PACKET_BATCH", 2)
    assert packets(checkpoint) == [i for i in interleaved() if isinstance(i, Packet)]


# --- refinement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["tiny", "tiny-paper"])
def test_refinement_makes_it_better_and_keeps_the_range(preset):
    """With both decoders, whose tokens have very different scales, and from the first few steps on."""
    clip = np.stack(pictures(8))
    layout = plan_layout(40, 36, 32)
    model = local_model(PRESETS[preset]).requires_grad_(False)
    decoder = model.decoder
    before = encode_clip(model.encoder, clip, layout)
    errors = [quantized_error(decoder, clip, layout, before, 6)]
    for steps in (3, 10):
        shares = []
        after, *told = refine_clip(decoder, clip, layout, before, 6, steps, progress=shares.append)
        errors.append(quantized_error(decoder, clip, layout, after, 6))
        assert told == [errors[0], errors[-1]]
        assert shares == sorted(shares)
        assert shares[-1] == 1
    assert errors[0] > errors[1] > errors[2]
    assert after.shape == before.shape
    assert before.min() <= after.min()
    assert after.max() <= before.max()
    assert np.array_equal(refine_clip(decoder, clip, layout, before, 6, 10).tokens, after)


def test_refinement_that_does_not_pay_is_dropped(checkpoint, monkeypatch):
    monkeypatch.setattr("coanerv_codec.refine.LEARNING_RATE", 100.0)
    clip = np.stack(pictures(8))
    layout = plan_layout(40, 36, 32)
    tokens = encode_clip(checkpoint.model.encoder, clip, layout)
    refined = refine_clip(checkpoint.model.decoder, clip, layout, tokens, 6, 2)
    assert refined.tokens is tokens
    assert refined.after == refined.before


def test_refining_leaves_the_decoder_as_it_was(checkpoint):
    before = {k: v.clone() for k, v in checkpoint.model.state_dict().items()}
    data = encoded(video(8), checkpoint, refine=2)
    assert len(decoded(data, checkpoint)) == 8
    assert len(decoded(encoded(video(8), checkpoint, refine=2, refine_from="random"), checkpoint)) == 8
    assert all(torch.equal(v, before[k]) for k, v in checkpoint.model.state_dict().items())


@pytest.mark.parametrize("bits", range(2, 9))
def test_modes_survive_every_number_of_bits(checkpoint, bits):
    """A switch that were rounded to zero would make the token's amplitudes those of other waves."""
    config = checkpoint.model.config
    layout = plan_layout(64, 64, 32, 0)
    tokens = encode_clip(checkpoint.model.encoder, np.stack(pictures(8, 64, 64)), layout)
    symbols, z, s = quantize(tokens, bits)
    stored = dequantize(symbols, z, s)[..., config.amplitudes :]
    assert np.array_equal(np.sign(stored), np.sign(tokens[..., config.amplitudes :]))
    assert stored.min() < 0 < stored.max()
