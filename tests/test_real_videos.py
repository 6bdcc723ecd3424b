"""Real videos in, the same videos out: through `encode` and `decode`, source and result compared by PyAV alone.

The model is untrained, so pictures are only compared among results; test_video.py follows colours without a model.
"""

import io
import os
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest
from make_video import decoded_planes, make_video

from coanerv_codec import decoding
from coanerv_codec.cells import fixed_layout
from coanerv_codec.video import CONTAINER_KEYS


class Stream(NamedTuple):
    """An audio or subtitle stream: its description, and time (seconds) and content of its packets."""

    codec: str
    language: str | None
    title: str | None
    packets: list[tuple[Fraction, bytes]]


class Probe(NamedTuple):
    """What PyAV says about a file. Times are in seconds, `color` is range, matrix, primaries, transfer."""

    size: tuple[int, int]
    codec: str
    pixel_format: str
    aspect: Fraction | None
    rotation: int
    times: list[Fraction]
    end: Fraction | None
    color: tuple[int, int, int, int]
    metadata: dict[str, str]
    track: tuple[str | None, str | None]
    streams: list[Stream]


def title_of(stream: av.stream.Stream) -> str | None:
    """FFmpeg's name for it depends on the container."""
    return stream.metadata.get("title") or stream.metadata.get("name")


def probe(path: Path) -> Probe:
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        others = {s.index: s for s in container.streams if s.type in ("audio", "subtitle")}
        frames, packets = [], {index: [] for index in others}
        for packet in container.demux():
            if packet.stream is video:
                frames += packet.decode()
            elif packet.size and packet.stream.index in others:
                packets[packet.stream.index].append((packet.pts * packet.time_base, bytes(packet)))
        first = frames[0]
        return Probe(
            size=(first.width, first.height),
            codec=video.codec_context.codec.canonical_name,
            pixel_format=first.format.name,
            aspect=video.sample_aspect_ratio,
            rotation=first.rotation,
            times=[frame.pts * video.time_base for frame in frames],
            end=((video.start_time or 0) + video.duration) * video.time_base if video.duration else None,
            color=tuple(map(int, (first.color_range, first.colorspace, first.color_primaries, first.color_trc))),
            metadata={k.lower(): v for k, v in container.metadata.items() if k.lower() not in CONTAINER_KEYS},
            track=(video.language, title_of(video)),
            streams=[
                Stream(s.codec_context.codec.canonical_name, s.language, title_of(s), packets[index])
                for index, s in others.items()
            ],
        )


class RoundTrip(NamedTuple):
    """A result, and the warnings of both commands."""

    result: Probe
    encode: str
    decode: str


@pytest.fixture
def round_trip(cli, tmp_path):
    """Encode a source and decode it into tmp_path/name."""

    def run(source, name, *, encode=(), decode=()) -> RoundTrip:
        coa, target = tmp_path / "x.coa", tmp_path / name
        outputs = [
            cli("encode", source, "-o", coa, "-y", "-q", *encode),
            cli("decode", coa, "-o", target, "-y", "-q", *decode),
        ]
        assert [output.code for output in outputs] == [0, 0], outputs
        assert all(line.startswith("coanerv: warning: ") for output in outputs for line in output.err.splitlines())
        return RoundTrip(probe(target), *(output.err for output in outputs))

    return run


# --- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (17, 1000), (63, 47), (33, 64), (70, 54)])
@pytest.mark.parametrize("name", ["b.mp4", "b.webm"])
def test_any_size_stays(round_trip, tmp_path, name, size):
    source = make_video(tmp_path / "a.mkv", width=size[0], height=size[1], frames=2)
    result, _, warnings = round_trip(source, name)
    assert result.size == size
    assert result.times == probe(source).times
    odd = size[0] % 2 or size[1] % 2
    assert ("written as 4:4:4" in warnings) == bool(odd and name == "b.mp4")


def test_4k_in_a_few_cells_and_at_another_size(round_trip, cli, tmp_path):
    source = make_video(tmp_path / "a.mp4", width=3840, height=2160, frames=1, options={"preset": "ultrafast"})
    assert round_trip(source, "b.mp4", encode=["--cells", "3x2"], decode=["--size", "96x54"]).result.size == (96, 54)
    assert "3840x2160, 1 frames" in cli("info", tmp_path / "x.coa").out.decode()


@pytest.mark.parametrize("cells", [["--fit"], ["--cells", "2x1"], ["--cells", "3x3", "--overlap", "0"]])
def test_every_step_of_the_ladder_keeps_size_and_time(round_trip, tmp_path, cells):
    source = make_video(tmp_path / "a.mp4", width=70, height=54)
    result = round_trip(source, "b.mp4", encode=cells).result
    assert (result.size, result.times) == ((70, 54), probe(source).times)


@pytest.mark.parametrize("cells", [(1, 1), (3, 2)])
def test_large_cells_decoded_in_parts_give_the_same_picture(checkpoint, monkeypatch, cells):
    layout = fixed_layout(150, 100, *cells, 8)
    shape = (layout.cells, checkpoint.model.config.tokens, 72)
    tokens = np.float32(0.05) * np.random.default_rng(0).standard_normal(shape, np.float32)  # a picture within range
    whole, parts = [], []
    for strip_bytes, frames in ((2**28, whole), (50_000, parts)):
        monkeypatch.setattr(decoding, "STRIP_BYTES", strip_bytes)
        view = decoding.make_view(150, 100)
        frames.append(decoding.decode_clip(checkpoint.model.decoder, tokens, layout, view, np.arange(8) / 8))
    assert np.std(whole) > 10
    assert np.abs(np.array(whole, int) - parts).max() <= 1


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 17])
@pytest.mark.parametrize("start", [0, 700])
def test_variable_timing_and_the_first_offset_are_exact(round_trip, tmp_path, start, frames):
    source = make_video(tmp_path / "a.mp4", pts=[start + 512 * n + 7 * n * n for n in range(frames)], frames=frames)
    before, (after, *warnings) = probe(source), round_trip(source, "b.mp4")
    assert (after.times, after.end) == (before.times, before.end)
    assert warnings == ["", ""]


def test_matroska_in_milliseconds(round_trip, tmp_path):
    source = make_video(tmp_path / "a.mp4", pts=[700 + 512 * n + 7 * n * n for n in range(10)])
    before, (after, _, warning) = probe(source), round_trip(source, "b.mkv")
    assert [round(t * 1000) for t in before.times] == [t * 1000 for t in after.times]
    assert "milliseconds: timestamps are rounded" in warning
    again, _, warning = round_trip(tmp_path / "b.mkv", "c.mkv")
    assert (again.times, warning) == (after.times, "")


def test_y4m_says_that_it_has_no_timestamps(round_trip, tmp_path):
    source = make_video(tmp_path / "a.mp4", pts=[512 * n + 60 * n * n for n in range(10)])
    result, _, warning = round_trip(source, "b.y4m")
    assert len(result.times) == 10
    assert "Y4M cannot carry the variable frame timing" in warning
    assert round_trip(make_video(tmp_path / "c.mp4"), "d.y4m").decode == ""


# --- description ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [90, 180, 270])
@pytest.mark.parametrize("name", ["b.mp4", "b.mov", "b.mkv"])
def test_rotation_aspect_and_metadata_are_kept(round_trip, tmp_path, name, rotation):
    metadata = {"title": "A clip", "comment": "größer"}
    source = make_video(tmp_path / "a.mp4", frames=3, rotation=rotation, aspect=Fraction(4, 3), metadata=metadata)
    before, after = probe(source), round_trip(source, name).result
    assert before.rotation % 360 == -rotation % 360
    assert before.metadata == metadata
    for what in ("size", "rotation", "aspect", "metadata"):
        assert getattr(after, what) == getattr(before, what)


@pytest.mark.parametrize(("name", "options"), [("b.webm", []), ("b.mkv", ["--lossless"])])
def test_an_aspect_ratio_that_cannot_be_written_is_said(round_trip, tmp_path, name, options):
    source = make_video(tmp_path / "a.mp4", frames=2, aspect=Fraction(4, 3), rotation=90, metadata={"title": "A clip"})
    result, _, warning = round_trip(source, name, decode=options)
    assert result.aspect in (None, 1)
    assert (result.rotation, result.metadata) == (-90, {"title": "A clip"})
    assert "sample aspect ratio is lost" in warning


# --- colour ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "color", [(0, 2, 2, 2), (1, 6, 6, 6), (2, 6, 5, 6), (1, 1, 1, 1), (2, 1, 1, 13), (1, 9, 9, 14)]
)
@pytest.mark.parametrize(("name", "options"), [("b.mp4", []), ("b.mkv", ["--lossless"])])
def test_colour_tags_are_kept(round_trip, tmp_path, name, options, color):
    source = make_video(tmp_path / "a.mp4", frames=2, color=(*color, 1))
    assert probe(source).color == color
    result, *warnings = round_trip(source, name, decode=options)
    assert result.color == color
    assert "colour" not in "".join(warnings)


@pytest.mark.parametrize("transfer", [16, 18])
def test_hdr_is_coded_at_8_bit_with_its_tags(round_trip, tmp_path, transfer):
    mastering = (
        "master-display=G(8500,39850)B(6550,2300)R(35400,14600)WP(15635,16450)L(9000000,50):max-cll=1000,400"
        if transfer == 16
        else "hdr10=0"
    )
    source = make_video(
        tmp_path / "a.mp4",
        frames=2,
        codec="libx265",
        pixel_format="yuv420p10le",
        color=(1, 9, 9, transfer, 3),
        options={"x265-params": f"log-level=error:bframes=0:{mastering}"},
    )
    result, warnings, _ = round_trip(source, "b.mp4")
    assert (result.pixel_format, result.color) == ("yuv420p", (1, 9, 9, transfer))
    assert "10-bit video is reduced to 8 bit" in warnings
    assert "HDR video (PQ or HLG) is coded as it is" in warnings
    assert ("mastering data (display, light levels) is not kept" in warnings) == (transfer == 16)


@pytest.mark.parametrize(
    ("pixel_format", "lossless", "mp4"),
    [
        ("gray", "gray", "yuv420p"),
        ("bgr0", "bgr0", "yuv420p"),
        ("yuv422p", "yuv422p", "yuv422p"),
        ("yuv444p", "yuv444p", "yuv444p"),
    ],
)
def test_the_kind_of_colour_is_kept_also_at_another_size(round_trip, tmp_path, pixel_format, lossless, mp4):
    source = make_video(tmp_path / "a.mkv", frames=2, pixel_format=pixel_format)
    for scale in ([], ["--scale", "2"]):
        assert round_trip(source, "b.mkv", decode=["--lossless", *scale]).result.pixel_format == lossless
        result, _, warning = round_trip(source, "b.mp4", decode=scale)
        assert result.pixel_format == mp4
        assert ("half resolution" in warning) == (pixel_format == "bgr0")
        if pixel_format == "gray":
            assert all(np.all(plane == 128) for plane in decoded_planes(tmp_path / "b.mp4")[0][1:])


def test_alpha_and_interlacing_are_said_to_be_lost(round_trip, tmp_path):
    source = make_video(tmp_path / "a.mkv", frames=2, pixel_format="yuva444p")
    result, warning, _ = round_trip(source, "b.mkv", decode=["--lossless"])
    assert result.pixel_format == "yuv444p"
    assert warning == "coanerv: warning: transparency is dropped\n"
    source = make_video(tmp_path / "a.mp4", options={"x264-params": "tff=1"})
    assert "interlaced video is treated as progressive" in round_trip(source, "b.mp4").encode


# --- sound and subtitles --------------------------------------------------------------------------------------------


def label(source: Path, target: Path, language: str, title: str) -> Path:
    """Copy a file, giving its audio and subtitle streams a language and a title, and its video others."""
    with av.open(str(source)) as before, av.open(str(target), "w") as after:
        copies = {stream.index: after.add_stream_from_template(stream) for stream in before.streams}
        for stream in before.streams:
            own = stream.type != "video"
            names = {"language": language, "title": title} if own else {"language": "fra", "title": "Bild"}
            copies[stream.index].metadata.update(names)
        for packet in before.demux():
            if packet.size and bytes(packet) != b"\0\0":  # the muxer's own mark where no text is shown
                packet.stream = copies[packet.stream.index]
                after.mux(packet)
    return target


@pytest.mark.parametrize("start", [0, 1536])
@pytest.mark.parametrize(("suffix", "subtitle"), [(".mp4", "mov_text"), (".mkv", "subrip"), (".mkv", "ass")])
def test_sound_and_subtitles_are_bit_exact_and_in_sync(round_trip, tmp_path, suffix, subtitle, start):
    pts = [start + 512 * n for n in range(20)]
    made = make_video(tmp_path / f"made{suffix}", frames=20, pts=pts, audio=True, subtitle=subtitle)
    source = label(made, tmp_path / f"a{suffix}", "deu", "Ton")
    before, (after, *warnings) = probe(source), round_trip(source, f"b{suffix}")
    assert [stream.codec for stream in before.streams] == ["aac", subtitle]
    assert [(stream.language, stream.title) for stream in before.streams] == 2 * [("deu", "Ton")]
    assert all(len(stream.packets) >= 2 for stream in before.streams)
    assert after.streams == before.streams
    assert after.track == before.track == ("fra", "Bild")
    assert after.times == before.times
    assert warnings == ["", ""]


@pytest.mark.parametrize("name", ["b.mp4", "b.mkv"])
def test_a_part_of_a_transport_stream_stays_in_sync(round_trip, tmp_path, name):
    source = make_video(tmp_path / "a.ts", frames=40, pts=[4608 + 512 * n for n in range(40)], audio=True)
    whole = round_trip(source, name).result
    assert whole.times[0] > 0.3
    part = round_trip(source, name, decode=["--start", "0.5", "--duration", "0.4"]).result
    assert len(part.times) == 12
    assert part.times[0] == pytest.approx(whole.times[0], abs=1e-3)
    original = {data: time for time, data in whole.streams[0].packets}
    sound = part.streams[0].packets
    assert [original[data] - time for time, data in sound] == pytest.approx([Fraction(1, 2)] * len(sound), abs=2e-3)
    # Packets of 1024 samples: from the one that begins just before the picture to the last that begins before its end.
    assert -0.022 < sound[0][0] - part.times[0] <= 0.002
    assert 0.4 - 0.022 - 0.002 < sound[-1][0] - part.times[0] < 0.4 + 0.002


@pytest.mark.parametrize(
    ("source_name", "subtitle", "name", "lost"),
    [
        ("a.mkv", "subrip", "b.webm", ["aac audio", "subrip subtitle"]),
        ("a.mkv", "subrip", "b.mp4", ["subrip subtitle"]),
        ("a.mp4", "mov_text", "b.mkv", ["mov_text subtitle"]),
        ("a.mp4", "mov_text", "b.y4m", ["audio and subtitles"]),
    ],
)
def test_what_a_container_cannot_hold_is_said(round_trip, tmp_path, source_name, subtitle, name, lost):
    source = make_video(tmp_path / source_name, audio=True, subtitle=subtitle)
    before, (after, _, warnings) = probe(source), round_trip(source, name)
    assert all(what in warnings for what in lost)
    kept = before.streams[:1] if "aac audio" not in lost and name != "b.y4m" else []
    assert [stream.codec for stream in after.streams] == [stream.codec for stream in kept]
    assert [[data for _, data in stream.packets] for stream in after.streams] == [
        [data for _, data in stream.packets] for stream in kept
    ]


def test_no_audio(round_trip, cli, tmp_path):
    source = make_video(tmp_path / "a.mp4", audio=True, subtitle="mov_text")
    assert round_trip(source, "b.mp4", decode=["--no-audio"]).result.streams == []
    assert b"audio aac" in cli("info", tmp_path / "x.coa").out
    assert round_trip(source, "b.mp4", encode=["--no-audio"]).result.streams == []
    assert b"aac" not in cli("info", tmp_path / "x.coa").out


# --- pipes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def feed(monkeypatch):
    """Make bytes come from standard input, through a pipe that cannot be sought in."""
    threads = []

    def start(data: bytes) -> None:
        read, write = os.pipe()

        def pour():
            with os.fdopen(write, "wb") as pipe:
                pipe.write(data)

        threads.append(threading.Thread(target=pour))
        threads[-1].start()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb")))

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", ["a.y4m", "a.ts", "a.mkv"])
def test_pipes_and_files_give_the_same_bytes(cli, feed, tmp_path, name):
    time_base = Fraction(1, 30) if name == "a.y4m" else Fraction(1, 15360)
    source = make_video(tmp_path / name, frames=19, audio=name != "a.y4m", time_base=time_base)
    coa, y4m = tmp_path / "a.coa", tmp_path / "b.y4m"
    assert cli("encode", source, "-o", coa).code == 0
    assert cli("decode", coa, "-o", y4m).code == 0
    feed(source.read_bytes())
    assert cli("encode", "-", "-o", "-").out == coa.read_bytes()
    feed(coa.read_bytes())
    assert cli("decode", "-", "-o", "-").out == y4m.read_bytes()


def test_two_processes_in_a_row(cli, process, clip, tmp_path):
    encode = process("encode", clip, "-o", "-", "-q", stdin=subprocess.DEVNULL)
    decode = process("decode", "-", "-o", "-", "-q", stdin=encode.stdout)
    encode.stdout.close()
    frames, _ = decode.communicate()
    assert (encode.wait(), decode.returncode) == (0, 0)
    cli("encode", clip, "-o", tmp_path / "a.coa")
    cli("decode", tmp_path / "a.coa", "-o", tmp_path / "b.y4m")
    assert frames == (tmp_path / "b.y4m").read_bytes()
    assert len(probe(tmp_path / "b.y4m").times) == 11


# --- kinds of output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "codec"),
    [
        ("b.mp4", [], "h264"),
        ("b.m4v", ["--crf", "10"], "h264"),
        ("b.mov", ["--encoder", "libx265"], "hevc"),
        ("b.mkv", [], "h264"),
        ("b.mkv", ["--encoder", "libsvtav1"], "av1"),
        ("b.webm", [], "vp9"),
        ("b.mkv", ["--lossless"], "ffv1"),
        ("b.y4m", [], "rawvideo"),
    ],
)
def test_every_kind_of_file_shows_the_same_pictures(round_trip, cli, tmp_path, clip, name, options, codec):
    result = round_trip(clip, name, decode=options).result
    assert result.codec == codec
    assert len(result.times) == 11
    assert cli("decode", tmp_path / "x.coa", "-o", tmp_path / "raw.y4m").code == 0
    difference = [
        np.abs(a.astype(int) - b).mean()
        for x, y in zip(decoded_planes(tmp_path / "raw.y4m"), decoded_planes(tmp_path / name), strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert max(difference) <= (0 if codec in ("ffv1", "rawvideo") else 3)


def test_numbered_pictures(cli, tmp_path, clip):
    cli("encode", clip, "-o", tmp_path / "a.coa")
    done = cli("decode", tmp_path / "a.coa", "-o", tmp_path / "b.png")
    assert done.code == 0
    assert "pictures cannot carry timestamps, audio and subtitles" in done.err
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [f"b_{n:05d}.png" for n in range(1, 12)]
    assert all(probe(path).size == (70, 54) for path in tmp_path.glob("*.png"))


def test_pictures_are_videos_too(round_trip, cli, tmp_path, clip):
    cli("encode", clip, "-o", tmp_path / "a.coa")
    cli("decode", tmp_path / "a.coa", "-o", tmp_path / "b%02d.png")
    assert len(round_trip(tmp_path / "b01.png", "one.mp4").result.times) == 1
    result = round_trip(tmp_path / "b%02d.png", "all.mkv", decode=["--lossless"]).result
    assert (len(result.times), result.size, result.pixel_format) == (11, (70, 54), "bgr0")


# --- length ---------------------------------------------------------------------------------------------------------


def peak_memory_mib(action) -> float:
    """Run `action`; the most memory this process occupied meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    action()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_does_not_grow_with_length(cli, tmp_path):
    def there_and_back(frames: int) -> None:
        source, coa = tmp_path / f"{frames}.mp4", tmp_path / f"{frames}.coa"
        assert cli("encode", source, "-o", coa, "-y", "--fit").code == 0
        assert cli("decode", coa, "-o", tmp_path / f"{frames}.mkv", "-y", "--crf", "40").code == 0

    for frames in (80, 600):
        options = {"preset": "ultrafast"}
        make_video(tmp_path / f"{frames}.mp4", width=128, height=96, frames=frames, audio=True, options=options)
    there_and_back(80)
    short, long = (peak_memory_mib(lambda n=n: there_and_back(n)) for n in (80, 600))
    assert len(probe(tmp_path / "600.mkv").times) == 600
    # The frames between the two would be 18 MiB if they were kept.
    assert long - short < 6
