"""Patches of Megatron's own modules. Each one replaces a single symbol, has a reason, is idempotent and is logged."""

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

TESTED = "0.16.1"  # version of megatron-core
_MARK = "_infcl_patch"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"


@dataclass(frozen=True)
class Patch:
    """A replacement for one symbol.

    Attributes:
        symbol: "package.module.name".
        reason: why it is replaced, for the log.
        parameters: parameter names of the symbol in the tested version.
        replace: installed function -> its replacement.
    """

    symbol: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable], Callable]

    @property
    def is_applied(self) -> bool:
        """Whether the symbol is replaced already."""
        return hasattr(self._installed(), _MARK)

    def apply(self) -> None:
        """Apply the patch, unless it is applied already.

        Raises:
            RuntimeError: the symbol is missing, or takes other arguments than in the tested version.
        """
        if self.is_applied:
            return
        installed = self._installed()
        found = tuple(inspect.signature(installed).parameters)
        if found != self.parameters:
            raise RuntimeError(
                f"{self.symbol}({', '.join(found)}) in megatron-core {_version()}: expected "
                f"({', '.join(self.parameters)}), as of the tested version {TESTED}"
            )
        replacement = functools.wraps(installed)(self.replace(installed))
        setattr(replacement, _MARK, True)
        path, _, name = self.symbol.rpartition(".")
        setattr(importlib.import_module(path), name, replacement)
        log.info("%s patched: %s (tested with megatron-core %s)", self.symbol, self.reason, TESTED)

    def _installed(self) -> Callable:
        path, _, name = self.symbol.rpartition(".")
        try:
            return getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"there is no {self.symbol} in megatron-core {_version()}; the tested version is {TESTED}"
            ) from error


def apply_patches(device: torch.device) -> None:
    """Patch megatron-core's mappings for use on `device`."""
    REDUCE.apply()
    if device.type == "cpu":
        GATHER.apply()


def describe_patches() -> str:
    """Describe the version of megatron-core and its patched mappings."""
    changed = [patch.symbol for patch in (REDUCE, GATHER) if patch.is_applied]
    tested = "" if _version() == TESTED else f" (tested: {TESTED})"
    return f"megatron-core {_version()}{tested}, patched: {', '.join(changed) or 'nothing'}"


def _version() -> str:
    return importlib.metadata.version("megatron-core")


def _reduce(input_, group):
    """Sum over the group, in place where `input_` is contiguous."""
    assert group is not None, "group should not be None"
    if group.size() == 1:
        return input_
    input_ = input_.contiguous()
    dist.all_reduce(input_, group=group)
    return input_


def _gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
    """All-gather [n, ...] -> [T n, ...], on the input's device."""
    assert group is not None and output_split_sizes is None, "equal splits only"
    if group.size() == 1:
        return input_
    output = input_.new_empty((group.size() * len(input_), *input_.shape[1:]))
    dist.all_gather_into_tensor(output, input_.contiguous(), group=group)
    return output


REDUCE = Patch(
    f"{_MAPPINGS}._reduce",
    "returns an input that is not contiguous without the sum, which goes to a copy",
    ("input_", "group"),
    replace=lambda installed: _reduce,
)
GATHER = Patch(
    f"{_MAPPINGS}._gather_along_first_dim",
    "allocates on torch.cuda.current_device(), so it cannot run on a CPU",
    ("input_", "group", "output_split_sizes", "use_global_buffer"),
    replace=lambda installed: _gather_along_first_dim,
)
