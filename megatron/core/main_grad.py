"""`main_grad`: where the gradient of a parameter is summed, a view of the gradient buffer, often of higher precision.

Note [First gradients]
~~~~~~~~~~~~~~~~~~~~~~
At the beginning of a step the sums are forgotten, not zeroed: what is in a forgotten one counts as zero. The product
that is the first weight gradient of a step is written over it (`begin_if_forgotten`), which spares a pass that writes
zeros and the reading of them. Whoever reads a sum or adds to a part of it takes it by `main_grad_of` or `summed`, which
make the zeros. A bucket does this for all of its parameters before it is reduced, so that what is read in one piece, by
collectives and the optimizer, are sums.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor


def main_grad_if_any(parameter: Tensor) -> Tensor | None:
    """The `main_grad` of `parameter`, if it has one; perhaps forgotten."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return main_grad


def main_grad_of(parameter: Tensor) -> Tensor:
    """What has been summed of the gradient of `parameter` in this step."""
    return summed(cast(Tensor, parameter.main_grad))  # type: ignore[attr-defined]


def forget(parameter: Tensor) -> None:
    """Let what is in the `main_grad` of `parameter` count as zero."""
    parameter.main_grad.is_forgotten = True  # type: ignore[attr-defined]


def summed(main_grad: Tensor) -> Tensor:
    """A `main_grad` itself, with its zeros if it was forgotten."""
    return main_grad.zero_() if begin_if_forgotten(main_grad) else main_grad


def begin_if_forgotten(main_grad: Tensor) -> bool:
    """Let a `main_grad` count from here on; whether it did not, so that the caller must write over all of it."""
    forgotten: bool = getattr(main_grad, "is_forgotten", False)
    main_grad.is_forgotten = False  # type: ignore[attr-defined]
    return forgotten
