"""The Python interface: its documented examples run, and what it gives is what the decoder shows."""

import inspect
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from make_video import make_video

import coanerv_codec as coa
from coanerv_codec.color import yuv_to_rgb
from coanerv_codec.decoding import make_view
from coanerv_codec.errors import CheckpointError, CoanervError, FormatError, InputError, OutputError
from coanerv_codec.playing import decode_items
from coanerv_codec.records import ClipRecord
from coanerv_codec.video import Frame

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("use_checkpoint")


@pytest.fixture(scope="module")
def encoded(clip, checkpoint_path, tmp_path_factory) -> Path:
    """The clip of eleven frames of 70 x 54, encoded."""
    path = tmp_path_factory.mktemp("api") / "clip.coa"
    coa.encode(clip, path, checkpoint=checkpoint_path, overlap=8)
    return path


# --- the documented examples --------------------------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_the_documentation_run(clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.mp4").symlink_to(clip)
    examples = blocks((ROOT / "docs" / "api.md").read_text())
    assert len(examples) >= 4
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
    assert len(names["frames"]) == 11
    assert names["tokens"].ndim == 3
    assert names["yuv"].shape == (3,)


def test_the_example_of_the_package_runs(clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.mp4").symlink_to(clip)
    code = "\n".join(line[4:] for line in coa.__doc__.splitlines() if line.startswith("    "))
    assert "coa.query" in code or "clip.query" in code
    exec(code, {})
    assert (tmp_path / "clip.coa").exists()


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, coanerv_codec; sys.exit(bool({'torch', 'av', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(coa.__file__).parents[1])
    assert set(coa.__all__) == {"__version__", "decode", "encode", "open"}
    with pytest.raises(AttributeError, match="nonsense"):
        coa.nonsense  # noqa: B018


# --- encode and decode --------------------------------------------------------------------------------------------


def test_decode_is_an_iterator_of_rgb_pictures(encoded):
    pictures = coa.decode(encoded)
    assert inspect.isgenerator(pictures)
    pictures = list(pictures)
    assert [(p.shape, p.dtype) for p in pictures] == [((54, 70, 3), np.uint8)] * 11
    with coa.open(encoded) as file:
        clips = [i for i in file.reader if isinstance(i, ClipRecord)]
        frames = list(decode_items(clips, file.header, file.checkpoint, make_view(70, 54)))
    assert all(np.array_equal(p, yuv_to_rgb(f.yuv)) for p, f in zip(pictures, frames, strict=True))


def test_decode_takes_views_and_times(encoded):
    whole = list(coa.decode(encoded))
    part = list(coa.decode(encoded, crop=(10, 20, 30, 16)))
    # One code value of YUV is up to two of RGB.
    assert np.abs(np.stack(part).astype(int) - np.stack(whole)[:, 20:36, 10:40]).max() <= 3
    assert next(coa.decode(encoded, size=(35, 27))).shape == (27, 35, 3)
    assert len(list(coa.decode(encoded, start=0.1, duration=Fraction(1, 10)))) == 3
    assert len(list(coa.decode(encoded, fps=60))) == 22
    for options in ({"tile": 16}, {"engine": "reference"}):
        assert np.abs(np.stack(list(coa.decode(encoded, **options))).astype(int) - np.stack(whole)).max() <= 3


def test_pictures_are_encoded_like_a_file_of_them(tmp_path):
    """RGB pictures and a lossless RGB video of the same pictures give the same tokens."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (24, 40, 3), np.uint8) for _ in range(9)]
    coa.encode(iter(pictures), tmp_path / "a.coa", fps=Fraction(30000, 1001), bits=5)
    planes = [[np.dstack([p[..., ::-1], np.zeros_like(p[..., 0])]).reshape(24, -1)] for p in pictures]
    make_video(tmp_path / "b.mkv", width=40, height=24, pixel_format="bgr0", pictures=planes)
    coa.encode(tmp_path / "b.mkv", tmp_path / "b.coa", bits=5)
    with coa.open(tmp_path / "a.coa") as a, coa.open(tmp_path / "b.coa") as b:
        assert len(a) == len(b) == 2
        assert all(np.array_equal(a.tokens(i), b.tokens(i)) for i in range(2))
        assert a.header.frame_rate == Fraction(30000, 1001)
    assert len(list(coa.decode(tmp_path / "a.coa"))) == 9


def test_fit_and_overwrite(clip, tmp_path):
    path = tmp_path / "a.coa"
    coa.encode(clip, path, fit=True)
    with coa.open(path) as file:
        assert (file.header.columns, file.header.rows) == (1, 1)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        coa.encode(clip, path)
    with pytest.raises(OutputError, match="exists already"):
        coa.encode([np.zeros((8, 8, 3), np.uint8)], path)
    assert path.read_bytes() == before
    coa.encode(clip, path, overwrite=True, bits=3)
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    "pictures",
    [
        [],
        [np.zeros((8, 8), np.uint8)],
        [np.zeros(8, np.uint8)],
        [np.zeros((8, 8, 4), np.uint8)],
        [np.zeros((8, 8, 3), np.float32)],
        [np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)],
        [np.zeros((0, 8, 3), np.uint8)],
    ],
    ids=lambda p: str([(a.dtype.name, a.shape) for a in p]),
)
def test_pictures_that_are_none_are_refused(tmp_path, pictures):
    with pytest.raises(InputError, match="picture"):
        coa.encode(pictures, tmp_path / "a.coa")
    assert list(tmp_path.iterdir()) == []


# --- open ---------------------------------------------------------------------------------------------------------


def test_tokens(encoded, checkpoint):
    with coa.open(encoded) as file:
        assert len(file) == 2
        for clip in range(2):
            tokens = file.tokens(clip)
            assert tokens.shape == (6, checkpoint.model.config.tokens, 72)
            assert tokens.dtype == np.float32
        assert np.array_equal(file.tokens(0), file.tokens(0))
        assert not np.array_equal(file.tokens(0), file.tokens(1))
        with pytest.raises(FormatError, match="no clip 2"):
            file.tokens(2)


def test_tokens_need_no_checkpoint(encoded, monkeypatch):
    monkeypatch.setenv("COANERV_CHECKPOINT", "/nowhere")
    with coa.open(encoded) as file:
        assert file.tokens(0).size
        with pytest.raises(CheckpointError, match="nowhere"):
            file.query(0, 0, 0)


def test_a_query_at_a_pixel_is_the_decoded_frame(encoded):
    with coa.open(encoded) as file:
        clips = [i for i in file.reader if isinstance(i, ClipRecord)]
        frames = [
            f for f in decode_items(clips, file.header, file.checkpoint, make_view(70, 54)) if isinstance(f, Frame)
        ]
        y, x = np.mgrid[:54, :70]
        for number in (0, 7, 8, 10):
            yuv = file.query(x / 69, y / 53, number / 30)
            assert yuv.shape == (54, 70, 3)
            difference = np.abs(yuv.clip(0, 1) * 255 - frames[number].yuv.transpose(1, 2, 0))
            # Where clips meet, frames are mixed of rounded pictures, with rounded weights.
            assert difference.max() <= (1.5 if number in (7, 8) else 0.501)


def test_queries_between_frames_and_beyond_the_ends(encoded):
    with coa.open(encoded) as file:
        x, y = np.random.default_rng(0).random((2, 20))
        assert np.array_equal(file.query(x, y, -5), file.query(x, y, 0))
        assert np.array_equal(file.query(x, y, 99), file.query(x, y, 10 / 30))
        near = np.abs(file.query(x, y, 3.001 / 30) - file.query(x, y, 3 / 30)).max()
        far = np.abs(file.query(x, y, 3.5 / 30) - file.query(x, y, 3 / 30)).max()
        assert near < far
        # Points of several clips at once, as in one at a time.
        t = np.array([0, 5, 8, 10])[:, None] / 30
        together = file.query(x, y, t)
        assert together.shape == (4, 20, 3)
        for row, moment in zip(together, t[:, 0], strict=True):
            np.testing.assert_allclose(row, file.query(x, y, moment), atol=1e-5)


def test_a_clip_beside_a_damaged_one_can_be_queried(encoded, tmp_path):
    data = bytearray(encoded.read_bytes())
    with coa.open(encoded) as file:
        entry = file.reader.index()[1]
        expected = file.query(0.3, 0.6, 4 / 30)
    data[entry.offset + 60] ^= 1
    (tmp_path / "damaged.coa").write_bytes(data)
    with coa.open(tmp_path / "damaged.coa") as file:
        assert np.array_equal(file.query(0.3, 0.6, 4 / 30), expected)
        assert np.isfinite(file.query(0.3, 0.6, 7.2 / 30)).all()
        with pytest.raises(FormatError, match="clip 1, frames 8-10"):
            file.query(0.3, 0.6, 8 / 30)


def test_what_cannot_be_opened(encoded, tmp_path, other_checkpoint_path):
    with pytest.raises(InputError, match="No such file"):
        coa.open(tmp_path / "none.coa")
    (tmp_path / "text.coa").write_text("text")
    with pytest.raises(FormatError):
        coa.open(tmp_path / "text.coa")
    with pytest.raises(CoanervError, match="--checkpoint"):
        next(coa.decode(encoded, checkpoint=other_checkpoint_path))
    with pytest.raises(InputError, match=r"none\.mp4"):
        coa.encode(tmp_path / "none.mp4", tmp_path / "a.coa")
    cut = tmp_path / "cut.coa"
    cut.write_bytes(encoded.read_bytes()[:-200])
    with pytest.raises(FormatError):
        list(coa.decode(cut))


def test_a_file_is_closed_at_the_end(encoded):
    with coa.open(encoded) as file:
        file.tokens(0)
    with pytest.raises(ValueError, match="closed"):
        file.tokens(1)
