"""Colour conversion against formulas written down here independently, and against itself backwards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_video import color_bars, rgb_to_planes

from coanerv_codec.color import ColorTags, color_warnings, from_model, to_model, yuv_to_rgb

BARS = color_bars(64, 16)


def paper_yuv(rgb):
    """The paper's appendix, in code values."""
    r, g, b = np.moveaxis(rgb, -1, 0)
    return 255 * np.stack(
        [
            0.299 * r + 0.587 * g + 0.114 * b,
            -0.169 * r - 0.331 * g + 0.500 * b + 0.5,
            0.500 * r - 0.419 * g - 0.081 * b + 0.5,
        ]
    )


def subsample(planes, chroma):
    """Keep the chroma samples that lie on a luma sample (location "top left")."""
    across, down = {"444": (1, 1), "422": (2, 1), "420": (2, 2)}[chroma]
    return [planes[0], *(p[::down, ::across] for p in planes[1:])]


def worst(a, b):
    return np.abs(np.asarray(a, float) - np.asarray(b, float)).max()


@pytest.mark.parametrize("depth", [8, 10, 12])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", [1, 6, 9])
def test_bars_arrive_as_the_paper_defines_them(matrix, full, depth):
    tags = ColorTags(range=2 if full else 1, matrix=matrix)
    model = to_model(rgb_to_planes(BARS, matrix, full, depth), "444", tags, depth)
    # Half a code value for each of the two roundings, the source's being up to twice as coarse.
    assert worst(model, paper_yuv(BARS)) <= (2.0 if depth == 8 else 1.0)


def test_rgb_arrives_exactly_rounded():
    codes = np.rint(BARS * 255)
    model = to_model(list(np.moveaxis(codes.astype(np.uint8), -1, 0)), "rgb", ColorTags())
    assert worst(model, paper_yuv(codes / 255)) <= 0.511
    assert worst(yuv_to_rgb(model), codes) <= 2


@pytest.mark.parametrize(("height", "matrix"), [(718, 6), (720, 1)])
def test_unspecified_matrix_follows_the_height(height, matrix):
    rgb = np.broadcast_to(np.array([0.2, 0.5, 0.9]), (height, 2, 3))
    planes = rgb_to_planes(rgb, matrix, full=False)
    assert np.array_equal(to_model(planes, "444", ColorTags()), to_model(planes, "444", ColorTags(1, matrix)))


@pytest.mark.parametrize("location", range(7))
@pytest.mark.parametrize("chroma", ["420", "422", "444"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", [1, 6, 9])
def test_bars_come_back_within_two_code_values(matrix, full, chroma, location):
    tags = ColorTags(range=2 if full else 1, matrix=matrix, chroma_location=location)
    planes = subsample(rgb_to_planes(BARS, matrix, full), chroma)
    for before, after in zip(planes, from_model(to_model(planes, chroma, tags), chroma, tags), strict=True):
        assert before.shape == after.shape
        assert worst(before, after) <= 2


@given(
    width=st.integers(1, 9),
    height=st.integers(1, 9),
    chroma=st.sampled_from(["420", "422", "444", "gray"]),
    location=st.integers(0, 4),
    matrix=st.sampled_from([1, 2, 4, 5, 6, 7, 9, 10]),
    color_range=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_colours_inside_the_gamut_come_back_at_any_size(width, height, chroma, location, matrix, color_range, seed):
    tags = ColorTags(color_range, matrix, chroma_location=location)
    random = np.random.default_rng(seed)
    small = (height + 1) // 2 if chroma == "420" else height, (width + 1) // 2 if chroma in ("420", "422") else width
    planes = [random.integers(100, 156, (height, width), np.uint8)]
    if chroma != "gray":
        planes += [random.integers(108, 149, small, np.uint8) for _ in range(2)]
    model = to_model(planes, chroma, tags)
    assert model.shape == (3, height, width)
    for before, after in zip(planes, from_model(model, chroma, tags), strict=True):
        # The filter that undoes interpolation half-way between samples doubles the model's rounding, once per axis.
        assert worst(before, after) <= 3
        assert np.abs(before.astype(float) - after).mean() <= 1


@pytest.mark.parametrize("chroma", ["gray", "422"])
@pytest.mark.parametrize(("tags", "legal"), [(ColorTags(1, 6), slice(16, 236)), (ColorTags(2, 6), slice(0, 256))])
def test_every_grey_comes_back_exactly(tags, legal, chroma):
    ramp = np.arange(256, dtype=np.uint8)[None]
    neutral = [np.full((1, 128), 128, np.uint8)] * 2
    planes = from_model(to_model([ramp, *neutral][: 1 if chroma == "gray" else 3], chroma, tags), chroma, tags)
    assert np.array_equal(planes[0][:, legal], ramp[:, legal])
    assert all(np.all(plane == 128) for plane in planes[1:])


@pytest.mark.parametrize(
    ("location", "across"),
    [(1, [0, 1, 2, 3, 4, 5, 6, 6]), (2, [0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6]), (3, [0, 1, 2, 3, 4, 5, 6, 6])],
)
def test_chroma_location_moves_the_chroma(location, across):
    """A chroma ramp of 2 per chroma sample, so 1 per luma column, seen where its samples lie."""
    cb = np.tile(128 + 2 * np.arange(4, dtype=np.uint8), (4, 1))
    planes = [np.full((8, 8), 128, np.uint8), cb, np.full((4, 4), 128, np.uint8)]
    model = to_model(planes, "420", ColorTags(2, 6, chroma_location=location))
    assert worst(model[1], 127.5 + np.array(across)) <= 0.75


def test_grey_has_no_colour():
    model = to_model([np.full((2, 3), 200, np.uint8)], "gray", ColorTags(range=2))
    assert model.tolist() == [[[200] * 3] * 2, [[128] * 3] * 2, [[128] * 3] * 2]


def test_warnings_name_what_is_lost():
    assert color_warnings(ColorTags(1, 1, 1, 1, 1), "420", 8) == []
    assert "10-bit" in color_warnings(ColorTags(), "420", 10)[0]
    assert "HDR" in color_warnings(ColorTags(transfer=16), "420", 8)[0]
    assert "matrix 8" in color_warnings(ColorTags(matrix=8), "444", 8)[0]
