"""`coanerv train`."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from coanerv_codec.config import PRESETS

PATIENCE = 10  # seconds that the others get to end when one process has failed


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder of videos (and photos) to train on.")
@click.option(
    "--valid", type=click.Path(path_type=Path), help="Folder to validate on [default: 1 in 20 of --data by name]."
)
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="Shape of the model [default: base, or that of --init]."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field of the preset (repeatable)."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Go on where the run in --out was stopped or killed.")
@click.option("--init", help="Start from this checkpoint (fine-tuning): a file, or `default` for the shipped one.")
@click.option("--schedule", type=click.Choice(["ours", "paper"]), help="Ours [default], or the paper's recipe.")
@click.option(
    "--recipe",
    "recipe_options",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field of the recipe (repeatable).",
)
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps in all.")
@click.option(
    "--lambda", "rate_lambda", type=click.FloatRange(0), help="Weight of the rate: larger means smaller files."
)
@click.option("--cache", type=click.Path(path_type=Path), help="Where decoded videos are kept [default: OUT/cache].")
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes on this machine (one thread each).",
)
@click.option(
    "--workers", type=click.IntRange(0), default=1, show_default=True, help="Processes per trainer that prepare cells."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--export",
    "export_folder",
    type=click.Path(path_type=Path),
    help="Only write the run's averaged weights to this folder.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Only draw the run's curves into this SVG.")
def command(
    data,
    valid,
    preset,
    overrides,
    out,
    resume,
    init,
    schedule,
    recipe_options,
    steps,
    rate_lambda,
    cache,
    processes,
    workers,
    device,
    export_folder,
    plot,
):
    """Train a checkpoint on a folder of videos.

    \b
    Examples:
      coanerv train --data videos/ --out run/ --processes 2
      coanerv train --data videos/ --out run/ --processes 2 --resume
      coanerv train --data videos/ --out run/ --init default --steps 500 --recipe lr=2e-4
      coanerv train --out run/ --export weights/
    """
    if export_folder or plot:
        _after(out, preset, export_folder, plot)
        return
    if data is None:
        raise click.UsageError("--data DIR is needed: a folder of videos to train on")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    import torch

    from coanerv_codec import corpus
    from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
    from coanerv_codec.device import keep_freed_memory, pick_device
    from coanerv_codec.errors import ProcessLostError
    from coanerv_codec.recipe import PAPER, Recipe
    from coanerv_codec.run_state import STATE, open_run, read_settings
    from coanerv_codec.train import train

    keep_freed_memory()
    if "WORLD_SIZE" in os.environ:
        torch.set_num_threads(1)
    start = None
    if resume:  # with the settings it had, where nothing else is said
        open_run(out, resume)
        config, recipe = read_settings(out / STATE)
        if schedule and schedule != recipe.schedule:
            raise click.UsageError(f"the run in {out} was started with --schedule {recipe.schedule}")
    else:
        if init:
            start = load_checkpoint(find_checkpoint(None if init == "default" else Path(init))).model
        config = start.config if start else PRESETS["base"]
        recipe = PAPER if schedule == "paper" else Recipe()
    wanted = _change(PRESETS[preset] if preset else config, overrides)
    if start and wanted != start.config:
        raise click.UsageError("--init brings a configuration of its own: leave out --preset and --set")
    config, recipe = wanted, _change(recipe, recipe_options)
    recipe = replace(recipe, steps=steps or recipe.steps)
    if rate_lambda is not None:
        recipe = replace(recipe, rate_lambda=rate_lambda)
    open_run(out, resume)  # before hours may go into decoding
    files = corpus.list_media(data)
    held = corpus.list_media(valid) if valid else [f for f in files if corpus.held_out(f.name)]
    used = [f for f in files if valid or not corpus.held_out(f.name)] or files
    folder = cache or out / "cache"
    sets = [corpus.build_cache(part, folder, config.frames, config.cell) for part in (used, held) if part]
    if not valid and not any(item.frames >= config.frames for item in sets[-1].items):
        sets = sets[:1]  # nothing that was held out is a video
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        _spawn(processes)  # after the cache is there, so that it is made once
    main = int(os.environ.get("RANK", "0")) == 0
    if main:
        click.echo(
            f"{len(sets[0].items)} files to train on, {sets[0].excluded} left out as too short or too small", err=True
        )
        if len(sets) == 1:
            click.echo("no video to validate on; name a folder of some with --valid", err=True)
    stop = _stop_on_signal()
    try:
        step = train(
            sets[0],
            next(iter(sets[1:]), None),
            config,
            recipe,
            out,
            resume=resume,
            init=start,
            device=pick_device(device),
            workers=workers,
            report=_show if main else lambda record: None,
            stop=stop,
        )
    except ProcessLostError as error:
        if main:
            raise
        sys.exit(error.exit_code)  # the first process says it, or if that is gone whoever started us
    if main:
        click.echo(f"step {step} of {recipe.steps}; state in {out}, weights with --export", err=True)


def _after(out: Path, preset: str | None, export_folder: Path | None, plot: Path | None) -> None:
    if export_folder:
        from coanerv_codec.run_state import export

        click.echo(export(out, export_folder, preset))
    if plot:
        from coanerv_codec.curves import plot_run
        from coanerv_codec.run_log import LOG

        plot_run(out / LOG, plot)
        click.echo(plot)


def _spawn(processes: int) -> NoReturn:
    """Run this same command once per process, as torchrun would (whose tracebacks a user should not see), and exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "coanerv_codec", *sys.argv[1:]]
    children = []
    for rank in range(processes):
        own = {k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        children.append(subprocess.Popen(command, env=os.environ | own))
    # Ctrl-C reaches the children by itself; they save and end, and so do we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    while all(child.poll() in (None, 0) for child in children) and any(child.poll() is None for child in children):
        time.sleep(0.2)
    for child in children:
        try:
            child.wait(PATIENCE)  # those that are left notice, and say so
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    failed = {rank: child.returncode for rank, child in enumerate(children) if child.returncode}
    if failed and failed.get(0, -1) < 0:  # the first process had no chance to say why
        message = f"training process {min(failed)} of {processes} is gone; --resume goes on from its last state"
        click.echo(f"coanerv: {message}", err=True)
    sys.exit(max(1, *failed.values()) if failed else 0)


def _change(base, options: tuple[str, ...]):
    """Apply FIELD=VALUE options to a dataclass, each value read as the type of the field."""
    changes = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in vars(base):
            raise click.UsageError(f"no field {name!r}; there are {', '.join(vars(base))}")
        kind = type(getattr(base, name))
        try:
            if kind is tuple:
                changes[name] = tuple(int(v) for v in text.split(","))
            elif kind is bool:
                changes[name] = {"true": True, "false": False}[text.lower()]
            else:
                changes[name] = kind(text)
        except (ValueError, KeyError) as error:
            raise click.UsageError(f"{name} needs a {kind.__name__}, not {text!r}") from error
    try:
        return replace(base, **changes)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _stop_on_signal():
    """Return a function that tells whether to stop: Ctrl-C or SIGTERM came, or whoever started several of us is gone.

    The run then saves its state and ends. Without the second case a killed `--processes 2` would train on unseen, beside
    the run that resumes it.
    """
    came = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: came.append(True))
    parent = os.getppid() if "WORLD_SIZE" in os.environ else None
    return lambda: bool(came) or (parent is not None and os.getppid() != parent)


def _show(record: dict[str, float]) -> None:
    parts = [f"{key} {value:.4g}" for key, value in record.items() if key != "step"]
    click.echo(f"step {record['step']:>6}  " + "  ".join(parts), err=True)
