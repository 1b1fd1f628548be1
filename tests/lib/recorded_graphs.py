"""CUDA graphs on a CPU: `torch.cuda.graph` records operators, and a replay computes them again into the same memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], list[Any]]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for compute, written in self.calls:
                for result, tensor in zip(tree_leaves(compute()), written):
                    if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != result.data_ptr():
                        tensor.copy_(result)  # neither a view nor in place


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.graph.calls.append((lambda: function(*args, **(kwargs or {})), tree_leaves(result)))
        return result


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Make torch.cuda's graphs record operators on a CPU, inside the context."""
    replaced = {
        "CUDAGraph": RecordedGraph,
        "graph": lambda graph, **_: _Recorder(graph),
        "graph_pool_handle": lambda: (0, 0),
        "Stream": mock.MagicMock,
        "current_stream": mock.MagicMock,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    with mock.patch.multiple(torch.cuda, **replaced):
        yield
