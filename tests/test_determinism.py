"""What is the same from run to run, and how far apart engines, tiles, precisions and threads may be (docs/format.md)."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from fork_server import COMMAND, fork_server

from coanerv_codec.bank import decode_bank
from coanerv_codec.checkpoint import VARIABLE, Checkpoint, find_checkpoint, load_checkpoint
from coanerv_codec.container import Reader
from coanerv_codec.decoding import EngineOptions, clip_tokens, decode_clip, layout_of, make_view
from coanerv_codec.demo import bundled_clip
from coanerv_codec.encoding import EncodeOptions, encode_video
from coanerv_codec.records import ClipRecord
from coanerv_codec.video import Frame, VideoInfo, open_video

THREADS = (1, 2, 3)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped() -> Checkpoint:
    """The default checkpoint that a user gets."""
    return load_checkpoint(find_checkpoint())


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    """A detailed part of the bundled clip, one clip long."""
    found = []
    with open_video(bundled_clip(), audio=False) as video:
        for frame in video:
            found.append(np.ascontiguousarray(frame.yuv[:, 100:180, 200:328]))
            if len(found) == 8:
                return found
    raise AssertionError("the bundled clip is shorter than a clip")


def encode(pictures: list[np.ndarray], checkpoint: Checkpoint, **options: object) -> bytes:
    height, width = pictures[0].shape[1:]
    info = VideoInfo(width, height, Fraction(1, 25), frame_duration=1, rate=Fraction(25))
    file = io.BytesIO()
    encode_video(info, [Frame(n, 1, p) for n, p in enumerate(pictures)], file, checkpoint, EncodeOptions(**options))
    return file.getvalue()


def clips(data: bytes) -> tuple[Reader, list[ClipRecord]]:
    reader = Reader(io.BytesIO(data))
    return reader, [item for item in reader if isinstance(item, ClipRecord)]


def symbols(data: bytes) -> np.ndarray:
    reader, found = clips(data)
    return np.stack([decode_bank(clip.bank, reader.header.bank_shape)[0] for clip in found]).astype(int)


def test_runs_of_the_command_give_the_same_bytes(clip, checkpoint_path, tmp_path):
    """In processes of their own, with another seed for Python's hashes each."""
    with fork_server() as start:
        for number in range(3):
            for command in (["encode", clip, "-o", "a.coa"], ["decode", "a.coa", "-o", "a.y4m"]):
                words = [w if not str(w).startswith("a.") else tmp_path / f"{number}{w}" for w in command]
                code, _, err = start(COMMAND, ["coanerv", *words], tmp_path, **{VARIABLE: checkpoint_path}).wait()
                assert code == 0, err
    for name in ("a.coa", "a.y4m"):
        contents = {(tmp_path / f"{number}{name}").read_bytes() for number in range(3)}
        assert len(contents) == 1


@pytest.mark.parametrize("model", ["tiny", "shipped"])
def test_the_number_of_threads_moves_hardly_a_symbol(checkpoint, pictures, request, model):
    """Sums in another order may take a value over the edge of its step, by one step and rarely; usually none is."""
    chosen = checkpoint if model == "tiny" else request.getfixturevalue("shipped")
    found = []
    for count in THREADS:
        with threads(count):
            data = encode(pictures, chosen)
            assert encode(pictures, chosen) == data  # the same from run to run, whatever the number
        found.append(symbols(data))
    for other in found[1:]:
        changed = np.abs(other - found[0])
        assert changed.max() <= 1
        assert changed.mean() <= 1e-3


@pytest.mark.parametrize("model", ["tiny", "shipped"])
def test_pixels_are_within_one_code_value_however_they_are_computed(checkpoint, pictures, request, model):
    chosen = checkpoint if model == "tiny" else request.getfixturevalue("shipped")
    reader, found = clips(encode(pictures, chosen, bits=8))
    header, tokens = reader.header, clip_tokens(found[0], reader.header)
    view, t = make_view(header.width, header.height, crop=(33, 11, 61, 47)), np.array([0, 0.3, 0.875], np.float32)

    def pixels(count: int = 1, **options: object) -> np.ndarray:
        with threads(count):
            return decode_clip(
                chosen.model.decoder, tokens, layout_of(header, found[0]), view, t, EngineOptions(**options)
            ).astype(int)

    expected = pixels()
    assert np.ptp(expected) > 15  # a picture, not a grey plane
    ways = [{"engine": "reference"}, {"precision": "bf16"}, {"engine": "reference", "tile": 5}]
    ways += [{"tile": tile} for tile in (1, 7, 16, 4096)] + [{"count": count} for count in THREADS]
    ways += [{"count": 2, "tile": 9, "precision": "bf16"}, {"count": 3, "engine": "reference"}]
    for way in ways:
        assert np.abs(pixels(**way) - expected).max() <= 1, way
    assert np.array_equal(pixels(), expected)
