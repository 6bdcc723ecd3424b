"""The factors of the separable softmax, per axis."""

import torch
from torch import Tensor


def axis_factors(logits: list[Tensor]) -> list[Tensor]:
    """Logits per axis, [H,N,w], [H,N,h], ... -> their exponentials, scaled so that no factor is above one.

    The scale is one per head, so it cancels in num/den. Each factor is relative to its token's maximum along the axis;
    what that took from a token, relative to the token that lost least, goes into the last factor.
    """
    tops = [a.amax(-1, keepdim=True) for a in logits]
    factors = [torch.exp(a - top) for a, top in zip(logits, tops, strict=True)]
    bound = sum(tops)  # [H,N,1], no logit of a token is above it
    return [*factors[:-1], factors[-1] * torch.exp(bound - bound.amax(1, keepdim=True))]
