"""Muon in float32: momentum whose matrix is made orthogonal before the step (Jordan et al., 2024).

torch.optim.Muon computes in bfloat16, which a CPU without bfloat16 instructions does a hundred times slower than float32.
Matrices of one shape are orthogonalised together, and in a distributed run each rank does its share of them.
"""

from collections import defaultdict

import torch
from torch import Tensor, distributed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalise(g: Tensor) -> Tensor:
    """Replace the singular values of each matrix in g [n,rows,cols] by about 1 (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    wide = g.shape[-2] <= g.shape[-1]
    x = g if wide else g.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; steps as large as AdamW's (RMS 0.2 x lr)."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Take one step from the gradients."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape].append(p)
            for same in shapes.values():
                self._step_together(same, group["lr"], group["weight_decay"], group["momentum"])

    def _step_together(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        directions = []
        for p in params:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            directions.append(p.grad.lerp(buffer, momentum))
        update = _shared_orthogonalise(torch.stack(directions))
        scale = 0.2 * max(update.shape[-2:]) ** 0.5
        for p, u in zip(params, update, strict=True):
            p.mul_(1 - lr * weight_decay).add_(u, alpha=-lr * scale)


def _shared_orthogonalise(g: Tensor) -> Tensor:
    """`orthogonalise`, each rank doing its share of the matrices and all getting the same result."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return orthogonalise(g)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    out = torch.zeros_like(g)
    out[rank::world] = orthogonalise(g[rank::world])
    distributed.all_reduce(out)
    return out
