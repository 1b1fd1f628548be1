"""Resolved runs, and engines of them, from flags and the shape of a batch."""

import dataclasses
from typing import Any

from torch import nn

from infcl.config import BatchPlan, RunSpec, TrainConfig, resolve
from infcl.engine.engine import Engine
from infcl.parallel import Parallel


def spec_of(config: TrainConfig, parallel: Parallel, batch: BatchPlan | None = None, unpackable: str = "") -> RunSpec:
    """The run of these flags, on these ranks, with `batch` instead of the flags' where it is given."""
    if batch is not None:
        shape: dict[str, Any] = {"accum_freq": batch.num_micro_batches, "batch_size": batch.micro_batch_size}
        config = dataclasses.replace(config, global_batch_size=None, **shape)
    device, ranks, hosts = parallel.device.type, parallel.dp_size, parallel.hosts
    return resolve(config, device=device, ranks=ranks, hosts=hosts, unpackable=unpackable)


def engine_of(model: nn.Module, config: TrainConfig, parallel: Parallel, batch: BatchPlan) -> Engine:
    """An engine that steps with `batch`, whatever the flags say of it."""
    return Engine(model, spec_of(config, parallel, batch), parallel)
