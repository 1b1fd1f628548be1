"""Search over settings: the largest batch that fits, the fastest settings of a batch, and scaling curves."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from operator import attrgetter

from infcl.config import BatchPlan
from infcl.config.preset import stage_over
from infcl.plan.memory import HEADROOM, host_bytes, memory_of, reserved_bytes
from infcl.plan.setting import Setting
from infcl.plan.timing import phases_of, step_seconds

_LARGEST, _SMALLEST = 2048, 8  # bounds of the micro-batch sizes to consider
_CONTEXT_BYTES = 2**30  # approximate device memory of the CUDA context and of libraries at start
GROUPS = {  # of phases, in a scaling curve
    "towers": ("encode", "replay", "tensor parallel", "ZeRO-3 hooks"),
    "loss": ("loss", "gather features"),
    "ring traffic": ("ring",),
    "ZeRO traffic": ("gradients", "parameters"),
    "host": ("host",),
    "optimizer": ("optimizer", "optimizer on the host", "gradients to it"),
}


def fits(setting: Setting) -> bool:
    """Return whether a setting fits in its GPUs and, if their memory is known, in its nodes."""
    return fits_gpu(setting) and (setting.host_memory_gib is None or fits_host(setting, setting.host_memory_gib))


def fits_gpu(setting: Setting) -> bool:
    """Return whether a setting fits in its GPUs."""
    return memory_of(setting)["peak"] <= setting.gpu.usable_bytes


def fits_host(setting: Setting, gib: float, *, pixels: bool = False) -> bool:
    """Return whether a node of `gib` GiB has room for its ranks' data.

    `pixels` includes the pixels of a full step. By default the trainer reads them again if they do not fit.
    """
    setting = setting if pixels else setting.with_(pixel_bytes=0.0)
    return host_bytes(setting, setting.ranks_of_host) <= gib * 2**30


def largest_batch(setting: Setting) -> int:
    """Return the largest global batch that fits, a multiple of one micro-batch per rank; 0 if none fits."""
    unit = setting.dp_size * setting.micro_batch
    multiples = range(unit, unit * 2**40, unit)
    return unit * bisect_left(multiples, True, key=lambda size: not fits(setting.with_(global_batch=size)))


def micro_batches(setting: Setting) -> list[int]:
    """Return the micro-batch sizes that divide a rank's batch, largest first; below 8 only if there are no others."""
    share = BatchPlan(setting.dp_size, 1, setting.rank_batch)
    sizes = list(share.divisors(_LARGEST, setting.tensor_parallel))
    return [size for size in sizes if size >= _SMALLEST] or sizes


def candidates(setting: Setting) -> Iterator[Setting]:
    """Yield settings of the same model, GPUs and global batch, with every value of all other options.

    These are micro-batch size, ZeRO stage, checkpointing, offload, T and, for T above 1, sequence parallelism.
    """
    for parts in (1, 2, 4, 8):
        split = setting.with_(tensor_parallel=parts, sequence_parallel=False)
        try:
            split.with_(micro_batch=parts, zero=1, offloads=()).check()
        except ValueError:  # T does not divide the GPUs, the model's heads or the batch
            continue
        for offload in (False, True):
            least = 1 if offload or setting.precision in ("bf16", "fp16") else 0  # as preset.check_stage
            stages = [stage_over(split.dp_size, zero, setting.precision, offloads=offload) for zero in range(least, 4)]
            for zero, checkpointing, sequence, micro_batch in product(
                dict.fromkeys(stages), (False, True), (False, True) if parts > 1 else (False,), micro_batches(split)
            ):
                yield split.with_(
                    offloads=("optimizer",) if offload else (),
                    zero=zero,
                    checkpointing=checkpointing,
                    sequence_parallel=sequence,
                    micro_batch=micro_batch,
                )


def resolved(setting: Setting) -> Setting:
    """Return the setting that the trainer runs: its ZeRO stage and, if `resident` is 0, its cached activations.

    The trainer (train/resident.py) measures the bytes of a graph and the free memory after parameters and optimizer;
    here both are estimates. Graphs are those of captions of full length (a row has room for two).
    """
    stage = stage_over(setting.dp_size, setting.zero, setting.precision, offloads=setting.offload)
    setting = setting.with_(zero=stage)
    if setting.resident:
        return setting
    longest = setting
    if setting.caption_row is not None:
        longest = setting.with_(model=setting.model.with_overrides(context_length=setting.caption_row // 2))
    longest, parts = longest.with_(resident=1), memory_of(longest.with_(resident=1))
    room = setting.gpu.memory_gib * 2**30 * (1 - HEADROOM) - _CONTEXT_BYTES - parts["parameters"] - parts["optimizer"]
    cached = int((room - reserved_bytes(longest)) // parts["activations"])
    return setting.with_(resident=max(1, min(cached, setting.num_micro_batches)))


def fastest(setting: Setting, count: int = 5) -> list[tuple[float, Setting]]:
    """Return [(seconds per step, setting)] of the `count` fastest candidates that fit, the fastest first.

    Equal times, to the three digits that an estimate has, are sorted by complexity, then by memory.
    """
    others = filter(fits, map(resolved, candidates(setting)))
    timed = [(step_seconds(other), memory_of(other)["peak"], other) for other in others]
    # complexity, most important first: tensor parallelism, offload, recomputation, ZeRO stage
    parts = attrgetter("tensor_parallel", "sequence_parallel", "offload", "checkpointing", "zero")
    timed.sort(key=lambda entry: (float(f"{entry[0]:.3g}"), parts(entry[2]), entry[1]))
    return [(seconds, other) for seconds, _, other in timed[:count]]


def sweep(setting: Setting, sizes: list[int]) -> list[dict]:
    """Compute a scaling curve.

    Args:
        setting: the setting; its batch per GPU is kept. With ring "auto" both rings are computed.
        sizes: numbers of GPUs.

    Returns:
        A row per ring and size: GPUs, global batch, samples/s per GPU, exposed seconds of each group of phases.

    Raises:
        ValueError: a setting is invalid.
    """
    per_gpu = setting.global_batch // setting.gpus
    rows = []
    for ring in ("flat", "two-level") if setting.ring == "auto" else (setting.ring,):
        for size in sizes:
            other = setting.with_(gpus=size, global_batch=per_gpu * size, ring=ring)
            other.check()
            phases = phases_of(resolved(other))
            groups = {name: sum(p.exposed for p in phases if p.name in members) for name, members in GROUPS.items()}
            total = sum(groups.values())
            rows.append({"ring": ring, "gpus": size, "global_batch": other.global_batch, "seconds": total, **groups})
            rows[-1]["samples_per_second_per_gpu"] = per_gpu / total
    return rows
