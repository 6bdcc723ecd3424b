"""Training: the material, the loss, the schedule, and runs that are killed, resumed, shared out and exported."""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
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
from coanerv_codec import train as training
from coanerv_codec.checkpoint import load_checkpoint
from coanerv_codec.config import PRESETS
from coanerv_codec.corpus import Cells, Corpus, build_cache, centre_cells, held_out, list_media, load_steps
from coanerv_codec.errors import CheckpointError, InputError
from coanerv_codec.muon import Muon, orthogonalise
from coanerv_codec.raw_video import png_bytes
from coanerv_codec.train import (
    PAPER,
    Prior,
    Recipe,
    TrainingLoss,
    learning_rate,
    new_state,
    read_log,
    train,
    train_step,
)
from coanerv_codec.video import open_video

TINY = PRESETS["tiny"]
QUICK = Recipe(steps=12, batch=8, warmup=2, rate_ramp=4)
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


def cells_of(corpus: Corpus, seed: int = 0, batch: int = 8) -> Cells:
    return Cells(corpus, TINY, seed, batch, (4, 6), draws=2)


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_cell_is_a_function_of_seed_and_number(corpus):
    for number in (0, 7, 123456):
        clip, pixels, noise, bits = cell = cells_of(corpus).cell(number)
        assert equal(cell, cells_of(corpus).cell(number))
        assert not equal(cell, cells_of(corpus).cell(number + 1))
        assert not equal(cell, cells_of(corpus, seed=1).cell(number))
        assert (clip.shape, clip.dtype) == ((8, 3, 32, 32), torch.uint8)
        assert noise.shape == (4, 72)
        assert -0.5 <= noise.min() < -0.4 < 0.4 < noise.max() <= 0.5
        assert bits in (4, 6)
        # Two pixels in each 8 x 8 block of each frame.
        frame, row, column = np.unravel_index(pixels.numpy(), (8, 32, 32))
        blocks = np.unique((frame * 4 + row // 8) * 4 + column // 8, return_counts=True)
        assert (blocks[1] == 2).all()
        assert len(blocks[0]) == 8 * 16


def test_processes_share_the_cells_of_one(corpus):
    whole = cells_of(corpus).step(3)
    parts = []
    for rank in range(2):
        cells = cells_of(corpus)
        cells.rank, cells.world = rank, 2
        parts.append(cells.step(3))
    for name in ("clips", "pixels", "noise", "bits"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


def test_worker_processes_give_the_same_batches_in_the_same_order(corpus):
    expected = [cells_of(corpus, batch=2).step(n) for n in range(5, 9)]
    for workers in (0, 2):
        batches = load_steps(cells_of(corpus, batch=2), 5, 0, 1, workers)
        for batch in expected:
            found = next(batches)
            assert torch.equal(found.clips, batch.clips)
            assert torch.equal(found.noise, batch.noise)


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


def test_a_priors_probabilities_add_up_to_one():
    prior = Prior(1)
    torch.nn.init.constant_(prior.mean, 0.3)
    torch.nn.init.constant_(prior.log_scale, 0.5)
    lattice = 0.25 * torch.arange(-200, 201)[:, None, None]
    bits = prior(lattice, torch.full_like(lattice, 0.25))
    assert (2 ** -bits.double()).sum().item() == pytest.approx(1.0, abs=1e-5)
    assert bits.argmin() == 201  # 0.25, the closest to the mean
    # All channels of all tokens of a cell count.
    assert Prior(3)(torch.zeros(2, 5, 3), torch.ones(2, 1, 1)).tolist() == pytest.approx(
        [15 * -math.log2(math.tanh(0.25))] * 2
    )


def test_the_loss_is_what_it_says(corpus):
    model = local_model()
    loss = TrainingLoss(model, replace(QUICK, loss="mse"))
    batch = cells_of(corpus).step(0)
    batch.noise.zero_()
    value, mse, bits = loss(batch, 0.0)
    clips = batch.clips.float() / 255
    tokens = model.encoder(clips)
    for i in range(8):
        frame, row, column = np.unravel_index(batch.pixels[i].numpy(), (8, 32, 32))
        q = torch.tensor(np.stack([column / 31, row / 31, frame / 8], -1), dtype=torch.float32)
        target = clips[i][frame, :, row, column]
        assert mse[i].item() == pytest.approx(
            (model.decoder(tokens[i : i + 1], q)[0] - target).square().mean().item(), rel=1e-4
        )
    assert value.item() == pytest.approx(mse.mean().item())
    assert loss(batch, 2.0)[0].item() == pytest.approx(mse.mean().item() + 2 * bits.mean().item())
    assert TrainingLoss(model, QUICK)(batch, 0.0)[0].item() == pytest.approx(mse.sqrt().mean().item(), rel=1e-3)


def test_noise_is_that_of_the_quantizer(corpus):
    """Tokens reach the decoder moved by up to half a step of their bank's quantizer, at the cell's bits."""
    loss = TrainingLoss(local_model(), QUICK)
    batch = cells_of(corpus).step(0)
    seen = []
    loss.model.decoder.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    loss(batch, 0.0)
    tokens = loss.model.encoder(batch.clips.float() / 255)
    for bank in (slice(0, 4), slice(4, 8)):
        extent = tokens[bank].max() - tokens[bank].min()
        for i in range(bank.start, bank.stop):
            expected = batch.noise[i] * extent / (2 ** batch.bits[i].item() - 1)
            torch.testing.assert_close(seen[0][i] - tokens[i], expected, atol=1e-5, rtol=0)


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


def test_a_step_counts_clips_and_averages(corpus):
    state = new_state(TINY, replace(QUICK, ema=0.5))
    before = {k: v.clone() for k, v in state.ema.state_dict().items()}
    train_step(state, state.loss, cells_of(corpus).step(0), replace(QUICK, ema=0.5))
    assert state.step == 1
    keep = 2 / 11  # forgets its start quickly at first
    for name, average in state.ema.state_dict().items():
        expected = keep * before[name] + (1 - keep) * state.loss.model.state_dict()[name]
        torch.testing.assert_close(average, expected)


# --- runs ---------------------------------------------------------------------------------------------------------


def log_of(run: Path) -> list[dict[str, float]]:
    return [{k: r[k] for k in ("step", *SAME) if k in r} for r in read_log(run / "log.jsonl")]


def start(corpus: Corpus, run: Path, recipe: Recipe = QUICK, **options) -> int:
    valid = replace(corpus, items=corpus.items[:1])
    return train(corpus, valid, TINY, recipe, run, **{"workers": 0, "log_every": 1, "valid_every": 6, **options})


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run") / "whole"
    torch.set_num_threads(1)
    assert start(corpus, run) == QUICK.steps
    return run


def test_a_run_lowers_the_loss_and_keeps_a_log(corpus, tmp_path):
    recipe = replace(QUICK, steps=60, lr=4e-3, rate_lambda=0.0)
    told = []
    videos = replace(corpus, items=corpus.items[:4])
    assert start(videos, tmp_path / "run", recipe, valid_every=30, report=told.append) == 60
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [r["step"] for r in records] == list(range(1, 61))
    losses = [r["loss"] for r in records]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
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
states, original = [], training.new_state
training.new_state = lambda *a: states.append(original(*a)) or states[-1]

def report(record):
    if record["step"] == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

valid = replace(corpus, items=corpus.items[:1])
training.train(corpus, valid, PRESETS["tiny"], training.Recipe(**recipe), Path(run), workers=0, log_every=1,
               valid_every=6, save_seconds=0.0, report=report)
save_file(states[0].loss.state_dict() | {"ema." + k: v for k, v in states[0].ema.state_dict().items()},
          f"{run}/rank-{os.environ.get('RANK', 0)}.safetensors")
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
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 8, "lo')  # as a kill in the middle of a line leaves it
    (run / ".state.safetensors.part").write_bytes(b"half a state")
    assert start(corpus, run, resume=True) == QUICK.steps
    assert log_of(run) == log_of(uninterrupted)
    expected, found = (load_file(r / training.STATE) for r in (uninterrupted, run))
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
    (damaged / training.STATE).write_bytes((uninterrupted / training.STATE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot resume"):
        start(corpus, damaged, resume=True)
    with pytest.raises(CheckpointError, match="cannot export"):
        training.export(tmp_path / "none", tmp_path, "tiny")


def test_export_gives_the_averaged_weights(uninterrupted, tmp_path):
    path = training.export(uninterrupted, tmp_path / "weights", "mine")
    loaded = load_checkpoint(path)
    state = load_file(uninterrupted / training.STATE)
    assert path.name.startswith("mine-")
    assert loaded.model.config == TINY
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, state[f"ema.{name}"].half().float())
    assert not torch.equal(state["ema.decoder.base"], state["loss.model.decoder.base"])


def test_a_run_can_start_from_a_checkpoint(checkpoint):
    state = new_state(TINY, QUICK, checkpoint.model)
    for weights in (state.loss.model, state.ema):
        assert all(torch.equal(v, checkpoint.model.state_dict()[k]) for k, v in weights.state_dict().items())


def test_validation_is_psnr_and_entropy_of_quantized_tokens(corpus):
    model = local_model()
    clips, owners = centre_cells(corpus, TINY, side=32)
    both = training.validate(model, clips, owners)
    each = [training.validate(model, clips[i : i + 1], [0]) for i in range(4)]
    assert both == pytest.approx([sum(e[0] for e in each), sum(e[1] for e in each)], rel=1e-5)
    symbols = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    assert training.channel_entropy(symbols) == pytest.approx(4 * 0 + 4 * 1.5)


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
    state = load_file(run / training.STATE)
    result = cli(*arguments, "--steps", reached + 2, "--recipe", "batch=4", "--resume")
    assert (result.code, result.out) == (0, b"")
    assert f"step {reached + 2} of {reached + 2}" in result.err
    assert not torch.equal(load_file(run / training.STATE)["loss.model.decoder.base"], state["loss.model.decoder.base"])
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
        (["--data", ".", "--set", "gamma_skip=perhaps"], 2, "needs a bool"),
        (["--data", ".", "--recipe", "lr=x"], 2, "needs a float"),
        (["--data", ".", "--init", "none.safetensors"], 5, "none.safetensors"),
        (["--data", "."], 3, "nothing to train on"),
        (["--resume", "--data", "."], 3, "nothing to resume"),
        (["--export", "weights"], 5, "cannot export"),
        (["--plot", "a.svg"], 1, "log.jsonl"),
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
