"""Changes of Megatron's own modules: one symbol each, with the reason, once, logged.

A patch tries the installed symbol first. If it does what the patch is for (a later version), it says so and leaves it
alone; if the symbol is not there or takes other arguments, it raises a RuntimeError with the path that it expected.
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

TESTED = "0.16.1"  # of megatron-core
_MARK = "_infcl_patch"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_REDUCE, _GATHER = f"{_MAPPINGS}._reduce", f"{_MAPPINGS}._gather_along_first_dim"


@dataclass(frozen=True)
class Patch:
    """symbol: "package.module.name". parameters: of the installed symbol, as tested.

    replace: installed function -> the one in its place. gone: whether the installed function does without it, tried;
    one that takes other arguments, or asks for a GPU where there is none, does not.
    """

    symbol: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable], Callable]
    gone: Callable[[Callable], bool] = lambda installed: False

    def apply(self) -> str:
        """Apply the patch; return "applied", "already applied" or "not needed". RuntimeError for an untested symbol."""
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
        except (TypeError, _AskedForGpu) as error:  # other arguments, which `apply` looks at; the reason of the patch
            log.debug("%s, tried: %s: %s", self.symbol, type(error).__name__, error)
            return False


def apply_patches(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """{symbol: what was done} with megatron-core's mappings, which a group of two ranks or more is to use on `device`.

    Collective: what is installed is tried over the group.
    """
    return {patch.symbol: patch.apply() for patch in patches_of(group, device)}


def require(symbol: str, *keywords: str) -> None:
    """RuntimeError, with the path and what was expected, where `symbol` is not there or does not take the keywords."""
    *_, installed = _find(symbol)
    found = inspect.signature(installed).parameters
    if missing := [name for name in keywords if name not in found]:
        raise RuntimeError(
            f"{symbol}({', '.join(found)}) in megatron-core {_version()}: expected {', '.join(missing)} among its "
            f"arguments, as of the tested version {TESTED}"
        )


def describe_patches() -> str:
    """The installed megatron-core, and which of its mappings are patched, in words."""
    changed = [symbol for symbol in (_REDUCE, _GATHER) if getattr(_find(symbol)[2], _MARK, False)]
    tested = "" if _version() == TESTED else f" (tested: {TESTED})"
    return f"megatron-core {_version()}{tested}, patched: {', '.join(changed) or 'nothing'}"


def _find(symbol: str) -> tuple[ModuleType, str, Callable]:
    """(module, name in it, what is installed under that name)."""
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
    """[n, ...] of each rank -> [T n, ...], on the input's device."""
    assert group is not None and output_split_sizes is None, "equal splits only"
    if group.size() == 1:
        return input_
    output = input_.new_empty((group.size() * len(input_), *input_.shape[1:]))
    dist.all_gather_into_tensor(output, input_.contiguous(), group=group)
    return output


# ---- what is patched ----


def patches_of(group: dist.ProcessGroup, device: torch.device) -> list[Patch]:
    """What `device` needs, to be tried over `group`."""
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
    """In a run on a CPU."""


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """Within, asking for the current GPU fails: on a host that has some, a run on the CPU would take memory there."""
    before = torch.cuda.current_device

    def refuse() -> int:
        raise _AskedForGpu("this run is on a CPU")

    torch.cuda.current_device = refuse
    try:
        yield
    finally:
        torch.cuda.current_device = before
