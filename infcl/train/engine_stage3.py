"""What ZeRO-3 does when towers are encoded without a graph and with one in turn: two mends of DeepSpeed 0.19.8.

Stage 3 follows a trace of the modules of a pass, to prefetch what comes next and to keep what is soon used again.
"""

from functools import _lru_cache_wrapper
from typing import Any

import torch

_COORDINATOR = "_PartitionedParameterCoordinator__"  # where Python puts that class's private names
_FETCHES_AHEAD = 64  # parameters whose gathering the host may have ordered without waiting for it


def mend_stage_3(optimizer: Any) -> None:
    """Let a stage-3 optimizer of DeepSpeed's gather what a step needs without repeating itself or waiting.

    AttributeError, with the symbol, where DeepSpeed is another version.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    _forget_what_an_old_trace_released(coordinator)
    _let_the_host_run_ahead(coordinator)


def _forget_what_an_old_trace_released(coordinator: Any) -> None:
    """Which parameters a module's end releases is computed once for each place in the trace, and cached. The cache
    outlives the trace: what the first pass (forward only) found, "nothing here is used again", then holds for the
    passes with a backward too, and each block is gathered three times where once would do.
    """
    cache = _cached_function(type(coordinator), f"{_COORDINATOR}params_to_release")
    invalidate = coordinator._invalidate_trace

    def invalidate_and_forget() -> None:
        invalidate()
        cache.cache_clear()

    cache.cache_clear()  # of an engine that this process had before: modules and places may look the same
    coordinator._invalidate_trace = invalidate_and_forget


def _let_the_host_run_ahead(coordinator: Any) -> None:
    """With more than two fetches under way DeepSpeed makes the host wait for the oldest, lest memory be allocated too
    far ahead; a block is a dozen fetches, so the host waits in every block, and the GPU then for the host.
    """
    if torch.cuda.is_available():
        _require(coordinator, f"{_COORDINATOR}max_ongoing_fetch_events")
        setattr(coordinator, f"{_COORDINATOR}max_ongoing_fetch_events", _FETCHES_AHEAD)


def _cached_function(owner: type, name: str) -> _lru_cache_wrapper:
    """The lru_cache behind a method, under whatever wraps it."""
    _require(owner, name)
    function = getattr(owner, name)
    while not isinstance(function, _lru_cache_wrapper):
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inner = [value for value in inner if callable(value)]
        if not inner:
            raise AttributeError(f"{owner.__module__}.{owner.__qualname__}.{name} has no cache in this DeepSpeed")
        function = inner[0]
    return function


def _require(owner: object, name: str) -> None:
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise AttributeError(
            f"this DeepSpeed has no {kind.__module__}.{kind.__qualname__}.{name}: tested with DeepSpeed 0.19.8"
        )
