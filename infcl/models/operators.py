"""A function as an operator of torch, which torch.compile leaves whole.

Defined by hand, which takes less of the host for a call than custom_op does.
"""

from collections.abc import Callable, Sequence

import torch


def operator(
    function: Callable, schema: str, fake: Callable, *, name: str | None = None, tags: Sequence[torch.Tag] = ()
) -> Callable:
    """The operator infcl::<name>, by default the function's without its leading _, on CPUs and GPUs.

    schema: its arguments and results as torch writes them. fake: makes results of their shapes and
    dtypes, without values. tags: what compilers must know of it.
    """
    name = name or function.__name__.lstrip("_")
    torch.library.define(f"infcl::{name}", schema, tags=tags)
    torch.library.impl(f"infcl::{name}", ("cpu", "cuda"), function)
    torch.library.register_fake(f"infcl::{name}", fake)
    return getattr(torch.ops.infcl, name).default
