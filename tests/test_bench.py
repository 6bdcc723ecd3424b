"""`coanerv bench` runs through, its JSON has the documented fields, and what is counted is counted right."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from conftest import local_model

from coanerv_codec import bench, bench_files, bench_report
from coanerv_codec.cli import group
from coanerv_codec.config import PRESETS
from coanerv_codec.device import has_bf16
from coanerv_codec.engine import decode_grid
from coanerv_codec.errors import InputError, OutputError
from coanerv_codec.model import CoANeRV


@pytest.fixture
def quick(monkeypatch):
    """Keep the fields, not the care."""
    monkeypatch.setattr(bench, "SAMPLE", 2**11)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "WARMUP", 0)
    monkeypatch.setattr(bench, "PRODUCTS", 1)
    monkeypatch.setattr(bench, "MEMORY_SIZES", {"1080p": (96, 64), "4K": (192, 128)})


def test_bench_measures_everything(checkpoint_path, quick, tmp_path):
    output = tmp_path / "bench.json"
    arguments = ["--resolution", "80x48", "--frames", "3", "--checkpoint", str(checkpoint_path), "--json", str(output)]
    done = CliRunner().invoke(group, ["bench", *arguments, "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(output.read_text())
    entries = {(e["preset"], e["engine"], e["precision"]): e for e in result["decode"]}
    expected = {(p, e, "fp32") for p in ("tiny", "paper-s") for e in ("separable", "reference")}
    if has_bf16(torch.device("cpu")):
        expected |= {(p, "separable", "bf16") for p in ("tiny", "paper-s")}
    assert set(entries) == expected
    for (_, _, precision), entry in entries.items():
        assert entry["fps"] > 0
        assert entry["kpx_per_s"] > 0
        assert entry["max_abs_diff"] <= (1e-4 if precision == "fp32" else 4 / 255)
        assert entry["share_of_gemm_peak"] == pytest.approx(entry["gflops"] / result["gemm_peak"][precision])
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["settings"]["frames"] == 3
    assert result["settings"]["cells"] == 3 * 2
    assert result["encode"]["bytes"] > 0
    assert result["encode"]["token_extraction_fps"] > 0
    assert result["end_to_end"]["fps"] > 0
    assert result["end_to_end"]["engine_fps"] > 0
    assert 0 < result["end_to_end"]["reading_share"] < 1
    assert result["encode"]["clip_256_ms"] > 0
    for size in ("1080p", "4K"):
        memory = result["memory"][size]
        assert memory["peak_rss_mb"] == pytest.approx(memory["frames_in_flight_mb"] + memory["apart_mb"])
        assert memory["apart_mb"] > 0
    assert 0 < result["bf16_error"]["max_abs_diff"] <= 4 / 255
    assert set(result["ratios"]) >= {
        "separable fp32 to reference",
        "separable fp32 to paper-s reference",
        "end-to-end decode to engine",
        "memory at 4K to 1080p, without frames in flight",
    }
    assert {c["codec"] for c in result["codecs"]} == {"libx264", "libsvtav1"}
    for text in (done.output, bench_report.markdown(result)):
        assert "separable fp32" in text
        assert "libx264" in text
    assert "75% of the GEMM peak" in bench_report.markdown(result)
    for line in bench_report.markdown(result).splitlines():
        assert line.startswith(("|", "###")) or not line


def test_moving_picture_moves():
    pictures = bench.moving_picture(64, 32, 3)
    assert pictures.shape == (3, 3, 32, 64)
    assert all((pictures[i] != pictures[i + 1]).any() for i in range(2))


def test_flop_counts_of_the_paper():
    """The figures of the design: 336 kFLOP for the paper's tokens, twice that its way; and its keys and values."""
    config = PRESETS["paper-s"]
    paper = CoANeRV(config).decoder
    tokens = 2 * 384 * 2 * 72 * 384
    assert bench.cell_flop(paper) == tokens
    fast = 2 * 6 * 384 * 73 + 2 * 72 * 3
    assert bench.flop_per_pixel(paper, "separable") == fast + tokens / (8 * 256**2)
    slow = 2 * (72 * 384 + 2 * 384 * 384 + 384 * 72 + 72 * 72 + 72 * 3)
    assert bench.flop_per_pixel(paper, "reference", 32) == slow + tokens / (8 * 32**2)
    deeper = CoANeRV(replace(config, mlp_depth=3)).decoder
    assert bench.flop_per_pixel(deeper, "separable") - bench.flop_per_pixel(paper, "separable") == 2 * 72 * 72


def test_flop_counts_are_those_of_the_products(monkeypatch):
    """Count the products that the carriers' engine calls, on a model whose tables are small beside them."""
    config = replace(PRESETS["tiny"], cell=128)
    decoder = local_model(config).decoder.requires_grad_(False)
    counted = []

    def watched(original):
        def product(*arguments, **options):
            a, b = arguments[-2:]
            counted.append(2 * a.numel() * b.shape[-1])
            return original(*arguments, **options)

        return product

    for name in ("mm", "addmm", "bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    line = torch.arange(128)[None] / 127
    tokens = 0.1 * torch.randn(1, config.tokens, config.token_dim)
    decode_grid(decoder, tokens, line, line, torch.arange(8) / 8)
    expected = bench.flop_per_pixel(decoder, "separable") * 8 * 128**2 - bench.cell_flop(decoder)
    along_x = (
        2 * config.decoder_heads * config.tokens * config.carriers * 128
    )  # by the operator @, which is not watched
    assert sum(counted) == pytest.approx(expected - along_x, rel=1e-6)


def test_other_codecs_that_are_missing_are_named():
    assert "missing" in bench_files.time_codec("no-such-codec", {}, bench.moving_picture(16, 16, 1))


def test_bad_arguments(checkpoint_path, tmp_path, quick, monkeypatch):
    run = CliRunner().invoke
    base = ["--checkpoint", str(checkpoint_path)]
    assert "WxH" in run(group, ["bench", *base, "--resolution", "huge"]).output
    assert "leave out" in run(group, ["bench", *base, "--resolution", "256", "--input", "a.mp4"]).output
    assert isinstance(run(group, ["bench", *base, "--input", str(tmp_path / "none.mp4")]).exception, InputError)
    monkeypatch.setattr(bench, "run", lambda *a, **k: {})
    assert isinstance(run(group, ["bench", *base, "--json", str(tmp_path / "no" / "x.json")]).exception, OutputError)
