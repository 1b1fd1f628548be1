"""fp16's loss scale changes between steps, not within them: a mend of DeepSpeed 0.19.8.

DeepSpeed lets the scale grow (once in loss_scale_window steps) before it divides a step's gradients by it: they come
out halved, and under stage 3 so does their norm. At the least scale, a step that is not finite raises DeepSpeed's own
error, on which no checkpoint follows; --max-skipped-steps is for that.
"""

from collections.abc import Callable
from typing import Any


def scale_between_steps(scaler: Any) -> Callable[[], None]:
    """Have a dynamic loss scaler of DeepSpeed's keep what follows from a finite step until the returned function is
    called: behind the step."""
    update, finite_steps = scaler.update_scale, []
    scaler.raise_error_at_min_scale = False

    def update_scale(overflow: bool) -> None:
        if overflow:  # no update follows
            update(True)
        else:
            finite_steps.append(overflow)

    def settle() -> None:
        while finite_steps:
            update(finite_steps.pop())

    scaler.update_scale = update_scale
    return settle
