"""Training: the loss, the schedule, and a loop that can be killed at any moment and resumed.

A run lives in one folder: `state.safetensors` (weights, their average, optimizers, step) and `log.jsonl`.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from coanerv_codec.atomic import write_whole
from coanerv_codec.bank import encode_bank
from coanerv_codec.checkpoint import save_checkpoint
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.corpus import Batch, Cells, Corpus, centre_cells, load_steps
from coanerv_codec.device import has_fast_bf16
from coanerv_codec.encoding import widen_switches
from coanerv_codec.errors import CheckpointError, CoanervError, InputError, OutputError
from coanerv_codec.lapped_start import choose_waves, set_functions, set_waves
from coanerv_codec.local_start import start_local
from coanerv_codec.model import CoANeRV
from coanerv_codec.muon import Muon
from coanerv_codec.positions import cell_positions, frame_times
from coanerv_codec.quantizer import dequantize, quantize
from coanerv_codec.rate import BANK_CELLS, amplitudes_modes, estimated_bits
from coanerv_codec.recipe import Recipe, learning_rate
from coanerv_codec.rounding import quantized

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
STATE = "state.safetensors"
BEFORE_DECAY = "before-decay.safetensors"
VALID_POSITIONS = 1024  # per cell, each in all frames
RATE_BITS = 6  # the default --bits, at which the rate is counted


# --- loss ---------------------------------------------------------------------------------------------------------


def quantizer_range(tokens: Tensor) -> Tensor:
    """Tokens [B,N,d] -> max - min over each bank of BANK_CELLS cells, [B,1,1], with its gradient.

    The gradient matters: it teaches the encoder not to buy one extreme value with a coarser step for all others.
    """
    size = math.gcd(BANK_CELLS, len(tokens))
    banks = tokens.unflatten(0, (-1, size)).flatten(1)
    return (banks.amax(1) - banks.amin(1)).repeat_interleave(size)[:, None, None]


class TrainingLoss(nn.Module):
    """The model and its loss as one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(self, model: CoANeRV, recipe: Recipe):
        super().__init__()
        self.model, self.recipe = model, recipe
        self.register_buffer("xy", cell_positions(model.config.cell), persistent=False)
        self.register_buffer("t", frame_times(model.config.frames), persistent=False)

    def forward(self, batch: Batch, rate_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, mean squared error per cell [B] and bits per pixel per cell [B]."""
        clips, c = batch.clips.float() / 255, self.model.config
        tokens = self.model.encoder(clips).float()
        extent = quantizer_range(tokens)
        amplitudes, switches = tokens.split([c.amplitudes, c.token_dim - c.amplitudes], dim=-1)
        # `widen_switches` sees to it that those of a file are never rounded to another sign.
        stored = torch.cat([quantized(amplitudes, extent / (2.0 ** batch.bits[:, None, None] - 2)), switches], dim=-1)
        predicted = self.model.decoder.at(stored, self.xy[batch.positions], self.t)  # [B,F,Q,3]
        mse = (predicted - pixels_at(clips, batch.positions)).square().mean((1, 2, 3))
        bits = estimated_bits(*amplitudes_modes(tokens, c), extent / (2.0**RATE_BITS - 2))
        bits_per_pixel = bits / (len(self.xy) * len(self.t))
        # The root weighs easy and hard cells more evenly, which is what a mean of PSNRs asks for.
        distortion = mse.mean() if self.recipe.loss == "mse" else mse.add(1e-8).sqrt().mean()
        return distortion + rate_weight * bits_per_pixel.mean(), mse.detach(), bits_per_pixel.detach()


def pixels_at(clips: Tensor, positions: Tensor) -> Tensor:
    """Clips [B,F,3,S,S], positions [B,Q] into S*S -> their pixels [B,F,Q,3]."""
    index = positions[:, None, None].expand(-1, *clips.shape[1:3], -1)
    return clips.flatten(3).gather(3, index).transpose(2, 3)


# --- state --------------------------------------------------------------------------------------------------------


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


# --- the loop -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def validate(model: CoANeRV, clips: Tensor, owners: list[int]) -> tuple[float, float]:
    """Sum over videos of PSNR (a fixed part of the pixels, tokens quantized to RATE_BITS) and of the token bank in kilobytes.

    clips [n,F,3,S,S] uint8, owners [n] names the video of each. A guide while training; `evaluate` measures real files.
    """
    c, device = model.config, model.decoder.base.device
    asked = torch.randint(c.cell**2, (VALID_POSITIONS,), generator=torch.Generator().manual_seed(0))
    xy, t = cell_positions(c.cell)[asked].to(device), frame_times(c.frames).to(device)
    total_psnr = total_kilobytes = 0.0
    for owner in dict.fromkeys(owners):
        cells = clips[[i for i, o in enumerate(owners) if o == owner]].float() / 255
        found = model.encoder(cells.to(device)).cpu()
        if not found.isfinite().all():
            raise CoanervError("the run has diverged: its tokens are not finite; start it again with a smaller rate")
        symbols, z, s = quantize(widen_switches(found.numpy(), c.amplitudes), RATE_BITS)
        tokens = torch.from_numpy(dequantize(symbols, z, s)).to(device)
        predicted = model.decoder.at(tokens, xy.expand(len(cells), -1, -1), t).clamp(0, 1).cpu()
        mse = (predicted - pixels_at(cells, asked.expand(len(cells), -1))).square().mean().item()
        total_psnr -= 10 * math.log10(max(mse, 1e-10))
        total_kilobytes += len(encode_bank(symbols, RATE_BITS, z, s, hints=c.hints)) / 1000
    return total_psnr, total_kilobytes


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """Join the other processes that torchrun started, if it did; gives (rank, world)."""
    if "WORLD_SIZE" not in os.environ:
        yield 0, 1
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        distributed.destroy_process_group()


def across(values: list[float], world: int, largest: bool = False) -> list[float]:
    """Add up (or take the largest of) values over all processes."""
    if world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return tensor.tolist()


class RunLog:
    """`log.jsonl`, cut back to the step at which a run resumes, so that no part of the curve stands twice."""

    def __init__(self, path: Path, step: int):
        kept = [r for r in read_log(path) if r["step"] <= step] if path.exists() else []
        write_whole(path, "".join(json.dumps(r) + "\n" for r in kept))
        self.path = path

    def write(self, record: dict[str, float]) -> None:
        """Append one record."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({k: round(v, 7) for k, v in record.items()}) + "\n")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error


def read_log(path: Path) -> list[dict[str, float]]:
    """Read a log; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def train_step(state: State, forward: nn.Module, batch: Batch, recipe: Recipe) -> tuple[float, float, float]:
    """Take one optimizer step; returns the loss, the mean squared error and the bits per pixel of this rank's cells."""
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, state.step)
        optimizer.zero_grad(set_to_none=True)
    device = next(state.loss.parameters()).device
    bf16 = has_fast_bf16(device) if recipe.precision == "auto" else recipe.precision == "bf16"
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        loss, mse, bits = forward(batch, recipe.rate_lambda)
    if not loss.isfinite():
        raise CoanervError("the run has diverged: its loss is not finite; start it again with a smaller rate (lr)")
    loss.backward()
    nn.utils.clip_grad_norm_(state.loss.parameters(), recipe.clip)
    for optimizer in state.optimizers.values():
        optimizer.step()
    state.step += 1
    # The average forgets its start quickly at first, so that it is useful from the first validation on.
    keep = min(recipe.ema, (1 + state.step) / (10 + state.step))
    pairs = zip(state.ema.parameters(), state.loss.model.parameters(), strict=True)
    for average, p in pairs:
        average.lerp_(p.detach(), 1 - keep)
    return loss.item(), mse.mean().item(), bits.mean().item()


def open_run(run: Path, resume: bool) -> None:
    """Make a run's folder, or see that there is a run to go on with."""
    path = run / STATE
    if resume and not path.exists():
        raise InputError(f"nothing to resume: {path} does not exist")
    if not resume and path.exists():
        raise InputError(f"{run} holds a run already; continue it with --resume, or choose another --out")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{run}: cannot be made a folder: {error.strerror}") from error


def train(
    corpus: Corpus,
    valid: Corpus | None,
    config: Config,
    recipe: Recipe,
    run: Path,
    *,
    resume: bool = False,
    init: CoANeRV | None = None,
    device: torch.device = CPU,
    workers: int = 1,
    log_every: int = 20,
    valid_every: int = 250,
    save_seconds: float = 180.0,
    report: Callable[[dict[str, float]], None] = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train in folder `run` until recipe.steps, or until `stop()`; returns the step reached.

    `report` gets each log record; every process of a distributed run calls this function, the first one writes.
    """
    path = run / STATE
    open_run(run, resume)
    with process_group(device) as (rank, world):
        if recipe.batch % world:
            raise InputError(f"a batch of {recipe.batch} cells cannot be shared evenly by {world} processes")
        state = load_state(path, config, recipe) if resume else new_state(config, recipe, init)
        state.loss.to(device), state.ema.to(device)
        forward = DistributedDataParallel(state.loss) if world > 1 else state.loss
        cells = Cells(corpus, config, recipe.seed, recipe.batch, recipe.bits, recipe.draws)
        trial = centre_cells(valid, config) if valid else None
        records = RunLog(run / "log.jsonl", state.step) if rank == 0 else None
        sums, counted, waited, since, saved = [0.0, 0.0, 0.0], 0, 0.0, time.monotonic(), time.monotonic()
        batches = load_steps(cells, state.step, rank, world, workers)
        stopping = False
        try:
            while state.step < recipe.steps and not stopping:
                before = time.monotonic()
                batch = next(batches).to(device)
                waited += time.monotonic() - before
                sums = [a + b for a, b in zip(sums, train_step(state, forward, batch, recipe), strict=True)]
                counted += 1
                record: dict[str, float] = {}
                if state.step % log_every == 0 or state.step == recipe.steps:
                    loss, mse, bits = (v / (world * counted) for v in across(sums, world))
                    seconds = time.monotonic() - since
                    record |= {"loss": loss, "psnr": -10 * math.log10(max(mse, 1e-10)), "bits_per_pixel": bits}
                    record |= {
                        "lr": learning_rate(recipe, state.step),
                        "cells_per_second": counted * recipe.batch / seconds,
                    }
                    record |= {"waiting_for_data": waited / seconds}
                    sums, counted, waited, since = [0.0, 0.0, 0.0], 0, 0.0, time.monotonic()
                if trial and (state.step % valid_every == 0 or state.step == recipe.steps):
                    began = time.monotonic()
                    record |= _validate_together(state.ema, *trial, rank, world)
                    since += time.monotonic() - began  # so that validation does not count as slow training
                stopping, due = map(
                    bool, across([stop(), time.monotonic() - saved > save_seconds], world, largest=True)
                )
                if records:
                    if record:
                        records.write({"step": state.step, **record})
                        report({"step": state.step, **record})
                    if due or stopping or state.step == recipe.steps:
                        save_state(state, path, recipe)
                    if state.step == int((1 - recipe.decay) * recipe.steps):
                        save_state(state, run / BEFORE_DECAY, recipe)  # where a longer run can go on from
                if due:
                    saved = time.monotonic()
        finally:
            # Not when this function is left: DistributedDataParallel would then be the last to hold the process group, and take
            # it down with the interpreter's lock in hand, for which a thread of the group may wait for ever (torch 2.13).
            del forward
        return state.step


def _validate_together(model: CoANeRV, clips: Tensor, owners: list[int], rank: int, world: int) -> dict[str, float]:
    videos = sorted(set(owners))
    mine = [i for i, owner in enumerate(owners) if videos.index(owner) % world == rank]
    psnr, kilobytes = across(list(validate(model, clips[mine], [owners[i] for i in mine])), world)
    return {"valid_psnr": psnr / len(videos), "valid_kb": kilobytes / len(videos)}


def export(run: Path, folder: Path, preset: str | None = None) -> Path:
    """Write the averaged weights of a run as a checkpoint into `folder`, named after its preset; returns its path."""
    if not (run / STATE).exists():
        raise CheckpointError(f"nothing to export: {run / STATE} does not exist")
    config, recipe = read_settings(run / STATE)
    state = load_state(run / STATE, config, recipe)
    preset = preset or next((name for name, known in PRESETS.items() if known == config), "custom")
    return save_checkpoint(state.ema, folder, preset, {"step": str(state.step)})
