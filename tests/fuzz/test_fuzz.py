"""The fuzzers' bounded part, with fixed seeds, and every file that once made trouble (`regressions/`)."""

import random
import sys
from pathlib import Path

import checkpoints
import mutate
import pytest
import run
import seeds
import targets

from coanerv_codec import bank_contexts, container
from coanerv_codec import checkpoint as checkpoint_module

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.coa"))
MEMORY = 2**30


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A place to work, after which all that targets change in the process is as it was."""
    monkeypatch.setenv(checkpoint_module.VARIABLE, "")
    monkeypatch.setattr(checkpoint_module, "load_checkpoint", checkpoint_module.load_checkpoint)
    monkeypatch.setattr(bank_contexts, "lanes_for", bank_contexts.lanes_for)
    monkeypatch.setattr(container, "decode_bank", container.decode_bank)
    return tmp_path


@pytest.mark.parametrize(
    ("what", "executions"),
    [("parser", 20_000), ("lanes", 4_000), ("info", 4_000), ("cli", 700), ("carriers", 300), ("checkpoint", 500)],
)
def test_nothing_but_typed_errors(folder, what, executions):
    fuzzer = run.make_fuzzer(what, seed=6, memory=MEMORY, folder=folder)
    fuzzer.run(executions)
    assert not fuzzer.findings, list(fuzzer.findings)
    assert sum(fuzzer.outcomes.values()) == executions
    if what != "checkpoint":
        right = sum(count for how, count in fuzzer.made.items() if "CRCs" in how)
        assert right > executions / 4
        # Mutants get all the way in, or the fuzzer would test nothing but the CRC.
        assert any(how.startswith("one field") and how.endswith(("accepted", " 0")) for how in fuzzer.outcomes)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: bytearray(2**40), "MemoryError"),
        (lambda: [None for _ in iter(int, 1)], "HangError"),
        (lambda: targets.check(False, "a promise"), "OddError-target-a-promise"),
    ],
    ids=["exception", "memory", "hang", "promise"],
)
def test_the_fuzzer_finds_faults(monkeypatch, tmp_path, fault, name):
    monkeypatch.setattr(run, "HANG_SECONDS", 0.05)
    fuzzer = run.Fuzzer(lambda data, rng: fault(), lambda rng: (b"input", "made"), 0, 2**28)
    fuzzer.run(2)
    fuzzer.save(tmp_path)
    (saved,) = tmp_path.iterdir()
    assert saved.name.startswith(name)
    assert saved.read_bytes() == b"input"
    assert fuzzer.outcomes == {"made: FINDING": 2}


def test_runs_are_repeatable_and_pieces_make_the_file_again():
    some = seeds.format_seeds()
    makers = [run.file_mutants(some) for _ in range(2)]
    first, second = (
        [make(rng) for _ in range(200)] for make, rng in zip(makers, map(random.Random, (5, 5)), strict=True)
    )
    assert first == second
    assert len({data for data, _ in first}) > 150
    for seed in some:
        assert mutate.join(list(seed.pieces)) == mutate.join(list(seed.pieces), index=True, copy=True) == seed.data


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_once_made_trouble(folder, path):
    data = path.read_bytes()
    line = targets.CommandLine(folder, checkpoints.tiny(folder))
    parser = targets.Parser()
    for number in range(20):  # each number chooses another way to read
        parser(data, random.Random(number))
    targets.info(data, random.Random(0))
    coa, small = str(folder / "mutant.coa"), targets.CommandLine.SMALL
    commands = [["info", coa], ["verify", coa], ["verify", coa, "--deep", *small]]
    for name in dict.fromkeys(targets.CommandLine.OUTPUTS):
        decode = ["decode", coa, "-o", str(line.out / name), "-y", "-q", *small]
        commands += [decode, [*decode, "--on-error", "conceal"], [*decode, "--fps", "50"]]
    for arguments in commands:
        line.arguments = lambda rng, arguments=arguments: arguments
        fuzzer = run.Fuzzer(line, lambda rng: (data, "regression"), 0, MEMORY)
        fuzzer.run(1)
        assert not fuzzer.findings, (arguments, list(fuzzer.findings))


def test_the_regressions_reach_the_decoder(folder):
    """Their checkpoint is the fuzzers' own; if its hash changed, decoding would end before the trouble."""
    _, digest = checkpoints.identity(checkpoints.tiny(folder))
    assert all(digest in path.read_bytes() for path in REGRESSIONS)
    assert len(REGRESSIONS) >= 4


def test_the_harness_needs_atheris_and_says_so():
    """It is no dependency; where it is missing the harness ends in ImportError and does not pretend to have run."""
    source = (Path(__file__).parent / "harness.py").read_text()
    assert "\nimport atheris\n" in source
    assert "atheris" not in sys.modules
