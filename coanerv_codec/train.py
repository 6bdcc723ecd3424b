"""Training: a loop that can be killed at any moment and resumed.

A run lives in one folder: `state.safetensors` (run_state.py) and `log.jsonl` (run_log.py).
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from coanerv_codec.config import Config
from coanerv_codec.corpus import Corpus
from coanerv_codec.device import has_fast_bf16
from coanerv_codec.errors import CoanervError, InputError, ProcessLostError
from coanerv_codec.loss import validate
from coanerv_codec.model import CoANeRV
from coanerv_codec.recipe import Recipe, learning_rate
from coanerv_codec.run_log import LOG, RunLog
from coanerv_codec.run_state import BEFORE_DECAY, STATE, State, load_state, new_state, open_run, save_state
from coanerv_codec.training_cells import Batch, Cells, centre_cells, load_steps

CPU = torch.device("cpu")


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


@contextmanager
def absence_explained() -> Iterator[None]:
    """Turn what torch says when another process is gone into an error of ours."""
    try:
        yield
    except RuntimeError as error:  # nothing finer: only the text tells what it was
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        message = "another process of the training is gone; --resume goes on from its last state"
        raise ProcessLostError(message) from error


def across(values: list[float], world: int, largest: bool = False) -> list[float]:
    """Add up (or take the largest of) values over all processes."""
    if world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return tensor.tolist()


class Meter:
    """Means over the steps since the last record, and where their time went."""

    def __init__(self) -> None:
        self.sums, self.steps, self.waited, self.since = [0.0, 0.0, 0.0], 0, 0.0, time.monotonic()

    def count(self, values: tuple[float, float, float]) -> None:
        """Add what `train_step` gives."""
        self.sums = [a + b for a, b in zip(self.sums, values, strict=True)]
        self.steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = time.monotonic()
        yield
        self.waited += time.monotonic() - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        before = time.monotonic()
        yield
        self.since += time.monotonic() - before

    def record(self, batch: int, world: int) -> dict[str, float]:
        """Return the means over all processes."""
        loss, mse, bits = (v / (world * self.steps) for v in across(self.sums, world))
        seconds = time.monotonic() - self.since
        return {
            "loss": loss,
            "psnr": -10 * math.log10(max(mse, 1e-10)),
            "bits_per_pixel": bits,
            "cells_per_second": self.steps * batch / seconds,
            "waiting_for_data": self.waited / seconds,
        }


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
    with process_group(device) as (rank, world), absence_explained():
        if recipe.batch % world:
            raise InputError(f"a batch of {recipe.batch} cells cannot be shared evenly by {world} processes")
        state = load_state(path, config, recipe) if resume else new_state(config, recipe, init)
        state.loss.to(device), state.ema.to(device)
        forward = DistributedDataParallel(state.loss) if world > 1 else state.loss
        cells = Cells(corpus, config, recipe.seed, recipe.batch, recipe.bits, recipe.draws)
        trial = centre_cells(valid, config) if valid else None
        records = RunLog(run / LOG, state.step) if rank == 0 else None
        meter, saved, stopping = Meter(), time.monotonic(), False
        batches = load_steps(cells, state.step, rank, world, workers)
        try:
            while state.step < recipe.steps and not stopping:
                with meter.waiting():
                    batch = next(batches).to(device)
                meter.count(train_step(state, forward, batch, recipe))
                record: dict[str, float] = {}
                if state.step % log_every == 0 or state.step == recipe.steps:
                    record |= meter.record(recipe.batch, world) | {"lr": learning_rate(recipe, state.step)}
                    meter = Meter()
                if trial and (state.step % valid_every == 0 or state.step == recipe.steps):
                    with meter.paused():  # validation does not count as slow training
                        record |= _validate_together(state.ema, *trial, rank, world)
                asked = [stop(), time.monotonic() - saved > save_seconds]
                stopping, due = map(bool, across(asked, world, largest=True))
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
