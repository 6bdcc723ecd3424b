"""The mutation fuzzer: needs nothing but coanerv.

    python tests/fuzz/run.py parser --executions 10000000 --seed 1
    python tests/fuzz/run.py lanes --executions 1000000 --seed 1
    python tests/fuzz/run.py cli --executions 100000 --seed 1
    python tests/fuzz/run.py checkpoint --executions 10000 --seed 1

Every execution must end in success or a typed error, within 2 s of CPU time and within the memory limit. What does not is
saved under a name that says what is odd. The input being run is kept in `last-input`, should the process itself die.
"""

import argparse
import hashlib
import mmap
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mutate
import seeds
import targets

import coanerv_codec
from coanerv_codec import bank_contexts

HANG_SECONDS = 2.0
Mutant = tuple[bytes, str]  # the input and how it was made


class HangError(BaseException):
    """Raised by the alarm. No `except Exception` may swallow it."""


def _alarm(*_: object) -> None:
    raise HangError(f"more than {HANG_SECONDS} s of CPU time")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Fuzzer:
    """Runs mutants through a target and counts what comes of them."""

    def __init__(self, target: targets.Target, make: Callable[[random.Random], Mutant], seed: int, memory: int):
        self.target, self.make, self.rng, self.memory = target, make, random.Random(seed), memory
        self.outcomes: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self.findings: dict[str, bytes] = {}
        self.executions = self.slowest = 0
        self.last = mmap.mmap(-1, 2**22)

    def keep_last_in(self, folder: Path) -> None:
        """Keep each input in a file while it runs, so that it outlives the process."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "last-input").open("w+b") as file:
            file.truncate(2**22)
            self.last = mmap.mmap(file.fileno(), 2**22)

    def run(self, executions: int, seconds: float = float("inf"), tell: Callable[[], None] | None = None) -> None:
        """Run so many executions, or for so long."""
        before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, _alarm)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + self.memory, before[0][1]))
        began = time.monotonic()
        try:
            for number in range(executions):
                self.execute()
                if number & 0xFF == 0xFF or tell:
                    if time.monotonic() - began > seconds:
                        break
                    if tell:
                        tell()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, before[0])
            signal.signal(signal.SIGPROF, before[1])

    def execute(self) -> None:
        """Make a mutant, run it, count it."""
        data, how = self.make(self.rng)
        self.executions += 1
        self.made[how] += 1
        self.last[: len(data) + 8] = len(data).to_bytes(8, "little") + data
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
            try:
                outcome = self.target(data, self.rng)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # every kind that is not an outcome is a finding
            outcome = "FINDING"
            self.note(data, error)
        self.slowest = max(self.slowest, time.process_time() - began)
        self.outcomes[f"{how}: {outcome}"] += 1

    def note(self, data: bytes, error: BaseException) -> None:
        """Keep the smallest input for each kind of finding: the exception, where it was raised, and what it said."""
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "coanerv_codec" in frame.filename]
        place = f"{Path(where[-1].filename).stem}-{where[-1].name}" if where else "target"
        said = "" if isinstance(error, HangError | MemoryError) else re.sub(r"[^a-z]+", "-", str(error).lower())[:60]
        name = f"{type(error).__name__}-{place}-{said}".strip("-")
        if name not in self.findings or len(data) < len(self.findings[name]):
            if name not in self.findings:
                traceback.print_exception(error, limit=-8, file=sys.stderr)
            self.findings[name] = data

    def save(self, folder: Path) -> None:
        """Write the findings to files."""
        for name, data in self.findings.items():
            folder.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(data).hexdigest()[:8]
            (folder / f"{name}-{digest}.bin").write_bytes(data)


def file_mutants(some: list[seeds.Seed]) -> Callable[[random.Random], Mutant]:
    """Mutants of `.coa` files: a third of raw bytes, the others with their CRCs right. Small files come more often."""
    some = sorted(some, key=lambda seed: len(seed.data))

    def make(rng: random.Random) -> Mutant:
        seed, other = some[int(rng.random() ** 2 * len(some))], some[int(rng.random() * len(some))]
        choice = rng.random()
        if choice < 0.33:
            return mutate.raw(seed.data, other.data, rng), "raw bytes"
        if choice < 0.66:
            return mutate.one_field(seed, rng), "one field, CRCs right"
        return mutate.repaired(seed, other, rng), "CRCs repaired"

    return make


def make_fuzzer(what: str, seed: int, memory: int, folder: Path) -> Fuzzer:
    """The fuzzer of a part, one of main's choices (carriers is cli with such a decoder); `folder` is for its files."""
    if what == "lanes":  # small files have one lane; this is the parser with four for all
        bank_contexts.lanes_for = lambda symbols: 4
    if what in ("parser", "lanes"):
        return Fuzzer(targets.Parser(), file_mutants(seeds.format_seeds()), seed, memory)
    if what == "info":
        return Fuzzer(targets.info, file_mutants(seeds.format_seeds()), seed, memory)
    import checkpoints

    if what == "checkpoint":
        return Fuzzer(checkpoints.Loader(folder), checkpoints.mutants(), seed, memory)
    config = checkpoints.CARRIERS if what == "carriers" else checkpoints.CONFIG
    path = checkpoints.tiny(folder, config)
    some = seeds.picture_seeds(checkpoints.identity(path), config)
    return Fuzzer(targets.CommandLine(folder, path), file_mutants(some), seed, memory)


def main() -> int:
    """Run from the command line; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parser", "lanes", "info", "cli", "carriers", "checkpoint"])
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=1024, metavar="MB", help="address space above the start's")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    # Where there is one, a file system in memory: the command line's files are written and deleted all the time.
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        fuzzer = make_fuzzer(options.what, options.seed, options.memory * 2**20, folder)
        fuzzer.keep_last_in(options.findings)
        print(f"{coanerv_codec.__file__}: {' '.join(sys.argv)}", flush=True)  # which of several checkouts is tested
        began = told = time.monotonic()

        def tell() -> None:
            nonlocal told
            if time.monotonic() - told > 30:
                told = time.monotonic()
                report(fuzzer, options, told - began)

        fuzzer.run(options.executions, options.seconds, tell)
        report(fuzzer, options, time.monotonic() - began, whole=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(fuzzer.findings)


def report(fuzzer: Fuzzer, options: argparse.Namespace, seconds: float, whole: bool = False) -> None:
    """Print the counts and save what was found."""
    fuzzer.save(options.findings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{options.what} seed {options.seed}: {fuzzer.executions:,} executions in {seconds:.0f} s, "
        f"slowest {1000 * fuzzer.slowest:.0f} ms of CPU, peak {peak} MB, {len(fuzzer.findings)} findings",
        flush=True,
    )
    if whole:
        for outcome, count in sorted(fuzzer.outcomes.items()):
            print(f"  {count:>12,}  {outcome}")
        for name in fuzzer.findings:
            print(f"  FINDING {name}")


if __name__ == "__main__":
    sys.exit(main())
