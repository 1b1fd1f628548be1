"""Patches of Megatron's own modules. Each one replaces a single symbol, has a reason, is idempotent and is logged."""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

TESTED = "0.16.1"  # version of megatron-core
_MARK = "_infcl_patch"
_REDUCE, _GATHER = (f"megatron.core.tensor_parallel.mappings.{name}" for name in ("_reduce", "_gather_along_first_dim"))


def apply_patches(device: torch.device) -> None:
    """Patch megatron-core's mappings for use on `device`."""
    patch(_REDUCE, ("input_", "group"), lambda _: _reduce, "returns an input that is not contiguous without the sum")
    if device.type == "cpu":
        parameters = ("input_", "group", "output_split_sizes", "use_global_buffer")
        patch(_GATHER, parameters, lambda _: _gather_along_first_dim, "allocates on the current CUDA device")


def patch(symbol: str, parameters: tuple[str, ...], make: Callable[[Callable], Callable], reason: str) -> None:
    """Replace a symbol, unless that was done already.

    Args:
        symbol: "package.module.name".
        parameters: its parameter names in the tested version.
        make: installed function -> its replacement.
        reason: why it is replaced, for the log.

    Raises:
        RuntimeError: the symbol is missing, or takes other arguments than in the tested version.
    """
    installed = _installed(symbol)
    if hasattr(installed, _MARK):
        return
    found = tuple(inspect.signature(installed).parameters)
    if found != parameters:
        raise RuntimeError(
            f"{symbol}({', '.join(found)}) in megatron-core {_version()}: expected ({', '.join(parameters)}), as of "
            f"the tested version {TESTED}"
        )
    replacement = functools.wraps(installed)(make(installed))
    setattr(replacement, _MARK, True)
    path, _, name = symbol.rpartition(".")
    setattr(importlib.import_module(path), name, replacement)
    log.info("%s patched: %s (tested with megatron-core %s)", symbol, reason, TESTED)


def describe_patches() -> str:
    """Describe the version of megatron-core and its patched mappings."""
    changed = [symbol for symbol in (_REDUCE, _GATHER) if hasattr(_installed(symbol), _MARK)]
    tested = "" if _version() == TESTED else f" (tested: {TESTED})"
    return f"megatron-core {_version()}{tested}, patched: {', '.join(changed) or 'nothing'}"


def _installed(symbol: str) -> Callable:
    path, _, name = symbol.rpartition(".")
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"there is no {symbol} in megatron-core {_version()}; the tested version is {TESTED}"
        ) from error


def _version() -> str:
    return importlib.metadata.version("megatron-core")


def _reduce(input_, group):
    """Sum over the group, in place where `input_` is contiguous."""
    if group.size() == 1:
        return input_
    input_ = input_.contiguous()
    dist.all_reduce(input_, group=group)
    return input_


def _gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
    """All-gather [n, ...] -> [T n, ...], on the input's device."""
    assert output_split_sizes is None, "equal splits only"
    if group.size() == 1:
        return input_
    output = input_.new_empty((group.size() * len(input_), *input_.shape[1:]))
    dist.all_gather_into_tensor(output, input_.contiguous(), group=group)
    return output
