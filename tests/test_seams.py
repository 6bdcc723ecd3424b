"""Seams: that the measures find what they should, and that the shipped checkpoint has none that show."""

import json
import math

import numpy as np
import pytest
from make_video import make_video

from coanerv_codec import seams
from coanerv_codec.cells import DEFAULT_OVERLAP
from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
from coanerv_codec.demo import bundled_clip
from coanerv_codec.errors import InputError

NOISE = np.random.default_rng(0).integers(0, 128, (16, 3, 80, 112)).astype(np.uint8)


def decibel(code_values: float) -> float:
    return 20 * math.log10(255 / code_values)


@pytest.fixture
def coder(monkeypatch):
    """Replace the codec by a function of a clip and its layout."""

    def use(function):
        monkeypatch.setattr(seams, "code", lambda clip, checkpoint, bits, layout: (0, function(clip, layout)))

    return use


@pytest.mark.parametrize("overlap", seams.OVERLAPS)
def test_an_error_on_borders_is_found_there(checkpoint, coder, overlap):
    def spoil(clip, layout):
        # The four pixels on either side of the middle of each overlap.
        result = clip.copy()
        for axis, lines in ((layout.x, np.moveaxis(result, 3, 0)), (layout.y, np.moveaxis(result, 2, 0))):
            for i in range(1, axis.count):
                middle = round(axis.start(i)) + overlap // 2
                lines[middle - 4 : middle + 4] = (
                    np.moveaxis(clip, 3 if axis is layout.x else 2, 0)[middle - 4 : middle + 4] + 10
                )
        return result

    coder(spoil)
    found = seams.border_error(NOISE[:8], checkpoint, 6, overlap)
    assert found.border == pytest.approx(decibel(10), abs=0.01)
    assert found.inside == 100


def test_a_step_from_cell_to_cell_is_found(checkpoint, coder):
    def brighten(clip, layout):
        # Every second column of cells, ten code values.
        column = np.maximum(np.arange(clip.shape[3]) - 4, 0) // 24
        return clip + (10 * (column % 2)).astype(np.uint8)

    coder(brighten)
    found = seams.border_error(NOISE[:8], checkpoint, 6, 8)
    assert found.inside_step == 100
    assert found.border_step < decibel(10) + 15


def test_hard_content_is_not_taken_for_a_border(checkpoint, coder):
    coder(lambda clip, layout: clip + clip % 7)
    found = seams.border_error(NOISE[:8], checkpoint, 6, 8)
    assert found.border == pytest.approx(found.inside, abs=1e-6)
    assert found.border_step == pytest.approx(found.inside_step, abs=1e-6)


def test_pictures_without_room_for_a_shift_are_refused(checkpoint):
    with pytest.raises(InputError, match="48x40 picture is too small"):
        seams.border_error(NOISE[:8, :, :40, :48], checkpoint, 6, 8)


def test_errors_by_position_in_the_clip(checkpoint, coder, monkeypatch):
    coder(lambda clip, layout: clip + np.arange(1, 9, dtype=np.uint8)[:, None, None, None])
    whole = np.tile(np.arange(3, 11, dtype=np.uint8), 2)[:, None, None, None]
    monkeypatch.setattr(seams, "code_video", lambda frames, checkpoint, bits: frames + whole)
    rows = seams.time_table(NOISE, checkpoint, 6)
    assert [row["psnr alone"] for row in rows] == pytest.approx([decibel(n) for n in range(1, 9)], abs=0.01)
    # From the last frame of a clip to the first of the next the error drops by 7, else it rises by 1.
    for column in ("change alone", "change"):
        assert [row[column] for row in rows] == pytest.approx([decibel(7)] + [decibel(1)] * 7, abs=0.01)
    assert [row["psnr"] for row in rows] == pytest.approx([decibel(n) for n in range(3, 11)], abs=0.01)


def test_a_whole_video_is_coded_as_a_file(checkpoint):
    """Cross-faded: unlike its clips alone where they meet, and only there."""
    frames = np.repeat(NOISE[::8], 8, axis=0) // 4 * 3
    layout = seams.plan_layout(112, 80, checkpoint.model.config.cell)
    alone = np.concatenate([seams.code(clip, checkpoint, 6, layout)[1] for clip in np.split(frames, 2)])
    differ = [
        bool(np.abs(a.astype(int) - b).max() > 1)
        for a, b in zip(alone, seams.code_video(frames, checkpoint, 6), strict=True)
    ]
    assert [i for i, found in enumerate(differ) if found] == [7, 8]


def test_the_command_prints_and_stores_its_tables(cli, tmp_path):
    source = make_video(tmp_path / "a.mp4", width=112, height=80, frames=16)
    done = cli("seams", source, source, "--json", tmp_path / "a.json", "--picture", tmp_path / "a.png")
    assert done.code == 0, done.err
    tables = json.loads((tmp_path / "a.json").read_text())
    assert [row["overlap"] for row in tables["overlap"]] == list(seams.OVERLAPS)
    ladder = {(row["cells"], row["bits"]): row["bytes"] for row in tables["ladder"]}
    for bits in seams.LADDER_BITS:
        assert ladder["--fit", bits] < ladder["half", bits] < ladder["default", bits]
    assert ladder["default", 4] < ladder["default", 6] < ladder["default", 8]
    assert [row["position"] for row in tables["time"]] == list(range(8))
    assert f"{tables['time'][0]['psnr']:.2f}" in done.out.decode()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    short = make_video(tmp_path / "b.mp4", width=112, height=80, frames=15)
    assert cli("seams", short).code == 3


def test_the_shipped_checkpoint_hides_its_borders():
    clip = seams.read_frames(bundled_clip(), 8)[:, :, :, 80:560]
    found = seams.border_error(clip, load_checkpoint(find_checkpoint()), 6, DEFAULT_OVERLAP)
    assert found.border >= found.inside - 0.3
    assert found.border_step >= found.inside_step - 0.3
