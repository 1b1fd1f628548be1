"""What ZeRO-3 does when towers are encoded without a graph and with one in turn: a mend of DeepSpeed 0.19.8.

Stage 3 follows a trace of the modules of a pass, to prefetch what comes next and to keep what is soon used again.
Which parameters a module's end releases is computed once for each place in the trace, and cached. The cache outlives
the trace: what the first pass (forward only) found, "nothing here is used again", then holds for the passes with a
backward too, and each block is gathered three times where once would do.
"""

from functools import _lru_cache_wrapper
from typing import Any

_CACHED = "_PartitionedParameterCoordinator__params_to_release"


def release_by_the_present_trace(optimizer: Any) -> None:
    """Let a stage-3 optimizer of DeepSpeed's forget what it released together with the trace that this came from.

    AttributeError, with the symbol, where DeepSpeed is another version.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    cache = _cached_function(type(coordinator), _CACHED)
    invalidate = coordinator._invalidate_trace

    def invalidate_and_forget() -> None:
        invalidate()
        cache.cache_clear()

    coordinator._invalidate_trace = invalidate_and_forget


def _cached_function(owner: type, name: str) -> _lru_cache_wrapper:
    """The lru_cache behind a method, under whatever wraps it."""
    function = getattr(owner, name, None)
    while not isinstance(function, _lru_cache_wrapper):
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inner = [value for value in inner if callable(value)]
        if not inner:
            symbol = f"{owner.__module__}.{owner.__qualname__}.{name}"
            raise AttributeError(f"this DeepSpeed has no cached {symbol}: tested with DeepSpeed 0.19.8")
        function = inner[0]
    return function
