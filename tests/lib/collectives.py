"""How many collectives an action starts, on all threads, as torch's profiler sees them."""

import torch


def collectives(kind: str, action) -> int:
    """Those whose name has `kind` in it: "reduce", "gather".

    profile.events() would pair all operations with their parts first, which takes longer than a small model's step.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    names = (event.name() for event in profile.profiler.kineto_results.events())
    return sum(name.startswith("c10d::") and kind in name for name in names)
