"""Cells that move: the path is found where it pays, and a moving cell is the same function asked along its path."""

import io
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import local_model
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import decoding, records
from coanerv_codec.cells import Layout, cut_row, find_motion, fixed_layout, pack_shake, plan_layout, unpack_shake
from coanerv_codec.checkpoint import load_checkpoint, save_checkpoint
from coanerv_codec.config import PRESETS
from coanerv_codec.container import DEFAULT_LIMITS, Reader
from coanerv_codec.decoding import EngineOptions, View, decode_clip, layout_of, make_view, query_points
from coanerv_codec.encoding import EncodeOptions, encode_clip, encode_video
from coanerv_codec.errors import FormatError
from coanerv_codec.motion import (
    FASTEST,
    FINEST,
    MOST_SHAKE,
    PARTS,
    STEPS,
    find_half_path,
    find_path,
    halve,
    offsets,
    reach,
)
from coanerv_codec.records import ClipRecord, Header
from coanerv_codec.summary import summary
from coanerv_codec.video import Frame, VideoInfo

MOMENTS = np.arange(8, dtype=np.float32) / 8
TINY = PRESETS["tiny"]


def texture(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A smooth texture without a period, in [0, 1], of any real positions."""
    rng = np.random.default_rng(5)
    out = np.zeros(np.broadcast(x, y).shape)
    for _ in range(24):
        a, b, phase = *rng.normal(0, 0.25, 2), rng.uniform(0, 6.28)
        out += np.cos(a * x + b * y + phase)
    return 0.5 + 0.06 * out


def moving(velocity: tuple[float, float], width: int, height: int | None = None, frames: int = 8) -> np.ndarray:
    """A texture that moves, [F,3,H,W] uint8; chroma moves along."""
    return textures(np.outer(offsets(frames), velocity), width, height)


def textures(path: np.ndarray, width: int, height: int | None = None) -> np.ndarray:
    """A texture that moves along a path [F,2] in pixels, [F,3,H,W] uint8."""
    y, x = np.mgrid[: height or width, :width].astype(float)
    planes = [texture(x - dx + 40 * c, y - dy) for dx, dy in path for c in range(3)]
    return np.rint(255 * np.clip(planes, 0, 1)).astype(np.uint8).reshape(len(path), 3, *y.shape)


def find_velocity(luma: np.ndarray) -> tuple[int, int]:
    """The velocity of what does not shake."""
    velocity, shake = find_half_path(halve(halve(luma, 1), 2))
    assert not shake.any()
    return velocity


# How a hand moves, in 1/PARTS pixel.
SHAKE = ((0, 2), (-3, 1), (4, -4), (1, 0), (-5, 3), (2, -3), (3, 1), (-2, 0))
PACKED = pack_shake(np.array(SHAKE))


# --- finding it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "velocity", [(0.5, 0.25), (-1.75, 1.5), (0, 2.75), (3.25, -0.5), (-5, 2), (0.25, 0), (6, -6)], ids=str
)
def test_the_velocity_of_a_moving_texture_is_found(velocity):
    luma = moving(velocity, 128)[:, 0] / np.float32(255)
    assert find_velocity(luma) == tuple(STEPS * v for v in velocity)


def test_velocities_between_the_steps_are_found_to_the_nearest():
    path = find_path(moving((1.1, -0.6), 128)[:, 0] / np.float32(255))
    assert np.abs(np.diff(path, axis=0) - (1.1, -0.6)).max() <= 0.3


@pytest.mark.parametrize("velocity", [(0, 0), (2, -0.75), (-4.5, 3)], ids=str)
def test_the_shake_of_a_hand_is_found(velocity):
    path = np.outer(offsets(8), velocity) + np.array(SHAKE) / PARTS
    found = find_path(textures(path, 128)[:, 0] / np.float32(255))
    assert np.abs(found - found.mean(0) - path + path.mean(0)).max() <= 0.25
    _, shake = find_half_path(halve(halve(textures(path, 128)[:, 0] / np.float32(255), 1), 2))
    assert shake.any()
    assert np.abs(shake).max() <= MOST_SHAKE


def test_a_shake_is_found_in_pixels_of_the_picture():
    path = np.outer(offsets(8), (1, 0)) + np.array(SHAKE) / PARTS
    layout = find_motion(textures(path, 256), fixed_layout(256, 256, 1, 1, 0), 128)
    found = layout.path(0, np.arange(8), 8)
    assert np.abs(found - found.mean(0) - path + path.mean(0)).max() <= 0.5
    assert [cell for cell, _ in layout.shakes] == [0]


def test_what_does_not_move_as_one_stands_still():
    rng = np.random.default_rng(0)
    flat = np.full((8, 128, 128), 0.3, np.float32)
    still = np.broadcast_to(moving((0, 0), 128)[0, 0] / np.float32(255), (8, 128, 128))
    noise = rng.random((8, 128, 128), dtype=np.float32)
    for luma in (flat, still, still + 0.02 * noise, noise):
        assert not find_path(luma).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from([1, 2, 6, 16, 17, 18, 33, 64]), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_luma_gives_a_path_within_reach(frames, side, seed, gain):
    luma = (gain * np.random.default_rng(seed).random((frames, side, side))).astype(np.float32)
    velocity, shake = find_half_path(halve(halve(luma, 1), 2))
    assert max(map(abs, velocity)) <= 2 * FASTEST * STEPS
    assert shake.shape == (frames, 2)
    assert np.abs(shake).max() <= MOST_SHAKE


def test_each_cell_has_its_own_velocity_in_pixels_of_the_picture():
    """The left half moves, the right half stands; cells that are shrunk count in the picture's pixels all the same."""
    frames = moving((2, 0), 256, 128)
    frames[..., 128:] = frames[4, ..., 128:]
    layout = find_motion(frames, fixed_layout(256, 128, 2, 1, 0), 128)
    assert layout.velocities == ((2 * STEPS, 0), (0, 0))
    small = find_motion(moving((3, -1.5), 256), fixed_layout(256, 256, 1, 1, 0), 128)
    assert np.abs(np.diff(small.path(0, np.arange(8), 8), axis=0) - (3, -1.5)).max() <= 0.26
    # Also where a cell covers a little more than its own number of pixels.
    found = find_motion(moving((5, -2.25), 256), plan_layout(256, 256, 128), 128)
    assert np.abs(np.array(found.velocities) - (40, -18)).max() <= 2
    assert not (np.array(found.velocities) % FINEST).any()
    assert find_motion(moving((0, 0), 64), plan_layout(64, 64, 32), 32).velocities == ()
    assert find_motion(moving((1, 0), 8), fixed_layout(8, 8, 2, 2, 0), 1).velocities == ()


# --- cutting and decoding ------------------------------------------------------------------------------------------


def test_a_cell_cut_along_its_path_stands_still():
    layout = replace(fixed_layout(256, 256, 2, 2, 4), velocities=((0, 0), (16, -6), (0, 0), (0, 0)))
    frames = moving((2, -0.75), 256)
    still, along = cut_row(frames, layout, 0, 128)
    assert np.abs(still - still[4]).max() > 0.2
    assert (
        np.abs(along[:, :, 8:-8, 8:-24] - along[4, :, 8:-8, 8:-24]).max() < 0.02
    )  # beyond the picture its edge is repeated
    plain = cut_row(frames, replace(layout, velocities=()), 0, 128)
    assert np.array_equal(still, plain[0])
    shaken = textures(np.outer(offsets(8), (2, -0.75)) + np.array(SHAKE) / PARTS, 256)
    assert np.abs(cut_row(shaken, layout, 0, 128)[1] - cut_row(shaken, layout, 0, 128)[1, 4]).max() > 0.05
    steady = cut_row(shaken, replace(layout, shakes=((1, PACKED),)), 0, 128)[1, :, :, 8:-8, 8:-24]
    assert np.abs(steady - steady[4]).max() < 0.02


@pytest.fixture(scope="module")
def decoder():
    return local_model(TINY).decoder.requires_grad_(False)


def tokens_of(layout: Layout) -> np.ndarray:
    return 0.1 * np.random.default_rng(1).normal(size=(layout.cells, TINY.tokens, TINY.token_dim)).astype(np.float32)


VELOCITIES = ((4, -2), (0, 0), (13, 5), (-40, 24), (3, 0), (0, -8))
SHAKES = ((0, PACKED), (1, PACKED[::-1]), (4, bytes((0, 0, 0, 0, 0, 0, 0, 1))))


@pytest.mark.parametrize("view", [{}, {"crop": (7, 5, 50, 40)}, {"size": (55, 41)}], ids=["whole", "crop", "scaled"])
@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_a_moving_cell_is_asked_along_its_path(decoder, view, engine):
    """Against single points, whose path is written out in `query_points`, and that against the decoder itself."""
    layout = replace(fixed_layout(90, 62, 3, 2, 4), velocities=VELOCITIES, shakes=SHAKES)
    tokens = tokens_of(layout)
    asked = make_view(90, 62, **view)
    frames = decode_clip(decoder, tokens, layout, asked, MOMENTS, EngineOptions(engine=engine))
    t, y, x = (a.ravel() for a in np.meshgrid(MOMENTS, asked.y, asked.x, indexing="ij"))
    points = query_points(decoder, tokens, layout, x, y, t).reshape(8, len(asked.y), len(asked.x), 3)
    expected = np.clip(255 * points.transpose(0, 3, 1, 2), 0, 255)
    assert np.abs(frames - expected).max() <= 0.51


def test_a_points_path_is_its_cells(decoder):
    layout = replace(fixed_layout(40, 30, 1, 1, 0), velocities=((12, -4),))
    tokens = tokens_of(layout)
    point = query_points(decoder, tokens, layout, np.array([11.0]), np.array([7.0]), np.array([0.75]))
    far_x, far_y = 1.5 * 3.5, 0.5 * 3.5  # half of the way in 7 frames
    x = (11 - 1.5 * (6 - 3.5) + far_x) / (39 + 2 * far_x)
    y = (7 + 0.5 * (6 - 3.5) + far_y) / (29 + 2 * far_y)
    expected = decoder(torch.from_numpy(tokens), torch.tensor([[x, y, 0.75]]))[0]
    np.testing.assert_allclose(point, expected.numpy(), atol=1e-4)


def test_a_point_shakes_with_its_cell(decoder):
    layout = replace(fixed_layout(40, 30, 1, 1, 0), shakes=((0, PACKED),))
    tokens, times = tokens_of(layout), np.array([6.0, 2.25, 9.0])  # at a frame, between two, and beyond the last
    points = query_points(decoder, tokens, layout, np.full(3, 11.0), np.full(3, 7.0), times / 8)
    for point, time, dx, dy in zip(points, times, (0.75, 0.8125, -0.5), (0.25, -0.75, 0), strict=True):
        x, y = (11 - dx + 1.25) / (39 + 2.5), (7 - dy + 1) / (29 + 2)
        expected = decoder(torch.from_numpy(tokens), torch.tensor([[x, y, time / 8]], dtype=torch.float32))[0, 0]
        np.testing.assert_allclose(point, expected.numpy(), atol=1e-4)


def test_any_moments_between_frames(decoder):
    layout = replace(fixed_layout(40, 30, 1, 1, 0), velocities=((5, 9),))
    tokens, view = tokens_of(layout), make_view(40, 30)
    t = np.array([0.0, 0.11, 0.123, 0.86], np.float32)
    together = decode_clip(decoder, tokens, layout, view, t)
    alone = [decode_clip(decoder, tokens, layout, view, t[i : i + 1])[0] for i in range(len(t))]
    assert np.abs(together.astype(int) - np.stack(alone)).max() <= 1


@pytest.mark.parametrize(("velocity", "grids"), [((0, 0), 1), ((8, -16), 1), ((4, 8), 2), ((2, 6), 4), ((1, 0), 8)])
def test_moments_that_differ_by_whole_pixels_are_asked_together(decoder, monkeypatch, velocity, grids):
    asked = []
    original = decoding.decode_grids
    monkeypatch.setattr(decoding, "decode_grids", lambda d, c, g, **o: asked.extend(g) or original(d, c, g, **o))
    layout = replace(fixed_layout(128, 128, 1, 1, 0), velocities=(velocity,) if any(velocity) else ())
    decode_clip(decoder, tokens_of(layout), layout, make_view(128, 128), MOMENTS)
    assert len(asked) == grids


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(-(2**16), 2**16)] * 2), st.integers(1, 40), st.integers(1, 30), st.integers(1, 8))
def test_grids_are_never_much_larger_than_what_is_asked(velocity, width, height, count):
    layout = replace(fixed_layout(40, 30, 1, 1, 0), velocities=(velocity,))
    view = View(np.arange(float(width)), np.arange(float(height)))
    shares = [decoding._shares(axis, u)[0] for axis, u in ((layout.x, view.x), (layout.y, view.y))]
    parts = decoding._together(layout, 0, 8, *shares, MOMENTS[:count])
    assert sorted(m for part in parts for m in part.moments) == list(range(count))
    for part in parts:
        assert len(part.x) <= width + max(8, width // 4)
        assert len(part.y) <= height + max(8, height // 4)
        for left, top in zip(part.left, part.top, strict=True):
            assert 0 <= left <= len(part.x) - width
            assert 0 <= top <= len(part.y) - height


def test_reach_is_half_of_the_way():
    assert reach(np.outer(offsets(8), (2.0, -1.0))).tolist() == [7.0, 3.5]
    assert offsets(4).tolist() == [-1.5, -0.5, 0.5, 1.5]


# --- through a file -------------------------------------------------------------------------------------------------


def test_motion_makes_a_moving_video_better_and_can_be_turned_off(tmp_path):
    checkpoint = load_checkpoint(save_checkpoint(local_model(TINY), tmp_path, "tiny", {}))
    pictures = moving((1, -0.5), 96, 64, frames=16)
    info = VideoInfo(96, 64, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    errors = {}
    for motion in (True, False):
        file = io.BytesIO()
        frames = [Frame(i, 1, picture) for i, picture in enumerate(pictures)]
        encode_video(info, frames, file, checkpoint, EncodeOptions(motion=motion, bits=8))
        reader = Reader(io.BytesIO(file.getvalue()))
        clip = reader.clip(1)
        assert bool(clip.velocities) == motion
        layout = layout_of(reader.header, clip)
        assert len(layout.velocities) == (layout.cells if motion else 0)
        tokens = decoding.clip_tokens(clip, reader.header)
        result = decode_clip(checkpoint.model.decoder, tokens, layout, make_view(96, 64), MOMENTS)
        errors[motion] = np.square(result - pictures[8:].astype(float)).mean()
    assert errors[True] < 0.9 * errors[False]


def test_tokens_of_a_moving_cell_are_as_still_as_at_rest():
    encoder = local_model(TINY).encoder.requires_grad_(False)
    layout = fixed_layout(96, 96, 3, 3, 0)
    moved = replace(layout, velocities=((8, 0),) * 9)
    # With two sets of waves the first switch tells what is still from what moves.
    switches = [encode_clip(encoder, moving((1, 0), 96), some)[4, :, -2] > 0 for some in (moved, layout)]
    assert not switches[0].any()
    assert switches[1].any()


HEADER = Header(
    checkpoint="tiny-00000000", checkpoint_sha256=bytes(32), frames_per_clip=2, tokens=3, token_dim=4, cell_size=16,
    width=40, height=20, columns=2, rows=1, overlap=2, time_base=Fraction(1, 25), frame_duration=1,
    frame_rate=Fraction(25),
)  # fmt: skip


def payload(*velocities: tuple[int, int], shakes: tuple = ()) -> bytes:
    return records.clip_bytes(ClipRecord(0, 0, (0, 1), 1, b"bank", velocities, shakes), 1)


@given(*[st.tuples(*[st.integers(-records.MAX_VELOCITY, records.MAX_VELOCITY)] * 2)] * 2)
def test_velocities_are_stored_exactly_and_only_where_something_moves(left, right):
    if any(left) or any(right):
        clip = records.read_clip(payload(left, right), HEADER, DEFAULT_LIMITS)
        assert (clip.velocities, clip.bank) == ((left, right), b"bank")
    else:
        with pytest.raises(FormatError, match="none does"):
            records.read_clip(payload(left, right), HEADER, DEFAULT_LIMITS)
    assert len(records.read_clip(payload(), HEADER, DEFAULT_LIMITS).velocities) == 0


@pytest.mark.parametrize("velocity", [(records.MAX_VELOCITY + 1, 0), (0, -(2**40))])
def test_velocities_beyond_reason_are_refused(velocity):
    with pytest.raises(FormatError, match="pixels per frame, more than 8192"):
        records.read_clip(payload((0, 0), velocity), HEADER, DEFAULT_LIMITS)


def test_velocities_that_are_cut_short_or_announced_with_reserved_bits_are_refused():
    data = payload((1, 2), (3, 4))
    with pytest.raises(FormatError, match="CLIP"):
        records.read_clip(data[:8], HEADER, DEFAULT_LIMITS)
    with pytest.raises(FormatError, match="reserved"):
        records.read_clip(data[:3] + bytes((data[3] | 16,)) + data[4:], HEADER, DEFAULT_LIMITS)


TWO_FRAMES = st.binary(min_size=2, max_size=2).filter(any)


@given(st.dictionaries(st.integers(0, 1), TWO_FRAMES, min_size=1), st.booleans())
def test_shakes_are_stored_exactly_in_a_byte_a_frame(shaking, moves):
    velocities, shakes = ((0, -3), (900, 1)) if moves else (), tuple(sorted(shaking.items()))
    data = payload(*velocities, shakes=shakes)
    clip = records.read_clip(data, HEADER, DEFAULT_LIMITS)
    assert (clip.velocities, clip.shakes, clip.bank) == (velocities, shakes, b"bank")
    assert len(data) - len(payload(*velocities)) == 1 + 3 * len(shakes)


@given(st.lists(st.tuples(*[st.integers(-8, 7)] * 2), min_size=1))
def test_a_shake_is_packed_into_a_byte_a_frame(steps):
    packed = pack_shake(np.array(steps))
    assert len(packed) == len(steps)
    assert unpack_shake(packed).tolist() == [list(step) for step in steps]


def test_shakes_have_one_way_to_be_stored():
    data = payload(shakes=((1, pack_shake(np.array([(1, 2), (-3, 4)]))),))
    at = data.index(b"bank") - 4
    assert data[at:-4] == bytes((1, 1, 0x21, 0x4D))
    wrongs = {
        (0, 1, 0x21, 0x4D): "number of cells that shake",
        (3, 1, 0x21, 0x4D): "number of cells that shake",
        (1, 2, 0x21, 0x4D): "a cell that shakes",
        (2, 1, 0x21, 0x4D): "a cell that shakes",
        (1, 1, 0, 0): "cell 1 shakes, but",
    }
    for wrong, says in wrongs.items():
        with pytest.raises(FormatError, match=says):
            records.read_clip(data[:at] + bytes(wrong) + b"bank", HEADER, DEFAULT_LIMITS)
    with pytest.raises(FormatError, match="CLIP"):
        records.read_clip(data[: at + 3], HEADER, DEFAULT_LIMITS)


def test_the_summary_counts_what_moves(checkpoint):
    file = io.BytesIO()
    frames = [Frame(i, 1, picture) for i, picture in enumerate(moving((1, -0.5), 96, 64, frames=9))]
    info = VideoInfo(96, 64, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    encode_video(info, frames, file, checkpoint, EncodeOptions())
    facts = summary(io.BytesIO(file.getvalue()))
    assert facts["cells"]["moving_share"] == 0.5  # the second clip is one frame, repeated
    assert facts["bytes"]["motion"] >= 2 * 6
    file = io.BytesIO()
    shaken = textures(np.array(SHAKE) / PARTS, 96, 64)
    encode_video(info, [Frame(i, 1, picture) for i, picture in enumerate(shaken)], file, checkpoint, EncodeOptions())
    facts = summary(io.BytesIO(file.getvalue()))
    assert facts["cells"]["moving_share"] > 0.5
    assert facts["bytes"]["motion"] > 4 * 8
    assert sum(facts["bytes"].values()) == len(file.getvalue())
