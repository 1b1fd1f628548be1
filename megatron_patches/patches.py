"""Patches of Megatron's own modules. Each one replaces a single symbol, has a reason, is idempotent and is logged.

A patch first tests the installed symbol. If a later version behaves as the patch intends, the symbol is left alone and
that is logged. If the symbol is missing or takes other arguments, a RuntimeError reports the expected path.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

TESTED = "0.16.1"  # version of megatron-core
_MARK = "_infcl_patch"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_REDUCE, _GATHER = f"{_MAPPINGS}._reduce", f"{_MAPPINGS}._gather_along_first_dim"


@dataclass(frozen=True)
class Patch:
    """A replacement for one symbol.

    Attributes:
        symbol: "package.module.name".
        reason: why it is replaced, for the log.
        parameters: parameter names of the symbol in the tested version.
        replace: installed function -> its replacement.
        gone: tests whether the installed function works without the patch. A TypeError, or a use of the GPU in a run on
            a CPU, counts as no.
    """

    symbol: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable], Callable]
    gone: Callable[[Callable], bool] = lambda installed: False

    def apply(self) -> str:
        """Apply the patch; return "applied", "already applied" or "not needed".

        Raises:
            RuntimeError: the symbol is missing, or takes other arguments than in the tested version.
        """
        module, name, installed = _find(self.symbol)
        if getattr(installed, _MARK, False):
            return "already applied"
        if self._is_gone(installed):
            log.info("%s: the patch is not needed any more (%s)", self.symbol, self.reason)
            return "not needed"
        found = tuple(inspect.signature(installed).parameters)
        if found != self.parameters:
            raise RuntimeError(
                f"{self.symbol}({', '.join(found)}) in megatron-core {_version()}: expected "
                f"({', '.join(self.parameters)}), as of the tested version {TESTED}"
            )
        replacement = functools.wraps(installed)(self.replace(installed))
        setattr(replacement, _MARK, True)
        setattr(module, name, replacement)
        log.info("%s patched: %s (tested with megatron-core %s)", self.symbol, self.reason, TESTED)
        return "applied"

    def _is_gone(self, installed: Callable) -> bool:
        try:
            return self.gone(installed)
        except (TypeError, _AskedForGpu) as error:  # `apply` checks the arguments
            log.debug("%s, tried: %s: %s", self.symbol, type(error).__name__, error)
            return False


def apply_patches(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """Patch megatron-core's mappings for use on `device` by a group of two ranks or more.

    Collective: the installed functions are tested over the group.

    Returns:
        {symbol: return value of Patch.apply}.
    """
    return {patch.symbol: patch.apply() for patch in patches_of(group, device)}


def require(symbol: str, *keywords: str) -> None:
    """Check that `symbol` exists and takes the keywords.

    Raises:
        RuntimeError: it does not. The message has the path and what was expected.
    """
    *_, installed = _find(symbol)
    found = inspect.signature(installed).parameters
    if missing := [name for name in keywords if name not in found]:
        raise RuntimeError(
            f"{symbol}({', '.join(found)}) in megatron-core {_version()}: expected {', '.join(missing)} among its "
            f"arguments, as of the tested version {TESTED}"
        )


def describe_patches() -> str:
    """Describe the version of megatron-core and its patched mappings."""
    changed = [symbol for symbol in (_REDUCE, _GATHER) if getattr(_find(symbol)[2], _MARK, False)]
    tested = "" if _version() == TESTED else f" (tested: {TESTED})"
    return f"megatron-core {_version()}{tested}, patched: {', '.join(changed) or 'nothing'}"


def _find(symbol: str) -> tuple[ModuleType, str, Callable]:
    """Return the symbol's module, its name there, and the installed function."""
    path, _, name = symbol.rpartition(".")
    try:
        module = importlib.import_module(path)
        return module, name, getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"there is no {symbol} in megatron-core {_version()}; the tested version is {TESTED}"
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
    """All-gather [n, ...] -> [T n, ...], on the input's device."""
    assert group is not None and output_split_sizes is None, "equal splits only"
    if group.size() == 1:
        return input_
    output = input_.new_empty((group.size() * len(input_), *input_.shape[1:]))
    dist.all_gather_into_tensor(output, input_.contiguous(), group=group)
    return output


# ---- patches ----


def patches_of(group: dist.ProcessGroup, device: torch.device) -> list[Patch]:
    """Return the patches for `device`; they are tested over `group`."""
    always = Patch(
        _REDUCE,
        "returns its input unsummed where that is not contiguous (the sum goes to a copy)",
        ("input_", "group"),
        replace=lambda installed: _reduce,
        gone=lambda installed: _sums_any_layout(installed, group, device),
    )
    on_cpu = Patch(
        _GATHER,
        "allocates on torch.cuda.current_device(), so it cannot run on a CPU",
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
        replace=lambda installed: _gather_along_first_dim,
        gone=lambda installed: _gathers_on_cpu(installed, group),
    )
    return [always] if device.type == "cuda" else [always, on_cpu]


def _sums_any_layout(reduce: Callable, group: dist.ProcessGroup, device: torch.device) -> bool:
    ones = torch.ones(2, 3, device=device).T
    return bool((reduce(ones, group) == group.size()).all())


def _gathers_on_cpu(gather: Callable, group: dist.ProcessGroup) -> bool:
    with _no_gpu():
        gathered = gather(torch.ones(2, 3), group)
    return torch.equal(gathered, torch.ones(2 * group.size(), 3))


class _AskedForGpu(Exception):
    """The current GPU was requested in a run on a CPU."""


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """Make torch.cuda.current_device raise: on a node with GPUs, a run on the CPU would otherwise use GPU memory."""
    before = torch.cuda.current_device

    def refuse() -> int:
        raise _AskedForGpu("this run is on a CPU")

    torch.cuda.current_device = refuse
    try:
        yield
    finally:
        torch.cuda.current_device = before
