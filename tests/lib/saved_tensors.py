"""Bytes that autograd keeps for a backward."""

from collections.abc import Callable

import torch
from torch import nn


def saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of all storages that `forward` saves, each counted once, without the model's parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # keeps it alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in kept.values())
