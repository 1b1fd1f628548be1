"""ZeRO presets (ds_configs/*.json): check a preset against the flags and complete it to DeepSpeed's config.

A preset defines how the state is sharded and where it is stored. Flags own the batch, optimizer, clipping and schedule.
A preset that sets one of these is rejected, and `deepspeed_config` adds them, so that each setting has one source.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import TypedDict

from infcl.config.batch import BatchPlan
from infcl.config.json_file import read_record
from infcl.config.precision import PRECISIONS, Precision
from infcl.config.settings import TrainConfig

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = next(folder / "ds_configs" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "ds_configs").is_dir())
_OWNED_BY_FLAGS = {
    "train_batch_size": "--batch-size and --accum-freq",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--accum-freq",
    "gradient_clipping": "--grad-clip-norm",
    "optimizer": "--opt, --lr, --wd, --beta1, --beta2 and --eps",
    "scheduler": "--lr-scheduler and --warmup",
    "torch_autocast": "--precision amp_bf16",
    "steps_per_print": "--log-every-n-steps",
}
BUCKET = 500_000_000  # DeepSpeed's default of `reduce_bucket_size`, in elements
# ZeRO++ in DeepSpeed 0.19.8 takes neighbouring ranks for copies, but tensor-parallel ranks hold different parameters.
_WRONG_OVER_PARTS = ("zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_weights")
_PRESET_KEYS = {
    "zero_optimization", "bf16", "fp16", "data_types",
    "communication_data_type", "zero_force_ds_cpu_optimizer", "comms_logger", "wall_clock_breakdown", "memory_breakdown"
}  # fmt: skip


class _Zero(TypedDict, total=False):
    stage: Literal[0, 1, 2, 3]
    offload_optimizer: dict[str, Any]
    offload_param: dict[str, Any]


class _Half(TypedDict, total=False):
    enabled: bool | Literal["auto"]


class _Preset(TypedDict, total=False):
    zero_optimization: _Zero
    bf16: _Half
    fp16: _Half
    data_types: dict[str, Any]


def preset_file(given: str) -> Path:
    """Return the file of a preset that is given by its name in ds_configs ("zero1") or as a path."""
    shipped = _SHIPPED / f"{given}.json"
    return shipped if given.isidentifier() and shipped.exists() else Path(given)


@cache
def shipped_preset(name: str) -> dict:
    """Return the contents of a preset of ds_configs; do not change them."""
    return json.loads(preset_file(name).read_text())


def read_preset(config: TrainConfig, device_type: str, hosts: int = 1) -> tuple[dict, Precision]:
    """Read and check the preset. Only `resolve` calls this; other modules use the RunSpec.

    An `overlap_comm` of "auto" becomes true across nodes and in stage 3. Within a node the overlap of stages 1 and 2
    costs more than it saves (docs/benchmarks/step.md).

    Returns:
        The preset and the precision.

    Raises:
        ValueError: the preset is invalid or contradicts the flags.
    """
    source, path = f"--deepspeed_config {config.deepspeed_config}", preset_file(config.deepspeed_config)
    try:
        preset: dict[str, Any] = dict(read_record(path, _Preset))
        zero = preset.get("zero_optimization", {})
        if zero.get("overlap_comm") == "auto":
            zero["overlap_comm"] = hosts > 1 or zero_stage(preset) == 3
        _check(preset, config.tensor_parallel_size)
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).removeprefix(f'{path}: ')}") from None
    in_preset = next((name for name in ("bf16", "fp16") if preset.get(name, {}).get("enabled")), None)
    precision = PRECISIONS[config.precision or in_preset or ("amp_bf16" if device_type == "cuda" else "fp32")]
    if in_preset and precision != PRECISIONS[in_preset]:
        raise ValueError(f"--precision {precision} contradicts {source}, which enables {in_preset}: change one of them")
    if precision.matmul_dtype == torch.float16 and device_type == "cpu" and not cpu_computes_fp16():
        raise ValueError(
            f"{'--precision fp16' if config.precision else source}: this CPU has no arithmetic for fp16, and no GPU is "
            "visible, or --device cpu was given. On a CPU train in fp32 or bf16"
        )
    check_stage(zero_stage(preset), precision, offloads=offloads(preset, "optimizer"), source=source)
    return preset, precision


def _check(preset: dict, tensor_parallel_size: int) -> None:
    """Raise ValueError for keys that flags own, that do not exist, or that the trainer or DeepSpeed cannot apply."""
    zero = preset.get("zero_optimization", {})
    for key in preset:
        if key in _OWNED_BY_FLAGS:
            raise ValueError(f"sets {key!r}: use {_OWNED_BY_FLAGS[key]} instead")
        if key not in _PRESET_KEYS:
            raise ValueError(f"unknown key {key!r} (known: {', '.join(sorted(_PRESET_KEYS))})")
    for key in _left_open(preset):
        raise ValueError(f'{key} is "auto", which only transformers fills in: write a value, or leave it out')
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            raise ValueError(
                f"{name} is on nvme, where checkpoints cannot read and write the state; "
                'use "device": "cpu", as zero3_offload does'
            )
    if old := [key for key in zero if key.startswith("cpu_offload")]:
        raise ValueError(f"{old[0]} is DeepSpeed's old name: use offload_optimizer and offload_param")
    if zero.get("round_robin_gradients"):
        raise ValueError("round_robin_gradients hides the gradients from the towers' norms: leave it out")
    if all(preset.get(name, {}).get("enabled") for name in ("bf16", "fp16")):
        raise ValueError("enables both bf16 and fp16: choose one")
    for key in _WRONG_OVER_PARTS if tensor_parallel_size > 1 else ():
        if (value := zero.get(key, 0)) not in (0, key == "zero_hpz_partition_size"):
            raise ValueError(
                f"--tensor-parallel-size {tensor_parallel_size} with {key} {json.dumps(value)}: DeepSpeed would mix "
                "other ranks' parameters into a rank's; leave it out"
            )


def _left_open(values: dict) -> Iterator[str]:
    for key, value in values.items():
        if value == "auto":
            yield key
        elif isinstance(value, dict):
            yield from _left_open(value)


def stage_over(ranks: int, stage: int, precision: Precision, *, offloads: bool) -> int:
    """Return the ZeRO stage that runs on `ranks` data-parallel ranks when the preset has `stage`.

    A single rank has no state to shard. Stages 1 and 2 become stage 0 there, which saves DeepSpeed's second copy of the
    parameters and its gradient buckets (docs/concepts/engine.md). FP32 master weights of half-precision parameters and
    state in host memory need their stage. Stage 3 is kept, so that it can be studied on one GPU.
    """
    if ranks == 1 and stage in (1, 2) and not precision.half_parameters and not offloads:
        return 0
    return stage


def check_stage(stage: int, precision: Precision, *, offloads: bool, source: str) -> None:
    """Raise ValueError for a combination that DeepSpeed's stage 0 does not support; `source` is who asks for it."""
    if stage == 0 and precision.half_parameters:
        raise ValueError(
            f"--precision {precision} needs ZeRO stage >= 1 ({source} has stage 0, where DeepSpeed keeps no exact FP32 "
            f"master weights); use zero1 or --precision amp_bf16"
        )
    if stage == 0 and offloads:
        raise ValueError(
            f"offloading the optimizer needs ZeRO stage >= 1 ({source} has stage 0, where DeepSpeed leaves it on the "
            f"GPU); use zero3_offload"
        )


def offloads(preset: dict, part: str) -> bool:
    """Return whether DeepSpeed moves `part` ("optimizer" or "param") to host memory; parameters only in stage 3."""
    device = preset.get("zero_optimization", {}).get(f"offload_{part}", {}).get("device", "none")
    return device != "none" and (part == "optimizer" or zero_stage(preset) == 3)


def sums_gradients_on_host(stage: int, precision: Precision) -> bool:
    """Return whether ZeRO-2 with offloading sums gradients in host memory; half precision keeps the sums on the GPU."""
    return stage == 2 and not precision.half_parameters


def bucket_elements(zero_optimization: dict, stage: int) -> int:
    """Return the gradient elements reduced at once; the default is smaller in engine/zero3.py, which holds three."""
    offloaded = offloads({"zero_optimization": zero_optimization}, "optimizer")
    ours = stage == 3 and not offloaded and zero_optimization.get("reduce_scatter", True)
    default = shipped_preset("zero3")["zero_optimization"]["reduce_bucket_size"] if ours else BUCKET
    return zero_optimization.get("reduce_bucket_size", default)


def cpu_computes_fp16() -> bool:
    """Return whether this CPU trains in fp16. DeepSpeed checks the same, but only after the data is read."""
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def zero_stage(preset: dict) -> int:
    return preset.get("zero_optimization", {}).get("stage", 0)


def deepspeed_config(
    preset: dict, precision: Precision, batch: BatchPlan, grad_clip_norm: float | None, *, leaves: list[str]
) -> dict:
    """Return DeepSpeed's config: the preset with the settings that flags own.

    Args:
        leaves: full names of module classes that stage 3 gathers as a unit, unless the preset lists its own.
    """
    merged = preset | {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.num_micro_batches,
        "train_batch_size": batch.global_batch_size,
        "gradient_clipping": grad_clip_norm or 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU before each forward
    }
    merged.setdefault("zero_force_ds_cpu_optimizer", False)  # the optimizers of optimizers.py run on a CPU too
    if zero_stage(preset) == 3:  # leaf modules: one gather and one set of hooks per block, which compiles as a unit
        zero = dict(merged["zero_optimization"])
        zero.setdefault("leaf_module", {"classes": leaves})
        zero["reduce_bucket_size"] = bucket_elements(zero, 3)
        merged["zero_optimization"] = zero
    if precision.autocast:
        # by default DeepSpeed reduces the gradients of torch's linear and convolution classes (conv1) in bf16
        merged["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    if precision.half_parameters:
        merged[precision.short_name] = merged.get(precision.short_name, {}) | {"enabled": True}
        merged.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    if precision == PRECISIONS["bf16"] and zero_stage(preset) == 1:
        # else DeepSpeed rounds the float32 sums before it reduces them
        merged.setdefault("communication_data_type", "fp32")
    return merged
