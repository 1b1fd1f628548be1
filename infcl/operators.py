"""A function as an operator of torch, which torch.compile leaves whole.

Defined by hand, which takes less of the host for a call than custom_op does.
"""

from collections.abc import Callable

import torch


def operator(function: Callable, schema: str, fake: Callable) -> Callable:
    """The operator infcl::<the function's name without its leading _>, on CPUs and GPUs.

    schema: its arguments and results as torch writes them. fake: makes results of their shapes and
    dtypes, without values.
    """
    name = function.__name__.lstrip("_")
    torch.library.define(f"infcl::{name}", schema)
    torch.library.impl(f"infcl::{name}", ("cpu", "cuda"), function)
    torch.library.register_fake(f"infcl::{name}", fake)
    return getattr(torch.ops.infcl, name).default
