"""Checkpoints: what was saved is loaded, what is not a checkpoint is refused with one clear line."""

import hashlib
import json
import struct
from dataclasses import replace

import pytest
import torch
from conftest import local_model
from safetensors import safe_open
from safetensors.torch import save

from coanerv_codec import checkpoint as module
from coanerv_codec.carriers import MOST_GAIN
from coanerv_codec.checkpoint import (
    VARIABLE,
    decoder_sha256,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weights_folder,
)
from coanerv_codec.config import PRESETS
from coanerv_codec.errors import CheckpointError
from coanerv_codec.model import CoANeRV

TINY, PAPER = PRESETS["tiny"], PRESETS["tiny-paper"]


def tensors_of(model) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: half precision, but for what attention's narrow windows depend on."""
    return {
        name: (value if name.startswith("decoder.key_") else value.half()).contiguous()
        for name, value in model.state_dict().items()
    }


def write(folder, data: bytes, name: str = "x"):
    """Write a file under a name that carries its hash, as a checkpoint's does."""
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}.safetensors"
    path.write_bytes(data)
    return path


def refused(path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- round trip ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [TINY, replace(TINY, mixer_depth=0, mlp_depth=3), PAPER, replace(PAPER, retrieval="lal")],
    ids=["carriers", "no mixer", "paper", "lal"],
)
def test_round_trip(tmp_path, config):
    model = local_model(config)
    path = save_checkpoint(model, tmp_path / "new" / "folder", "mine", {"step": "7"})
    assert path.name == f"mine-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.safetensors"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    loaded = load_checkpoint(path)
    assert loaded.name == path.stem
    assert loaded.model.config == config
    assert not loaded.model.training
    for name, value in loaded.model.state_dict().items():
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert torch.equal(value, tensors_of(model)[name].float()), name
    assert loaded.decoder_sha256 == decoder_sha256(config, tensors_of(model))


def test_saving_is_deterministic(tmp_path):
    """Again and again, since safetensors itself writes notes in random order."""
    notes = {"step": "7", "a": "b", "c": "d"}
    paths = [save_checkpoint(local_model(), tmp_path / str(i), "x", notes) for i in range(5)]
    assert len({path.name for path in paths}) == 1
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"config": TINY.to_json(), **notes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_load(tmp_path, dtype):
    tensors = {name: value.to(dtype).clone() for name, value in local_model().state_dict().items()}  # none shared
    loaded = load_checkpoint(write(tmp_path, save(tensors, {"config": TINY.to_json()})))
    assert torch.equal(loaded.model.state_dict()["decoder.base"], tensors["decoder.base"].float())


def test_diverged_weights_are_not_saved(tmp_path):
    model = local_model()
    with torch.no_grad():
        model.encoder.queries[0, 0] = 1e5  # beyond half precision
    with pytest.raises(CheckpointError, match=r"encoder\.queries"):
        save_checkpoint(model, tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


# --- identity -----------------------------------------------------------------------------------------------------


def test_decoder_hash_is_independent_of_the_encoder():
    tensors = tensors_of(local_model())
    before = decoder_sha256(TINY, tensors)
    other = {name: value + 1 if name.startswith("encoder.") else value for name, value in tensors.items()}
    assert decoder_sha256(TINY, other) == before
    assert decoder_sha256(replace(TINY, depth=3, width=32, heads=1), tensors) == before


@pytest.mark.parametrize(
    ("config", "name"),
    [(c, name) for c in (TINY, PAPER) for name in local_model(c).state_dict() if name.startswith("decoder.")],
    ids=lambda v: v if isinstance(v, str) else "carriers" if v.carriers else "paper",
)
def test_decoder_hash_depends_on_each_of_its_weights(config, name):
    tensors = tensors_of(local_model(config))
    before = decoder_sha256(config, tensors)
    changed = tensors[name].clone()
    changed.view(-1)[-1] += 0.125
    assert decoder_sha256(config, {**tensors, name: changed}) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 4},
        {"cell": 64},
        {"grid": (3, 2, 1)},
        {"temperature": 0.5},
        {"carriers": 0},
        {"carriers": 40},
        {"mixer_depth": 2},
        {"mixer_width": 64},
        {"carriers": 0, "retrieval": "lal"},
        {"lal_threshold": 0.01},
        {"decoder_heads": 4, "decoder_head_dim": 32},
    ],
    ids=str,
)
def test_decoder_hash_depends_on_how_the_decoder_computes(changes):
    """Also where the shapes of the weights stay the same."""
    tensors = tensors_of(local_model())
    assert decoder_sha256(replace(TINY, **changes), tensors) != decoder_sha256(TINY, tensors)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_missing_file_and_folder(tmp_path):
    refused(tmp_path / "x-01234567.safetensors", "No such file")
    refused(tmp_path, "Is a directory")


def test_renamed_damaged_truncated(tmp_path, checkpoint_path):
    data = checkpoint_path.read_bytes()
    renamed = tmp_path / "renamed.safetensors"
    renamed.write_bytes(data)
    refused(renamed, f"renamed-{checkpoint_path.stem[-8:]}")
    path = tmp_path / checkpoint_path.name
    for damaged in (data[:-1], data[:100], data + b"\0", data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], b""):
        path.write_bytes(damaged)
        refused(path, "damaged or renamed")


def test_truncated_or_damaged_with_a_hash_that_fits(tmp_path, checkpoint_path):
    data = checkpoint_path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for damaged in (b"", data[:7], data[:8], data[:100], data[: 8 + length], data[:-1], data + b"\0"):
        refused(write(tmp_path, damaged), "not a coanerv checkpoint")
    for hostile in (b"\xff" * 8 + data[8:], struct.pack("<Q", 2**40) + data[8:], data[:8] + b"[" * length):
        refused(write(tmp_path, hostile), "not a coanerv checkpoint")


def test_a_file_of_any_size_is_not_read_into_memory(tmp_path):
    huge = tmp_path / "x-00000000.safetensors"
    with huge.open("wb") as file:
        file.truncate(2**40)  # sparse: takes no room on the disk
    refused(huge, "a checkpoint has at most")


def test_not_safetensors(tmp_path):
    refused(write(tmp_path, b"This is a text file, not weights.\n" * 10), "not a coanerv checkpoint")
    code = write(tmp_path, b"")
    torch.save(local_model().state_dict(), code)  # a pickle, which could run code
    refused(code.rename(code.with_name(f"x-{hashlib.sha256(code.read_bytes()).hexdigest()[:8]}.safetensors")), "not a")


def test_missing_or_wrong_configuration(tmp_path):
    tensors = tensors_of(local_model())
    refused(write(tmp_path, save(tensors)), "no configuration")
    refused(write(tmp_path, save(tensors, {"step": "7"})), "no configuration")
    for config in ("", "{}}", "[]", "[" * 100_000, '{"grid": 5}', '{"temperature": 1' + "0" * 400 + "}", '{"new": 1}'):
        refused(write(tmp_path, save(tensors, {"config": config})), "not a coanerv checkpoint")


def test_tensors_that_do_not_fit_the_configuration(tmp_path):
    tensors, metadata = tensors_of(local_model()), {"config": TINY.to_json()}
    wrong = {
        "decoder.base": {**tensors, "decoder.base": tensors["decoder.base"][:-1].contiguous()},
        "encoder.queries": {**tensors, "encoder.queries": tensors["encoder.queries"].T.contiguous()},
        "decoder.value.weight": {k: v for k, v in tensors.items() if k != "decoder.value.weight"},
        "extra": {**tensors, "extra": torch.zeros(1)},
        "decoder.mix.bias": {**tensors, "decoder.mix.bias": torch.zeros(32, dtype=torch.int32)},
        "decoder.mix.weight": {**tensors, "decoder.mix.weight": tensors["decoder.mix.weight"].double()},
        "decoder.harmonics": {k: v for k, v in tensors.items() if k != "decoder.harmonics"},
    }
    for name, changed in wrong.items():
        refused(write(tmp_path, save(changed, metadata)), name)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("decoder.sets", TINY.carriers, "other numbers than 0 to 175"),
        ("decoder.sets", -1.0, "other numbers than 0 to 175"),
        ("decoder.sets", 1.5, "other numbers than 0 to 175"),
        ("encoder.analysis.sets", 2000.0, "other numbers than 0 to 175"),
        ("encoder.analysis.space_of", 240.0, "other numbers than 0 to 239"),
        ("decoder.sets", None, "names a carrier twice"),
        ("decoder.sets", "swap", "different sets of carriers"),
        ("decoder.gain", 0.5, "different gains"),
        ("gain", 2 * MOST_GAIN, "beyond"),
        ("gain", -2 * MOST_GAIN, "beyond"),
    ],
)
def test_numbers_of_carriers_that_there_are_not(tmp_path, name, value, problem):
    """They are indices: out of range they would end in a traceback while decoding. Gains are one thing in two places."""
    tensors = tensors_of(local_model())
    for key in ("decoder.gain", "encoder.gain") if name == "gain" else (name,):
        flat = tensors[key].view(-1)
        if value == "swap":
            flat[:2] = flat[:2].flip(0)
        else:
            flat[0] = flat[1] if value is None else value
    refused(write(tmp_path, save(tensors, {"config": TINY.to_json()})), problem)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["decoder.mlp.0.weight", "encoder.queries"])
def test_weights_that_are_not_finite(tmp_path, name, value):
    tensors = tensors_of(local_model())
    tensors[name].view(-1)[3] = value
    refused(write(tmp_path, save(tensors, {"config": TINY.to_json()})), f"{name} holds values that are not finite")


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 65536, "feed_forward": 65536, "heads": 65536, "head_dim": 65536},
        {"depth": 65536},
        {"depth": 64},
        {"mlp_depth": 65536},
        {"grid": [1024, 1024, 1024]},
        {"frames": 65536, "cell": 65536, "patch": 1},
        {"frequencies": 10920, "token_dim": 65520, "mlp_hidden": 65536},
        {"carriers": 65536, "mixer_width": 65536, "mixer_depth": 64},
        {"cell": 65536, "patch": 65536, "frames": 65536, "frequencies": 10920, "token_dim": 65520},
        {"cell": 65536, "patch": 65536, "grid": [1023, 1023, 1]},
    ],
    ids=str,
)
def test_hostile_configurations_are_refused_without_memory_for_them(tmp_path, monkeypatch, changes):
    path = write(tmp_path, save(tensors_of(local_model()), {"config": json.dumps({**vars(TINY), **changes})}))
    devices = []
    monkeypatch.setattr(module, "CoANeRV", lambda c: devices.append(torch.empty(0).device.type) or CoANeRV(c))
    refused(path, "not a coanerv checkpoint")
    assert devices in ([], ["meta"])


# --- finding ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of shipped checkpoints of our own."""
    monkeypatch.setattr(module, "weights_folder", lambda: tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("a-00000000", "b-11111111"):
        (tmp_path / f"{name}.safetensors").touch()
    return tmp_path


def test_explicit_path_before_variable_before_shipped(shipped, monkeypatch, tmp_path):
    assert find_checkpoint().stem == "a-00000000"
    (shipped / "default.txt").write_text("b-11111111\n")
    assert find_checkpoint().stem == "b-11111111"
    assert find_checkpoint(wanted="a-00000000").stem == "a-00000000"
    monkeypatch.setenv(VARIABLE, "/elsewhere/c.safetensors")
    assert str(find_checkpoint(wanted="a-00000000")) == "/elsewhere/c.safetensors"
    assert find_checkpoint(tmp_path / "d", wanted="a-00000000") == tmp_path / "d"
    monkeypatch.setenv(VARIABLE, "")
    assert find_checkpoint().stem == "b-11111111"


def test_what_is_not_shipped_is_asked_for(shipped):
    with pytest.raises(CheckpointError, match=rf"needs checkpoint 'z-22222222'.*--checkpoint PATH or \${VARIABLE}"):
        find_checkpoint(wanted="z-22222222")
    for path in shipped.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*--checkpoint PATH"):
        find_checkpoint()


def test_weights_folder_is_the_one_of_this_checkout():
    assert (weights_folder() / "README.md").exists()


def test_config_survives_a_checkpoint_made_before_a_field_existed(tmp_path):
    """Fields left out of the metadata mean what they meant before: the default."""
    new = ("carriers", "mixer_depth", "mixer_width")
    old = {k: v for k, v in json.loads(PAPER.to_json()).items() if k not in new}
    loaded = load_checkpoint(write(tmp_path, save(tensors_of(local_model(PAPER)), {"config": json.dumps(old)})))
    assert loaded.model.config == PAPER


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    """As those with `gamma_skip` are, which this version does not know."""
    other = json.loads(PAPER.to_json()) | {"gamma_skip": True}
    path = write(tmp_path, save(tensors_of(local_model(PAPER)), {"config": json.dumps(other)}))
    refused(path, "unknown configuration field 'gamma_skip'")


def test_harmonics_are_stored_and_survive_half_precision(tmp_path):
    """Also those of base, which have to be whole numbers: half precision holds them up to 2048."""
    for name in ("base", "tiny"):
        model = local_model(PRESETS[name])
        path = save_checkpoint(model, tmp_path, name)
        with safe_open(path, "pt") as file:
            stored = file.get_tensor("decoder.harmonics")
        assert stored.dtype == torch.float16
        assert torch.equal(stored.float(), model.decoder.harmonics)
        loaded = load_checkpoint(path).model.decoder
        assert torch.equal(loaded.harmonics, loaded.harmonics.round())
        assert torch.equal(loaded.signs(), model.decoder.signs())
        assert loaded.harmonics.amax() > 1
