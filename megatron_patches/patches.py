"""What is changed in Megatron's own modules: one symbol each, with the reason, once, logged.

A patch looks at the installed symbol first. If the reason is gone (a later version), it says so and leaves it alone; if
the symbol is not there or takes other arguments, it raises a RuntimeError with the path that it expected.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

TESTED = "0.16.1"  # of megatron-core
_MARK = "_infcl_patch"


@dataclass(frozen=True)
class Patch:
    """symbol: "package.module.name". parameters: of the installed symbol, as tested.

    replace: installed function -> the one in its place. gone: whether the installed source has no need of it.
    """

    symbol: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable], Callable]
    gone: Callable[[str], bool] = lambda source: False

    def apply(self) -> str:
        """What was done: "applied", "already applied", "not needed". RuntimeError for a symbol other than tested."""
        module, _, name = self.symbol.rpartition(".")
        installed = _find(module, name, self.symbol)
        if getattr(installed, _MARK, False):
            return "already applied"
        if self.gone(inspect.getsource(installed)):
            log.info("%s: the patch is not needed any more (%s)", self.symbol, self.reason)
            return "not needed"
        found = tuple(inspect.signature(installed).parameters)
        if found != self.parameters:
            raise RuntimeError(
                f"{self.symbol}({', '.join(found)}) beside megatron-core {_version()}: expected "
                f"({', '.join(self.parameters)}), as of the tested version {TESTED}"
            )
        replacement = functools.wraps(installed)(self.replace(installed))
        setattr(replacement, _MARK, True)
        setattr(importlib.import_module(module), name, replacement)
        log.info("%s patched: %s (tested with megatron-core %s)", self.symbol, self.reason, TESTED)
        return "applied"


def apply_patches(device: torch.device) -> dict[str, str]:
    """{symbol: what was done}; those for CPUs only where the run is on one."""
    chosen = ALWAYS if device.type == "cuda" else ALWAYS + ON_CPU
    return {patch.symbol: patch.apply() for patch in chosen}


def _find(module: str, name: str, symbol: str):
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"there is no {symbol} beside megatron-core {_version()}; the tested version is {TESTED}"
        ) from error


def _version() -> str:
    return importlib.metadata.version("megatron-core")


# ---- replacements ----


def _reduce(input_, group):
    """Sum over the group, in place where `input_` is contiguous."""
    assert group is not None, "group should not be None"
    if group.size() == 1:
        return input_
    input_ = input_.contiguous()
    dist.all_reduce(input_, group=group)
    return input_


def _gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
    """[n, ...] of each rank -> [T n, ...], on the input's device."""
    assert group is not None and output_split_sizes is None, "equal splits only"
    if group.size() == 1:
        return input_
    output = input_.new_empty((group.size() * len(input_), *input_.shape[1:]))
    dist.all_gather_into_tensor(output, input_.contiguous(), group=group)
    return output


_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_ON_GPU_ONLY = "allocates on torch.cuda.current_device(), so it cannot run on a CPU"
ALWAYS = (
    Patch(
        f"{_MAPPINGS}._reduce",
        "returns its input unsummed where that is not contiguous (the sum goes to a copy)",
        ("input_", "group"),
        replace=lambda installed: _reduce,
        gone=lambda source: "all_reduce(input_.contiguous()" not in source.replace(" ", ""),
    ),
)
ON_CPU = (
    Patch(
        f"{_MAPPINGS}._gather_along_first_dim",
        _ON_GPU_ONLY,
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
        replace=lambda installed: _gather_along_first_dim,
        gone=lambda source: "torch.cuda.current_device()" not in source,
    ),
)
