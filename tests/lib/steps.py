"""Finished steps, as observers receive them."""

from types import SimpleNamespace
from typing import Any

import torch

from infcl.step.grad_cache import StepOutput
from infcl.train.observers import Step


def step_done(number: int = 1, *, waited: float = 0.0, again: float = 0.0, **fields: Any) -> Step:
    """Make a step of 4 seconds that was applied; `waited` s for data, of which `again` s in the second reading."""
    plain = {
        "samples_seen": number, "seconds": 4.0, "phases": {}, "loss": 1.0, "applied": True, "is_last": False,
        "values": {}, "batches": SimpleNamespace(ids=[], text_share=1.0, waited_for_data=waited, waited_again=again),
        "output": StepOutput(torch.zeros([]), torch.zeros(1), {}, []),
    }  # fmt: skip
    return Step(number, **(plain | fields))
