"""The quantizer as training and refinement see it: rounded forwards, open to gradients backwards."""

from torch import Tensor


def quantized(tokens: Tensor, step: Tensor) -> Tensor:
    """Round tokens [B,N,d] to multiples of step [B,1,1], as the quantizer does.

    Backwards, a token's gradient passes as if there were no rounding, and the step gets its share of the rounding error.
    """
    step = step.clamp_min(1e-12)
    error = ((tokens / step).round() - tokens / step).detach()
    return tokens + error * step
