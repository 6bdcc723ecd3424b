"""Training: the material, the loss, the schedule, and runs that are killed, resumed, shared out and exported."""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import local_model
from make_video import make_video
from safetensors.torch import load_file

from coanerv_codec import corpus as material
from coanerv_codec import device
from coanerv_codec import loss as training_loss
from coanerv_codec import train as training
from coanerv_codec.bank import decode_bank, encode_bank
from coanerv_codec.checkpoint import load_checkpoint
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.corpus import Corpus, build_cache, held_out, list_media
from coanerv_codec.errors import CheckpointError, CoanervError, InputError, OutputError
from coanerv_codec.loss import TrainingLoss, pixels_at, validate
from coanerv_codec.muon import Muon, orthogonalise
from coanerv_codec.positions import cell_positions, frame_times
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.rate import estimated_bits
from coanerv_codec.raw_video import png_bytes
from coanerv_codec.recipe import PAPER, Recipe, learning_rate
from coanerv_codec.rounding import quantized
from coanerv_codec.run_log import LOG, read_log
from coanerv_codec.run_state import STATE, export, new_state
from coanerv_codec.train import train, train_step
from coanerv_codec.training_cells import Cells, centre_cells, load_steps
from coanerv_codec.video import open_video

TINY, TINY_PAPER = PRESETS["tiny"], PRESETS["tiny-paper"]
both = pytest.mark.parametrize("config", [TINY, TINY_PAPER], ids=["carriers", "paper"])
QUICK = Recipe(steps=12, batch=8, warmup=2)
SAME = ("loss", "psnr", "bits_per_pixel", "lr", "valid_psnr", "valid_kb")  # of a log record; the others are times


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of four videos and a photo that can be used, and five files that cannot."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "deeper").mkdir()
    for number, name in enumerate(["a.mp4", "b.mkv", "c.MP4", "deeper/d.mp4"]):
        path = make_video(folder / name.lower(), width=64 + 8 * number, height=48, frames=8 + 3 * number)
        path.rename(folder / name)
    photo = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    (folder / "photo.png").write_bytes(png_bytes(photo))
    make_video(folder / "short.mp4", frames=7)
    make_video(folder / "small.mp4", width=64, height=30)
    (folder / "small.png").write_bytes(png_bytes(photo[:20]))
    (folder / "text.mp4").write_text("not a video")
    (folder / "empty.mov").touch()
    (folder / "notes.txt").write_text("not looked at")
    return folder


@pytest.fixture(scope="module")
def corpus(data, tmp_path_factory) -> Corpus:
    return build_cache(list_media(data), tmp_path_factory.mktemp("cache"), TINY.frames, TINY.cell)


@pytest.fixture(autouse=True)
def one_thread():
    """Runs in this process and in others must add up in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def one_precision():
    """Which precision is faster is timed, and a busy machine may answer differently from one process to the next."""
    patch = pytest.MonkeyPatch()
    patch.setattr(training, "has_fast_bf16", lambda device: False)
    yield
    patch.undo()


# --- material -----------------------------------------------------------------------------------------------------


def test_folders_are_listed_in_one_order(data, tmp_path):
    names = [str(p.relative_to(data)) for p in list_media(data)]
    assert names == sorted(names)
    assert {"a.mp4", "c.MP4", "deeper/d.mp4", "photo.png"} <= set(names)
    assert "notes.txt" not in names
    with pytest.raises(InputError, match="not a folder"):
        list_media(tmp_path / "none")
    with pytest.raises(InputError, match="no videos"):
        list_media(tmp_path)


def test_what_is_too_short_or_too_small_is_left_out_and_counted(corpus):
    assert [i.name for i in corpus.items] == ["a.mp4", "b.mkv", "c.MP4", "d.mp4", "photo.png"]
    assert [i.frames for i in corpus.items] == [8, 11, 14, 17, 1]
    assert corpus.excluded == 5


def test_the_cache_holds_the_frames(corpus, data):
    with open_video(data / "b.mkv") as video:
        frames = np.stack([f.yuv for f in video])
    y, uv = corpus.planes(corpus.items[1])
    assert np.array_equal(y, frames[:, 0])
    blocks = frames[:, 1:].reshape(11, 2, 24, 2, 36, 2).astype(float).mean((3, 5))
    assert np.abs(uv.transpose(1, 0, 2, 3) - blocks).max() <= 0.5


def test_the_cache_is_made_once(data, tmp_path, monkeypatch):
    files = list_media(data)[:2]
    first = build_cache(files, tmp_path, 8, 32)
    monkeypatch.setattr(material, "_decode_all", lambda *_: pytest.fail("decoded again"))
    assert build_cache(files, tmp_path, 8, 32) == first
    assert len(list(tmp_path.iterdir())) == 2


def test_the_split_goes_by_name_alone():
    names = [f"video-{i}.mp4" for i in range(4000)]
    held = [n for n in names if held_out(n)]
    assert len(held) / len(names) == pytest.approx(0.05, abs=0.01)
    # These must never move: weights were judged on what they had not seen.
    assert held[:4] == ["video-0.mp4", "video-34.mp4", "video-35.mp4", "video-57.mp4"]


def cells_of(corpus: Corpus, seed: int = 0, batch: int = 8, config: Config = TINY) -> Cells:
    return Cells(corpus, config, seed, batch, (4, 6), draws=2)


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_cell_is_a_function_of_seed_and_number(corpus):
    for number in (0, 7, 123456):
        clip, positions, bits = cell = cells_of(corpus).cell(number)
        assert equal(cell, cells_of(corpus).cell(number))
        assert not equal(cell, cells_of(corpus).cell(number + 1))
        assert not equal(cell, cells_of(corpus, seed=1).cell(number))
        assert (clip.shape, clip.dtype) == ((8, 3, 32, 32), torch.uint8)
        assert bits in (4, 6)
        # Two positions in each 8 x 8 block.
        row, column = np.unravel_index(positions.numpy(), (32, 32))
        blocks = np.unique(row // 8 * 4 + column // 8, return_counts=True)
        assert (blocks[1] == 2).all()
        assert len(blocks[0]) == 16


def test_processes_share_the_cells_of_one(corpus):
    whole = cells_of(corpus).step(3)
    parts = []
    for rank in range(2):
        cells = cells_of(corpus)
        cells.rank, cells.world = rank, 2
        parts.append(cells.step(3))
    for name in ("clips", "positions", "bits"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


def test_worker_processes_give_the_same_batches_in_the_same_order(corpus):
    expected = [cells_of(corpus, batch=2).step(n) for n in range(5, 9)]
    for workers in (0, 2):
        batches = load_steps(cells_of(corpus, batch=2), 5, 0, 1, workers)
        for batch in expected:
            found = next(batches)
            assert torch.equal(found.clips, batch.clips)
            assert torch.equal(found.positions, batch.positions)


def test_what_a_worker_process_fails_of_is_said_in_one_line(corpus):
    lost = replace(corpus, path=corpus.path.with_name("lost.yuv"))
    with pytest.raises(CoanervError, match=r"^a worker process .*No such file.*lost\.yuv.*--workers 0 [^\n]*$"):
        next(load_steps(cells_of(lost), 0, 0, 1, 1))


def test_a_photo_becomes_a_moving_clip(corpus):
    only = replace(corpus, items=corpus.items[-1:])
    clip = cells_of(only).cell(0)[0]
    assert clip.shape == (8, 3, 32, 32)
    assert not torch.equal(clip[0], clip[-1])


def test_validation_cells_are_the_first_frames_centre(corpus, data):
    clips, owners = centre_cells(corpus, TINY, side=32)
    assert owners == [0, 1, 2, 3]  # a photo is no video
    with open_video(data / "b.mkv") as video:
        luma = np.stack([f.yuv[0] for f in video][:8])
    assert np.array_equal(clips[1, :, 0], luma[:, 8:40, 20:52])
    clips, owners = centre_cells(corpus, TINY, side=64)
    assert clips.shape == (16, 8, 3, 32, 32)
    assert owners == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_nothing_to_train_or_validate_on(corpus):
    with pytest.raises(InputError, match="nothing to train on"):
        cells_of(replace(corpus, items=()))
    with pytest.raises(InputError, match="--valid"):
        centre_cells(replace(corpus, items=corpus.items[-1:]), TINY)


# --- loss, schedule, optimizer ------------------------------------------------------------------------------------


def test_our_learning_rate_rises_stays_and_falls_to_zero():
    recipe = Recipe(steps=1000, warmup=100, decay=0.3, lr=2.0)
    rates = [learning_rate(recipe, step) for step in range(1001)]
    assert rates[0] == pytest.approx(0.02)
    assert rates[49] == pytest.approx(1.0)
    assert set(rates[99:701]) == {2.0}
    assert rates[850] == pytest.approx(1.0)
    assert rates[1000] == 0
    assert all(a > b for a, b in pairwise(rates[700:]))


def test_the_papers_learning_rate():
    """1e-4 through epoch 135 of 150, a tenth of it for the last fifteen."""
    recipe = replace(PAPER, steps=150)
    assert {learning_rate(recipe, step) for step in range(135)} == {1e-4}
    assert [learning_rate(recipe, step) for step in range(135, 150)] == [pytest.approx(1e-5)] * 15
    optimizer = new_state(TINY, recipe).optimizers
    assert set(optimizer) == {"adamw"}
    assert optimizer["adamw"].defaults["weight_decay"] == 1e-2
    assert optimizer["adamw"].defaults["betas"] == (0.9, 0.999)


def test_estimated_bits_are_the_entropy_of_what_the_coder_expects():
    """Of two-sided geometric magnitudes whose mean depends on channel and mode, which is what the estimate assumes."""
    rng = np.random.default_rng(0)
    n, means = 40_000, np.array([[0.3, 1.0, 3.0, 8.0], [2.0, 0.5, 0.5, 2.0]])  # [mode, channel]
    mode = rng.integers(2, size=(2, n))
    size = rng.geometric(1 / (1 + means[mode])) - 1
    tokens = 0.1 * size * rng.choice([-1, 1], size.shape)
    expected = 0.0
    for m, row in enumerate(means):
        for channel in range(len(row)):
            counts = np.unique(np.rint(tokens[mode == m][:, channel] / 0.1), return_counts=True)[1]
            expected -= (counts * np.log2(counts / counts.sum())).sum()
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(mode), 2).double()
    found = estimated_bits(torch.from_numpy(tokens), one_hot, torch.full((2, 1, 1), 0.1, dtype=torch.float64))
    assert found.sum().item() == pytest.approx(expected, rel=0.05)
    # Lively and quiet tokens are told apart, which random ones are not.
    lively = torch.from_numpy(tokens) * torch.tensor([0.0, 2.0]).repeat(n // 2)[:, None]
    mixed = lively[:, torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    shuffled = torch.stack([mixed[..., i].roll(i, 1) for i in range(4)], -1)
    step = torch.full((2, 1, 1), 0.1, dtype=torch.float64)
    one = torch.ones(2, n, 1, dtype=torch.float64)
    assert estimated_bits(mixed, one, step).sum() < 0.95 * estimated_bits(shuffled, one, step).sum()


def test_estimated_bits_are_next_to_nothing_for_zeros_and_fall_with_the_step():
    tokens = torch.randn(4, 50, 6, generator=torch.Generator().manual_seed(0))
    one = torch.ones(4, 50, 1)
    for step in (0.0, 0.1):  # a range of zero, too
        assert (estimated_bits(torch.zeros(4, 50, 6), one, torch.full((4, 1, 1), step)) < 0.05 * 300).all()
    by_step = [estimated_bits(tokens, one, torch.full((4, 1, 1), s)) for s in (0.01, 0.03, 0.1, 1.0)]
    assert all((fine > coarse).all() for fine, coarse in pairwise(by_step))
    assert (by_step[-1] > 0).all()


def test_the_gradient_of_the_bits_makes_amplitudes_smaller():
    tokens = torch.randn(4, 50, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    step = torch.full((4, 1, 1), 0.2)
    estimated_bits(tokens, torch.ones(4, 50, 1), step).sum().backward()
    assert (tokens.grad.sign() == tokens.sign()).float().mean() > 0.95
    # What is rounded to the same value however much it changes a little saves nothing, what is about to tip over does.
    near, far = tokens.new_zeros(4, 50, 6), tokens.new_full((4, 50, 6), 0.099)
    slopes = []
    for some in (near + 0.002, far):
        some = some.detach().requires_grad_()
        estimated_bits(some, torch.ones(4, 50, 1), step).sum().backward()
        slopes.append(some.grad.abs().mean())
    assert slopes[0] < 0.01 * slopes[1]


def test_pixels_at_positions_are_those_of_the_clip():
    clips = torch.rand(2, 3, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 24, 7, 7], [4, 20, 13, 1]])
    found = pixels_at(clips, positions)
    assert found.shape == (2, 3, 4, 3)
    for b in range(2):
        for i, position in enumerate(positions[b].tolist()):
            assert torch.equal(found[b, :, i], clips[b, :, :, position // 5, position % 5])


@both
def test_the_loss_is_what_it_says(corpus, config):
    model = local_model(config)
    loss = TrainingLoss(model, replace(QUICK, loss="mse"))
    batch = cells_of(corpus, config=config).step(0)
    value, mse, bits = loss(batch, 0.0)
    clips = batch.clips.float() / 255
    tokens = model.encoder(clips)
    extent = torch.stack([v.max() - v.min() for v in (tokens[:4], tokens[4:])]).repeat_interleave(4)[:, None, None]
    step = extent / (2.0 ** batch.bits[:, None, None] - 2)
    stored = (tokens / step).round() * step
    for i in range(8):
        row, column = np.unravel_index(batch.positions[i].numpy(), (32, 32))
        frame, row, column = np.repeat(np.arange(8), len(row)), np.tile(row, 8), np.tile(column, 8)
        q = torch.tensor(np.stack([column / 31, row / 31, frame / 8], -1), dtype=torch.float32)
        target = clips[i][frame, :, row, column]
        assert mse[i].item() == pytest.approx(
            (model.decoder(stored[i : i + 1], q)[0] - target).square().mean().item(), rel=1e-3
        )
    # Bits at the default --bits, with the range of the bank of four cells.
    values, modes = tokens, torch.ones(8, config.tokens, 1)
    if config.carriers:  # a switch costs what it costs
        values, high = tokens[..., :-2], (tokens[..., -2:] > 0).long()
        modes = torch.eye(4)[high[..., 0] + 2 * high[..., 1]]
    torch.testing.assert_close(bits, estimated_bits(values, modes, extent / 62).detach() / (8 * 32 * 32))
    assert value.item() == pytest.approx(mse.mean().item())
    assert loss(batch, 2.0)[0].item() == pytest.approx(mse.mean().item() + 2 * bits.mean().item())
    assert TrainingLoss(model, QUICK)(batch, 0.0)[0].item() == pytest.approx(mse.sqrt().mean().item(), rel=1e-3)


def test_tokens_are_rounded_as_the_quantizer_does(corpus, monkeypatch):
    loss = TrainingLoss(local_model(), QUICK)
    batch = cells_of(corpus).step(0)
    batch.bits[:4], batch.bits[4:] = 4, 6
    seen = []
    original = loss.model.decoder.at
    monkeypatch.setattr(loss.model.decoder, "at", lambda tokens, *rest: seen.append(tokens) or original(tokens, *rest))
    loss(batch, 0.0)
    tokens = loss.model.encoder(batch.clips.float() / 255).detach().numpy()
    for bank, bits in ((slice(0, 4), 4), (slice(4, 8), 6)):
        stored = dequantize(*quantize(tokens[bank], bits))
        found = seen[0][bank].detach().numpy()
        # A value in the middle between two levels may go either way; of switches only the signs count.
        different = np.abs(found - stored)[..., : TINY.amplitudes] > 1e-5
        assert different.mean() < 1e-3
        assert np.array_equal(found[..., TINY.amplitudes :], tokens[bank][..., TINY.amplitudes :])


def test_rounding_and_rate_teach_the_gains(corpus):
    loss = TrainingLoss(local_model(), QUICK)
    assert loss.model.encoder.gain is loss.model.decoder.gain
    gradients = []
    for rate_weight in (0.0, 10.0):
        loss.zero_grad()
        loss(cells_of(corpus).step(0), rate_weight)[0].backward()
        gradients.append(loss.model.decoder.gain.grad.clone())
    for_error, for_rate = gradients[0], gradients[1] - gradients[0]
    assert for_error.abs().max() > 1e-4
    # The rate makes channels coarser, but for those few that set the range, and with it the step of all.
    taught = for_rate[for_rate != 0]  # those of the modes that there are
    assert (taught > 0).float().mean() > 0.8


def test_rounding_lets_gradients_pass():
    tokens = torch.tensor([[[0.1, 0.26, -0.4]]], requires_grad=True)
    step = torch.tensor([[[0.2]]], requires_grad=True)
    stored = quantized(tokens, step)
    torch.testing.assert_close(stored, torch.tensor([[[0.0, 0.2, -0.4]]]))
    stored.sum().backward()
    assert tokens.grad.tolist() == [[[1.0, 1.0, 1.0]]]
    # d(level * step)/d(step) less what the token itself contributes: the error in steps.
    assert step.grad.item() == pytest.approx(-0.5 - 0.3 + 0.0, abs=1e-5)


def test_muon_makes_matrices_orthogonal():
    g = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    for matrices in (g, g.mT):
        values = torch.linalg.svdvals(orthogonalise(matrices))
        assert values.min() > 0.6
        assert values.max() < 1.3
    # Its step has the size of AdamW's: 0.2 lr per entry, root mean square.
    p = torch.nn.Parameter(torch.zeros(20, 50))
    p.grad = g[0].clone()
    Muon([p], lr=0.1, weight_decay=0.0).step()
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.2)
    assert (p.detach() * g[0]).sum() < 0


@both
def test_a_step_counts_clips_and_averages(corpus, config):
    state = new_state(config, replace(QUICK, ema=0.5))
    before = {k: v.clone() for k, v in state.ema.state_dict().items()}
    train_step(state, state.loss, cells_of(corpus, config=config).step(0), replace(QUICK, ema=0.5))
    assert state.step == 1
    keep = 2 / 11  # forgets its start quickly at first
    for name, average in state.ema.state_dict().items():
        expected = keep * before[name] + (1 - keep) * state.loss.model.state_dict()[name]
        torch.testing.assert_close(average, expected)


@both
def test_a_step_in_bf16_is_nearly_the_same(corpus, config, monkeypatch):
    results = []
    for fast in (False, True):
        monkeypatch.setattr(training, "has_fast_bf16", lambda device, fast=fast: fast)
        state = new_state(config, QUICK)
        results.append(train_step(state, state.loss, cells_of(corpus, config=config).step(0), QUICK))
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in state.loss.parameters())
    assert results[0] != results[1]
    assert results[0] == pytest.approx(results[1], rel=0.05)


def test_a_random_start_has_the_carriers_all_the_same():
    """Which waves there are is what the decoder computes, not where training begins."""
    random, local = (new_state(TINY, replace(QUICK, start=start)).loss.model for start in ("random", "local"))
    assert torch.equal(random.decoder.harmonics, local.decoder.harmonics)
    assert torch.equal(random.decoder.sets, local.decoder.sets)
    assert torch.equal(random.encoder.analysis.space_of, local.encoder.analysis.space_of)
    assert not torch.equal(random.decoder.key_x, local.decoder.key_x)


@pytest.mark.parametrize("start", ["local", "random"])
def test_tokens_depend_on_the_clip_from_the_start(corpus, start):
    """And what finds them can learn: the analysis is a product of functions of space and of time, which zeros would kill."""
    loss = new_state(TINY, replace(QUICK, start=start)).loss
    batch = cells_of(corpus).step(0)
    tokens = loss.model.encoder(batch.clips.float() / 255)
    assert (tokens[0] - tokens[1]).abs().max() > 1e-3
    loss(batch, 0.0)[0].backward()
    analysis = loss.model.encoder.analysis
    assert all(p.grad.abs().max() > 0 for p in (analysis.luma, analysis.chroma, analysis.time))


def test_whether_bf16_is_fast_is_asked_once(monkeypatch):
    device.has_fast_bf16.cache_clear()
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for seconds, expected in [
        ({torch.bfloat16: 1.0, torch.float32: 2.0}, True),
        ({torch.bfloat16: 1.9, torch.float32: 2.0}, False),
    ]:
        asked = []
        monkeypatch.setattr(device, "_product_seconds", lambda t, s=seconds, a=asked: a.append(t) or s[t])
        assert [device.has_fast_bf16(cpu), device.has_fast_bf16(cpu)] == [expected, expected]
        assert asked == [torch.bfloat16, torch.float32]
        device.has_fast_bf16.cache_clear()
    monkeypatch.undo()
    assert type(device.has_fast_bf16(cpu)) is bool
    assert device._product_seconds(torch.float32) > 0
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(device, "_product_seconds", lambda dtype: pytest.fail("timed without the instructions"))
    device.has_fast_bf16.cache_clear()
    assert device.has_fast_bf16(cpu) is False
    device.has_fast_bf16.cache_clear()


# --- runs ---------------------------------------------------------------------------------------------------------


def log_of(run: Path) -> list[dict[str, float]]:
    return [{k: r[k] for k in ("step", *SAME) if k in r} for r in read_log(run / LOG)]


def start(corpus: Corpus, run: Path, recipe: Recipe = QUICK, config: Config = TINY, **options) -> int:
    valid = replace(corpus, items=corpus.items[:1])
    return train(corpus, valid, config, recipe, run, **{"workers": 0, "log_every": 1, "valid_every": 6, **options})


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run") / "whole"
    torch.set_num_threads(1)
    assert start(corpus, run) == QUICK.steps
    return run


# With carriers the start is a working codec, so there is less left to gain in a minute.
@pytest.mark.parametrize(("config", "share"), [(TINY, 0.95), (TINY_PAPER, 0.75)], ids=["carriers", "paper"])
def test_a_run_lowers_the_loss_and_keeps_a_log(corpus, tmp_path, config, share):
    recipe = replace(QUICK, steps=60, lr=4e-3, rate_lambda=0.0)
    told = []
    videos = replace(corpus, items=corpus.items[:4])
    assert start(videos, tmp_path / "run", recipe, config, valid_every=30, report=told.append) == 60
    records = read_log(tmp_path / "run" / LOG)
    assert [r["step"] for r in records] == list(range(1, 61))
    losses = [r["loss"] for r in records]
    assert np.mean(losses[-5:]) < share * np.mean(losses[:5])
    assert [r["step"] for r in records if "valid_psnr" in r] == [30, 60]
    valid = [r["valid_psnr"] for r in records if "valid_psnr" in r]
    assert valid[1] > valid[0]
    assert [r["step"] for r in told] == [r["step"] for r in records]
    assert all(0 <= r["waiting_for_data"] <= 1 and r["cells_per_second"] > 0 for r in records)


def test_a_mean_over_some_steps_is_that_of_the_steps(corpus, uninterrupted, tmp_path):
    """Also in the first record after a resume, which covers fewer steps."""
    each = [r["loss"] for r in log_of(uninterrupted)]
    stopper = iter([False] * 4 + [True])
    options = {"workers": 0, "log_every": 3, "valid_every": 100}
    assert train(corpus, None, TINY, QUICK, tmp_path / "run", stop=lambda: next(stopper), **options) == 5
    train(corpus, None, TINY, QUICK, tmp_path / "run", resume=True, **options)
    found = {r["step"]: r["loss"] for r in log_of(tmp_path / "run")}
    assert found == pytest.approx(
        {3: np.mean(each[:3]), 6: each[5], 9: np.mean(each[6:9]), 12: np.mean(each[9:])}, abs=1e-5
    )


# A run in a process of its own. It captures the state, so that every rank can show its weights.
SCRIPT = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
from coanerv_codec import train as training
from coanerv_codec.config import PRESETS
from coanerv_codec.corpus import Corpus, Item

path, items, run, recipe, kill_at = json.loads(sys.argv[1])
torch.set_num_threads(1)
corpus = Corpus(Path(path), tuple(Item(**i) for i in items), 0)
recipe["bits"] = tuple(recipe["bits"])
training.has_fast_bf16 = lambda device: False
states, original = [], training.new_state
training.new_state = lambda *a: states.append(original(*a)) or states[-1]

def report(record):
    if record["step"] == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

valid = replace(corpus, items=corpus.items[:1])
training.train(corpus, valid, PRESETS["tiny"], training.Recipe(**recipe), Path(run), workers=0, log_every=1,
               valid_every=6, save_seconds=0.0, report=report)
tensors = states[0].loss.state_dict() | {"ema." + k: v for k, v in states[0].ema.state_dict().items()}
save_file({k: v.clone() for k, v in tensors.items()}, f"{run}/rank-{os.environ.get('RANK', 0)}.safetensors")
"""


def start_script(corpus: Corpus, run: Path, kill_at: int = -1, **environment: object) -> subprocess.Popen:
    job = [str(corpus.path), [vars(i) for i in corpus.items], str(run), vars(QUICK), kill_at]
    env = {**os.environ, "PYTHONPATH": str(Path(training.__file__).parents[1])}
    env |= {k: str(v) for k, v in environment.items()}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(job)], env=env, stderr=subprocess.PIPE)


def test_killed_and_resumed_it_goes_on_exactly(corpus, uninterrupted, tmp_path):
    run = tmp_path / "run"
    killed = start_script(corpus, run, kill_at=7)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert [r["step"] for r in log_of(run)] == list(range(1, 8))  # one more than was saved
    with (run / LOG).open("a") as log:
        log.write('{"step": 8, "lo')  # as a kill in the middle of a line leaves it
    (run / ".state.safetensors.part").write_bytes(b"half a state")
    assert start(corpus, run, resume=True) == QUICK.steps
    assert log_of(run) == log_of(uninterrupted)
    expected, found = (load_file(r / STATE) for r in (uninterrupted, run))
    assert expected.keys() == found.keys()
    assert any(k.startswith("optimizer.muon.") for k in found)
    assert all(torch.equal(found[k], expected[k]) for k in expected)


def test_two_processes_are_one_with_their_batches_together(corpus, uninterrupted, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start_script(corpus, tmp_path / "run", RANK=rank, **common) for rank in range(2)]
    for rank in ranks:
        errors = rank.communicate()[1]
        assert rank.returncode == 0, errors
    a, b = (load_file(tmp_path / "run" / f"rank-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    for found, expected in zip(log_of(tmp_path / "run"), log_of(uninterrupted), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert log_of(tmp_path / "run")[0] == pytest.approx(log_of(uninterrupted)[0], abs=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_outlives_what_uses_it(corpus, tmp_path, monkeypatch, fails):
    """Taken down by DistributedDataParallel it hangs now and then, as one of two processes did that were stopped."""
    made = []

    class Parallel(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            made.append(weakref.ref(self))

        def forward(self, *arguments):
            return self.module(*arguments)

    @contextmanager
    def group(device):
        try:
            yield 0, 2
        finally:
            assert [wrapper() for wrapper in made] == [None]

    monkeypatch.setattr(training, "DistributedDataParallel", Parallel)
    monkeypatch.setattr(training, "process_group", group)
    monkeypatch.setattr(training, "across", lambda values, world, largest=False: values)
    if fails:
        monkeypatch.setattr(training, "save_state", lambda *_: (_ for _ in ()).throw(OutputError("disk full")))
    with pytest.raises(OutputError, match="disk full") if fails else nullcontext():
        start(corpus, tmp_path / "run", replace(QUICK, steps=2))


def test_a_batch_that_cannot_be_shared_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "process_group", lambda device: nullcontext((0, 3)))
    with pytest.raises(InputError, match="8 cells cannot be shared evenly by 3"):
        start(corpus, tmp_path / "run")


def test_a_run_is_neither_overwritten_nor_invented(corpus, uninterrupted, tmp_path):
    with pytest.raises(InputError, match="--resume"):
        start(corpus, uninterrupted)
    with pytest.raises(InputError, match="nothing to resume"):
        start(corpus, tmp_path / "none", resume=True)
    with pytest.raises(CheckpointError, match="another configuration"):
        train(corpus, None, replace(TINY, depth=2), QUICK, uninterrupted, resume=True, workers=0)
    damaged = tmp_path / "run"
    damaged.mkdir()
    (damaged / STATE).write_bytes((uninterrupted / STATE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="it is damaged"):
        start(corpus, damaged, resume=True)
    with pytest.raises(CheckpointError, match="nothing to export"):
        export(tmp_path / "none", tmp_path, "tiny")


def test_export_gives_the_averaged_weights(uninterrupted, tmp_path):
    path = export(uninterrupted, tmp_path / "weights", "mine")
    loaded = load_checkpoint(path)
    state = load_file(uninterrupted / STATE)
    assert path.name.startswith("mine-")
    assert loaded.model.config == TINY
    for name, value in loaded.model.state_dict().items():
        exact = state[f"ema.{name}"]
        assert torch.equal(value, exact if name.startswith("decoder.key_") else exact.half().float())
    assert not torch.equal(state["ema.decoder.base"], state["loss.model.decoder.base"])


def test_a_run_can_start_from_a_checkpoint(checkpoint):
    state = new_state(TINY, QUICK, checkpoint.model)
    for weights in (state.loss.model, state.ema):
        assert all(torch.equal(v, checkpoint.model.state_dict()[k]) for k, v in weights.state_dict().items())


@both
def test_validation_is_psnr_and_size_of_quantized_tokens(corpus, config, monkeypatch):
    model = local_model(config).requires_grad_(False)
    clips, owners = centre_cells(corpus, config, side=64)
    psnr, kilobytes = validate(model, clips, owners)
    each = [validate(model, clips[4 * i : 4 * i + 4], [i] * 4) for i in range(4)]
    assert (psnr, kilobytes) == pytest.approx([sum(e[0] for e in each), sum(e[1] for e in each)], rel=1e-5)
    # The bytes are those of the bank that a file would hold, and the picture is that of what the bank gives back.
    monkeypatch.setattr(training_loss, "VALID_POSITIONS", 20_000)  # nearly every pixel, some of them often
    cells = clips[:4].float() / 255
    symbols, z, s = quantize(model.encoder(cells).numpy(), 6)
    bank = encode_bank(symbols, 6, z, s, hints=config.hints)
    psnr, kilobytes = validate(model, clips[:4], [0] * 4)
    assert kilobytes == len(bank) / 1000
    symbols, _, z, s = decode_bank(bank, (4, config.tokens, config.token_dim))
    tokens = torch.from_numpy(dequantize(symbols, z, s))
    pixels = model.decoder.at(tokens, cell_positions(32).expand(4, -1, -1), frame_times(8)).clamp(0, 1)
    mse = (pixels.transpose(2, 3) - cells.flatten(3)).square().mean().item()
    assert psnr == pytest.approx(-10 * math.log10(mse), abs=0.1)


def test_a_run_that_has_diverged_says_so(corpus):
    model = local_model().requires_grad_(False)
    model.encoder.queries.fill_(math.nan)
    with pytest.raises(CoanervError, match="diverged"):
        validate(model, *centre_cells(corpus, TINY, side=32))


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_logging(monkeypatch):
    """A command in this process must not take the test's logging and signals with it."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_train_in_two_processes_stop_resume_export_plot(process, cli, quiet_logging, data, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "--data", data, "--valid", data, "--preset", "tiny", "--out", run, "--workers", 0]
    command = process(*arguments, "--processes", 2, "--steps", 10**6, "--recipe", "batch=4")
    lines = []
    for line in command.stderr:
        lines.append(line.decode())
        if line.startswith(b"step"):
            command.send_signal(signal.SIGTERM)
            break
    rest = command.communicate()[1].decode()
    assert command.returncode == 0, rest
    assert "5 files to train on, 5 left out as too short or too small\n" in lines
    assert "Traceback" not in rest
    (reached,) = (int(line.split()[1]) for line in rest.splitlines() if "state in" in line)
    assert reached >= 20
    state = load_file(run / STATE)
    result = cli(*arguments, "--steps", reached + 2, "--recipe", "batch=4", "--resume")
    assert (result.code, result.out) == (0, b"")
    assert f"step {reached + 2} of {reached + 2}" in result.err
    assert not torch.equal(load_file(run / STATE)["loss.model.decoder.base"], state["loss.model.decoder.base"])
    exported = cli("train", "--out", run, "--preset", "tiny", "--export", tmp_path / "weights").out.decode().strip()
    assert load_checkpoint(Path(exported)).model.config == TINY
    assert cli("train", "--out", run, "--plot", tmp_path / "curves.svg").code == 0
    assert (tmp_path / "curves.svg").read_text().count("<path") > 2


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--data", "none"], 3, "not a folder"),
        (["--data", ".", "--set", "nonsense=1"], 2, "no field"),
        (["--data", ".", "--set", "tokens=5"], 2, "no field"),
        (["--data", ".", "--set", "depth=x"], 2, "needs a int"),
        (["--data", ".", "--set", "depth=0"], 2, "whole number"),
        (["--data", ".", "--set", "gamma_skip=true"], 2, "no field"),
        (["--data", ".", "--set", "grid=2,2,2"], 2, "one anchor in t"),
        (["--data", ".", "--set", "mixer_width=40"], 2, "multiple of 32"),
        (["--data", ".", "--set", "carriers=120"], 1, "has waves for"),
        (["--data", ".", "--recipe", "lr=x"], 2, "needs a float"),
        (["--data", ".", "--recipe", "lr=nan"], 2, "must be positive"),
        (["--data", ".", "--recipe", "batch=0"], 2, "batch must be at least 1"),
        (["--data", ".", "--recipe", "optimizer=sgd"], 2, "muon or adamw"),
        (["--data", ".", "--recipe", "bits=6,9"], 2, "from 2 to 8"),
        (["--data", ".", "--recipe", "ema=2"], 2, "from 0 to 1"),
        (["--data", ".", "--recipe", "weight_decay=-1"], 2, "must not be negative"),
        (["--data", ".", "--set", "width=65"], 2, "width must be even"),
        (["--data", ".", "--init", "default", "--set", "depth=2"], 2, "leave out --preset"),
        (["--data", ".", "--cache", "short.mp4/cache"], 6, "cannot be made a folder"),
        (["--data", ".", "--out", "short.mp4/run"], 6, "cannot be made a folder"),
        (["--data", ".", "--init", "none.safetensors"], 5, "none.safetensors"),
        (["--data", "."], 3, "nothing to train on"),
        (["--resume", "--data", "."], 3, "nothing to resume"),
        (["--export", "weights"], 5, "nothing to export"),
        (["--plot", "a.svg"], 3, LOG),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_wrong_use_of_train(cli, quiet_logging, tmp_path, monkeypatch, options, code, text):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "short.mp4", frames=3)
    result = cli("train", "--out", "run", "--preset", "tiny", *options)
    assert (result.code, result.out) == (code, b"")
    assert text in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


def test_the_schedule_of_the_paper_uses_the_papers_loss():
    assert (PAPER.loss, PAPER.start, PAPER.optimizer, PAPER.batch) == ("mse", "random", "adamw", 2)
    assert (PAPER.lr, PAPER.weight_decay, PAPER.clip, PAPER.rate_lambda) == (1e-4, 1e-2, math.inf, 0.0)
