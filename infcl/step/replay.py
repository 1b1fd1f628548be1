"""Replay: restore running statistics after both passes, and check that pass 2 repeats pass 1."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infcl.step.grad_cache import Features

_SAME = 0.05  # relative difference of the two passes; different dropout masks exceed it, rounding does not


class Replay:
    """State of one step: a context around both passes. Call `begin` before and `compare` after each encoding.

    Args:
        model: the module.
        name: its name, for messages.
        total: number of micro-batches, M.
    """

    def __init__(self, model: nn.Module, name: str, total: int):
        self.name, self.total, self.calls = name, total, 0
        self.seen: Features = {}
        self.difference: Tensor | None = None
        self.statistics = RunningStatistics(model)
        own = {id(buffer) for layer in self.statistics.layers for buffer in layer.buffers(recurse=False)}
        self.buffers = {key: value for key, value in model.named_buffers() if id(value) not in own}
        self.versions: dict[str, int] = {}

    @property
    def index(self) -> int:
        """The micro-batch that is encoded: 0 ... M - 1, then 0 ... in pass 2."""
        return (self.calls - 1) % self.total

    def begin(self) -> None:
        self.calls += 1
        if self.calls == 2 and self.total > 1:  # not the first: DDP may broadcast the buffers in its forward
            self.versions = {key: value._version for key, value in self.buffers.items()}

    def compare(self, features: Features) -> None:
        """Compare the two encodings of micro-batch 0. In pass 1, raise ValueError if a forward changed a buffer."""
        for key, version in self.versions.items():
            if self.buffers[key]._version != version:
                raise ValueError(
                    f"{self.name}: a forward changes the buffer {key}, and contrastive_step runs two per micro-batch; "
                    "only the running statistics of BatchNorm are handled. Freeze it, or put its module in eval mode"
                )
        self.versions = {}
        if self.calls == 1:
            self.seen = {key: value.detach().clone() for key, value in features.items()}
        elif self.index == 0:
            apart = [
                (value.detach() - self.seen[key]).norm()
                / value.detach().norm().clamp(min=torch.finfo(value.dtype).tiny)
                for key, value in features.items()
            ]
            self.difference = torch.stack(apart).max()

    def check(self) -> None:
        """Raise ValueError if pass 2 differs from pass 1. Waits for the device."""
        if self.difference is not None and float(self.difference) > _SAME:
            raise ValueError(
                f"{self.name}: pass 2 gives other features than pass 1 (relative difference {self.difference:.2g}): a "
                "forward depends on random numbers that are not torch's, or on a state that it changes"
            )

    def __enter__(self) -> None:
        self.statistics.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.statistics.__exit__(*error)
        if error[0] is None:
            self.statistics.publish()


class RunningStatistics:
    """Running statistics of a model's BatchNorm layers, as a context around both passes.

    A step updates them once, by the mean over its micro-batches. The context leaves them as they were: `publish` stores
    the update, so that the statistics follow a step that is made, and no other. Call `on_phase` with each phase.
    """

    def __init__(self, model: nn.Module):
        self.layers: list[Any] = [layer for layer in running_statistics(model) if layer.training]

    def __enter__(self) -> None:
        self.momenta = [layer.momentum for layer in self.layers]
        self.before: dict[Any, list[Tensor]] = {}  # mean, variance and count of the layers that were called
        self.updates: list[tuple[Tensor, Tensor]] = []  # buffers and what the step makes of them
        self.calls = dict.fromkeys(self.layers, 0)
        self.hooks = [layer.register_forward_pre_hook(self._before_forward) for layer in self.layers]

    def _before_forward(self, layer: Any, _: Any) -> None:
        if layer not in self.before:  # by now DDP has broadcast the buffers
            self.before[layer] = [buffer.clone() for buffer in _buffers(layer)]
        self.calls[layer] += 1
        layer.momentum = 1 / self.calls[layer]  # makes the statistics the mean over this step's micro-batches

    def on_phase(self, phase: str) -> None:
        if phase != "loss":
            return
        self._remove_hooks()
        for layer, momentum in zip(self.layers, self.momenta):
            layer.momentum = 0.0
            if layer in self.before:
                *before, count = self.before[layer]
                factor = 1 / (1 + int(count)) if momentum is None else momentum
                self.updates += [(buffer, old.lerp(buffer, factor)) for buffer, old in zip(_buffers(layer), before)]

    def __exit__(self, *_: Any) -> None:
        self._remove_hooks()
        for layer, momentum in zip(self.layers, self.momenta):
            layer.momentum = momentum
            for buffer, old in zip(_buffers(layer), self.before.get(layer, ())):
                buffer.data.copy_(old)  # .data: graphs hold it, but do not read it

    @torch.no_grad()
    def publish(self, group: dist.ProcessGroup | None = None) -> None:
        """Store the step's statistics, or their mean over the ranks of `group`, if all are finite. Collective."""
        if not self.updates:
            return
        flat = torch.cat([value.flatten() for _, value in self.updates])
        if group is not None:
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        finite = flat.isfinite().all()
        for (buffer, _), value in zip(self.updates, flat.split([value.numel() for _, value in self.updates])):
            buffer.copy_(torch.where(finite, value.view_as(buffer), buffer))
        for layer in self.before:
            layer.num_batches_tracked.add_(finite)

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _buffers(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    return layer.running_mean, layer.running_var, layer.num_batches_tracked


def running_statistics(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of a model that keep running statistics."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
