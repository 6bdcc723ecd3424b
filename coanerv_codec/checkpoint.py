"""Checkpoints: safetensors files with the configuration in their metadata, checked before anything is allocated.

A file is called `<preset>-<8 hex digits>.safetensors`, the digits being the start of its SHA-256. A `.coa` file is bound to the
*decoder's* SHA-256, so that a better encoder for the same decoder stays compatible.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coanerv_codec.atomic import make_folder, write_whole
from coanerv_codec.carriers import MOST_GAIN
from coanerv_codec.config import Config
from coanerv_codec.errors import CheckpointError
from coanerv_codec.model import CoANeRV

SUFFIX = ".safetensors"
VARIABLE = "COANERV_CHECKPOINT"
MAX_BYTES = 2**31  # the paper's largest model takes a tenth; a sparse file may claim any size
_NAME = re.compile(r"-([0-9a-f]{8})$")
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model (float32, evaluation mode) and its identity."""

    name: str
    model: CoANeRV
    decoder_sha256: bytes


def decoder_sha256(config: Config, tensors: dict[str, Tensor]) -> bytes:
    """Hash what a decoder computes with: its shape parameters and its weights as stored, in the order of their names."""
    digest = hashlib.sha256()
    fields = (
        *(config.frames, config.cell, config.grid, config.token_dim, config.frequencies),
        *(config.decoder_heads, config.decoder_head_dim, config.temperature, config.mlp_depth, config.mlp_hidden),
        *(config.retrieval, config.lal_threshold),
        # False stands for an option that is gone: what computes the same as before keeps its identity.
        *((config.carriers, config.mixer_depth, config.mixer_width) if config.carriers else (False,)),
    )
    digest.update(repr(fields).encode())
    for name in sorted(n for n in tensors if n.startswith("decoder.")):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def save_checkpoint(model: CoANeRV, folder: Path, preset: str, notes: dict[str, str] | None = None) -> Path:
    """Write the weights in half precision under a name that carries their hash; returns the path."""
    tensors = {k: _stored(k, v.detach()).cpu().contiguous() for k, v in model.state_dict().items()}
    if bad := [k for k, v in tensors.items() if not torch.isfinite(v).all()]:
        raise CheckpointError(f"{bad[0]} has values that half precision cannot hold; the run has diverged")
    data = _in_order(save(tensors, {"config": model.config.to_json(), **(notes or {})}))
    make_folder(folder)
    path = folder / f"{preset}-{hashlib.sha256(data).hexdigest()[:8]}{SUFFIX}"
    write_whole(path, data)
    return path


def _in_order(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which the library writes in random order: equal weights have one name."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _stored(name: str, tensor: Tensor) -> Tensor:
    """Half precision, but for the keys of carriers: attention's narrow windows are small differences of large logits."""
    return tensor.float() if name in ("decoder.key_x", "decoder.key_y") else tensor.half()


def load_checkpoint(path: Path) -> Checkpoint:
    """Load and verify a checkpoint: hash in the name, configuration, then every shape and dtype, then the data."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; a checkpoint has at most {MAX_BYTES}")
        with path.open("rb") as file:
            data_hash = hashlib.file_digest(file, "sha256").hexdigest()
        match = _NAME.search(path.stem)
        if not match:
            raise CheckpointError(
                f"{path}: the name must end in the file's hash, as in {path.stem}-{data_hash[:8]}{SUFFIX}"
            )
        if not data_hash.startswith(match[1]):
            raise CheckpointError(
                f"{path} is damaged or renamed: its SHA-256 starts with {data_hash[:8]}, not {match[1]}"
            )
        config, tensors = _read(path)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a coanerv checkpoint: {error}") from error
    model = CoANeRV(config)
    model.load_state_dict({k: v.float() for k, v in tensors.items()})
    return Checkpoint(path.stem, model.eval().requires_grad_(False), decoder_sha256(config, tensors))


def _read(path: Path) -> tuple[Config, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise ValueError("no configuration in its metadata")
        config = Config.from_json(metadata["config"])
        try:
            with torch.device("meta"):  # shapes without memory, whatever the configuration says
                expected = {k: tuple(v.shape) for k, v in CoANeRV(config).state_dict().items()}
        except RuntimeError as error:  # a product of sizes that overflows
            raise ValueError(f"its configuration makes no model: {str(error).splitlines()[0]}") from error
        names = set(file.keys())
        if names != set(expected):
            raise ValueError(
                f"unexpected or missing tensor {sorted(names ^ set(expected))[0]!r}; another version may have made it"
            )
        for name, shape in expected.items():
            found = file.get_slice(name)
            if tuple(found.get_shape()) != shape or found.get_dtype() not in _DTYPES:
                raise ValueError(f"{name} is {found.get_dtype()} {found.get_shape()}, not floating point {list(shape)}")
        tensors = {name: file.get_tensor(name) for name in expected}
    if bad := [k for k, v in tensors.items() if not torch.isfinite(v).all()]:
        raise ValueError(f"{bad[0]} holds values that are not finite")
    if config.carriers:
        _check_numbers(config, tensors)
    return config, tensors


def _check_numbers(config: Config, tensors: dict[str, Tensor]) -> None:
    """Refuse numbers of carriers or functions that there are not, and a carrier that a set has twice."""
    functions = config.luma_functions + config.chroma_functions
    limits = {"decoder.sets": config.carriers, "encoder.analysis.sets": config.carriers}
    for name, limit in (limits | {"encoder.analysis.space_of": functions}).items():
        numbers = tensors[name].float()
        if not ((numbers >= 0) & (numbers < limit) & (numbers == numbers.round())).all():
            raise ValueError(f"{name} holds other numbers than 0 to {limit - 1}")
        if name in limits and (numbers.flatten(1).sort(1).values.diff(dim=1) == 0).any():
            raise ValueError(f"{name} names a carrier twice in one set")
    if not torch.equal(tensors["decoder.sets"].float(), tensors["encoder.analysis.sets"].float()):
        raise ValueError("its encoder and its decoder have different sets of carriers")
    if not torch.equal(tensors["decoder.gain"].float(), tensors["encoder.gain"].float()):
        raise ValueError("its encoder and its decoder have different gains")
    if tensors["decoder.gain"].abs().max() > MOST_GAIN:
        raise ValueError(f"it has gains beyond {MOST_GAIN} in size, which cannot be computed with")


def weights_folder() -> Path:
    """Return the folder of shipped checkpoints: package data when installed, `weights/` beside the package in a checkout."""
    try:
        return Path(str(resources.files("coanerv_codec.weights")))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / "weights"


def find_checkpoint(explicit: Path | None = None, wanted: str | None = None) -> Path:
    """Return the checkpoint to use: the explicit path, $COANERV_CHECKPOINT, the one `wanted` by name, or the default."""
    if explicit is not None:
        return explicit
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    folder = weights_folder()
    shipped = sorted(folder.glob(f"*{SUFFIX}"))
    if wanted is not None:
        for path in shipped:
            if path.stem == wanted:
                return path
        raise CheckpointError(
            f"the file needs checkpoint {wanted!r}, which is not in {folder}; give it with --checkpoint PATH or ${VARIABLE}"
        )
    default = (folder / "default.txt").read_text().strip() if (folder / "default.txt").exists() else None
    for path in shipped:
        if default in (None, path.stem):
            return path
    raise CheckpointError(f"no checkpoint in {folder}; give one with --checkpoint PATH or ${VARIABLE}")
