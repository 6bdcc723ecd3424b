"""How to train: every choice in one dataclass, ours and the paper's, and the learning rate over the steps."""

import math
from dataclasses import dataclass

from coanerv_codec.quantizer import MAX_BITS, MIN_BITS


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults are what docs/training.md settled on."""

    steps: int = 10_000
    batch: int = 16  # cells per step, over all processes
    draws: int = 4  # positions asked per 8x8 block, each in all frames
    lr: float = 5e-4
    warmup: int = 150
    decay: float = 0.6  # share of the steps over which the rate falls to zero
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.999
    rate_lambda: float = 0.03
    bits: tuple[int, ...] = (4, 5, 6, 7, 8)
    optimizer: str = "muon"
    loss: str = "rmse"
    start: str = "local"
    schedule: str = "ours"  # or "paper"
    precision: str = "auto"  # of the products: bf16 where that is faster; or "fp32", "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "optimizer": ("muon", "adamw"),
            "loss": ("rmse", "mse"),
            "start": ("local", "random"),
            "schedule": ("ours", "paper"),
            "precision": ("auto", "fp32", "bf16"),
        }
        for name, possible in choices.items():
            if getattr(self, name) not in possible:
                raise ValueError(f"{name} must be {' or '.join(possible)}, not {getattr(self, name)!r}")
        for name, least in {"steps": 1, "batch": 1, "draws": 1, "warmup": 0, "seed": 0}.items():
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0 and self.clip > 0):
            raise ValueError(f"lr and clip must be positive, not {self.lr} and {self.clip}")
        for name in ("decay", "ema"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if not (0 <= self.weight_decay < math.inf and 0 <= self.rate_lambda < math.inf):
            raise ValueError("weight_decay and rate_lambda must not be negative")
        if not self.bits or not all(MIN_BITS <= b <= MAX_BITS for b in self.bits):
            raise ValueError(f"bits must be from {MIN_BITS} to {MAX_BITS}, not {self.bits}")


PAPER = Recipe(
    schedule="paper",
    batch=2,
    lr=1e-4,
    warmup=0,
    decay=0.1,
    clip=math.inf,
    ema=0.0,
    rate_lambda=0.0,
    optimizer="adamw",
    loss="mse",
    start="random",
)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm-up, constant, then linear to zero (the paper: constant, then a tenth of it)."""
    if recipe.schedule == "paper":
        return recipe.lr * (0.1 if step >= (1 - recipe.decay) * recipe.steps else 1.0)
    rise = min(1.0, (step + 1) / max(recipe.warmup, 1))
    fall = (recipe.steps - step) / max(recipe.decay * recipe.steps, 1)
    return recipe.lr * min(rise, fall, 1.0)
