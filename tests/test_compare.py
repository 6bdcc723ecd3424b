"""`coanerv compare`: the same frames for everybody, complete files, one measure."""

import io
import json
import math
from dataclasses import replace

import av
import numpy as np
import pytest
from make_video import make_video

from coanerv_codec import compare
from coanerv_codec.compare import Point, Rival, average, rate_difference, read_source
from coanerv_codec.errors import InputError


def curve(codec: str, factor: float, psnrs=(30, 32, 35, 40)) -> list[Point]:
    """Bytes that double every 5 dB, times a factor."""
    return [Point(codec, f"at {p}", round(factor * 10_000 * 2 ** (p / 5)), 0.1, p, 1.0, 1.0) for p in psnrs]


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_rate_difference_of_shifted_curves_is_their_factor(factor):
    points = curve("a", factor, (29, 33, 41)) + curve("b", 1.0)
    assert rate_difference(points, "a", "b") == pytest.approx(factor - 1, abs=1e-3)
    assert rate_difference(points, "b", "a") == pytest.approx(1 / factor - 1, abs=1e-3)


def test_curves_without_a_common_psnr_have_no_rate_difference():
    assert rate_difference(curve("a", 1.0, (20, 25)) + curve("b", 1.0, (26, 30)), "a", "b") is None


def test_means_are_taken_setting_by_setting():
    merged = average([curve("a", 1.0), curve("a", 3.0)])
    assert [p.setting for p in merged] == [p.setting for p in curve("a", 1.0)]
    assert [p.bytes for p in merged] == [p.bytes for p in curve("a", 2.0)]


def test_odd_pictures_are_cut_and_too_small_ones_refused(tmp_path):
    odd = make_video(tmp_path / "odd.mkv", width=71, height=53, frames=5, pixel_format="yuv444p")
    info, frames = read_source(odd, 3)
    assert (info.width, info.height, len(frames)) == (70, 52, 3)
    assert frames[0].yuv.shape == (3, 52, 70)
    thin = make_video(tmp_path / "thin.y4m", width=1, height=20, frames=2, pixel_format="yuv444p")
    with pytest.raises(InputError, match="too small to compare"):
        read_source(thin, 2)


def test_what_is_measured_is_what_comes_back(tmp_path, checkpoint, monkeypatch):
    """Bytes are those of a playable file, and the PSNR is that of its pictures, computed here once more."""
    seen = {}
    original = compare._code_other

    def kept(name, options, info, pictures):
        coded = original(name, options, info, pictures)
        seen[options["crf"]] = coded, pictures
        return coded

    monkeypatch.setattr(compare, "_code_other", kept)
    monkeypatch.setattr(compare, "BITS", (8, 4))
    monkeypatch.setattr(compare, "OTHERS", {"libx264": Rival("libx264", {"preset": "ultrafast"}, (10, 40))})
    points = compare.compare(make_video(tmp_path / "in.mp4", frames=10), checkpoint, 9, lambda point: None)
    assert [(p.codec, p.setting) for p in points] == [
        ("coanerv", "8 bits"),
        ("coanerv", "4 bits"),
        ("libx264", "crf 10"),
        ("libx264", "crf 40"),
    ]
    for better, worse in (points[:2], points[2:]):
        assert better.bytes > worse.bytes
        assert better.psnr > worse.psnr
    assert points[2].psnr > 38
    (size, result, *_), pictures = seen["40"]
    source = np.stack([p.to_ndarray(format="yuv420p") for p in pictures]).astype(float)
    assert points[3].bytes == size
    assert points[3].bits_per_pixel == pytest.approx(8 * size / (9 * 64 * 48))
    assert points[3].psnr == pytest.approx(
        10 * math.log10(255**2 / np.square(source - np.stack(result)).mean()), abs=1e-3
    )


def test_clips_alone_have_key_frames_where_ours_begin(tmp_path, checkpoint, monkeypatch):
    kept = []
    original = compare._code_other
    monkeypatch.setattr(compare, "_code_other", lambda *a: kept.append(a[1]) or original(*a))
    monkeypatch.setattr(compare, "BITS", ())
    some = {name: replace(rival, qualities=(28,)) for name, rival in compare.OTHERS.items() if "x264" in name}
    monkeypatch.setattr(compare, "OTHERS", some)
    source = make_video(tmp_path / "in.mp4", frames=24)
    plain, alone = compare.compare(source, checkpoint, 24, lambda point: None)
    assert [options.get("g") for options in kept] == [None, "8"]
    assert alone.bytes > plain.bytes


def test_key_frames_are_where_clips_begin_whatever_the_scene(tmp_path, monkeypatch):
    info, _ = read_source(make_video(tmp_path / "in.mp4"), 1)
    cut = np.concatenate([np.zeros((13, 3, 48, 64), np.uint8), np.full((11, 3, 48, 64), 200, np.uint8)])
    cut[:, 0] += np.arange(64, dtype=np.uint8) // 2
    pictures = [compare._subsampled(picture) for picture in cut]
    options = {"preset": "medium", "crf": "28"} | compare.OTHERS["libx264, clips alone"].alone(8)
    written, original = [], io.BytesIO
    monkeypatch.setattr(compare.io, "BytesIO", lambda *a: written.append(original(*a)) or written[-1])
    compare._code_other("libx264", options, info, pictures)
    with av.open(original(written[0].getvalue())) as container:
        assert [i for i, frame in enumerate(container.decode(video=0)) if frame.key_frame] == [0, 8, 16]


def test_the_command(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "BITS", (8, 3))
    source = make_video(tmp_path / "in.mp4", frames=8)
    result = cli("compare", source, "--frames", 8, "--plot", tmp_path / "rd.svg", "--json", tmp_path / "rd.json")
    assert result.code == 0
    lines = result.out.decode().splitlines()
    assert sum(line.startswith("| coanerv") for line in lines) == 2
    assert sum(line.startswith("| libx264 |") for line in lines) == 6
    assert sum(line.startswith("| libx264, clips alone |") for line in lines) == 6
    assert sum(line.startswith("| libsvtav1") for line in lines) == 6
    assert lines[-3].startswith("coanerv against libx264 (preset medium): ")
    assert lines[-2].startswith("coanerv against libx264, clips alone (preset medium): ")
    assert (tmp_path / "rd.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "rd.json").read_text())["means"]) == 20
    missing = cli("compare", tmp_path / "none.mp4")
    assert missing.code == InputError.exit_code
    assert len(missing.err.splitlines()) == 1
