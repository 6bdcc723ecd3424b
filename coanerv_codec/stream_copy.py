"""Streams for copied packets: an output stream made from a `StreamInfo` alone.

PyAV makes a stream for packets that are not encoded here only from a stream it is reading. So a Matroska header that
describes the stream is written to memory, opened, and its stream taken as the template. `mov_text`, which Matroska
cannot hold, takes another way: its encoder is opened, never used, and given the real extradata.
"""

import io
import struct

import av

from coanerv_codec.records import StreamInfo

# FFmpeg's codec name to Matroska's, and for PCM the bits per sample.
CODEC_IDS = {
    "aac": ("A_AAC", 0),
    "ac3": ("A_AC3", 0),
    "alac": ("A_ALAC", 0),
    "dts": ("A_DTS", 0),
    "eac3": ("A_EAC3", 0),
    "flac": ("A_FLAC", 0),
    "mp2": ("A_MPEG/L2", 0),
    "mp3": ("A_MPEG/L3", 0),
    "opus": ("A_OPUS", 0),
    "pcm_f32le": ("A_PCM/FLOAT/IEEE", 32),
    "pcm_s16be": ("A_PCM/INT/BIG", 16),
    "pcm_s16le": ("A_PCM/INT/LIT", 16),
    "pcm_s24be": ("A_PCM/INT/BIG", 24),
    "pcm_s24le": ("A_PCM/INT/LIT", 24),
    "pcm_s32le": ("A_PCM/INT/LIT", 32),
    "pcm_u8": ("A_PCM/INT/LIT", 8),
    "truehd": ("A_TRUEHD", 0),
    "vorbis": ("A_VORBIS", 0),
    "ass": ("S_TEXT/ASS", 0),
    "dvd_subtitle": ("S_VOBSUB", 0),
    "hdmv_pgs_subtitle": ("S_HDMV/PGS", 0),
    "subrip": ("S_TEXT/UTF8", 0),
    "webvtt": ("D_WEBVTT/SUBTITLES", 0),
}

ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, SecondaryColour, OutlineColour, BackColour, Bold, Italic, Underline, \
StrikeOut, ScaleX, ScaleY, Spacing, Angle, BorderStyle, Outline, Shadow, Alignment, MarginL, MarginR, MarginV, Encoding
Style: Default,Arial,16,&Hffffff,&Hffffff,&H0,&H0,0,0,0,0,100,100,0,0,1,1,0,2,10,10,10,1

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""


def add_copied_stream(output: av.container.OutputContainer, info: StreamInfo) -> av.stream.Stream | None:
    """Add a stream that takes packets of `info`; None if the container or this module cannot hold its codec."""
    try:
        if info.codec == "mov_text":
            stream = output.add_stream("mov_text")
            stream.codec_context.subtitle_header = ASS_HEADER
            stream.codec_context.open()
            stream.codec_context.extradata = info.extradata
        elif info.codec in CODEC_IDS:
            with av.open(io.BytesIO(_matroska_header(info)), format="matroska") as template:
                if not template.streams:  # FFmpeg leaves out a track that makes no sense to it
                    return None
                stream = output.add_stream_from_template(template.streams[0])
        else:
            return None
    except ValueError:  # PyAV's answer where the container does not take the codec, and ours to absurd parameters
        return None
    stream.time_base = info.time_base
    stream.disposition = info.disposition & 0x7FFFFFFF  # an int in FFmpeg
    stream.metadata.update(info.metadata)
    if info.language:
        stream.metadata["language"] = info.language
    return stream


def _matroska_header(info: StreamInfo) -> bytes:
    """A Matroska file of one track and no packets. The hexadecimal numbers are its element ids."""
    codec_id, bits = CODEC_IDS[info.codec]
    audio = info.kind == "audio"
    track = _element("d7", 1) + _element("73c5", 1) + _element("83", 2 if audio else 17) + _element("86", codec_id)
    if info.extradata:
        track += _element("63a2", _codec_private(info))
    if info.delay:
        track += _element("56aa", round(info.delay * info.time_base * 10**9))
    if audio:
        sampling = _element("b5", struct.pack(">d", info.sample_rate)) + _element("9f", info.channels)
        track += _element("e1", sampling + (_element("6264", bits) if bits else b""))
    segment = (
        _element("1549a966", _element("2ad7b1", 1_000_000))
        + _element("1654ae6b", _element("ae", track))
        + _element("1f43b675", _element("e7", 0))
    )
    return _element("1a45dfa3", _element("4282", "matroska")) + _element("18538067", segment)


def _codec_private(info: StreamInfo) -> bytes:
    """FFmpeg's extradata in Matroska's wrapping, which differs for two codecs."""
    if info.codec == "flac":
        return b"fLaC\x80\x00\x00\x22" + info.extradata
    if info.codec == "alac":
        return info.extradata[12:]
    return info.extradata


def _element(element_id: str, content: bytes | int | str) -> bytes:
    if isinstance(content, int):
        if content >= 1 << 64:
            raise ValueError("a number is beyond 64 bits")
        content = content.to_bytes(8, "big")
    elif isinstance(content, str):
        content = content.encode()
    return bytes.fromhex(element_id) + (1 << 56 | len(content)).to_bytes(8, "big") + content
