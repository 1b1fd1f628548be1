"""What a compiler or a kernel of our own makes, beside plain torch, before a run relies on it."""

import math

from torch import Tensor


class SomethingElse(RuntimeError):
    """It runs, and computes another thing than plain torch."""


def require_near(found: dict[str, Tensor], expected: dict[str, Tensor], apart: float, otherwise: str) -> None:
    """SomethingElse, with `otherwise` and the name of the tensor furthest off, by its norm, or by a hundredth of the
    largest norm there is, where that is more than `apart`.
    """
    norms = {name: float(value.float().norm()) for name, value in expected.items()}
    least = 1e-2 * max(norms.values())
    off = {
        name: float((found[name].float() - expected[name].float()).norm()) / max(norms[name], least) for name in norms
    }
    worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    if not off[worst] <= apart:
        raise SomethingElse(f"{otherwise}: {worst} is {off[worst]:.3g} off")


def cause_of(error: Exception) -> str:
    """Its type, and the first line of what it says, which is all of SomethingElse."""
    if isinstance(error, SomethingElse):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
