"""The checkpoint that ships: found by default, named by its hash, loaded, and able to show a picture."""

from coanerv_codec.checkpoint import VARIABLE, find_checkpoint, load_checkpoint, weights_folder
from coanerv_codec.config import PRESETS
from coanerv_codec.demo import bundled_clip, run_demo


def test_one_default_checkpoint_of_the_base_preset_ships(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    path = find_checkpoint()
    assert path.parent == weights_folder()
    assert path.stat().st_size < 40e6
    assert load_checkpoint(path).model.config == PRESETS["base"]
    assert path.stem in (weights_folder() / "README.md").read_text()


def test_the_demo_shows_the_clip(monkeypatch, tmp_path):
    """Checkpoints gave 29.2, 32.5, 34.9, 35.6, 34.9 and 35.8 dB, the last two in a fifth and a sixth less bytes than the 35.6.

    A later one must not be much worse.
    """
    monkeypatch.delenv(VARIABLE, raising=False)
    result = run_demo(bundled_clip(), tmp_path, load_checkpoint(find_checkpoint()), bits=6)
    assert result.frames == 41
    assert result.psnr > 35.6
    assert result.coa_bytes < 226_000
    assert result.coa_bytes == (tmp_path / "demo.coa").stat().st_size
    assert result.video.stat().st_size > 0
    assert result.picture.read_bytes().startswith(b"\x89PNG")
