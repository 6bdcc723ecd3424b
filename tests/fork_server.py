"""A process that has imported everything and forks one child per job, so that hundreds of kills hit work and not imports.

with fork_server() as start:
    child = start("from coanerv_codec.cli import main; main()", ["coanerv", "info", "a.coa"], folder)
    child.kill(signal.SIGKILL)
    code, out, err = child.wait()
"""

import gc
import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

COMMAND = "from coanerv_codec.cli import main; main()"


class Child(NamedTuple):
    """A forked child. Its process id stays its own until `wait`, also when it has ended."""

    pid: int
    wait: Callable[[], tuple[int, bytes, str]]  # exit code (minus the signal that ended it), standard output and error

    def kill(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


@contextmanager
def fork_server() -> Iterator[Callable[..., Child]]:
    """Give a function that starts a job: code, sys.argv, a folder for its outputs; limit on the size of files, stdout."""
    # Threads do not survive a fork, so nothing may start any before it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )

    def ask(job: dict[str, object]) -> int:
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def start(
        code: str,
        arguments: list[object],
        folder: Path,
        *,
        file_size: int | None = None,
        out: Path | None = None,
        **env: object,
    ) -> Child:
        out, err = out or folder / "stdout", folder / "stderr"
        job = {"code": code, "argv": [str(a) for a in arguments], "out": str(out), "err": str(err)}
        pid = ask({**job, "file_size": file_size, "env": {k: str(v) for k, v in env.items()}})

        def wait() -> tuple[int, bytes, str]:
            return ask({"wait": pid}), out.read_bytes() if out.is_file() else b"", err.read_text()

        return Child(pid, wait)

    try:
        yield start
    finally:
        server.stdin.close()
        server.wait()


def _run(job: dict) -> None:
    """Become the job: its streams, limits and arguments."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, name in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = job["argv"]
    os.environ.update(job["env"])
    if job["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
    try:
        exec(job["code"], {"__name__": "job"})
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    # Python would now take down all of torch, which takes longer than most jobs.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


def _serve() -> None:
    import torch

    import coanerv_codec.cli.decode
    import coanerv_codec.cli.encode
    import coanerv_codec.files
    import coanerv_codec.train  # noqa: F401
    from coanerv_codec.config import PRESETS
    from coanerv_codec.model import CoANeRV

    with torch.device("meta"):  # has torch import a great deal, as loading a checkpoint does
        CoANeRV(PRESETS["tiny"])
    gc.freeze()  # or the children would copy what they collect
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads would not survive a fork"

    # Unbuffered, so that a child inherits nothing half read or half written.
    while line := _read_line():
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            _run(job)
        os.write(1, f"{answer}\n".encode())


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    _serve()
