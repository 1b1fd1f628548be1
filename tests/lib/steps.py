"""Finished steps, as observers receive them."""

from typing import Any

import torch

from infcl.step.grad_cache import StepOutput
from infcl.train.observers import Step


def step_done(number: int = 1, **fields: Any) -> Step:
    """Make a step of 4 seconds that was applied, in a run that continues."""
    plain = {
        "samples_seen": number, "seconds": 4.0, "phases": {}, "waited_for_data": 0.0, "waited_again": 0.0,
        "text_share": 1.0, "loss": 1.0, "applied": True, "is_last": False, "ids": [], "values": {},
        "output": StepOutput(torch.zeros([]), torch.zeros(1), {}, []),
    }  # fmt: skip
    return Step(number, **(plain | fields))
