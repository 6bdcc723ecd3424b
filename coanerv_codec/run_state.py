"""The state of a training run, `state.safetensors` in its folder: weights, their average, optimizers, step."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from coanerv_codec.atomic import make_folder, write_whole
from coanerv_codec.checkpoint import save_checkpoint
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.errors import CheckpointError, InputError
from coanerv_codec.lapped_start import choose_waves, set_functions, set_waves
from coanerv_codec.local_start import start_local
from coanerv_codec.loss import TrainingLoss
from coanerv_codec.model import CoANeRV
from coanerv_codec.muon import Muon
from coanerv_codec.recipe import Recipe

STATE = "state.safetensors"
BEFORE_DECAY = "before-decay.safetensors"


def make_optimizers(loss: TrainingLoss, recipe: Recipe) -> dict[str, torch.optim.Optimizer]:
    """Muon for the token former's matrices (if asked for), AdamW for everything else."""
    matrices, rest = [], []
    for name, p in loss.named_parameters():
        muon = recipe.optimizer == "muon" and name.startswith("model.encoder.blocks.") and p.ndim == 2
        (matrices if muon else rest).append(p)
    betas = (0.9, 0.999) if recipe.schedule == "paper" else (0.9, 0.98)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(rest, lr=recipe.lr, weight_decay=recipe.weight_decay, betas=betas, foreach=True)
    }
    if matrices:
        optimizers["muon"] = Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return optimizers


@dataclass
class State:
    """Everything a run needs to go on: the step and all tensors."""

    loss: TrainingLoss
    ema: CoANeRV
    optimizers: dict[str, torch.optim.Optimizer]
    step: int = 0


def new_state(config: Config, recipe: Recipe, init: CoANeRV | None = None) -> State:
    """Build a model with the recipe's start, or from given weights."""
    torch.manual_seed(recipe.seed)
    model = CoANeRV(config)
    if init is not None:
        model.load_state_dict(init.state_dict())
    elif recipe.start == "local":
        start_local(model, torch.Generator().manual_seed(recipe.seed))
    elif config.carriers:
        waves = choose_waves(config)
        set_waves(model.decoder, *waves)
        set_functions(model.encoder.analysis, *waves)
        for functions in (model.encoder.analysis.luma, model.encoder.analysis.chroma, model.encoder.analysis.time):
            nn.init.normal_(functions)  # products of them, so that from zero none would ever learn
    ema = CoANeRV(config).requires_grad_(False)
    ema.load_state_dict(model.state_dict())
    loss = TrainingLoss(model, recipe)
    return State(loss, ema, make_optimizers(loss, recipe))


def save_state(state: State, path: Path, recipe: Recipe) -> None:
    """Write the state atomically."""
    tensors = {f"loss.{k}": v for k, v in state.loss.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in state.ema.state_dict().items()}
    for name, optimizer in state.optimizers.items():
        for index, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{name}.{index}.{slot}": torch.as_tensor(value) for slot, value in slots.items()}
    metadata = {
        "step": str(state.step),
        "config": state.loss.model.config.to_json(),
        "recipe": json.dumps(asdict(recipe)),
    }
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    # Not `save_file`, which a kill makes leave a file of its own behind.
    write_whole(path, save(tensors, metadata | {"sha256": _digest(tensors, metadata)}))


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Return the SHA-256 of all that a state holds."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_settings(path: Path) -> tuple[Config, Recipe]:
    """Return the configuration and the recipe of the run that wrote a state."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        recipe = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(metadata["recipe"]).items()}
        return Config.from_json(metadata["config"]), Recipe(**recipe)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be used, it is damaged: {' '.join(str(error).split())}") from error


def load_state(path: Path, config: Config, recipe: Recipe) -> State:
    """Read what `save_state` wrote; the configuration must be the same, the recipe may differ."""
    state = new_state(config, recipe)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            if Config.from_json(metadata["config"]) != config:
                raise CheckpointError(f"{path} was trained with another configuration; resume with the same --preset")
            if json.loads(metadata["recipe"])["optimizer"] != recipe.optimizer:
                raise CheckpointError(f"{path} was trained with another optimizer; resume with the same one")
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
        stored = metadata.pop("sha256", None)  # states of early versions have none
        if stored is not None and stored != _digest(tensors, metadata):
            raise ValueError("its SHA-256 is not the one it had when it was written")
        state.step = int(metadata["step"])
        _fill_state(state, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be used, it is damaged: {' '.join(str(error).split())}") from error
    return state


def _fill_state(state: State, tensors: dict[str, Tensor]) -> None:
    part = {
        k: {n.removeprefix(f"{k}."): v for n, v in tensors.items() if n.startswith(f"{k}.")} for k in ("loss", "ema")
    }
    state.loss.load_state_dict(part["loss"])
    state.ema.load_state_dict(part["ema"])
    for name, optimizer in state.optimizers.items():
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{name}."):
                index, slot = key.split(".")[2:]
                slots.setdefault(int(index), {})[slot] = value
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def open_run(run: Path, resume: bool) -> None:
    """Make a run's folder, or see that there is a run to go on with."""
    path = run / STATE
    if resume and not path.exists():
        raise InputError(f"nothing to resume: {path} does not exist")
    if not resume and path.exists():
        raise InputError(f"{run} holds a run already; continue it with --resume, or choose another --out")
    make_folder(run)


def export(run: Path, folder: Path, preset: str | None = None) -> Path:
    """Write the averaged weights of a run as a checkpoint into `folder`, named after its preset; returns its path."""
    if not (run / STATE).exists():
        raise CheckpointError(f"nothing to export: {run / STATE} does not exist")
    config, recipe = read_settings(run / STATE)
    state = load_state(run / STATE, config, recipe)
    preset = preset or next((name for name, known in PRESETS.items() if known == config), "custom")
    return save_checkpoint(state.ema, folder, preset, {"step": str(state.step)})
