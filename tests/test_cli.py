"""The command line: what each command does, and that every mistake ends in one line and the documented exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from conftest import being_written
from make_video import decoded_planes, make_video

from coanerv_codec import errors
from coanerv_codec.cli import COMMANDS
from coanerv_codec.encoding import EncodeOptions
from coanerv_codec.files import encode_file
from coanerv_codec.version import __version__


def inspect(path) -> dict:
    """What a player would see: frame times in seconds, size, rate, and the packets of the sound."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        size, rate = (stream.width, stream.height), stream.average_rate
        frames = [f.pts * f.time_base for f in container.decode(stream)]
    sound = []
    with av.open(str(path)) as container:
        if container.streams.audio:
            sound = [(p.pts * p.time_base, bytes(p)) for p in container.demux(audio=0) if p.size]
    return {"size": size, "rate": rate, "frames": frames, "sound": sound}


def planes(path) -> np.ndarray:
    """All samples of a video, one row per frame."""
    return np.stack([np.concatenate([p.ravel() for p in frame]) for frame in decoded_planes(path)]).astype(int)


def left_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(scope="session")
def coa_bytes(clip, checkpoint, tmp_path_factory) -> bytes:
    """The clip of eleven frames, encoded."""
    path = tmp_path_factory.mktemp("coa") / "clip.coa"
    encode_file(clip, path, lambda: checkpoint, EncodeOptions(overlap=8))
    return path.read_bytes()


@pytest.fixture
def coa(coa_bytes, tmp_path) -> Path:
    """The encoded clip, as a file in a folder that holds nothing else."""
    path = tmp_path / "clip.coa"
    path.write_bytes(coa_bytes)
    return path


# --- end to end, each command in a process of its own -------------------------------------------------------------


def test_encode_info_decode(process, clip, tmp_path):
    coa, result = tmp_path / "clip.coa", tmp_path / "out.mp4"
    for arguments in (["encode", clip, "-o", coa, "--bits", 6], ["decode", coa, "-o", result, "--tile", 64]):
        command = process(*arguments)
        out, err = command.communicate()
        assert (command.returncode, out) == (0, b""), err
        assert len(err.splitlines()) == 1
    assert left_in(tmp_path) == ["clip.coa", "out.mp4"]
    command = process("info", coa, "--json")
    facts = json.loads(command.communicate()[0])
    assert (facts["frames"], facts["clips"], facts["width"], facts["height"]) == (11, 2, 70, 54)
    assert sum(facts["bytes"].values()) == coa.stat().st_size
    source = inspect(clip)
    assert len(source["frames"]) == 11
    assert source["sound"]
    assert inspect(result) == source


def test_pipes_give_the_same_bytes_as_files(process, cli, tmp_path):
    source = make_video(tmp_path / "in.y4m", width=70, height=54, frames=9, time_base=Fraction(1, 30))
    assert cli("encode", source, "-o", tmp_path / "a.coa").code == 0
    assert cli("decode", tmp_path / "a.coa", "-o", tmp_path / "a.y4m").code == 0
    encode = process("encode", "-", "-o", "-")
    out, _ = encode.communicate(source.read_bytes())
    assert out == (tmp_path / "a.coa").read_bytes()
    decode = process("decode", "-", "-o", "-")
    assert decode.communicate(out)[0] == (tmp_path / "a.y4m").read_bytes()
    assert (encode.returncode, decode.returncode) == (0, 0)


# Y4M of some clips, whose end never comes.
STALLED = b"YUV4MPEG2 W64 H48 F30:1 C420jpeg\n" + 60 * (b"FRAME\n" + bytes(64 * 48 * 3 // 2))


@pytest.mark.parametrize("piped", [True, False], ids=["waiting for input", "computing"])
def test_ctrl_c_during_encode_leaves_nothing_behind(process, clip, tmp_path, piped):
    command = process("encode", *(["-"] if piped else [clip, "--refine", 10**6]), "-o", tmp_path / "a.coa")
    if piped:
        command.stdin.write(STALLED)
        command.stdin.flush()
    wait_for(lambda: being_written(command.pid, tmp_path), command)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert command.stderr.read() == b"coanerv: interrupted; no unfinished file is left behind\n"
    assert left_in(tmp_path) == []


def test_ctrl_c_during_decode_leaves_nothing_behind(process, coa, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    # A rate at which this would take minutes.
    command = process("decode", coa, "-o", folder / "a.y4m", "--fps", 10**5)
    wait_for(lambda: any(being_written(command.pid, folder)), command)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (130, b"")
    assert err == b"coanerv: interrupted; no unfinished file is left behind\n"
    assert left_in(folder) == []


def wait_for(condition, command: subprocess.Popen) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert command.poll() is None, command.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_reader_that_goes_away_is_no_error_to_talk_about(process, coa):
    command = process("decode", coa, "-o", "-", "--size", "320x240", "-q")
    assert command.stdout.readline().startswith(b"YUV4MPEG2 W320 H240")
    command.stdout.close()
    assert command.wait(60) == 141
    assert command.stderr.read() == b""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info"], ["encode", "--help"], ["decode", "--help"]])
def test_nothing_heavy_is_imported_for_help_and_info(coa, arguments):
    code = (
        "import sys; from coanerv_codec.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: code = e.code\n"
        "else: code = 0\n"
        "heavy = {'torch', 'av', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'code {code}, imported {heavy}' if code or heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    arguments = [*arguments, str(coa)] if arguments == ["info"] else arguments
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP on Linux only")
@pytest.mark.parametrize(
    ("said", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")]
)
def test_threads_soon_wait_asleep_unless_told_otherwise(use_checkpoint, coa, tmp_path, said, spins):
    """As OpenMP itself reports it, which reads it once, when torch is imported."""
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_DISPLAY_ENV": "verbose", **said}
    command = [sys.executable, "-m", "coanerv_codec", "decode", coa, "-o", tmp_path / "a.y4m", "-q"]
    done = subprocess.run(command, capture_output=True, env=environment, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux lists them")
@pytest.mark.parametrize(("said", "threads"), [({}, 1), ({"OPENBLAS_NUM_THREADS": "2"}, 2)])
def test_numpy_has_no_threads_of_its_own_unless_told_otherwise(said, threads):
    code = (
        "import os; from coanerv_codec.cli import _wait_politely; _wait_politely(); "
        "import numpy; numpy.ones((600, 600)) @ numpy.ones((600, 600)); print(len(os.listdir('/proc/self/task')))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    environment |= {"PYTHONPATH": str(Path(errors.__file__).parents[1]), **said}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, text=True, check=True)
    assert int(done.stdout.split()[-1]) == min(threads, os.cpu_count())


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_shows_an_example(cli, name):
    result = cli(name, "--help")
    text = result.out.decode()
    assert result.code == 0
    assert "Example" in text
    assert f"coanerv {name} " in text or name == "demo"
    assert cli(name, "-h").out == result.out


def test_help_lists_every_command(cli):
    text = cli("--help").out.decode()
    assert "Example" in text
    for name, line in COMMANDS.items():
        assert name in text
        assert line in text


def test_version(cli):
    assert cli("--version").out.decode() == f"coanerv, version {__version__}\n"


# --- encode -------------------------------------------------------------------------------------------------------


def facts(cli, path) -> dict:
    return json.loads(cli("info", path, "--json").out)


def test_bits(cli, clip, tmp_path):
    sizes = []
    for bits in range(2, 9):
        path = tmp_path / f"{bits}.coa"
        assert cli("encode", clip, "-o", path, "--bits", bits, "-q") == (0, b"", "")
        assert facts(cli, path)["tokens"]["bits"] == [bits]
        assert cli("decode", path, "-o", tmp_path / f"{bits}.y4m", "-q").code == 0
        sizes.append(path.stat().st_size)
    assert sizes == sorted(set(sizes))


def test_coders_give_the_same_pictures(cli, clip, tmp_path):
    pictures = {}
    for coder, options in (
        ("contexts", ()),
        ("contexts", ("--coder", "contexts")),
        ("huffman", ("--coder", "huffman")),
    ):
        path = tmp_path / "a.coa"
        assert cli("encode", clip, "-o", path, "-y", *options).code == 0
        assert facts(cli, path)["tokens"]["coders"] == [coder]
        assert f"{coder} coded" in cli("info", path).out.decode()
        assert cli("decode", path, "-o", tmp_path / "a.y4m", "-y", "-q").code == 0
        pictures[options] = (tmp_path / "a.y4m").read_bytes()
    assert len(set(pictures.values())) == 1
    assert cli("encode", clip, "-o", path, "-y", "--coder", "zip").code == 2


def test_fit_cells_and_overlap(cli, clip, tmp_path):
    layouts = {
        ("--overlap", "8"): (3, 2, 8),
        ("--fit",): (1, 1, 0),
        ("--cells", "2x3", "--overlap", "5"): (2, 3, 5),
        ("--overlap", "0"): (2, 2, 0),
    }
    for number, (options, expected) in enumerate(layouts.items()):
        path = tmp_path / f"{number}.coa"
        assert cli("encode", clip, "-o", path, *options).code == 0
        cells = facts(cli, path)["cells"]
        assert (cells["columns"], cells["rows"], cells["overlap"]) == expected
        assert cli("decode", path, "-o", tmp_path / f"{number}.mp4").code == 0
        assert inspect(tmp_path / f"{number}.mp4")["size"] == (70, 54)


def test_frames_and_no_audio(cli, clip, tmp_path):
    assert cli("encode", clip, "-o", tmp_path / "a.coa", "--frames", 3, "--no-audio").code == 0
    found = facts(cli, tmp_path / "a.coa")
    assert (found["frames"], found["streams"], found["packets"]) == (3, [], 0)
    assert cli("decode", tmp_path / "a.coa", "-o", tmp_path / "a.mp4").code == 0
    assert inspect(tmp_path / "a.mp4")["frames"] == inspect(clip)["frames"][:3]


def test_the_summary_is_true(cli, clip, tmp_path):
    result = cli("encode", clip, "-o", tmp_path / "a.coa", "--overlap", 8)
    size = (tmp_path / "a.coa").stat().st_size
    assert (
        f"a.coa: 11 frames of 70x54 in 3x2 cells, {size:,} bytes ({size * 8 / (11 / 30) / 1000:.0f} kbit/s)"
        in result.err
    )
    assert len(result.err.splitlines()) == 1
    result = cli("decode", tmp_path / "a.coa", "-o", tmp_path / "a.mp4")
    assert "a.mp4: 11 frames of 70x54" in result.err
    assert cli("decode", tmp_path / "a.coa", "-o", tmp_path / "b.mp4", "-q") == (0, b"", "")


def test_refine_makes_other_tokens(cli, clip, tmp_path):
    assert cli("encode", clip, "-o", tmp_path / "a.coa", "--fit", "--frames", 8).code == 0
    assert cli("encode", clip, "-o", tmp_path / "b.coa", "--fit", "--frames", 8, "--refine", 3).code == 0
    assert (tmp_path / "a.coa").read_bytes() != (tmp_path / "b.coa").read_bytes()


# --- decode -------------------------------------------------------------------------------------------------------


def test_tiles_and_engines_differ_by_at_most_one(cli, coa, tmp_path):
    pictures = []
    for options in (
        ["--tile", 16],
        ["--tile", 64],
        ["--tile", 256],
        ["--engine", "reference"],
        ["--precision", "fp32"],
    ):
        assert cli("decode", coa, "-o", tmp_path / "a.y4m", "-y", *options).code == 0
        pictures.append(planes(tmp_path / "a.y4m"))
    for other in pictures[1:]:
        assert np.abs(other - pictures[0]).max() <= 1


@pytest.mark.parametrize(
    ("options", "size", "times"),
    [
        (["--crop", "10,20,30,16"], (30, 16), range(11)),
        (["--crop", "10,20,30,16", "--scale", "2"], (60, 32), range(11)),
        (["--scale", "0.5"], (35, 27), range(11)),
        (["--scale", "3/2"], (105, 81), range(11)),
        (["--size", "96x40"], (96, 40), range(11)),
        (["--start", "0.1", "--duration", "1/10"], (70, 54), range(3)),
        (["--start", "0.3"], (70, 54), range(2)),
        (["--duration", "0.05"], (70, 54), range(2)),
        (["--fps", "60"], (70, 54), [i / 2 for i in range(22)]),
        (["--fps", "10"], (70, 54), [0, 3, 6, 9]),
        (["--fps", "60", "--start", "0.1", "--duration", "0.1"], (70, 54), [i / 2 for i in range(6)]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) and v and isinstance(v[0], str) else "",
)
def test_views(cli, coa, tmp_path, options, size, times):
    """Times are in frames of the source, 1/30 s."""
    assert cli("decode", coa, "-o", tmp_path / "a.mp4", *options).code == 0
    found = inspect(tmp_path / "a.mp4")
    assert found["size"] == size
    assert [float(t * 30) for t in found["frames"]] == pytest.approx(list(times), abs=1e-3)


def test_kinds_of_output(cli, coa, tmp_path):
    assert cli("decode", coa, "-o", tmp_path / "a.y4m").code == 0
    y4m = (tmp_path / "a.y4m").read_bytes()
    assert y4m.startswith(b"YUV4MPEG2 W70 H54 F30:1")
    result = cli("decode", coa, "-o", "-")
    assert (result.code, result.out) == (0, y4m)
    assert cli("decode", coa, "-o", tmp_path / "a.mkv", "--lossless").code == 0
    assert np.array_equal(planes(tmp_path / "a.mkv"), planes(tmp_path / "a.y4m"))
    assert cli("decode", coa, "-o", tmp_path / "p.png", "--duration", "0.1").code == 0
    assert [p for p in left_in(tmp_path) if p.startswith("p_")] == ["p_00001.png", "p_00002.png", "p_00003.png"]
    assert cli("decode", coa, "-o", tmp_path / "silent.mp4", "--no-audio").code == 0
    assert inspect(tmp_path / "silent.mp4")["sound"] == []


# --- info ---------------------------------------------------------------------------------------------------------


def test_info_for_people(cli, coa, checkpoint):
    text = cli("info", coa).out.decode()
    for part in ("70x54, 11 frames at 30 fps, 0.367 s", "3x2 cells of 6x72 per 8 frames, 6 bits", "audio aac"):
        assert part in text
    assert checkpoint.name in text
    assert f"{coa.stat().st_size:,} bytes" in text


def test_info_of_a_damaged_file_says_so(cli, coa):
    coa.write_bytes(coa.read_bytes()[:-300])
    result = cli("info", coa)
    assert result.code == 0
    assert "NOT COMPLETE" in result.out.decode()
    assert facts(cli, coa)["complete"] is False


# --- mistakes -----------------------------------------------------------------------------------------------------


def refused(result, code: int, *parts: str) -> None:
    """One line on stderr that begins with our name and holds `parts`; nothing on stdout."""
    assert result.code == code, result
    assert result.out == b""
    assert result.err.startswith("coanerv: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    for part in parts:
        assert part in result.err


def test_exit_codes_are_the_documented_ones():
    kinds = (errors.CoanervError, errors.InputError, errors.FormatError, errors.CheckpointError, errors.OutputError)
    assert [k.exit_code for k in kinds] == [1, 3, 4, 5, 6]
    table = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
    for code in [0, 1, 2, 3, 4, 5, 6, errors.DamageError.exit_code, 130, 141]:
        assert f"| {code} |" in table


@pytest.mark.parametrize("content", [None, b"", b"Just a text.\n" * 50, bytes(range(256)) * 40], ids=str)
def test_source_that_is_no_video(cli, tmp_path, content):
    source = tmp_path / "in.mp4"
    if content is not None:
        source.write_bytes(content)
    refused(cli("encode", source, "-o", tmp_path / "a.coa"), 3, str(source))
    assert "a.coa" not in left_in(tmp_path)


def test_source_without_a_picture(cli, tmp_path):
    source = tmp_path / "sound.mp4"
    with av.open(str(source), "w") as out:
        stream = out.add_stream("aac", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 48000, 0
        out.mux([*stream.encode(frame), *stream.encode(None)])
    refused(cli("encode", source, "-o", tmp_path / "a.coa"), 3, str(source), "video")
    refused(cli("encode", tmp_path, "-o", tmp_path / "a.coa"), 3, str(tmp_path))
    assert left_in(tmp_path) == ["sound.mp4"]


@pytest.mark.parametrize("command", ["info", "decode"])
def test_a_coa_that_is_none(cli, clip, tmp_path, command):
    output = ["-o", tmp_path / "a.mp4"] if command == "decode" else []
    refused(cli(command, tmp_path / "none.coa", *output), 3, "none.coa", "No such file")
    refused(cli(command, tmp_path, *output), 3, str(tmp_path))
    refused(cli(command, clip, *output), 4, "not a .coa file")
    (tmp_path / "empty.coa").touch()
    refused(cli(command, tmp_path / "empty.coa", *output), 4)
    assert left_in(tmp_path) == ["empty.coa"]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_coa(cli, coa, tmp_path, share):
    coa.write_bytes(coa.read_bytes()[: int(share * coa.stat().st_size)])
    refused(cli("decode", coa, "-o", tmp_path / "a.mp4"), 4)
    assert left_in(tmp_path) == ["clip.coa"]


def test_corrupt_coa(cli, coa, tmp_path):
    data = bytearray(coa.read_bytes())
    for offset in range(3, len(data), len(data) // 12):
        changed = bytearray(data)
        changed[offset] ^= 0x10
        coa.write_bytes(changed)
        refused(cli("decode", coa, "-o", tmp_path / "a.mp4"), 4)
        assert left_in(tmp_path) == ["clip.coa"]


def test_damage_can_be_concealed(cli, coa, tmp_path):
    data = bytearray(coa.read_bytes())
    second = data.rindex(b"CLIP") + 200
    data[second] ^= 1
    coa.write_bytes(data)
    refused(cli("decode", coa, "-o", tmp_path / "a.mp4"), 4)
    result = cli("decode", coa, "-o", tmp_path / "a.mp4", "--on-error", "conceal", "-q")
    refused(result, errors.DamageError.exit_code, "a.mp4", "damaged", "frames 8-10")
    assert len(inspect(tmp_path / "a.mp4")["frames"]) == 8


def test_wrong_checkpoint(cli, coa, tmp_path, checkpoint_path, other_checkpoint_path):
    output = ["-o", tmp_path / "a.mp4", "--checkpoint"]
    result = cli("decode", coa, *output, other_checkpoint_path)
    refused(result, 5, checkpoint_path.stem, other_checkpoint_path.stem, "--checkpoint")
    refused(cli("decode", coa, *output, tmp_path / "none"), 5, "none")
    refused(cli("encode", coa, "-o", tmp_path / "a.coa", "--checkpoint", coa), 3)  # the source is looked at first
    assert left_in(tmp_path) == ["clip.coa"]
    assert cli("decode", coa, *output, checkpoint_path).code == 0


def test_damaged_checkpoint(cli, clip, tmp_path, checkpoint_path):
    damaged = tmp_path / checkpoint_path.name
    damaged.write_bytes(checkpoint_path.read_bytes()[:-1])
    refused(cli("encode", clip, "-o", tmp_path / "a.coa", "--checkpoint", damaged), 5, "damaged or renamed")
    assert left_in(tmp_path) == [damaged.name]


def test_existing_output(cli, clip, coa, tmp_path):
    before = coa.read_bytes()
    refused(cli("encode", clip, "-o", coa), 6, str(coa), "-y")
    assert coa.read_bytes() == before
    assert cli("encode", clip, "-o", coa, "-y", "--bits", 3).code == 0
    assert coa.read_bytes() != before
    video = tmp_path / "a.mp4"
    video.write_bytes(b"keep me")
    refused(cli("decode", coa, "-o", video), 6, str(video), "-y")
    assert video.read_bytes() == b"keep me"
    assert cli("decode", coa, "-o", video, "-y").code == 0
    assert len(inspect(video)["frames"]) == 11
    # Only success replaces it.
    good = video.read_bytes()
    coa.write_bytes(coa.read_bytes()[:-10])
    refused(cli("decode", coa, "-o", video, "-y"), 4)
    assert video.read_bytes() == good


def test_output_that_cannot_be_written(cli, clip, coa, tmp_path):
    for command, source, name in [("encode", clip, "a.coa"), ("decode", coa, "a.mp4")]:
        refused(cli(command, source, "-o", tmp_path / "no" / "folder" / name), 6, "directory")
        refused(cli(command, source, "-o", coa / name), 6)
        refused(cli(command, source, "-o", f"/proc/{name}"), 6)
    refused(cli("encode", clip, "-o", tmp_path, "-y"), 6, "not a regular file")
    refused(cli("decode", coa, "-o", tmp_path / "a.xyz"), 6, "unknown file type")
    refused(cli("decode", coa, "-o", tmp_path / "a.mp4", "--encoder", "nonsense"), 6, "nonsense")
    refused(cli("decode", coa, "-o", tmp_path / "a.mp4", "--lossless"), 6, ".mkv")
    assert left_in(tmp_path) == ["clip.coa"]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--crop", "0,0,71,54"], 1, "not inside the 70x54 picture"),
        (["--size", "1000000x1000000"], 1, "too large"),
        (["--start", "1"], 3, "no frame"),
        (["--duration", "0"], 3, "no frame"),
        (["--device", "cuda"], 1, "no CUDA device"),
    ],
    ids=str,
)
def test_what_cannot_be_decoded(cli, coa, tmp_path, options, code, text):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(cli("decode", coa, "-o", tmp_path / "a.y4m", *options), code, text)
    assert left_in(tmp_path) == ["clip.coa"]


@pytest.mark.parametrize(
    "options",
    [["--overlap", "20"], ["--overlap", "32"], ["--overlap", "255"], ["--cells", "71x1"], ["--cells", "20x20"]],
    ids=" ".join,
)
def test_cells_that_cannot_be(cli, clip, tmp_path, options):
    refused(cli("encode", clip, "-o", tmp_path / "a.coa", *options), 3, "70x54 picture", "--overlap")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "encode",
        "encode in.mp4",
        "encode in.mp4 -o a.coa --bits 1",
        "encode in.mp4 -o a.coa --bits 9",
        "encode in.mp4 -o a.coa --fit --cells 2x2",
        "encode in.mp4 -o a.coa --cells 2",
        "encode in.mp4 -o a.coa --cells 0x2",
        "encode in.mp4 -o a.coa --frames 0",
        "encode in.mp4 -o a.coa --device tpu",
        "decode a.coa -o a.mp4 --scale 2 --size 4x4",
        "decode a.coa -o a.mp4 --scale 0",
        "decode a.coa -o a.mp4 --fps 0",
        "decode a.coa -o a.mp4 --fps x",
        "decode a.coa -o a.mp4 --fps 1/0",
        "decode a.coa -o a.mp4 --fps 1e999999999",
        "decode a.coa -o a.mp4 --start -1",
        "decode a.coa -o a.mp4 --start nan",
        "decode a.coa -o a.mp4 --size 4",
        "decode a.coa -o a.mp4 --crop 1,2,3",
        "decode a.coa -o a.mp4 --crop a,b,c,d",
        "decode a.coa -o a.mp4 --tile 0",
        "info",
        "train",
        "train --out x",
        "nonsense",
        "--nonsense",
    ],
)
def test_wrong_usage(cli, arguments):
    result = cli(*arguments.split())
    assert (result.code, result.out) == (2, b"")
    assert result.err.startswith("Usage: ")
    assert "Error: " in result.err.splitlines()[-1]


# --- demo and evaluate --------------------------------------------------------------------------------------------


def test_demo(cli, clip, tmp_path):
    result = cli("demo", "--input", clip, "--out", tmp_path / "demo")
    assert result.code == 0
    for part in ("11 frames of 70x54", "PSNR", "SSIM", "frames per second"):
        assert part in result.out.decode()
    assert left_in(tmp_path / "demo") == ["demo.coa", "demo.mp4", "side-by-side.png"]
    assert inspect(tmp_path / "demo" / "demo.mp4") == inspect(clip)
    assert inspect(tmp_path / "demo" / "side-by-side.png")["size"] == (2 * 70 + 4, 54)


def test_the_bundled_clip_is_short_and_has_its_attribution():
    from coanerv_codec.demo import bundled_clip

    assert bundled_clip().stat().st_size < 400_000
    assert "Blender Foundation" in (bundled_clip().parent / "ATTRIBUTION.md").read_text()
    assert 24 <= len(inspect(bundled_clip())["frames"]) <= 60


def test_evaluate(cli, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, frames in [("a.mp4", 9), ("b.mp4", 8), ("short.mp4", 7)]:
        make_video(data / name, frames=frames)
    scores, pictures = tmp_path / "scores.json", tmp_path / "pictures"
    arguments = ["--bits", "8,4", "--side", 48, "--json", scores, "--pictures", pictures]
    result = cli("evaluate", "--data", data, *arguments)
    assert result.code == 0
    assert "1 of 3 videos have fewer than 8 frames" in result.err
    found = json.loads(scores.read_text())
    assert [(s["name"], s["bits"]) for s in found["scores"]] == [("a.mp4", 8), ("a.mp4", 4), ("b.mp4", 8), ("b.mp4", 4)]
    assert [(m["bits"], m["clips"]) for m in found["means"]] == [(8, 2), (4, 2)]
    for key in ("psnr", "bytes", "ssim"):
        assert found["means"][0][key] == pytest.approx(np.mean([s[key] for s in found["scores"] if s["bits"] == 8]))
    assert found["means"][0]["bytes"] > found["means"][1]["bytes"]
    assert sorted(p.split("dB-")[1] for p in left_in(pictures)) == ["8bits-a.png", "8bits-b.png"]
    assert cli("evaluate", "--data", data, *arguments, "--coder", "huffman").code == 0
    paper = json.loads(scores.read_text())
    assert paper["means"][1]["psnr"] == found["means"][1]["psnr"]
    assert paper["means"][1]["bytes"] != found["means"][1]["bytes"]
    (data / "a.mp4").unlink()
    (data / "b.mp4").unlink()
    refused(cli("evaluate", "--data", data, "--side", 48), 3, "long enough")
    refused(cli("evaluate", "--data", "unread", "--json", tmp_path / "none" / "a.json"), 6, "directory does not exist")
    refused(cli("evaluate", "--data", "unread", "--pictures", scores), 6, "cannot be made a folder")
    refused(cli("evaluate", "--data", tmp_path / "none"), 3, "not a folder")
    make_video(data / "c.mp4", frames=8)
    refused(cli("evaluate", "--data", data, "--side", 96, "--overlap", 40), 3, "--overlap")
