"""Real files in, the same files out: reader and writer together, without the model between them."""

import signal
import subprocess
import sys
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from conftest import being_written
from make_video import color_bars, decoded_planes, make_video, rgb_to_planes

from coanerv_codec.atomic import atomic_path
from coanerv_codec.color import ColorTags
from coanerv_codec.errors import InputError, OutputError
from coanerv_codec.records import Packet, StreamInfo
from coanerv_codec.stream_copy import CODEC_IDS, add_copied_stream
from coanerv_codec.video import Frame, VideoInfo, display_matrix, open_video
from coanerv_codec.writer import open_output

BARS = color_bars(64, 48)


def read(path, **options):
    """All of a source: its reader (for info and warnings), frames, packets."""
    with open_video(path, **options) as reader:
        items = list(reader)
    frames = [item for item in items if isinstance(item, Frame)]
    return reader, frames, [item for item in items if isinstance(item, Packet)]


def copy(source, target, **options):
    """Read `source` and write `target` without a model between; gives the writer's warnings."""
    with open_video(source) as reader, open_output(target, reader.info, **options) as output:
        for item in reader:
            output.write(item)
    return output.warnings


def times(frames):
    return [(frame.pts, frame.duration) for frame in frames]


def worst(first, second):
    """The largest difference between two lists of frames of planes."""
    assert len(first) == len(second)
    return max(
        np.abs(a.astype(int) - b).max() for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


# --- colour ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chroma", ["420", "444"])
@pytest.mark.parametrize("color_range", [1, 2])
@pytest.mark.parametrize("matrix", [1, 6, 9])
def test_color_bars_come_back_within_two_code_values(tmp_path, matrix, color_range, chroma):
    planes = rgb_to_planes(BARS, matrix, color_range == 2)
    step = 2 if chroma == "420" else 1
    planes = [planes[0], planes[1][::step, ::step], planes[2][::step, ::step]]
    color = (color_range, matrix, matrix, 1, 1 if chroma == "420" else 0)
    source = make_video(tmp_path / "a.mkv", pixel_format=f"yuv{chroma}p", pictures=[planes] * 2, color=color)
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([planes] * 2, decoded_planes(tmp_path / "b.mkv", f"yuv{chroma}p")) <= 2
    assert read(tmp_path / "b.mkv")[0].info.color == ColorTags(*color)
    copy(source, tmp_path / "b.y4m")
    assert worst([planes] * 2, decoded_planes(tmp_path / "b.y4m")) <= 2


@pytest.mark.parametrize("location", [1, 2, 3])
@pytest.mark.parametrize("name", ["b.mp4", "b.mkv", "b.y4m"])
def test_tags_and_chroma_location_are_kept(tmp_path, name, location):
    source = make_video(tmp_path / "a.mp4", color=(2, 9, 9, 18, location))
    info = read(source)[0].info
    assert info.color == ColorTags(2, 9, 9, 18, location)
    copy(source, tmp_path / name)
    expected = ColorTags(2, chroma_location=location) if name == "b.y4m" else info.color
    assert read(tmp_path / name)[0].info.color == expected


def test_unspecified_tags_stay_unspecified(tmp_path):
    copy(make_video(tmp_path / "a.mkv"), tmp_path / "b.mkv", lossless=True)
    assert read(tmp_path / "b.mkv")[0].info.color == ColorTags()


@pytest.mark.parametrize("format_and_warning", ["yuv420p10le 10-bit", "yuv444p12le 12-bit"])
def test_deep_colour_is_reduced_with_a_warning(tmp_path, format_and_warning):
    pixel_format, warning = format_and_warning.split()
    depth = int(warning[:2])
    planes = rgb_to_planes(BARS, 9, full=False, depth=depth)
    step = 2 if "420" in pixel_format else 1
    planes = [planes[0], planes[1][::step, ::step], planes[2][::step, ::step]]
    source = make_video(tmp_path / "a.mkv", pixel_format=pixel_format, pictures=[planes], color=(1, 9, 9, 16, 0))
    reader, _, _ = read(source)
    assert any(warning in w for w in reader.warnings)
    assert any("HDR" in w for w in reader.warnings)
    assert reader.info.bit_depth == depth
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([[p / 2 ** (depth - 8) for p in planes]], decoded_planes(tmp_path / "b.mkv")) <= 2


def test_gray_stays_gray(tmp_path):
    ramp = np.tile(np.arange(16, 80, dtype=np.uint8), (48, 1))
    source = make_video(tmp_path / "a.mkv", pixel_format="gray", pictures=[[ramp]])
    assert read(source)[0].info.chroma == "gray"
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([[ramp]], decoded_planes(tmp_path / "b.mkv", "gray")) == 0
    copy(source, tmp_path / "b.y4m")
    assert worst([[ramp]], decoded_planes(tmp_path / "b.y4m", "gray")) == 0
    copy(source, tmp_path / "b.mp4")
    luma, *chroma = decoded_planes(tmp_path / "b.mp4", "yuv420p")[0]
    assert np.abs(luma.astype(int) - ramp).max() <= 6
    assert all(np.all(plane == 128) for plane in chroma)


def test_rgb_comes_back(tmp_path):
    rgb = np.rint(BARS * 255).astype(np.uint8)
    packed = np.concatenate([rgb[..., ::-1], np.zeros((48, 64, 1), np.uint8)], axis=-1).reshape(48, -1)
    source = make_video(tmp_path / "a.mkv", pixel_format="bgr0", pictures=[[packed]])
    assert read(source)[0].info.chroma == "rgb"
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([[packed]], decoded_planes(tmp_path / "b.mkv", "bgr0")) <= 2
    assert any("4:2:0" in w for w in copy(source, tmp_path / "b.mp4"))
    copy(source, tmp_path / "b.png")
    assert worst([[rgb.reshape(48, -1)]], decoded_planes(tmp_path / "b_00001.png", "rgb24")) <= 2


def test_alpha_is_dropped_with_a_warning(tmp_path):
    y, cb, cr = rgb_to_planes(BARS, 6, full=False)
    alpha = np.full_like(y, 7)
    source = make_video(tmp_path / "a.mkv", pixel_format="yuva444p", pictures=[[y, cb, cr, alpha]])
    reader, _, _ = read(source)
    assert reader.info.alpha
    assert any("transparency" in w for w in reader.warnings)
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([[y, cb, cr]], decoded_planes(tmp_path / "b.mkv", "yuv444p")) <= 2


@pytest.mark.parametrize("color_range", [1, 2])
@pytest.mark.parametrize("packing", ["nv12", "uyvy422"])
def test_other_packings_of_the_same_samples(tmp_path, packing, color_range):
    y, cb, cr = rgb_to_planes(BARS, 6, color_range == 2)
    if packing == "nv12":
        planes = [y, np.stack([cb, cr], -1)[::2, ::2].reshape(24, -1)]
        expected = [y, cb[::2, ::2], cr[::2, ::2]]
    else:
        planes = [np.stack([cb[:, ::2], y[:, ::2], cr[:, ::2], y[:, 1::2]], -1).reshape(48, -1)]
        expected = [y, cb[:, ::2], cr[:, ::2]]
    color = (color_range, 6, 6, 6, 0)
    source = make_video(tmp_path / "a.mkv", codec="rawvideo", pixel_format=packing, pictures=[planes], color=color)
    assert read(source)[0].info.color == ColorTags(*color)
    copy(source, tmp_path / "b.mkv", lossless=True)
    assert worst([expected], decoded_planes(tmp_path / "b.mkv")) <= 2


# --- size, time, description ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(63, 47), (64, 47), (63, 48), (1, 1), (17, 100)])
@pytest.mark.parametrize("name", ["b.mp4", "b.mkv", "b.webm", "b.y4m"])
def test_odd_sizes_stay(tmp_path, name, width, height):
    source = make_video(tmp_path / "a.mkv", width=width, height=height, frames=3)
    warnings = copy(source, tmp_path / name)
    reader, frames, _ = read(tmp_path / name)
    assert (reader.info.width, reader.info.height) == (width, height)
    assert [frame.yuv.shape for frame in frames] == [(3, height, width)] * 3
    assert any("4:4:4" in w for w in warnings) == (name in ("b.mp4", "b.mkv"))


@pytest.mark.parametrize("start", [0, 700])
@pytest.mark.parametrize("name", ["b.mp4", "b.mov"])
def test_variable_timing_is_exact(tmp_path, name, start):
    pts = [start + 512 * n + 7 * n * n for n in range(10)]
    source = make_video(tmp_path / "a.mp4", pts=pts)
    reader, frames, _ = read(source)
    assert [frame.pts for frame in frames] == pts
    assert copy(source, tmp_path / name) == []
    again, copied, _ = read(tmp_path / name)
    assert again.info.time_base == reader.info.time_base
    assert times(copied) == times(frames)


def test_matroska_rounds_to_milliseconds_and_says_so(tmp_path):
    source = make_video(tmp_path / "a.mp4", pts=[700 + 512 * n + 7 * n * n for n in range(10)])
    assert any("milliseconds" in w for w in copy(source, tmp_path / "b.mkv"))
    before, after = read(source)[1], read(tmp_path / "b.mkv")[1]
    assert [round(frame.pts * 1000 / 15360) for frame in before] == [frame.pts for frame in after]
    assert copy(tmp_path / "b.mkv", tmp_path / "c.mkv") == []
    assert times(read(tmp_path / "c.mkv")[1]) == times(after)


def test_durations_fill_the_time_between_frames(tmp_path):
    _, frames, _ = read(make_video(tmp_path / "a.mp4"))
    assert times(frames) == [(512 * n, 512) for n in range(10)]


def test_y4m_says_what_it_cannot_carry(tmp_path):
    source = make_video(tmp_path / "a.mp4", pts=[512 * n + 60 * n * n for n in range(10)], rotation=90, audio=True)
    (warning,) = copy(source, tmp_path / "b.y4m")
    assert all(what in warning for what in ("variable frame timing", "rotation", "audio"))
    assert copy(make_video(tmp_path / "c.mp4"), tmp_path / "d.y4m") == []


@pytest.mark.parametrize("rotation", [90, 180, 270])
@pytest.mark.parametrize("name", ["b.mp4", "b.mov", "b.mkv"])
def test_rotation_aspect_and_metadata_are_kept(tmp_path, name, rotation):
    metadata = {"title": "A clip", "comment": "größer"}
    source = make_video(tmp_path / "a.mp4", rotation=rotation, aspect=Fraction(4, 3), metadata=metadata)
    copy(source, tmp_path / name)
    for path in (source, tmp_path / name):
        info = read(path)[0].info
        assert (info.width, info.height, info.rotation, info.flip) == (64, 48, rotation, False)
        assert info.sample_aspect_ratio == Fraction(4, 3)
        assert {key.lower(): text for key, text in info.metadata.items()} == metadata


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_mirrored_pictures_stay_mirrored(tmp_path, rotation):
    info = VideoInfo(16, 16, Fraction(1, 30), rotation=rotation, flip=True, rate=Fraction(30))
    with open_output(tmp_path / "a.mp4", info) as output:
        output.write(Frame(0, 1, np.zeros((3, 16, 16), np.uint8)))
    again = read(tmp_path / "a.mp4")[0].info
    assert (again.rotation, again.flip) == (rotation, True)


def test_display_matrix_turns_right_to_down():
    assert display_matrix(90, flip=False) == [0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30]


def test_unusual_metadata_keys_survive_in_mp4(tmp_path):
    info = VideoInfo(16, 16, Fraction(1, 30), rate=Fraction(30), metadata={"com.example.lens": "50 mm", "title": "T"})
    with open_output(tmp_path / "a.mp4", info) as output:
        output.write(Frame(0, 1, np.zeros((3, 16, 16), np.uint8)))
    assert read(tmp_path / "a.mp4")[0].info.metadata == info.metadata


def test_a_change_of_size_is_refused(tmp_path):
    tick = Fraction(1, 30)
    parts = [make_video(tmp_path / f"{n}.ts", width=64 + 16 * n, codec="mpeg2video", time_base=tick) for n in range(2)]
    joined = tmp_path / "a.ts"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(InputError, match="size changes from 64x48 to 80x48"):
        read(joined)


def test_interlaced_gets_a_warning(tmp_path):
    source = make_video(tmp_path / "a.mp4", options={"x264-params": "tff=1"})
    reader, _, _ = read(source)
    assert reader.info.scan == "tff"
    assert any("interlaced" in w for w in reader.warnings)


# --- audio and subtitles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_name", "subtitle", "name"),
    [
        ("a.mp4", "mov_text", "b.mp4"),
        ("a.mp4", "mov_text", "b.mov"),
        ("a.mkv", "subrip", "b.mkv"),
        ("a.mkv", "ass", "b.mkv"),
    ],
)
def test_audio_and_subtitles_are_copied_bit_by_bit(tmp_path, source_name, subtitle, name):
    source = make_video(tmp_path / source_name, audio=True, subtitle=subtitle, frames=15)
    assert copy(source, tmp_path / name) == []
    reader, frames, packets = read(source)
    again, copied_frames, copied = read(tmp_path / name)
    assert times(frames) == times(copied_frames)
    assert [s.codec for s in reader.info.streams] == ["aac", subtitle]
    for before, after in zip(reader.info.streams, again.info.streams, strict=True):
        assert (before.codec, before.time_base, before.delay) == (after.codec, after.time_base, after.delay)
        assert after.extradata.startswith(before.extradata)
    for stream in range(2):
        # MP4 has empty subtitle packets where nothing is said; they too are the same.
        before = [(p.pts, p.data) for p in packets if p.stream == stream]
        assert len(before) >= 2
        assert before == [(p.pts, p.data) for p in copied if p.stream == stream]


def test_the_encoder_delay_of_audio_does_not_move_the_video(tmp_path):
    source = make_video(tmp_path / "a.mp4", audio=True)
    assert read(source)[0].info.streams[0].delay == 1024
    copy(source, tmp_path / "b.mkv")
    _, frames, packets = read(tmp_path / "b.mkv")
    assert frames[0].pts == 0
    assert packets[0].pts == -21


@pytest.mark.parametrize("name", ["b.mp4", "b.mkv"])
def test_audio_of_a_transport_stream_fits_files(tmp_path, name):
    source = make_video(tmp_path / "a.ts", audio=True)
    copy(source, tmp_path / name)
    original = read(make_video(tmp_path / "a.mp4", audio=True))[2]
    reader, _, packets = read(tmp_path / name)
    assert [p.data for p in packets] == [p.data for p in original]
    assert reader.info.streams[0].extradata == bytes.fromhex("1190")


def test_what_a_container_cannot_hold_is_dropped_with_a_warning(tmp_path):
    source = make_video(tmp_path / "a.mkv", audio=True, subtitle="subrip")
    warnings = copy(source, tmp_path / "b.webm")
    assert [w.split()[0:5] for w in warnings] == [
        [".webm", "cannot", "hold", "its", "aac"],
        [".webm", "cannot", "hold", "its", "subrip"],
    ]
    assert read(tmp_path / "b.webm")[0].info.streams == ()


def test_without_audio_nothing_else_is_read(tmp_path):
    reader, frames, packets = read(make_video(tmp_path / "a.mp4", audio=True, subtitle="mov_text"), audio=False)
    assert (len(frames), packets, reader.info.streams) == (10, [], ())


def real_extradata(codec):
    """What an encoder of the codec says about its stream; nothing for codecs that need nothing said."""
    encoders = {"aac": "aac", "alac": "alac", "flac": "flac", "opus": "libopus", "vorbis": "vorbis"}
    if codec not in encoders:
        return b"[Script Info]\n" if codec == "ass" else b""
    encoder = av.CodecContext.create(encoders[codec], "w")
    encoder.sample_rate, encoder.layout, encoder.format = 48000, "stereo", encoder.codec.audio_formats[0]
    encoder.options = {"strict": "experimental"}
    encoder.open()
    return encoder.extradata


@pytest.mark.parametrize("codec", sorted(CODEC_IDS))
def test_streams_are_made_from_their_description_alone(tmp_path, codec):
    audio = CODEC_IDS[codec][0].startswith("A_")
    info = StreamInfo(
        index=0,
        kind="audio" if audio else "subtitle",
        codec=codec,
        time_base=Fraction(1, 48000),
        sample_rate=48000 if audio else 0,
        channels=2 if audio else 0,
        extradata=real_extradata(codec),
    )
    with av.open(str(tmp_path / "a.mkv"), "w") as output:
        context = add_copied_stream(output, info).codec_context
        assert context.codec.canonical_name == codec
        assert (context.extradata or b"") == info.extradata
        if audio:
            assert (context.sample_rate, context.channels) == (48000, 2)


# --- sources that are not what they should be -------------------------------------------------------------------------


def test_a_source_that_cannot_be_read_is_one_clear_error(tmp_path):
    (tmp_path / "text.txt").write_text("hello\n" * 50)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    for name in ("missing.mp4", "text.txt", "empty.mp4", "noise.mp4", "."):
        with pytest.raises(InputError) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
        assert str(tmp_path) in str(error.value)


def test_a_source_without_video_is_refused_also_with_a_cover_picture(tmp_path):
    with av.open(str(tmp_path / "a.m4a"), "w", format="mp4") as out:
        audio = out.add_stream("aac", rate=48000, layout="mono")
        cover = out.add_stream("png", rate=1, width=8, height=8, pix_fmt="rgb24")
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.VideoFrame(8, 8, "rgb24")
        frame.pts = 0
        out.mux(cover.encode(frame))
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.float32), format="fltp", layout="mono")
        samples.sample_rate, samples.pts = 48000, 0
        out.mux(audio.encode(samples))
        out.mux(audio.encode(None))
        out.mux(cover.encode(None))
    with pytest.raises(InputError, match="no video stream"):
        open_video(tmp_path / "a.m4a")


def test_a_truncated_mp4_gives_what_is_there(tmp_path):
    whole = make_video(tmp_path / "a.mp4", frames=60, options={"bf": "0"})
    start = make_video(tmp_path / "start.mp4", frames=60, options={"bf": "0"})
    with (
        av.open(str(whole)) as source,
        av.open(str(start), "w", container_options={"movflags": "faststart"}) as faststart,
    ):
        stream = faststart.add_stream_from_template(source.streams.video[0])
        for packet in source.demux():
            if packet.size:
                packet.stream = stream
                faststart.mux(packet)
    data = start.read_bytes()
    start.write_bytes(data[: len(data) * 3 // 4])
    reader, frames, _ = read(start)
    assert 0 < len(frames) < 60
    assert any("cut short" in w and "of 60 frames" in w for w in reader.warnings)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])  # its index is at the end
    with pytest.raises(InputError, match="cannot be read as a video"):
        open_video(whole)


@pytest.mark.parametrize("audio", [False, True])
def test_a_truncated_mkv_gives_what_is_there(tmp_path, audio):
    source = make_video(tmp_path / "a.mkv", frames=60, audio=audio)
    whole = read(source)
    assert whole[0].warnings == []
    data = source.read_bytes()
    source.write_bytes(data[: len(data) * 3 // 4])
    reader, frames, _ = read(source)
    assert 0 < len(frames) < 60
    assert times(frames)[:-1] == times(whole[1])[: len(frames) - 1]
    assert any("cut short" in w for w in reader.warnings)


def test_damage_inside_is_survived_with_a_warning(tmp_path):
    source = make_video(tmp_path / "a.mp4", frames=60)
    data = bytearray(source.read_bytes())
    data[2000:3000] = b"\xff" * 1000
    source.write_bytes(data)
    reader, frames, _ = read(source)
    assert 10 < len(frames) < 60
    assert any("damaged" in w for w in reader.warnings)


# --- pipes ----------------------------------------------------------------------------------------------------------

FRAMES_FROM_STDIN = """
import hashlib, sys
from coanerv_codec.video import Frame, open_video
digest = hashlib.sha256()
with open_video("-") as reader:
    for item in reader:
        digest.update(item.yuv.tobytes() if isinstance(item, Frame) else item.data)
        digest.update(repr((item.pts, item.duration)).encode())
print(digest.hexdigest())
"""

Y4M_TO_STDOUT = """
import sys
from coanerv_codec.video import open_video
from coanerv_codec.writer import open_output
with open_video(sys.argv[1]) as reader, open_output("-", reader.info) as output:
    for item in reader:
        output.write(item)
"""


def run(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout


@pytest.mark.parametrize("name", ["a.y4m", "a.ts", "a.mkv"])
def test_pipe_and_file_give_the_same(tmp_path, name):
    time_base = Fraction(1, 30) if name == "a.y4m" else Fraction(1, 15360)
    source = make_video(tmp_path / name, audio=name != "a.y4m", time_base=time_base)
    with source.open("rb") as file:
        from_file = run(FRAMES_FROM_STDIN, stdin=file)
    # A real pipe cannot be sought in.
    from_pipe = run(FRAMES_FROM_STDIN, input=source.read_bytes())
    assert from_file == from_pipe


def test_standard_output_is_the_y4m_file(tmp_path):
    source = make_video(tmp_path / "a.mp4")
    copy(source, tmp_path / "b.y4m")
    assert run(Y4M_TO_STDOUT, str(source)) == (tmp_path / "b.y4m").read_bytes()


# --- outputs that must not go wrong -----------------------------------------------------------------------------------

PICTURE = np.full((3, 16, 16), 128, np.uint8)
INFO = VideoInfo(16, 16, Fraction(1, 30), rate=Fraction(30))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", ["a.mp4", "a.y4m", "a.png"])
def test_an_existing_file_is_refused_or_replaced(tmp_path, name):
    existing = tmp_path / ("a_00001.png" if name == "a.png" else name)
    existing.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists already"):
        open_output(tmp_path / name, INFO)
    assert existing.read_bytes() == b"precious"
    with open_output(tmp_path / name, INFO, overwrite=True) as output:
        output.write(Frame(0, 1, PICTURE))
        assert existing.read_bytes() == b"precious"
    assert existing.read_bytes() != b"precious"
    assert names(tmp_path) == [existing.name]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.y4m", "a.png"])
def test_an_exception_leaves_nothing(tmp_path, name):
    def interrupted():
        with open_output(tmp_path / name, INFO) as output:
            output.write(Frame(0, 1, PICTURE))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


ENDLESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background has it ignored
import numpy as np
from fractions import Fraction
from coanerv_codec.video import Frame, VideoInfo
from coanerv_codec.writer import open_output
with open_output(sys.argv[1], VideoInfo(16, 16, Fraction(1, 30), rate=Fraction(30))) as output:
    pts = 0
    while True:
        output.write(Frame(pts, 1, np.zeros((3, 16, 16), np.uint8)))
        pts += 1
        if pts == 20:
            print("running", flush=True)
"""


def test_an_interrupted_process_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "a.mp4")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"running\n"
    assert being_written(process.pid, tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert names(tmp_path) == []


def test_of_two_writers_to_one_file_the_second_is_refused(tmp_path):
    first, second = (open_output(tmp_path / "a.mp4", INFO) for _ in range(2))
    for output in (first, second):
        output.write(Frame(0, 1, PICTURE))
    first.close()
    content = (tmp_path / "a.mp4").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        second.close()
    assert (tmp_path / "a.mp4").read_bytes() == content
    assert names(tmp_path) == ["a.mp4"]


NO_SPACE = """
import resource, sys
import numpy as np
from fractions import Fraction
from coanerv_codec.errors import OutputError
from coanerv_codec.video import Frame, VideoInfo
from coanerv_codec.writer import open_output
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
noise = np.random.default_rng(0)
try:
    with open_output(sys.argv[1], VideoInfo(64, 64, Fraction(1, 30), rate=Fraction(30))) as output:
        for pts in range(40):
            output.write(Frame(pts, 1, noise.integers(0, 256, (3, 64, 64), np.uint8)))
except OutputError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.y4m"])
def test_a_full_disk_is_one_clear_error(tmp_path, name):
    message = run(NO_SPACE, str(tmp_path / name)).decode()
    assert message == f"{tmp_path / name}: cannot be written: File too large\n"
    assert names(tmp_path) == []


def test_outputs_that_cannot_be(tmp_path):
    cases = [
        ("a.avi", {}, "unknown file type"),
        ("none/a.mp4", {}, "directory does not exist"),
        ("a.mp4", {"encoder": "nonsense"}, "no encoder 'nonsense'"),
        ("a.mp4", {"encoder": "aac"}, "does not encode video"),
        ("a.webm", {"encoder": "libx264"}, "cannot hold libx264"),
        ("a.mp4", {"lossless": True}, "ends in .mkv"),
        ("a.y4m", {"crf": 20}, "takes no encoder"),
    ]
    for name, options, message in cases:
        with pytest.raises(OutputError, match=message):
            open_output(tmp_path / name, INFO, **options)
    with pytest.raises(OutputError, match="libx264 refuses 70000x16"):
        open_output(tmp_path / "a.mp4", VideoInfo(70000, 16, Fraction(1, 30)))
    assert names(tmp_path) == []
    (tmp_path / "d.mp4").mkdir()
    with pytest.raises(OutputError, match="not a regular file"):
        open_output(tmp_path / "d.mp4", INFO, overwrite=True)


def test_encoder_and_crf_are_used(tmp_path):
    source = make_video(tmp_path / "a.mp4")
    for crf in (10, 45):
        copy(source, tmp_path / f"{crf}.mkv", encoder="libx265", crf=crf)
    with av.open(str(tmp_path / "10.mkv")) as container:
        assert container.streams.video[0].codec_context.name == "hevc"
    assert (tmp_path / "10.mkv").stat().st_size > (tmp_path / "45.mkv").stat().st_size


def test_png_names_can_be_chosen(tmp_path):
    with open_output(tmp_path / "f%03d.png", INFO) as output:
        for pts in range(2):
            output.write(Frame(pts, 1, PICTURE))
    assert names(tmp_path) == ["f001.png", "f002.png"]


def test_atomic_path_follows_links_and_cleans_up(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_path(tmp_path / "link", overwrite=True) as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    with suppress(ZeroDivisionError), atomic_path(tmp_path / "other") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == ["link", "real"]


def test_the_library_reads_without_torch():
    code = "import sys, coanerv_codec.video, coanerv_codec.writer; print('torch' in sys.modules)"
    assert run(code, cwd=Path(__file__).parent.parent) == b"False\n"
