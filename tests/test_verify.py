"""`coanerv verify`, limits on the command line, and files of other versions: all through the real commands."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from make_video import make_video

import coanerv_codec as coa_api
from coanerv_codec import errors, records
from coanerv_codec.bank import encode_bank
from coanerv_codec.container import FRAMING, SIGNATURE, TAIL, chunk_bytes
from coanerv_codec.encoding import EncodeOptions
from coanerv_codec.fields import signed, varint
from coanerv_codec.files import encode_file
from coanerv_codec.metrics import psnr
from coanerv_codec.records import Limits
from coanerv_codec.video import Frame, open_video


@pytest.fixture(scope="session")
def whole(clip, checkpoint, tmp_path_factory) -> bytes:
    """The clip of eleven frames (two clips, with sound), encoded."""
    path = tmp_path_factory.mktemp("whole") / "clip.coa"
    encode_file(clip, path, lambda: checkpoint, EncodeOptions(overlap=8))
    return path.read_bytes()


@pytest.fixture
def coa(whole, tmp_path) -> Path:
    path = tmp_path / "clip.coa"
    path.write_bytes(whole)
    return path


def chunks_of(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """(offset, kind, payload) of an intact file's chunks."""
    at, found = len(SIGNATURE), []
    while at < len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        found.append((at, kind, data[at + 8 : at + 8 + length]))
        at += length + FRAMING
    return found


def rebuilt(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A whole file of these chunks: CRCs, index and TAIL fit wherever the clips have come to stand."""
    out, index, frames, index_at, header = bytearray(SIGNATURE), records.IndexBytes(), 0, 0, None
    for kind, payload in chunks:
        if kind == b"HEAD":
            header = records.read_header(payload, Limits())
        elif kind == b"CLIP":
            clip = records.read_clip(payload, header, Limits())
            index.add(len(out), len(clip.pts), clip.pts[0])
            frames += len(clip.pts)
        elif kind == b"indx":
            payload, index_at = index.payload(), len(out)
        elif kind == b"TAIL":
            payload = TAIL.pack(index.count, frames, index_at)
        out += chunk_bytes(kind, payload)
    return bytes(out)


def changed(data: bytes, change) -> bytes:
    """The file after `change` has had its list of [kind, payload]."""
    chunks = [(kind, payload) for _, kind, payload in chunks_of(data)]
    change(chunks)
    return rebuilt(chunks)


def verdict(cli, *arguments) -> tuple[int, dict]:
    """Exit code and JSON of one file."""
    result = cli("verify", *arguments, "--json")
    assert result.err == ""
    (found,) = json.loads(result.out)
    return result.code, found


# --- verify -------------------------------------------------------------------------------------------------------


def test_a_good_file(cli, coa):
    result = cli("verify", coa)
    assert (result.code, result.err) == (0, "")
    assert result.out.decode() == f"{coa}: ok, 11 frames in 2 clips\n"
    code, found = verdict(cli, coa, "--deep")
    assert (code, found["ok"], found["frames"], found["decoded"], found["findings"]) == (0, True, 11, 11, [])


def test_verify_needs_no_torch_without_the_checkpoint(coa):
    code = (
        "import sys; from coanerv_codec.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: code = e.code\n"
        "sys.exit(code or bool({'torch', 'av', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    arguments = ["verify", str(coa), "--no-checkpoint"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b": ok, 11 frames" in done.stdout


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


@pytest.mark.parametrize("kind", [b"HEAD", b"CLIP", b"strm", b"pckt", b"indx", b"head", b"TAIL"], ids=bytes.decode)
def test_a_flipped_bit_is_found_in_every_kind_of_chunk(cli, coa, whole, kind):
    offset = next(at for at, name, _ in chunks_of(whole) if name == kind)
    coa.write_bytes(flipped(whole, offset + 9))
    code, found = verdict(cli, coa)
    assert code == 4
    assert not found["ok"]
    assert f"{kind.decode()} chunk at byte {offset}" in found["findings"][0]["problem"]
    if kind == b"CLIP":
        assert found["findings"][0]["frames"] == [0, 8]
        assert "frames 0-7" in found["findings"][0]["problem"]
        assert found["frames"] == 3  # the other clip's


def test_a_truncated_file(cli, coa, whole):
    second = [at for at, name, _ in chunks_of(whole) if name == b"CLIP"][1]
    coa.write_bytes(whole[: second + 20])
    result = cli("verify", coa)
    assert result.code == 4
    assert "NOT OK, 8 frames in 1 clips" in result.out.decode()
    assert "truncated" in result.out.decode()
    assert result.out.count(b"\n") == 1


def test_wrong_symbols_behind_right_crcs(cli, coa, whole):
    """The bank of clip 1 is cut short by a byte, which only entropy decoding can tell."""

    def cut(chunks):
        at = [i for i, (kind, _) in enumerate(chunks) if kind == b"CLIP"][1]
        chunks[at] = b"CLIP", chunks[at][1][:-1]

    coa.write_bytes(changed(whole, cut))
    shown = cli("info", coa)
    assert shown.code == 0
    assert b"token bank" in shown.out
    code, found = verdict(cli, coa)
    assert code == 4
    (finding,) = found["findings"]
    assert "token bank" in finding["problem"]
    assert (finding["clips"], finding["frames"]) == ([1, 2], [8, 11])


def test_too_few_symbols_behind_right_crcs(cli, coa, whole, checkpoint):
    """A bank that is sound in itself but coded for one cell, where the header has several."""

    def shrink(chunks):
        header = records.read_header(chunks[0][1], Limits())
        assert header.bank_shape[0] > 1
        at = next(i for i, (kind, _) in enumerate(chunks) if kind == b"CLIP")
        clip = records.read_clip(chunks[at][1], header, Limits())
        symbols = np.random.default_rng(0).integers(0, 16, (1, *header.bank_shape[1:])).astype(np.uint8)
        bank = encode_bank(symbols, 4, -1.0, 0.1)
        chunks[at] = b"CLIP", chunks[at][1][: -len(clip.bank)] + bank

    coa.write_bytes(changed(whole, shrink))
    code, found = verdict(cli, coa)
    assert code == 4
    assert "symbols run out" in found["findings"][0]["problem"]


def test_a_wrong_index_and_bytes_after_the_end(cli, coa, whole):
    chunks = chunks_of(whole)
    wrong = SIGNATURE + b"".join(
        chunk_bytes(kind, payload[:-1] + b"\x02" if kind == b"indx" else payload) for _, kind, payload in chunks
    )
    coa.write_bytes(wrong)
    code, found = verdict(cli, coa)
    assert code == 4
    assert "indx: does not list the clips that are there" in found["findings"][0]["problem"]
    coa.write_bytes(whole + b"x")
    code, found = verdict(cli, coa)
    assert code == 4
    assert "goes on after it" in found["findings"][0]["problem"]


def test_another_checkpoint(cli, coa, other_checkpoint_path, monkeypatch):
    code, found = verdict(cli, coa, "--checkpoint", other_checkpoint_path)
    assert code == 5
    assert "the file needs checkpoint" in found["findings"][0]["problem"]
    assert found["frames"] == 11  # the rest was still checked
    monkeypatch.delenv("COANERV_CHECKPOINT")
    code, found = verdict(cli, coa)
    assert code == 5
    assert "which is not in" in found["findings"][0]["problem"]
    assert verdict(cli, coa, "--no-checkpoint")[0] == 0


def test_several_files_and_the_worst_code(cli, coa, whole, tmp_path):
    bad, missing = tmp_path / "bad.coa", tmp_path / "missing.coa"
    bad.write_bytes(whole[:-1])
    assert cli("verify", coa, missing).code == 3
    result = cli("verify", coa, missing, bad, coa)
    assert result.code == 4
    lines = result.out.decode().splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["ok", "NOT OK", "NOT OK", "ok"]


def test_deep_finds_times_that_no_player_can_show(cli, coa, whole):
    def move(chunks):
        header = records.read_header(chunks[0][1], Limits())
        at = [i for i, (kind, _) in enumerate(chunks) if kind == b"CLIP"][1]
        clip = records.read_clip(chunks[at][1], header, Limits())
        late = tuple(t + 2**61 for t in clip.pts)
        moved = records.ClipRecord(clip.number, clip.first_frame, late, clip.last_duration, clip.bank)
        chunks[at] = b"CLIP", records.clip_bytes(moved, header.frame_duration)

    coa.write_bytes(changed(whole, move))
    assert verdict(cli, coa)[0] == 0
    code, found = verdict(cli, coa, "--deep")
    assert code == 4
    assert "beyond what a player can show (frames 8-10)" in found["findings"][0]["problem"]


def test_against_its_source(cli, coa, clip):
    code, found = verdict(cli, coa, "--against", clip)
    assert (code, found["findings"]) == (0, [])
    values = found["psnr"]["frames"]
    assert list(values) == [str(i) for i in range(11)]
    with open_video(clip, audio=False) as video:
        source = [torch.from_numpy(item.yuv).float() / 255 for item in video if isinstance(item, Frame)]
    with coa_api.open(coa) as file:
        from coanerv_codec.decoding import make_view
        from coanerv_codec.playing import decode_items

        clips = (item for item in file.reader if isinstance(item, records.ClipRecord))
        frames = decode_items(clips, file.header, file.checkpoint, make_view(70, 54))
        expected = [psnr(a, torch.from_numpy(b.yuv).float() / 255) for a, b in zip(source, frames, strict=True)]
    assert list(values.values()) == pytest.approx(expected, abs=0.01)
    assert found["psnr"]["mean"] == pytest.approx(sum(expected) / 11, abs=0.01)
    lines = cli("verify", coa, "--against", clip).out.decode().splitlines()
    assert len(lines) == 12
    assert f"PSNR {sum(expected) / 11:.2f} dB" in lines[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"width": 72}, "is 72x54, the file 70x54"),
        ({"frames": 9}, "ends after 9 frames"),
        ({"frames": 12}, "goes on after the file's last frame, number 10"),
        ({"pts": [700 * i for i in range(11)]}, "not its source"),
    ],
    ids=str,
)
def test_against_another_source(cli, coa, tmp_path, options, problem):
    other = make_video(tmp_path / "other.mp4", **{"width": 70, "height": 54, "frames": 11, **options})
    code, found = verdict(cli, coa, "--against", other)
    assert code == 3
    assert problem in " ".join(finding["problem"] for finding in found["findings"])


def test_the_clip_is_blamed_whose_frame_it_is_and_the_others_are_still_decoded(cli, coa, tmp_path):
    """The last frame of a clip is shown with the next one, which it is cross-faded with."""
    pts = [512 * i + 100 * (i == 7) for i in range(11)]
    other = make_video(tmp_path / "other.mp4", width=70, height=54, frames=11, pts=pts)
    _, found = verdict(cli, coa, "--against", other)
    (finding,) = found["findings"]
    assert "frame 7 is at" in finding["problem"]
    assert (finding["clips"], finding["frames"]) == ([0, 1], [0, 8])
    assert found["decoded"] == 11


def test_against_what_is_no_video(cli, coa, tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    assert verdict(cli, coa, "--against", tmp_path / "text.mp4")[0] == 3


@pytest.mark.parametrize(
    "arguments", [[], ["a.coa", "--deep", "--no-checkpoint"], ["a.coa", "b.coa", "--against", "x.mp4"]], ids=str
)
def test_wrong_usage(cli, arguments):
    assert cli("verify", *arguments).code == 2


def test_text_from_a_file_cannot_act_on_a_terminal(cli, coa, whole):
    evil = records.metadata_bytes(records.Metadata((("title", "a\x1b[2Jb\nc\u202ed"),)))
    coa.write_bytes(changed(whole, lambda chunks: chunks.insert(1, (b"meta", evil))))
    out = cli("info", coa).out.decode()
    assert "a\\x1b[2Jb\\nc\\u202ed" in out
    assert "\x1b" not in out


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["info"], ["verify"], ["decode", "-o", "OUT", "-q"]], ids=lambda c: c[0])
def test_limits_can_be_lowered_and_raised(cli, coa, tmp_path, command):
    out = tmp_path / "out.y4m"
    command = [str(out) if part == "OUT" else part for part in command]
    for limit in ("side=69", "pixels=3779", "frames=10", "tokens=1", "memory=1000", "chunk_bytes=20", "clips=1"):
        result = cli(*command, coa, "--limit", limit)
        # `info` lists what is in damaged files; a header beyond a limit cannot be read at all.
        said = result.err + result.out.decode()
        assert f"limit {limit.split('=')[0]}" in said
        counted = limit.startswith(("frames", "clips"))
        assert result.code == (0 if command[0] == "info" and counted else 4)
        assert not out.exists()
    assert cli(*command, coa, "--limit", "side=70", "--limit", "pixels=3780", "--limit", "frames=11").code == 0


def test_limits_that_are_none(cli, coa):
    for wrong in ("sides=3", "side", "side=", "side=-1", "side=1e3", "side=" + "9" * 30):
        result = cli("info", coa, "--limit", wrong)
        assert result.code == 2
        assert "limit" in result.err


def test_a_large_picture_needs_a_raised_limit(cli, coa, whole, tmp_path):
    """The header alone decides, before anything is allocated; with the limit raised the next check speaks."""

    def grow(chunks):
        header = records.read_header(chunks[0][1], Limits())
        large = records.header_bytes(replace(header, width=16_000, height=16_000))
        for i, (kind, _) in enumerate(chunks):
            if kind in (b"HEAD", b"head"):
                chunks[i] = kind, large

    chunks = [(kind, payload) for _, kind, payload in chunks_of(whole)]
    grow(chunks)
    coa.write_bytes(SIGNATURE + b"".join(chunk_bytes(*chunk) for chunk in chunks))
    result = cli("decode", coa, "-o", tmp_path / "a.y4m")
    assert (result.code, "limit pixels" in result.err) == (4, True)
    result = cli("decode", coa, "-o", tmp_path / "a.y4m", "--limit", "pixels=256000000")
    assert (result.code, "limit memory" in result.err) == (4, True)
    assert cli("info", coa, "--limit", "pixels=256000000", "--limit", f"memory={2**40}").code == 0


@pytest.mark.parametrize("command", ["info", "verify", "decode"])
def test_two_hundred_bytes_cannot_announce_a_trillion_frames(cli, coa, whole, tmp_path, command):
    """Refused by bounded work: a few reads, and memory that has nothing to do with the number."""
    head = chunks_of(whole)[0][2]
    start = SIGNATURE + chunk_bytes(b"HEAD", head)
    index = varint(10**11) + varint(len(start)) + varint(8) + signed(0)
    ends = {
        "TAIL": chunk_bytes(b"TAIL", TAIL.pack(10**11, 10**12, len(start))),
        "indx": chunk_bytes(b"indx", index) + chunk_bytes(b"TAIL", TAIL.pack(10**11, 10**12, len(start))),
        "CLIP": chunk_bytes(b"CLIP", varint(10**11) + varint(10**12) + varint(1) + b"\0" + signed(0) + varint(1)),
    }
    output = ["-o", tmp_path / "a.y4m", "--on-error", "conceal"] if command == "decode" else []
    for name, end in ends.items():
        data = start + end
        assert len(data) <= 200
        coa.write_bytes(data)
        cli(command, coa, *output)  # what is imported and cached the first time is not the file's doing
        tracemalloc.start()
        result = cli(command, coa, *output)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        said = result.err + result.out.decode()
        assert result.code == (0 if command == "info" else 4), (name, said)
        # Without an index TAIL is refused before its numbers matter; decode says that there is no clip.
        assert "100000000000" in said or name == "TAIL" or command == "decode", (name, said)
        assert peak < 4 * 2**20
        assert not (tmp_path / "a.y4m").exists()


def test_a_gap_cannot_ask_for_endless_concealment(cli, coa, whole, tmp_path):
    """Clip 0, then a clip that says it is a million frames later: with `conceal` they would all be made up."""
    chunks = chunks_of(whole)
    header = records.read_header(chunks[0][2], Limits())
    clips = [records.read_clip(payload, header, Limits()) for _, kind, payload in chunks if kind == b"CLIP"]
    late = records.ClipRecord(200_000, 1_600_000, tuple(t + 10**9 for t in clips[1].pts), 1, clips[1].bank)
    parts = [chunk_bytes(kind, payload) for _, kind, payload in chunks[:1]]
    parts += [chunk_bytes(b"CLIP", records.clip_bytes(c, header.frame_duration)) for c in (clips[0], late)]
    coa.write_bytes(SIGNATURE + b"".join(parts))
    result = cli("decode", coa, "-o", tmp_path / "a.y4m", "--on-error", "conceal")
    assert result.code == 4
    assert "limit concealed" in result.err


def test_a_frame_shown_for_years_cannot_ask_for_endless_frames(cli, coa, whole, tmp_path):
    chunks = chunks_of(whole)
    header = records.read_header(chunks[0][2], Limits())

    def stretch(chunks):
        at = [i for i, (kind, _) in enumerate(chunks) if kind == b"CLIP"][1]
        clip = records.read_clip(chunks[at][1], header, Limits())
        long = records.ClipRecord(clip.number, clip.first_frame, clip.pts, 2**61, clip.bank)
        chunks[at] = b"CLIP", records.clip_bytes(long, header.frame_duration)

    coa.write_bytes(changed(whole, stretch))
    result = cli("decode", coa, "-o", tmp_path / "a.y4m", "--fps", "50")
    assert result.code == 4
    assert "limit frames" in result.err


# --- versions -----------------------------------------------------------------------------------------------------


def samples(path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray().tobytes() for frame in container.decode(video=0)]


def test_a_later_minor_version_with_an_unknown_ancillary_chunk_decodes(cli, coa, whole, tmp_path):
    def extend(chunks):
        head = bytes((1, 9)) + chunks[0][1][2:]
        chunks[:] = [(kind, head if kind in (b"HEAD", b"head") else payload) for kind, payload in chunks]
        chunks.insert(1, (b"xtra", b"of version 1.9"))

    later = tmp_path / "later.coa"
    later.write_bytes(changed(whole, extend))
    assert cli("decode", coa, "-o", tmp_path / "a.y4m").code == 0
    assert cli("decode", later, "-o", tmp_path / "b.y4m").code == 0
    assert samples(tmp_path / "a.y4m") == samples(tmp_path / "b.y4m")
    assert cli("verify", later).code == 0
    assert "format 1.9" in cli("info", later).out.decode()


@pytest.mark.parametrize(
    "command", [["info"], ["verify"], ["decode", "--on-error", "conceal", "-o"]], ids=lambda c: c[0]
)
def test_an_unknown_critical_chunk_is_refused_by_name(cli, coa, whole, tmp_path, command):
    command = [*command, tmp_path / "a.y4m"] if command[-1] == "-o" else command
    coa.write_bytes(changed(whole, lambda chunks: chunks.insert(2, (b"WAVE", b"new"))))
    result = cli(*command, coa)
    assert result.code == 4
    assert "WAVE chunk" in result.err + result.out.decode()
    assert not (tmp_path / "a.y4m").exists()
