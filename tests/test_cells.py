"""Cells: how many, where, that their cross-fades add up to one, and that cutting keeps what is in the picture."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coanerv_codec.cells import Axis, Layout, cut_row, fixed_layout, plan_axis, plan_layout, sampling_matrix


@st.composite
def axes(draw) -> Axis:
    """Any possible axis."""
    length, count, overlap = draw(st.integers(1, 5000)), draw(st.integers(1, 50)), draw(st.integers(0, 200))
    assume(count <= length and (count == 1 or (length + (count - 1) * overlap) / count >= 2 * overlap))
    return Axis(length, count, overlap)


# --- how many and where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (17, 1), (128, 1), (180, 1), (256, 2), (720, 6), (1000, 8), (1080, 9), (1920, 15)]
)
def test_counts_of_native_cells(length, count):
    axis = plan_axis(length, 128)
    assert (axis.count, axis.overlap) == (count, 4 if count > 1 else 0)


@given(st.integers(1, 20_000), st.sampled_from([32, 128, 256]), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_planned_cells_are_about_their_native_size(length, cell, overlap):
    axis = plan_axis(length, cell, overlap)
    if axis.count > 1:
        assert 2 / 3 <= axis.extent / cell <= 4 / 3
    else:
        assert axis.extent == length
        assert axis.overlap == 0


@given(axes())
@settings(max_examples=200, deadline=None)
def test_cells_cover_the_axis_and_share_the_overlap(axis):
    assert axis.start(0) == 0
    assert axis.start(axis.count - 1) + axis.extent == pytest.approx(axis.length)
    for i in range(axis.count - 1):
        assert axis.start(i) + axis.extent - axis.start(i + 1) == pytest.approx(axis.overlap)


@pytest.mark.parametrize(
    ("length", "count", "overlap"), [(0, 1, 0), (10, 0, 0), (10, 11, 0), (10, 2, -1), (10, 2, 12), (64, 4, 30)]
)
def test_impossible_layouts_are_refused(length, count, overlap):
    with pytest.raises(ValueError, match="cell"):
        Axis(length, count, overlap)


def test_layouts():
    layout = plan_layout(1920, 1080, 128)
    assert (layout.x.count, layout.y.count, layout.cells) == (15, 9, 135)
    layout = plan_layout(17, 1000, 128)
    assert (layout.x.count, layout.x.overlap, layout.y.count, layout.y.overlap) == (1, 0, 8, 4)
    assert plan_layout(1, 1, 128).cells == 1
    assert fixed_layout(1920, 1080, 1, 1, 8) == Layout(Axis(1920, 1, 0), Axis(1080, 1, 0))
    assert fixed_layout(100, 100, 3, 1, 8) == Layout(Axis(100, 3, 8), Axis(100, 1, 0))


# --- coordinates and weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 17, 256, 1920])
def test_one_cell_has_the_papers_coordinates(length):
    axis = Axis(length, 1, 0)
    expected = np.arange(length) / max(length - 1, 1)
    assert np.array_equal(axis.coordinates(0, np.arange(length)), expected.astype(np.float32))


def test_a_cell_of_native_size_has_the_papers_coordinates_too():
    axis = Axis(248, 2, 8)
    assert axis.extent == 128
    assert np.array_equal(axis.coordinates(1, 120 + np.arange(128.0)), (np.arange(128) / 127).astype(np.float32))


@given(axes(), st.lists(st.floats(-0.5, 1.0), min_size=1, max_size=50))
@settings(max_examples=300, deadline=None)
def test_weights_are_a_partition_of_unity(axis, places):
    positions = np.concatenate([np.array(places) * axis.length, np.arange(min(axis.length, 300))])
    weights = np.stack([axis.weights(i, positions) for i in range(axis.count)])
    assert weights.dtype == np.float32
    assert weights.min() >= 0
    assert weights.max() <= 1
    np.testing.assert_allclose(weights.sum(0), 1, atol=1e-5)
    # No more than two cells meet in a point, and a cell is asked only for what it has seen (half a pixel around it).
    assert (weights > 0).sum(0).max() <= 2
    inside = (positions >= -0.5) & (positions <= axis.length - 0.5)
    for i in range(axis.count):
        asked = positions[inside & (weights[i] > 0)]
        assert (asked >= axis.start(i) - 0.5 - 1e-6).all()
        assert (asked <= axis.start(i) + axis.extent - 0.5 + 1e-6).all()


def test_the_cross_fade_is_linear_over_the_overlap():
    axis = Axis(24, 2, 8)  # cells of 16 pixels, the second from pixel 8 on
    assert axis.start(1) == 8
    expected = np.clip((np.arange(24) - 7.5) / 8, 0, 1)
    np.testing.assert_allclose(axis.weights(1, np.arange(24)), expected, atol=1e-6)


# --- cutting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "i"), [(Axis(128, 1, 0), 0), (Axis(248, 2, 8), 0), (Axis(248, 2, 8), 1)])
def test_at_native_size_sampling_is_the_identity(axis, i):
    first, matrix = sampling_matrix(axis, i, 128)
    pixels = np.zeros((128, axis.length), np.float32)
    pixels[:, first : first + matrix.shape[1]] = matrix
    start = round(axis.start(i))
    assert np.array_equal(pixels[:, start : start + 128], np.eye(128, dtype=np.float32))
    assert np.count_nonzero(pixels) == 128


@given(axes(), st.sampled_from([1, 16, 32, 128]), st.data())
@settings(max_examples=200, deadline=None)
def test_sampling_keeps_constants_and_stays_inside_the_picture(axis, side, data):
    i = data.draw(st.integers(0, axis.count - 1))
    first, matrix = sampling_matrix(axis, i, side)
    assert matrix.shape[0] == side
    assert matrix.dtype == np.float32
    assert first >= 0
    assert first + matrix.shape[1] <= axis.length
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("axis", [Axis(100, 1, 0), Axis(130, 1, 0), Axis(300, 3, 8), Axis(1000, 8, 8)])
@pytest.mark.parametrize("side", [32, 128])
def test_a_linear_ramp_stays_one(axis, side):
    """Exact where no tap of the kernel passes the picture's edge; there the edge's pixel is repeated."""
    ramp = np.arange(axis.length, dtype=np.float64)
    for i in range(axis.count):
        first, matrix = sampling_matrix(axis, i, side)
        positions = axis.start(i) + np.arange(side) / (side - 1) * (axis.extent - 1)
        reach = 2 * max(1.0, (axis.extent - 1) / (side - 1))
        inner = (positions >= reach) & (positions <= axis.length - 1 - reach)
        assert inner.any()
        sampled = matrix.astype(np.float64) @ ramp[first : first + matrix.shape[1]]
        np.testing.assert_allclose(sampled[inner], positions[inner], atol=0.02)


def test_enlarging_keeps_parabolas():
    """What the Catmull-Rom kernel is known for: three degrees of freedom pass through it unchanged."""
    axis = Axis(100, 1, 0)
    _, matrix = sampling_matrix(axis, 0, 128)
    positions = np.arange(128) / 127 * 99
    inner = (positions >= 2) & (positions <= 97)
    parabola = np.arange(100.0) ** 2
    np.testing.assert_allclose((matrix.astype(np.float64) @ parabola)[inner], positions[inner] ** 2, atol=0.01)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 3), (17, 1000), (70, 54), (32, 32), (300, 5)])
def test_a_constant_picture_stays_constant(width, height):
    layout = plan_layout(width, height, 32)
    frames = np.empty((2, 3, height, width), np.uint8)
    frames[:] = np.array([200, 17, 255], np.uint8)[:, None, None]
    for row in range(layout.y.count):
        cells = cut_row(frames, layout, row, 32)
        assert cells.shape == (layout.x.count, 2, 3, 32, 32)
        assert cells.dtype == np.float32
        for channel, value in enumerate([200, 17, 255]):
            np.testing.assert_allclose(cells[:, :, channel], value / 255, atol=1e-5)


def test_cells_hold_their_own_part_of_the_picture():
    """At native size a cell is the very pixels it covers."""
    layout = Layout(Axis(56, 2, 8), Axis(80, 3, 8))  # cells of 32 x 32 from 0, 24, 48
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 80, 56), np.uint8)
    for row in range(3):
        cells = cut_row(frames, layout, row, 32)
        for column in range(2):
            part = frames[:, :, 24 * row : 24 * row + 32, 24 * column : 24 * column + 32]
            np.testing.assert_allclose(cells[column], part / 255, atol=1e-6)


def test_shrinking_does_not_alias():
    """A checkerboard made eight times smaller becomes grey, not another pattern."""
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    cells = cut_row(np.broadcast_to(board, (1, 3, 256, 256)), fixed_layout(256, 256, 1, 1, 0), 0, 32)
    np.testing.assert_allclose(cells[..., 4:-4, 4:-4], 0.5, atol=0.01)
