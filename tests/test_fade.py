"""Cross-fading where clips meet: its arithmetic, and that playing a file does it once, everywhere, and nowhere else."""

import io
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_codec import decoded, encoded, video

from coanerv_codec import playing, separable_carriers
from coanerv_codec.container import Reader
from coanerv_codec.decoding import clip_tokens, decode_clip, layout_of, make_view
from coanerv_codec.errors import FormatError
from coanerv_codec.fade import mix, mix_points, shares
from coanerv_codec.moments import Timing, meet
from coanerv_codec.playing import decode_items
from coanerv_codec.records import ClipRecord

PICTURES = arrays(np.uint8, (3, 2, 5))


def clips_of(data: bytes) -> list[ClipRecord]:
    return [item for item in Reader(io.BytesIO(data)) if isinstance(item, ClipRecord)]


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_weights_fall_evenly_from_one_clip_to_the_next():
    before, after = shares(np.array([0, 0.5, 1, 4, 6, 6.5, 7, 7.5, 8]), 8)
    assert before == pytest.approx([1 / 3, 1 / 6, 0, 0, 0, 0, 0, 0, 0])
    assert after == pytest.approx([0, 0, 0, 0, 0, 1 / 6, 1 / 3, 1 / 2, 2 / 3])


@given(PICTURES, PICTURES, st.floats(0, 1))
def test_a_mixture_lies_between_and_does_not_care_whose_turn_it_is(own, other, share):
    result = mix(own, other, share)
    assert result.dtype == np.uint8
    assert ((np.minimum(own, other) <= result) & (result <= np.maximum(own, other))).all()
    if share != 0.5:  # where it does: either may count as the nearer one
        assert np.array_equal(result, mix(other, own, 1 - share))
    points = mix_points(*(x.reshape(3, -1).T / np.float32(255) for x in (own, other)), np.full(10, share))
    assert (
        np.abs(255 * points.T.reshape(3, 2, 5) - result).max() <= 0.5 + 255 / 512 + 1e-3
    )  # its weights are 8 bits fine


@given(PICTURES, PICTURES, st.floats(0, 0.5), PICTURES, PICTURES)
def test_pictures_that_differ_by_one_give_mixtures_that_differ_by_two_at_most(own, other, share, a, b):
    """So what docs/format.md says of engines holds for frames that are cross-faded, too."""
    near_own, near_other = (
        np.clip(x + (noise % 3).astype(int) - 1, 0, 255).astype(np.uint8) for x, noise in ((own, a), (other, b))
    )
    assert np.abs(mix(own, other, share).astype(int) - mix(near_own, near_other, share)).max() <= 2


def test_noise_is_averaged_and_another_scene_left_out():
    own = np.full((3, 1, 256), 100, np.uint8)
    other = np.broadcast_to(np.arange(256, dtype=np.uint8), own.shape)
    step = mix(own, other, 1 / 3).astype(int)[0, 0] - 100
    assert step[100 - 3] == -1
    assert step[100 + 9] in (2, 3)
    assert np.abs(step).max() == 4
    assert np.abs(step[[0, 255]]).max() <= 2


# --- playing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(checkpoint) -> bytes:
    return encoded(video(20), checkpoint)


def alone(data: bytes, checkpoint, number: int, places: list[float]) -> np.ndarray:
    """What a clip shows at some places, without its neighbours."""
    reader = Reader(io.BytesIO(data))
    clip = reader.clip(number)
    t = np.array(places) / 8
    layout, view = layout_of(reader.header, clip), make_view(40, 36)
    return decode_clip(checkpoint.model.decoder, clip_tokens(clip, reader.header), layout, view, t)


def test_frames_where_clips_meet_are_mixed_and_no_others(data, checkpoint):
    frames = np.stack([f.yuv for f in decoded(data, checkpoint)])
    plain = np.concatenate([alone(data, checkpoint, i, range(n)) for i, n in enumerate((8, 8, 4))])
    for number, (clip, place) in {7: (1, -1), 8: (0, 8), 15: (2, -1), 16: (1, 8)}.items():
        expected = mix(plain[number], alone(data, checkpoint, clip, [place])[0], 1 / 3)
        assert np.abs(frames[number].astype(int) - expected).max() <= 1
        assert not np.array_equal(frames[number], plain[number])
        frames[number] = plain[number]
    assert np.abs(frames.astype(int) - plain).max() <= 1


def test_clips_are_read_once_and_asked_once(data, checkpoint, monkeypatch):
    read, asked = [], []
    tokens, clip = playing.clip_tokens, playing.decode_clip
    monkeypatch.setattr(playing, "clip_tokens", lambda c, h: read.append(c.number) or tokens(c, h))
    monkeypatch.setattr(playing, "decode_clip", lambda *a: asked.append((a[4] * 8).tolist()) or clip(*a))
    assert len(decoded(data, checkpoint)) == 20
    assert read == [0, 1, 2]
    assert asked == [[*range(9)], [*range(-1, 9)], [*range(-1, 4)]]


@pytest.mark.parametrize(("start", "count"), [(7, 1), (7, 2), (8, 1), (5, 3), (15, 2), (0, 8)])
def test_a_window_shows_the_same_frames(data, checkpoint, start, count):
    whole = decoded(data, checkpoint)
    some = decoded(data, checkpoint, timing=Timing(Fraction(start, 30), Fraction(count, 30)))
    assert len(some) == count
    for a, b in zip(some, whole[start:], strict=False):
        assert np.abs(a.yuv.astype(int) - b.yuv).max() <= 1


def test_a_rate_goes_from_clip_to_clip_evenly(data, checkpoint):
    whole = decoded(data, checkpoint)
    doubled = decoded(data, checkpoint, timing=Timing(rate=Fraction(60)))
    assert len(doubled) == 40
    for a, b in zip(doubled[::2], whole, strict=True):
        assert np.abs(a.yuv.astype(int) - b.yuv).max() <= 1
    # Half of the way between the frames of two clips both count alike.
    ends = alone(data, checkpoint, 0, [7.5])[0], alone(data, checkpoint, 1, [-0.5])[0]
    assert np.abs(doubled[15].yuv.astype(int) - mix(*ends, 0.5)).max() <= 1
    # What follows the last clip is nothing, so its last frame stands.
    assert np.abs(doubled[39].yuv.astype(int) - doubled[38].yuv).max() == 0


def test_rates_at_which_too_many_pictures_would_wait_are_not_faded(data, checkpoint):
    first, second, _ = clips_of(data)
    header = Reader(io.BytesIO(data)).header
    assert meet(first, second, header, Timing(rate=Fraction(80)))
    assert not meet(first, second, header, Timing(rate=Fraction(81)))
    frames = decoded(data, checkpoint, timing=Timing(rate=Fraction(161), duration=Fraction(9, 30)))
    assert np.abs(frames[41].yuv.astype(int) - alone(data, checkpoint, 0, [7])[0]).max() <= 1  # at 7.64 of 8: it stands


def test_nothing_is_faded_across_what_is_lost(data, checkpoint):
    first, _, third = clips_of(data)
    header = Reader(io.BytesIO(data)).header
    frames = list(decode_items([first, third], header, checkpoint, make_view(40, 36)))
    assert len(frames) == 20
    assert np.array_equal(frames[7].yuv, alone(data, checkpoint, 0, [*range(8)])[7])
    assert np.array_equal(frames[16].yuv, alone(data, checkpoint, 2, [*range(4)])[0])


def test_nothing_is_faded_behind_a_clip_that_was_cut_short(data, checkpoint):
    header = Reader(io.BytesIO(data)).header
    first, second, _ = clips_of(data)
    assert meet(first, second, header)
    assert not meet(replace(first, pts=first.pts[:7]), second, header)
    assert not meet(first, None, header)
    short = replace(header, frames_per_clip=2)
    assert not meet(replace(first, pts=first.pts[:2]), second, short)  # both ends of a clip of two frames would be one


def test_frames_before_a_bank_that_cannot_be_decoded_are_shown(data, checkpoint):
    first, second, _ = clips_of(data)
    header = Reader(io.BytesIO(data)).header
    frames = decode_items([first, replace(second, bank=second.bank[:9])], header, checkpoint, make_view(40, 36))
    assert [next(frames).pts for _ in range(8)] == list(first.pts)
    with pytest.raises(FormatError):
        next(frames)


def test_frames_before_tokens_that_cannot_be_computed_with_are_shown(data, checkpoint, monkeypatch):
    first, second, _ = clips_of(data)
    original = playing.clip_tokens
    monkeypatch.setattr(playing, "clip_tokens", lambda c, h: original(c, h) * np.float32(1e30 if c.number else 1))
    frames = decode_items([first, second], Reader(io.BytesIO(data)).header, checkpoint, make_view(40, 36))
    assert [next(frames).pts for _ in range(8)] == list(first.pts)
    with pytest.raises(FormatError, match="beyond what the decoder"):
        next(frames)


def test_what_waits_for_a_clip_that_is_not_played_is_shown_as_it_is(data, checkpoint):
    first, second, third = clips_of(data)
    player = playing.Player(Reader(io.BytesIO(data)).header, checkpoint, make_view(40, 36))
    frames = [*player.play(first, second), *player.play(third, None)]
    assert [f.pts for f in frames] == [*first.pts, *third.pts]
    assert np.array_equal(frames[7].yuv, alone(data, checkpoint, 0, [*range(8)])[7])
    assert np.array_equal(frames[8].yuv, alone(data, checkpoint, 2, [*range(4)])[0])
    frames = [*player.play(first, second), *player.flush()]
    assert [f.pts for f in frames] == list(first.pts)
    assert not list(player.flush())


def test_attention_is_evaluated_once_for_a_clip_and_what_is_asked_beyond_its_ends(data, checkpoint, monkeypatch):
    calls = []
    original = separable_carriers.sum_along_x
    monkeypatch.setattr(separable_carriers, "sum_along_x", lambda *a: calls.append(1) or original(*a))
    clips = [replace(clip, velocities=(), shakes=()) for clip in clips_of(data)]
    header = Reader(io.BytesIO(data)).header
    assert len(list(decode_items(clips, header, checkpoint, make_view(40, 36)))) == 20
    assert len(calls) == 3 * header.bank_shape[0]


def test_a_single_frame_without_a_duration_is_shown(checkpoint):
    reader = Reader(io.BytesIO(encoded(video(1), checkpoint)))
    clip = replace(reader.clip(0), last_duration=0)
    assert len(list(decode_items([clip], reader.header, checkpoint, make_view(40, 36)))) == 1


@settings(max_examples=20, deadline=None)
@given(st.fractions(1, 159, max_denominator=7), st.fractions(0, Fraction(1, 2), max_denominator=90))
def test_every_moment_is_shown_in_order(data, checkpoint, rate, start):
    """Frames that wait for the next clip come before its own, whatever the rate and the window."""
    view = make_view(40, 36, crop=(0, 0, 1, 1))
    frames = decoded(data, checkpoint, view, timing=Timing(start, rate=rate))
    assert len(frames) == -(-(Fraction(20, 30) - start) * rate // 1)
    assert all(b.pts - a.pts == 1 for a, b in itertools.pairwise(frames))
