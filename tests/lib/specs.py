"""Resolved runs, and engines of them, from flags and the shape of a batch."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from infcl.config import BatchPlan, RunSpec, TrainConfig, resolve
from infcl.config.precision import PRECISIONS
from infcl.config.preset import shipped_preset
from infcl.engine.engine import Engine
from infcl.models import CLIP
from infcl.models.config import CLIPConfig, load_model_config
from infcl.parallel import Parallel
from infcl.plan.memory import memory_of
from infcl.plan.setting import Setting, parameter_counts, setting_of_run


def spec_of(config: TrainConfig, parallel: Parallel, batch: BatchPlan | None = None, unpackable: str = "") -> RunSpec:
    """Resolve a run from its flags and ranks; `batch`, if given, replaces the flags' batch."""
    config = config if batch is None else _of_batch(config, batch)
    device, ranks, hosts = parallel.device.type, parallel.dp_size, parallel.hosts
    return resolve(config, device=device, ranks=ranks, hosts=hosts, unpackable=unpackable)


def _of_batch(config: TrainConfig, batch: BatchPlan) -> TrainConfig:
    shape: dict[str, Any] = {"accum_freq": batch.num_micro_batches, "batch_size": batch.micro_batch_size}
    return dataclasses.replace(config, global_batch_size=None, **shape)


def engine_of(model: nn.Module, config: TrainConfig, parallel: Parallel, batch: BatchPlan) -> Engine:
    """Make an engine for `batch`, which replaces the flags' batch."""
    return Engine(model, spec_of(config, parallel, batch), parallel)


def planned_run(config: TrainConfig, batch: BatchPlan, precision: str, zero: dict, *, stage=1, on_cpu=False) -> RunSpec:
    """Resolve a run with this batch, precision and zero_optimization, which replace those of flags and preset."""
    flags, preset = _of_batch(config, batch), {"zero_optimization": zero | {"stage": stage}}
    return RunSpec(flags, "cpu" if on_cpu else "cuda", batch.dp_size, 1, preset, stage, PRECISIONS[precision], False)


def memory_of_run(cfg, batch, config, counts, precision, zero, *, stage=1, on_cpu=False, **where) -> dict[str, float]:
    """Return the planned {part: bytes per rank} of a run without offload."""
    spec = planned_run(config, batch, precision, zero, stage=stage, on_cpu=on_cpu)
    return memory_of(setting_of_run(spec, cfg, counts, **where).with_(offloads=()))


@functools.lru_cache
def counts_of(cfg: CLIPConfig) -> dict[str, tuple[int, int]]:
    """Return the counts of parameters of a model that is trained as a whole."""
    with torch.device("meta"):
        return parameter_counts(CLIP(cfg))


def whole(model: CLIPConfig, *, gpus: int, zero: int = 1, offloads: tuple[str, ...] = (), **fields: Any) -> Setting:
    """Return a setting that trains all of a model, with AdamW and a preset of ds_configs."""
    preset = shipped_preset("zero3_offload" if zero == 3 and offloads else f"zero{zero}")
    options = preset["zero_optimization"] | {f"offload_{part}": {"device": "cpu"} for part in offloads}
    if options.get("overlap_comm") == "auto":
        options["overlap_comm"] = gpus // fields.get("gpus_per_node", 8) > 1
    total = sum(count for count, _ in counts_of(model).values())
    blocks = {"image": model.vision_cfg.layers, "text": model.text_cfg.layers}
    own: dict[str, Any] = {"counts": (total, total), "blocks": blocks, "checkpoint": 0.0, "zero_optimization": options}
    return Setting(model=model, gpus=gpus, zero=zero, offloads=offloads, **own | fields)


def setting(
    cfg: CLIPConfig | None = None,
    *,
    micro_batch=1,
    micro_batches=1,
    ranks=1,
    trainable=0,
    precision="amp_bf16",
    **fields,
) -> Setting:
    """Return a setting of `ranks` data-parallel ranks; without `cfg`, of the demo's model."""
    gpus, sizes = ranks * fields.get("tensor_parallel", 1), {"micro_batch": micro_batch}
    sizes |= {"gpus": gpus, "gpus_per_node": gpus, "global_batch": ranks * micro_batches * micro_batch}
    own = {"counts": (trainable, trainable), "zero_optimization": {}, "precision": PRECISIONS[precision]}
    return whole(cfg or load_model_config("demo"), **sizes | own | fields)
