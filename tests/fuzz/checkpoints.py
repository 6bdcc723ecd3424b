"""Mutants of checkpoints: safetensors files with hostile headers and configurations, under names whose hashes fit."""

import hashlib
import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path

import mutate
import numpy as np
import torch
from safetensors.torch import save

from coanerv_codec.checkpoint import load_checkpoint, save_checkpoint
from coanerv_codec.config import Config
from coanerv_codec.encoding import encode_cells
from coanerv_codec.errors import CheckpointError
from coanerv_codec.model import CoANeRV

torch.set_num_threads(1)

CONFIG = Config(
    frames=2, cell=8, grid=(2, 1, 1), token_dim=18, frequencies=3, patch=8, width=8, heads=1, head_dim=8, depth=1,
    feed_forward=8, decoder_heads=1, decoder_head_dim=8, mlp_hidden=8,
)  # fmt: skip
CARRIERS = Config(
    frames=2, cell=8, grid=(2, 2, 1), token_dim=18, frequencies=3, patch=8, width=8, heads=1, head_dim=8, depth=1,
    feed_forward=8, decoder_heads=1, mlp_hidden=8, carriers=24, switches=2, luma_functions=4, chroma_functions=4,
    mixer_depth=1, mixer_width=32,
)  # fmt: skip
VALUES = (0, 1, -1, 2, 3, 64, 65, 1024, 65536, 65537, 2**31, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, 1e-320, math.nan,
          math.inf, -math.inf, True, False, None, "", "8", "lal", [], [1], {}, {"a": 1}, [2, 1, 1], [1024, 1024, 1024],
          [10**9] * 3, [[]])  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16", "I8", "U8", "BOOL", "I64", "F8_E4M3", "f32", "", None, 5)
DEEP = 100_000


def _model(config: Config = CONFIG) -> CoANeRV:
    """Weights that half precision holds exactly, so that the hash in a regression file fits on every machine."""
    model = CoANeRV(config)
    for value in model.state_dict().values():
        value.copy_((torch.arange(value.numel()) * 37 % 64 - 32).reshape(value.shape) / 64)
    if config.carriers:
        model.encoder.analysis.space_of.copy_(torch.arange(config.carriers) % config.luma_functions)
        for sets in (model.encoder.analysis.sets, model.decoder.sets):
            sets.copy_(torch.arange(config.carriers).expand(config.sets, -1).view_as(sets))
    return model


def tiny(folder: Path, config: Config = CONFIG) -> Path:
    """Write the smallest checkpoint there is."""
    return save_checkpoint(_model(config), folder, "fuzz")


def identity(path: Path) -> tuple[str, bytes]:
    """A checkpoint's name and its decoder's hash, as a header holds them."""
    loaded = load_checkpoint(path)
    return loaded.name, loaded.decoder_sha256


class Loader:
    """Target: load the checkpoint from a file whose name holds its hash, and encode a cell with it."""

    def __init__(self, folder: Path):
        self.folder = folder
        load_checkpoint(tiny(folder))  # torch imports much at its first model, for which no mutant is to blame

    def __call__(self, data: bytes, rng: random.Random) -> str:
        path = self.folder / f"x-{hashlib.sha256(data).hexdigest()[:8]}.safetensors"
        path.write_bytes(data)
        try:
            loaded = load_checkpoint(path)
            config = loaded.model.config
            if config.frames * config.cell**2 <= 2**16:
                cell = np.full((config.frames, 3, config.cell, config.cell), 0.25, np.float32)
                encode_cells(loaded.model.encoder, [cell])
        except CheckpointError:
            return "refused"
        finally:
            path.unlink()
        finite = all(torch.isfinite(v).all() for v in loaded.model.state_dict().values())
        if not finite or len(loaded.decoder_sha256) != 32:
            raise AssertionError("a loaded checkpoint is finite and has an identity")
        return "accepted"


def mutants() -> Callable[[random.Random], tuple[bytes, str]]:
    """Mutants of the bytes, of the header's JSON, and of the configuration in it, of both kinds of decoder."""
    whole = []
    for config in (CONFIG, CARRIERS):
        tensors = {k: v.detach().half().clone() for k, v in _model(config).state_dict().items()}
        whole.append(save(tensors, {"config": config.to_json()}))

    def make(rng: random.Random) -> tuple[bytes, str]:
        data = rng.choice(whole)
        (length,) = struct.unpack_from("<Q", data)
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        choice = rng.random()
        if choice < 0.15:
            return mutate.raw(data, data, rng), "raw bytes"
        if choice < 0.25:
            return struct.pack("<Q", rng.choice(mutate.NUMBERS)) + data[8:], "header length"
        if choice < 0.35:
            return data[: 8 + length] + mutate.raw(body, body, rng), "weights"
        changed = header
        if choice < 0.65:
            _change_config(changed, rng)
            how = "configuration"
        else:
            _change_tensors(changed, rng)
            how = "tensors"
        text = json.dumps(changed).encode()
        if rng.random() < 0.05:  # what json.dumps cannot make
            deep = rng.choice((b"[", b'{"a":')) * DEEP
            text = rng.choice((deep, text[:-1] + b', "deep": ' + deep, text[:-1] + b"," + text[1:], text + b"\0"))
            how = "JSON text"
        return struct.pack("<Q", len(text)) + text + body, how

    return make


def _change_config(header: dict, rng: random.Random) -> None:
    if rng.random() < 0.1:
        deep = rng.choice(("[", '{"a":')) * DEEP
        odd = ("", "null", "[]", "7", "{", deep, '{"width": ' + "9" * 5000 + "}", '{"frames": ' + deep, "\0", '"x"')
        header["__metadata__"] = rng.choice(({}, *({"config": text} for text in odd)))
        return
    config = json.loads(header["__metadata__"]["config"])
    for _ in range(rng.choice((1, 1, 2, 3))):
        config[rng.choice((*config, "unknown"))] = rng.choice(VALUES)
    header["__metadata__"]["config"] = json.dumps(config)


def _change_tensors(header: dict, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        span = (
            entry.get("data_offsets") if isinstance(entry, dict) else None
        )  # an earlier round may have made it anything
        start, end = span if isinstance(span, list) and len(span) == 2 else (0, 0)
        match rng.randrange(8):
            case 0:
                del header[name]
            case 1:
                header["decoder.other" if rng.random() < 0.5 else "x" * 1000] = entry
            case 2:
                other = rng.choice([key for key in header if key != "__metadata__"])
                header[name], header[other] = header[other], header[name]
            case 3 if isinstance(entry, dict):
                entry["dtype"] = rng.choice(DTYPES)
            case 4 if isinstance(entry, dict):
                entry["shape"] = rng.choice(
                    ([], [0], [2**32, 2**32], [2**63], [-1], [1.5], ["8"], [[8]], None, [1] * 5000, [2**64])
                )
            case 5 | 6 if isinstance(entry, dict):
                number = rng.choice((*mutate.NUMBERS, -1, 1.5, "0", None))
                entry["data_offsets"] = rng.choice(
                    ([start, number], [number, end], [end, start], [0, end], [start], [number, number], "x")
                )
            case _:
                header[name] = rng.choice(VALUES)
