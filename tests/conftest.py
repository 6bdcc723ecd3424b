"""What the suites share: a tiny checkpoint, a small video, and the command line in this process or in its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from make_video import make_video

import coanerv_codec
from coanerv_codec.checkpoint import VARIABLE, Checkpoint, load_checkpoint, save_checkpoint
from coanerv_codec.cli import STOPPED, main
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.local_start import start_local
from coanerv_codec.model import CoANeRV


def local_model(config: Config = PRESETS["tiny"], seed: int = 0) -> CoANeRV:
    """An untrained model at its local start, the same for the same seed."""
    torch.manual_seed(seed)
    model = CoANeRV(config)
    start_local(model, torch.Generator().manual_seed(seed))
    return model


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory) -> Path:
    """A tiny checkpoint on disk."""
    return save_checkpoint(local_model(), tmp_path_factory.mktemp("weights"), "tiny")


@pytest.fixture(scope="session")
def other_checkpoint_path(tmp_path_factory) -> Path:
    """A checkpoint of the same shapes with other weights."""
    return save_checkpoint(local_model(seed=1), tmp_path_factory.mktemp("weights"), "tiny")


@pytest.fixture(scope="session")
def checkpoint(checkpoint_path) -> Checkpoint:
    """The tiny checkpoint, loaded."""
    return load_checkpoint(checkpoint_path)


@pytest.fixture
def use_checkpoint(checkpoint_path, monkeypatch) -> None:
    """Make the tiny checkpoint the default one, also for processes that a test starts."""
    monkeypatch.setenv(VARIABLE, str(checkpoint_path))


@pytest.fixture(scope="session")
def clip(tmp_path_factory) -> Path:
    """A real mp4 of an odd number of frames (two clips of the tiny model, the second one short), with sound."""
    return make_video(tmp_path_factory.mktemp("clip") / "clip.mp4", width=70, height=54, frames=11, audio=True)


def being_written(pid: int, folder: Path) -> list[int]:
    """Sizes of the files that a process has open in a folder, with a name or without."""
    sizes = []
    with suppress(OSError):  # the process, or one of its descriptors, may be gone by now
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith(f"{folder}/"):
                sizes.append(descriptor.stat().st_size)
    return sizes


class Result(NamedTuple):
    """What a command left: its exit code and its two outputs."""

    code: int
    out: bytes
    err: str


@pytest.fixture
def cli(use_checkpoint, monkeypatch, capfdbinary) -> Callable[..., Result]:
    """Run a command in this process: cli("info", path)."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["coanerv", *map(str, arguments)])
        capfdbinary.readouterr()
        handlers = {number: signal.getsignal(number) for number in STOPPED}
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capfdbinary.readouterr()
        return Result(code, out, err.decode())

    return run


@pytest.fixture
def process(use_checkpoint) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command in a process of its own, its three streams being pipes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(coanerv_codec.__file__).parents[1])}
    started = []

    def start(*arguments: object, module: str = "coanerv_codec", **options) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", module, *map(str, arguments)]
        started.append(subprocess.Popen(command, env=environment, **{**pipes, **options}))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()
