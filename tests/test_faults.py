"""What a machine can do to a running command: kill it, interrupt it, fill its disk, take its input or its reader away.

Never is there a final file that is not whole, and never a traceback. The campaigns of hundreds of kills are marked slow:

    pytest -m slow tests/test_faults.py -s
"""

import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import being_written
from fork_server import COMMAND, Child, fork_server
from make_video import make_video
from safetensors import safe_open
from safetensors.torch import load_file

from coanerv_codec import atomic
from coanerv_codec.checkpoint import VARIABLE
from coanerv_codec.cli import STOPPED
from coanerv_codec.errors import OutputError
from coanerv_codec.files import encode_file
from coanerv_codec.run_log import LOG, read_log
from coanerv_codec.run_state import BEFORE_DECAY, STATE

FEW, MANY = 3, pytest.param(40, marks=pytest.mark.slow)
OLD = b"what was there before"


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Child]]:
    with fork_server() as started:
        yield started


@pytest.fixture
def command(start, checkpoint_path, tmp_path) -> Callable[..., Child]:
    """Start a command of coanerv; its standard streams are files beside the folder that `outputs` gives."""

    def run(*arguments: object, **options: object) -> Child:
        return start(COMMAND, ["coanerv", *arguments], tmp_path, **{VARIABLE: checkpoint_path, **options})

    return run


@pytest.fixture
def outputs(tmp_path) -> Path:
    """A folder that holds nothing but what a command leaves."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """Three clips of the tiny model, with sound."""
    return make_video(tmp_path_factory.mktemp("faults") / "in.mp4", width=36, height=32, frames=17, audio=True)


@pytest.fixture(scope="session")
def coded(source, start, checkpoint_path, tmp_path_factory) -> dict[str, bytes]:
    """The whole outputs, by file name."""
    folder = tmp_path_factory.mktemp("whole")
    for arguments in (
        ["encode", source, "-o", folder / "a.coa"],
        *(decode(folder / "a.coa", folder / n) for n in NAMES),
    ):
        code, _, err = start(COMMAND, ["coanerv", *arguments], folder, **{VARIABLE: checkpoint_path}).wait()
        assert code == 0, err
    return {name: (folder / name).read_bytes() for name in ("a.coa", *NAMES)}


NAMES = ("a.y4m", "a.mp4")


def decode(coa: Path, output: Path) -> list[object]:
    # Y4M has no place for sound, which would be a warning.
    return ["decode", coa, "-o", output, *(["--no-audio"] if output.suffix == ".y4m" else [])]


def jobs(source: Path, coded: dict[str, bytes], tmp_path: Path, outputs: Path) -> dict[str, list[object]]:
    """Arguments of a command by the name of its output."""
    coa = tmp_path / "in.coa"
    coa.write_bytes(coded["a.coa"])
    return {"a.coa": ["encode", source, "-o", outputs / "a.coa"]} | {n: decode(coa, outputs / n) for n in NAMES}


def left_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def seconds_of(run: Callable[[], Child]) -> float:
    began = time.monotonic()
    assert run().wait()[0] == 0
    return time.monotonic() - began


# --- killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["a.coa", *NAMES])
@pytest.mark.parametrize("kills", [FEW, MANY])
def test_killed_at_any_moment_a_command_leaves_a_whole_file_or_none(
    command, source, coded, tmp_path, outputs, name, kills, overwrite
):
    arguments = [*jobs(source, coded, tmp_path, outputs)[name], "-y"]
    if not overwrite:
        arguments.pop()
    longest = seconds_of(lambda: command(*arguments))
    rng, found = random.Random(f"{name} {overwrite}"), {"killed": 0, "none": 0, "old": 0, "whole": 0, "part": 0}
    while found["killed"] < kills:
        empty(outputs)
        if overwrite:
            (outputs / name).write_bytes(OLD)
        child = command(*arguments)
        time.sleep(rng.uniform(0, 1.05 * longest))
        child.kill(signal.SIGKILL)
        code = child.wait()[0]
        assert code in (0, -signal.SIGKILL)
        found["killed"] += code != 0
        names = left_in(outputs)
        # To replace a file takes a name for an instant.
        parts = {n for n in names if n.startswith(".") and n.endswith(".part")} if overwrite else set()
        found["part"] += len(parts)
        assert names - parts <= {name}
        content = (outputs / name).read_bytes() if name in names else None
        assert content in ((OLD, coded[name]) if overwrite else (None, coded[name]))
        if code:
            found["whole" if content == coded[name] else "old" if content else "none"] += 1
    print(f"{arguments[0]} {name}{' -y' if overwrite else ''}: {found}")


TRAIN = """
import json, sys
from pathlib import Path
import torch
from coanerv_codec import train as training
from coanerv_codec.config import PRESETS
from coanerv_codec.corpus import build_cache, list_media

data, run, resume = json.loads(sys.argv[1])
torch.set_num_threads(1)
config = PRESETS["tiny"]
corpus = build_cache(list_media(Path(data)), Path(run) / "cache", config.frames, config.cell)
recipe = training.Recipe(steps=30, batch=4, warmup=2)
training.train(corpus, None, config, recipe, Path(run), resume=resume, workers=0, log_every=1, save_seconds=0.0)
"""


@pytest.fixture(scope="session")
def train(source, start, tmp_path_factory) -> Callable[..., Child]:
    """Start or resume a short run of training in a folder; it saves its state after every step."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "data").mkdir()
    shutil.copy(source, folder / "data")

    def run(out: Path, **options: object) -> Child:
        job = json.dumps([str(folder / "data"), str(out), (out / STATE).exists()])
        return start(TRAIN, ["train", job], folder, **options)

    return run


def losses(run: Path) -> list[tuple[float, float]]:
    return [(r["step"], r["loss"]) for r in read_log(run / LOG)]


@pytest.mark.parametrize("kills", [FEW, pytest.param(100, marks=pytest.mark.slow)])
def test_training_killed_again_and_again_ends_where_it_would_have(train, tmp_path, kills):
    whole = tmp_path / "whole"
    whole.mkdir()
    longest = seconds_of(lambda: train(whole))
    expected = load_file(whole / STATE)
    rng, killed, finished = random.Random(0), 0, 0
    for number in itertools.count():
        run, step = tmp_path / f"run{number}", 0
        run.mkdir()
        code = -signal.SIGKILL
        while code:
            child = train(run)
            if killed < kills:
                time.sleep(rng.uniform(0, longest / 2))
                child.kill(signal.SIGKILL)
            code, _, err = child.wait()
            assert code in (0, -signal.SIGKILL), err
            killed += code != 0
            assert left_in(run) <= {"cache", STATE, BEFORE_DECAY, LOG} | left_parts(run)
            if (run / STATE).exists():
                with safe_open(run / STATE, "pt") as state:
                    before, step = step, int(state.metadata()["step"])
                assert step >= before
        finished += 1
        assert losses(run) == losses(whole)
        found = load_file(run / STATE)
        assert found.keys() == expected.keys()
        assert all(found[k].equal(expected[k]) for k in expected)
        shutil.rmtree(run)
        if killed >= kills:
            break
    print(f"train: {killed} killed, {finished} runs ended with the same weights")


def left_parts(run: Path) -> set[str]:
    """Names that a state has for an instant before it replaces the old one."""
    return {p.name for p in run.iterdir() if p.name.startswith(".") and p.name.endswith(".part")}


@pytest.fixture
def training(process, source, tmp_path):
    """Start to train in `tmp_path / "run"`; returns the process when the first steps are done."""

    def start(*options) -> subprocess.Popen:
        (tmp_path / "data").mkdir()
        shutil.copy(source, tmp_path / "data")
        folders = ["--data", tmp_path / "data", "--valid", tmp_path / "data", "--out", tmp_path / "run"]
        started = process("train", *folders, "--preset", "tiny", "--steps", 10**6, "--recipe", "batch=8", *options)
        line = b"-"
        while line and not line.startswith(b"step"):
            line = started.stderr.readline()
            assert b"coanerv" not in line
        return started

    return start


def child_with(parent: subprocess.Popen, file: str, part: bytes) -> int:
    """Return the child whose /proc/PID/`file` has `part` in it."""
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    (found,) = (child for child in children if part in Path(f"/proc/{child}/{file}").read_bytes())
    return int(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_of_two_ends_the_other_with_one_line(training, rank):
    launcher = training("--workers", 0, "--processes", 2)
    os.kill(child_with(launcher, "environ", f"\0RANK={rank}\0".encode()), signal.SIGKILL)
    _, err = launcher.communicate()
    rest = [line for line in err.decode().splitlines() if not line.startswith("step ")]
    assert (launcher.returncode, len(rest)) == (1, 1), err.decode()
    assert re.match(r"coanerv: .* is gone; --resume goes on from its last state", rest[0])


def test_a_killed_worker_ends_training_with_one_line(training):
    trainer = training("--workers", 1)
    os.kill(child_with(trainer, "cmdline", b"spawn_main"), signal.SIGKILL)
    _, err = trainer.communicate()
    rest = [line for line in err.decode().splitlines() if not line.startswith("step ")]
    assert (trainer.returncode, len(rest)) == (1, 1), err.decode()
    assert rest[0].startswith("coanerv: a worker process that cuts cells failed")


def test_processes_of_a_killed_launcher_end(training, tmp_path):
    launcher = training("--workers", 0, "--processes", 2)
    launcher.kill()
    launcher.wait()
    # The pipe is at its end when the last of them has closed it.
    assert b"state in" in launcher.stderr.read()
    assert (tmp_path / "run" / STATE).exists()


# --- interrupted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOPPED, ids=lambda n: n.name)
@pytest.mark.parametrize("name", ["a.coa", *NAMES])
@pytest.mark.parametrize("times", [FEW, MANY])
def test_stopped_at_any_moment_a_command_says_one_line(command, source, coded, tmp_path, outputs, name, times, number):
    arguments = [*jobs(source, coded, tmp_path, outputs)[name], "-q"]
    longest = seconds_of(lambda: command(*arguments))
    rng, stopped, whole = random.Random(f"{name} {number}"), 0, 0
    while stopped < times:
        empty(outputs)
        child = command(*arguments)
        wait_until_caught(child.pid)
        time.sleep(rng.uniform(0, longest))
        child.kill(number)
        code, out, err = child.wait()
        assert out == b""
        if code == 0:  # it was done, or as good as
            assert err == ""
        else:
            assert (code, err) == (128 + number, f"coanerv: {STOPPED[number]}; no unfinished file is left behind\n")
            stopped += 1
        assert left_in(outputs) <= {name}
        if left_in(outputs):
            assert (outputs / name).read_bytes() == coded[name]
            whole += code != 0
        else:
            assert code != 0
    print(f"{arguments[0]} {name}: {stopped} {number.name}, {whole} of them after the file was there")


@pytest.mark.parametrize("number", STOPPED, ids=lambda n: n.name)
@pytest.mark.parametrize("times", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_stopped_while_it_imports(process, source, tmp_path, times, number):
    rng = random.Random(int(number))
    for _ in range(times):
        child = process("encode", source, "-o", tmp_path / "a.coa", "-q")
        wait_until_caught(child.pid)
        time.sleep(rng.uniform(0, 2))
        child.send_signal(number)
        _, err = child.communicate()
        line = f"coanerv: {STOPPED[number]}; no unfinished file is left behind\n".encode()
        assert (child.returncode, err) in ((128 + number, line), (0, b""))
        assert left_in(tmp_path) <= {"a.coa"}
        (tmp_path / "a.coa").unlink(missing_ok=True)


def wait_until_caught(pid: int) -> None:
    """Wait until the program has set up its signals: before that Python and the shell answer in their own ways."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")), None)
        if caught is None or caught >> (signal.SIGTERM - 1) & 1 or "State:\tZ" in status:
            return
        time.sleep(0.001)


SWALLOW = """
import os, signal
from coanerv_codec import cli
from coanerv_codec.errors import CheckpointError

def group(**options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            pass
    except SystemExit:
        raise CheckpointError("is not a checkpoint") from None

cli.group = group
"""


def test_a_signal_that_a_library_makes_another_error_of(start, tmp_path):
    """safetensors did: SIGTERM while a checkpoint was read called the checkpoint damaged, in a line of its own."""
    code, _, err = start(SWALLOW + COMMAND, ["coanerv", "info"], tmp_path).wait()
    assert (code, err) == (143, "coanerv: terminated; no unfinished file is left behind\n")


def test_a_second_signal_ends_it_at_once(command, source, outputs):
    child = command("encode", source, "-o", outputs / "a.coa", "--refine", 10**6)
    wait_until_open(child, outputs)
    for _ in range(2):
        child.kill(signal.SIGINT)
    assert child.wait()[0] == 130
    assert left_in(outputs) == set()


def wait_until_open(child: Child, folder: Path) -> None:
    while not being_written(child.pid, folder):
        assert "State:\tZ" not in Path(f"/proc/{child.pid}/status").read_text(), child.wait()
        time.sleep(0.001)


# --- a disk that takes no more --------------------------------------------------------------------------------------


def one_line(err: str, *parts: str) -> None:
    assert len(err.splitlines()) == 1, err
    assert err.startswith("coanerv: ")
    for part in parts:
        assert part in err


@pytest.mark.parametrize("name", ["a.coa", *NAMES])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99, -1], ids=str)
def test_a_file_may_not_grow_further(command, source, coded, tmp_path, outputs, name, share):
    size = len(coded[name])
    arguments = jobs(source, coded, tmp_path, outputs)[name]
    limit = size - 1 if share == -1 else int(size * share)
    code, _, err = command(*arguments, "-q", file_size=max(limit, 1000)).wait()
    assert code == 6
    one_line(err, name, "cannot be written", "File too large")
    assert left_in(outputs) == set()
    assert command(*arguments, "-q", file_size=size).wait()[0] == 0
    assert (outputs / name).read_bytes() == coded[name]


@pytest.mark.parametrize("name", ["a.mkv", "a.webm", "a.mov", "a.png"])
def test_other_kinds_of_file_may_not_grow_further(command, coded, tmp_path, outputs, name):
    (tmp_path / "in.coa").write_bytes(coded["a.coa"])
    arguments = [*decode(tmp_path / "in.coa", outputs / name), "-q"]
    assert command(*arguments).wait()[0] == 0
    size = max(p.stat().st_size for p in outputs.iterdir())
    for limit in (size // 2, size - 1):
        empty(outputs)
        code, _, err = command(*arguments, file_size=limit).wait()
        assert code == 6
        one_line(err.splitlines()[-1], "cannot be written", "File too large")
        assert left_in(outputs) == set()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """Mount a file system of some bytes, where that is allowed."""
    mounted = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["a.coa", *NAMES])
def test_a_full_disk(command, source, coded, tmp_path, small_disk, name):
    disk = small_disk(f"size={len(coded[name]) // 2 // 4096 * 4096 + 4096}")
    code, _, err = command(*jobs(source, coded, tmp_path, disk)[name], "-q").wait()
    assert code == 6
    one_line(err, name, "cannot be written", "No space left on device")
    assert left_in(disk) == set()


@pytest.mark.parametrize("name", ["a.coa", *NAMES])
def test_a_disk_that_is_read_only(command, source, coded, tmp_path, small_disk, name):
    disk = small_disk("ro")
    code, _, err = command(*jobs(source, coded, tmp_path, disk)[name], "-q").wait()
    assert code == 6
    one_line(err, name, "cannot be written to")


@pytest.mark.parametrize("name", ["a.coa", *NAMES])
@pytest.mark.parametrize("folder", ["/proc", "/proc/self", "file", "file/deeper", "gone"])
def test_a_folder_that_takes_no_files(command, source, coded, tmp_path, name, folder):
    (tmp_path / "file").write_bytes(OLD)
    code, _, err = command(*jobs(source, coded, tmp_path, tmp_path / folder)[name], "-q").wait()
    assert code == 6
    one_line(err, name)


def test_a_folder_that_vanishes(command, tmp_path, outputs):
    os.mkfifo(tmp_path / "in.y4m")
    child = command("encode", tmp_path / "in.y4m", "-o", outputs / "a.coa", "-q")
    with (tmp_path / "in.y4m").open("wb") as pipe:
        wait_until_open(child, outputs)
        shutil.rmtree(outputs)
        pipe.write(Y4M)
    code, _, err = child.wait()
    assert code == 6
    one_line(err, "a.coa", "No such file or directory")


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_disk_full_while_a_state_is_saved_keeps_the_old_one(train, tmp_path, share):
    run = tmp_path / "run"
    run.mkdir()
    child = train(run)
    deadline = time.monotonic() + 60
    while not (run / STATE).exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    child.kill(signal.SIGKILL)
    child.wait()
    before = (run / STATE).read_bytes()
    code, _, err = train(run, file_size=int(share * len(before))).wait()
    assert code == 1  # as this is not the command, the exception is shown
    assert "OutputError" in err.splitlines()[-1]
    assert f"{run / STATE}: cannot be written: File too large" in err.splitlines()[-1]
    assert (run / STATE).read_bytes() == before
    assert train(run).wait()[0] == 0


# --- a state that is damaged ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state(train, tmp_path_factory) -> bytes:
    run = tmp_path_factory.mktemp("run")
    assert train(run).wait()[0] == 0
    return (run / STATE).read_bytes()


def resume(command, source: Path, tmp_path: Path, state: bytes) -> tuple[int, str]:
    for folder in ("data", "run"):
        (tmp_path / folder).mkdir(exist_ok=True)
    shutil.copy(source, tmp_path / "data")
    (tmp_path / "run" / STATE).write_bytes(state)
    options = ["--preset", "tiny", "--workers", 0, "--steps", 31, "--valid", tmp_path / "data", "--recipe", "batch=4"]
    code, _, err = command("train", "--data", tmp_path / "data", "--out", tmp_path / "run", "--resume", *options).wait()
    return code, err


def test_a_damaged_state_is_refused_in_one_line(command, source, state, tmp_path):
    code, err = resume(command, source, tmp_path, state)
    assert code == 0, err
    rng = random.Random(0)
    header = int.from_bytes(state[:8], "little")
    flips = [0, 7, 9, *(rng.randrange(8, 8 + header) for _ in range(6)), *(rng.randrange(len(state)) for _ in range(6))]
    damaged = [state[:length] for length in (0, 4, 8, 100, header, len(state) // 2, len(state) - 1)]
    damaged += [state[:at] + bytes([state[at] ^ 1 << rng.randrange(7)]) + state[at + 1 :] for at in flips]
    for content in damaged:
        code, err = resume(command, source, tmp_path, content)
        assert "Traceback" not in err
        assert code == 5, err
        one_line(err.splitlines()[-1], "it is damaged", STATE)
        assert (tmp_path / "run" / STATE).read_bytes() == content


# --- input that goes away -----------------------------------------------------------------------------------------

Y4M = b"YUV4MPEG2 W64 H48 F30:1 C420jpeg\n" + 30 * (b"FRAME\n" + bytes(64 * 48 * 3 // 2))


@pytest.mark.parametrize("cut", [0, 10, 40, 1000, 4700, len(Y4M) - 1])
def test_a_pipe_whose_writer_dies(command, cli, tmp_path, cut):
    fifo = tmp_path / "in.y4m"
    os.mkfifo(fifo)
    child = command("encode", fifo, "-o", tmp_path / "a.coa", "-q")
    with fifo.open("wb") as pipe:
        pipe.write(Y4M[:cut])
    code, _, err = child.wait()
    frames = max(0, cut - Y4M.index(b"FRAME")) // (6 + 64 * 48 * 3 // 2)
    assert code == (0 if frames else 3), err
    if frames:
        assert err == ""  # that the last frame is cut short is lost in FFmpeg
    else:
        one_line(err, "in.y4m")
    assert (tmp_path / "a.coa").exists() == bool(frames)
    if frames:
        assert json.loads(cli("info", tmp_path / "a.coa", "--json").out)["frames"] == frames


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts", ".y4m"])
def test_a_source_that_shrinks_while_it_is_read(command, cli, tmp_path, outputs, suffix):
    """What was read is encoded and the rest is said to be missing; or nothing is written and an error says why."""
    base = Fraction(1, 30) if suffix == ".y4m" else Fraction(1, 15360)
    (tmp_path / "source").mkdir()
    source = make_video(tmp_path / "source" / f"in{suffix}", width=320, height=240, frames=60, time_base=base)
    child = command("encode", source, "-o", outputs / "a.coa", "-q", "--fit")
    wait_until_open(child, source.parent)
    os.truncate(source, source.stat().st_size // 3)
    code, _, err = child.wait()
    assert code in (0, 3)
    assert (outputs / "a.coa").exists() == (code == 0)
    assert all(line.startswith("coanerv: ") for line in err.splitlines())
    if code == 0:
        frames = json.loads(cli("info", outputs / "a.coa", "--json").out)["frames"]
        assert frames <= 60
        assert "became shorter while it was read" in err
    else:
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("gone", ["shrinks", "is deleted"])
def test_a_coa_that_goes_away_while_it_is_read(command, checkpoint, tmp_path, outputs, gone):
    coa = tmp_path / "in.coa"
    source = make_video(tmp_path / "in.mp4", width=160, height=120, frames=64)
    encode_file(source, coa, lambda: checkpoint)
    assert coa.stat().st_size > 2 * io.DEFAULT_BUFFER_SIZE  # or it would be read in one go
    child = command("decode", coa, "-o", outputs / "a.y4m", "--fps", 300, "--crop", "0,0,2,2", "-q", "--no-audio")
    wait_until_open(child, outputs)
    if gone == "shrinks":
        os.truncate(coa, 300)
    else:
        coa.unlink()
    code, _, err = child.wait()
    if gone == "shrinks":
        assert code == 4
        one_line(err, "truncated")
        assert left_in(outputs) == set()
    else:
        assert (code, left_in(outputs)) == (0, {"a.y4m"})


# --- a reader that goes away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["decode", "{coa}", "-o", "-", "-q"], ["encode", "{source}", "-o", "-", "-q"], ["info", "{coa}"], ["--help"],
     ["decode", "--help"], ["info", "{coa}", "--json"]],
    ids=" ".join,
)  # fmt: skip
def test_a_reader_that_takes_ten_bytes(command, source, coded, tmp_path, arguments):
    coa = tmp_path / "in.coa"
    coa.write_bytes(coded["a.coa"])
    arguments = [a.format(coa=coa, source=source) for a in arguments]
    os.mkfifo(tmp_path / "pipe")
    child = command(*arguments, out=tmp_path / "pipe")
    with (tmp_path / "pipe").open("rb", buffering=0) as pipe:
        if "-o" in arguments:  # the others write less than a pipe holds, and are done before the reader is
            seen = b""
            while len(seen) < 10 and (more := pipe.read(10 - len(seen))):  # a pipe may hand out less than asked for
                seen += more
            assert seen in (b"YUV4MPEG2 ", coded["a.coa"][:10])
    code, _, err = child.wait()
    assert (code, err) == (141, "")


@pytest.mark.parametrize(
    "arguments",
    [["decode", "{coa}", "-o", "-", "-q"], ["encode", "{source}", "-o", "-", "-q"], ["info", "{coa}"], ["--help"]],
    ids=" ".join,
)
def test_a_standard_output_that_is_full(command, source, coded, tmp_path, arguments):
    coa = tmp_path / "in.coa"
    coa.write_bytes(coded["a.coa"])
    code, _, err = command(*(a.format(coa=coa, source=source) for a in arguments), out=Path("/dev/full")).wait()
    assert code == 6
    one_line(err, "output", "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        (["decode", "{coa}", "-o", "-"], ["stdout"], 6),
        (["encode", "{source}", "-o", "-"], ["stdout"], 6),
        (["encode", "-", "-o", "{folder}/b.coa"], ["stdin"], 3),
        (["decode", "-", "-o", "{folder}/b.y4m"], ["stdin"], 3),
        (["encode", "{source}", "-o", "{folder}/b.coa"], ["stdin", "stdout", "stderr"], 0),
        (["decode", "{coa}", "-o", "{folder}/b.y4m"], ["stdin", "stdout", "stderr"], 0),
    ],
)
def test_streams_that_are_closed(start, checkpoint_path, source, coded, tmp_path, outputs, arguments, closed, code):
    coa = tmp_path / "in.coa"
    coa.write_bytes(coded["a.coa"])
    words = [a.format(coa=coa, source=source, folder=outputs) for a in arguments]
    # As Python finds them after `<&- >&- 2>&-`.
    close = "import os, sys\n" + "".join(f"os.close(sys.{s}.fileno()); sys.{s} = None\n" for s in closed)
    found, _, err = start(close + COMMAND, ["coanerv", *words], tmp_path, **{VARIABLE: checkpoint_path}).wait()
    assert found == code, err
    if code:
        one_line(err)
        assert left_in(outputs) == set()
    else:
        name = "a.coa" if arguments[0] == "encode" else "a.y4m"
        assert (outputs / name.replace("a", "b", 1)).read_bytes() == coded[name]


# --- two at a time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["a.coa", *NAMES])
def test_two_writers_of_one_file(start, source, coded, tmp_path, outputs, checkpoint_path, name, overwrite):
    arguments = ["coanerv", *jobs(source, coded, tmp_path, outputs)[name], "-q", *(["-y"] if overwrite else [])]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    children = [start(COMMAND, arguments, folder, **{VARIABLE: checkpoint_path}) for folder in folders]
    ends = [child.wait() for child in children]
    assert left_in(outputs) == {name}
    assert (outputs / name).read_bytes() == coded[name]
    if overwrite:
        assert [(code, err) for code, _, err in ends] == [(0, ""), (0, "")]
    else:
        assert sorted(code for code, _, _ in ends) == [0, 6]
        one_line("".join(err for _, _, err in ends), "exists already")


def test_files_without_a_name_are_not_needed(tmp_path, monkeypatch):
    """As on a file system that has none: the same promises, but for SIGKILL."""
    monkeypatch.delattr(os, "O_TMPFILE")
    target = tmp_path / "a"
    with atomic.atomic_path(target) as path:
        path.write_bytes(b"one")
        assert left_in(tmp_path) == {path.name}
    with pytest.raises(OutputError, match="exists already"), atomic.atomic_path(target):
        pass
    with atomic.atomic_path(target, overwrite=True) as path:
        path.write_bytes(b"two")
        assert target.read_bytes() == b"one"
    with pytest.raises(KeyError), atomic.atomic_path(target, overwrite=True) as path:  # noqa: PT012
        path.write_bytes(b"three")
        raise KeyError
    assert (left_in(tmp_path), target.read_bytes()) == ({"a"}, b"two")


def test_many_files_at_once_in_threads(tmp_path):
    """Descriptors are closed once and never those of another."""

    def write(number: int) -> None:
        for round_ in range(50):
            atomic.write_whole(tmp_path / f"{number}", f"{number} {round_}")

    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {f"{n}": f"{n} 49" for n in range(8)}
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- memory -------------------------------------------------------------------------------------------------------

READ = """
import sys
from coanerv_codec.device import keep_freed_memory
from coanerv_codec.video import Frame, open_video

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

keep_freed_memory()
count, sizes = 0, []
with open_video(sys.argv[1]) as video:
    for item in video:
        count += isinstance(item, Frame)
        if isinstance(item, Frame) and count % 1000 == 0:
            sizes.append(resident())
print(*sizes)
"""


def test_reading_takes_no_more_memory_as_it_goes_on(start, tmp_path):
    """It once grew by 1,800 kB in 1,000 frames."""
    source = make_video(tmp_path / "in.mp4", width=64, height=48, frames=4000, options={"preset": "ultrafast"})
    code, out, err = start(READ, ["read", source], tmp_path).wait()
    assert code == 0, err
    first, *_, last = map(int, out.split())
    assert last - first < 1500  # kB in 3,000 frames
