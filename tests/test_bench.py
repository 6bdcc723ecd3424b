"""`coanerv bench` runs through, its JSON has the documented fields, and what is counted is counted right."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from coanerv_codec import bench
from coanerv_codec.checkpoint import save_checkpoint
from coanerv_codec.cli import group
from coanerv_codec.config import PRESETS
from coanerv_codec.device import has_fast_bf16
from coanerv_codec.errors import InputError, OutputError
from coanerv_codec.local_start import start_local
from coanerv_codec.model import CoANeRV


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = CoANeRV(PRESETS["tiny"])
    start_local(model, torch.Generator().manual_seed(0))
    return save_checkpoint(model, tmp_path_factory.mktemp("weights"), "tiny")


@pytest.fixture
def quick(monkeypatch):
    """Keep the fields, not the care."""
    monkeypatch.setattr(bench, "SAMPLE", 2**11)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "PRODUCTS", 1)


def test_bench_measures_everything(checkpoint, quick, tmp_path):
    output = tmp_path / "bench.json"
    arguments = ["--resolution", "80x48", "--frames", "3", "--checkpoint", str(checkpoint), "--json", str(output)]
    done = CliRunner().invoke(group, ["bench", *arguments, "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(output.read_text())
    entries = {(e["preset"], e["engine"], e["precision"]): e for e in result["decode"]}
    expected = {(p, e, "fp32") for p in ("tiny", "paper-s") for e in ("separable", "reference")}
    if has_fast_bf16(torch.device("cpu")):
        expected |= {(p, "separable", "bf16") for p in ("tiny", "paper-s")}
    assert set(entries) == expected
    for (_, _, precision), entry in entries.items():
        assert entry["fps"] > 0
        assert entry["kpx_per_s"] > 0
        assert entry["max_abs_diff"] <= (1e-5 if precision == "fp32" else 2 / 255)
        assert entry["share_of_gemm_peak"] == pytest.approx(entry["gflops"] / result["gemm_peak"][precision])
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["settings"]["frames"] == 3
    assert result["settings"]["cells"] == 3 * 2
    assert result["encode"]["bytes"] > 0
    assert result["encode"]["token_extraction_fps"] > 0
    assert result["end_to_end"]["fps"] > 0
    assert 0 < result["end_to_end"]["reading_share"] < 1
    assert result["memory"]["peak_rss_mb"] >= result["memory"]["loaded_rss_mb"] > 0
    assert 0 < result["bf16_error"]["max_abs_diff"] <= 1 / 255
    assert set(result["ratios"]) >= {"separable fp32 to reference", "separable fp32 to paper-s reference"}
    assert {c["codec"] for c in result["codecs"]} == {"libx264", "libsvtav1"}
    for text in (done.output, bench.markdown(result)):
        assert "separable fp32" in text
        assert "libx264" in text
    for line in bench.markdown(result).splitlines():
        assert line.startswith(("|", "###")) or not line


def test_moving_picture_moves():
    pictures = bench.moving_picture(64, 32, 3)
    assert pictures.shape == (3, 3, 32, 64)
    assert all((pictures[i] != pictures[i + 1]).any() for i in range(2))


def test_flop_counts():
    """The figures of the design: 84 kFLOP for small cells, 336 for the paper's tokens, twice that its way."""
    plain, paper = replace(PRESETS["base"], mlp_depth=2, gamma_skip=False), PRESETS["paper-s"]
    assert bench.flop_per_pixel(plain, "separable") == 2 * 6 * 96 * 73 + 2 * 72 * 3
    assert bench.flop_per_pixel(replace(plain, mlp_depth=3), "separable") == 2 * (6 * 96 * 73 + 72 * 72 + 72 * 3)
    assert bench.flop_per_pixel(paper, "separable") == 2 * 6 * 384 * 73 + 2 * 72 * 3
    by_hand = 2 * (72 * 384 + 2 * 384 * 384 + 384 * 72 + 72 * 72 + 72 * 3)
    assert bench.flop_per_pixel(paper, "reference") == by_hand
    assert bench.flop_per_pixel(replace(paper, gamma_skip=True), "reference") == by_hand + 2 * 72 * 72


def test_other_codecs_that_are_missing_are_named():
    assert "missing" in bench.bench_codec("no-such-codec", {}, bench.moving_picture(16, 16, 1))


def test_bad_arguments(checkpoint, tmp_path, quick, monkeypatch):
    run = CliRunner().invoke
    base = ["--checkpoint", str(checkpoint)]
    assert "WxH" in run(group, ["bench", *base, "--resolution", "huge"]).output
    assert "leave out" in run(group, ["bench", *base, "--resolution", "256", "--input", "a.mp4"]).output
    assert isinstance(run(group, ["bench", *base, "--input", str(tmp_path / "none.mp4")]).exception, InputError)
    monkeypatch.setattr(bench, "run", lambda *a, **k: {})
    assert isinstance(run(group, ["bench", *base, "--json", str(tmp_path / "no" / "x.json")]).exception, OutputError)
