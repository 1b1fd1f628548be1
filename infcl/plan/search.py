"""Search for the largest batch that fits, and for the fastest settings of a given batch."""

import dataclasses
from collections.abc import Iterator
from operator import attrgetter

from infcl.config import BatchPlan
from infcl.config.preset import stage_over
from infcl.models.config import with_overrides
from infcl.plan.host import host_bytes
from infcl.plan.loads import load_of, memory_of
from infcl.plan.memory import HEADROOM, bytes_beside_graphs, graphs_of, parts_of
from infcl.plan.setting import Setting
from infcl.plan.timing import step_seconds

_LARGEST, _SMALLEST = 2048, 8  # bounds of the micro-batch sizes to consider
CONTEXT_BYTES = 2**30  # approximate device memory of the CUDA context and of libraries at start


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
    load = load_of(setting) if pixels else dataclasses.replace(load_of(setting), pixels=0.0)
    return host_bytes(load, setting.ranks_of_host) <= gib * 2**30


def largest_batch(setting: Setting) -> int:
    """Return the largest global batch that fits, a multiple of one micro-batch per rank; 0 if none fits."""
    unit = setting.dp_size * setting.micro_batch

    def fitting(count: int) -> bool:
        return fits(setting.with_(global_batch=count * unit))

    if not fitting(1):
        return 0
    above = 2
    while fitting(above) and above < 2**40:
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if fitting(middle) else (below, middle)
    return below * unit


def micro_batches(setting: Setting) -> list[int]:
    """Return the micro-batch sizes that divide a rank's batch, largest first; below 8 only if there are no others."""
    share = BatchPlan(setting.dp_size, 1, setting.rank_batch)
    sizes = list(share.divisors(_LARGEST, setting.tensor_parallel))
    return [size for size in sizes if size >= _SMALLEST] or sizes


def candidates(setting: Setting) -> Iterator[Setting]:
    """Yield settings of the same model, GPUs and global batch.

    They have every micro-batch size, ZeRO stage, checkpointing, offload and T; for T above 1, with and without sequence
    parallelism.
    """
    for tensor_parallel in (1, 2, 4, 8):
        if not _can_be_shared(setting.with_(tensor_parallel=tensor_parallel, sequence_parallel=False)):
            continue
        ranks = setting.gpus // tensor_parallel
        for offload in (False, True):
            least = 1 if offload or setting.precision in ("bf16", "fp16") else 0  # as preset.check_stage
            stages = (stage_over(ranks, zero, setting.precision, offloads=offload) for zero in range(least, 4))
            for zero in dict.fromkeys(stages):
                for checkpointing in (False, True):
                    for sequence in (False, True) if tensor_parallel > 1 else (False,):
                        changes = {"zero": zero, "checkpointing": checkpointing, "offload": offload}
                        changes |= {"tensor_parallel": tensor_parallel, "sequence_parallel": sequence}
                        for micro_batch in micro_batches(setting.with_(**changes)):
                            yield setting.with_(micro_batch=micro_batch, **changes)


def _can_be_shared(setting: Setting) -> bool:
    """Return whether T divides the setting's GPUs, its model's heads and its batch."""
    sizes = micro_batches(setting) if setting.gpus % setting.tensor_parallel == 0 else []
    try:
        setting.with_(micro_batch=max(sizes, default=1), zero=1, offload=False).check()
    except ValueError:
        return False
    return True


def with_graphs(setting: Setting) -> Setting:
    """Return the setting with the cached activations of --resident-micro-batches auto, by the trainer's rule.

    The trainer (train/resident.py) measures the bytes of a graph and the free memory after parameters and optimizer;
    here both are estimates. Graphs are those of captions of full length (a row has room for two).
    """
    model, row = setting.model, setting.caption_row
    whole = model if row is None else with_overrides(model, context_length=row // 2)
    load = load_of(setting.with_(resident=1, model=whole))
    parts = parts_of(load)
    room = setting.gpu.memory_gib * 2**30 * (1 - HEADROOM) - CONTEXT_BYTES - parts["parameters"] - parts["optimizer"]
    kept = int((room - bytes_beside_graphs(load)) // graphs_of(load)["activations"])
    return setting.with_(resident=max(1, min(kept, setting.num_micro_batches)))


def fastest(setting: Setting, count: int = 5, *, graphs: bool = False) -> list[tuple[float, Setting]]:
    """Return the fastest settings that fit.

    Equal times, to the three digits that an estimate has, are sorted by complexity, then by memory.

    Args:
        setting: the setting to vary.
        count: how many settings to return.
        graphs: cache the activations of as many micro-batches as fit.

    Returns:
        [(seconds per step, setting)], the fastest first.
    """
    others = filter(fits, map(with_graphs, candidates(setting.with_(resident=1))) if graphs else candidates(setting))
    timed = [(step_seconds(other), memory_of(other)["peak"], other) for other in others]
    # complexity, most important first: tensor parallelism, offload, recomputation, ZeRO stage
    parts = attrgetter("tensor_parallel", "sequence_parallel", "offload", "checkpointing", "zero")
    timed.sort(key=lambda entry: (float(f"{entry[0]:.3g}"), parts(entry[2]), entry[1]))
    return [(seconds, other) for seconds, _, other in timed[:count]]
