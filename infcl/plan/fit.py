"""Whether a run fits into memory, with which micro-batch, and the largest batch that does.

The check rejects only an estimate above the full memory of the device or the host. Pixels of --pixel-cache-gb auto
use the remaining host memory, so they count as 0.
"""

import dataclasses
from bisect import bisect_left
from typing import Any

from infcl.config import RunSpec, counted, shown_bytes
from infcl.config.preset import shipped_preset
from infcl.models.config import CLIPConfig
from infcl.plan.memory import HEADROOM, host_bytes, host_parts, memory_of, reserved_bytes
from infcl.plan.setting import Setting, setting_of_run

_ROOM = 0.90  # share of the memory that --batch-size auto and a suggestion may use
_LARGEST = 4096  # largest micro-batch that --batch-size auto tries
_CONTEXT_BYTES = 2**30  # approximate device memory of the CUDA context and of libraries at start
_LESS_HOST_MEMORY = 'Try --pixel-cache-gb auto, "pin_memory": false or no offloading in --deepspeed_config, more hosts'


@dataclasses.dataclass
class Fit:
    """One run on ranks with `capacity` bytes each and `host` bytes per node.

    On a CPU `capacity` is a rank's share of the host, which holds everything.
    """

    spec: RunSpec
    cfg: CLIPConfig
    counts: dict[str, tuple[int, int]]
    capacity: float
    host: float = float("inf")
    ranks_of_host: int = 1
    teacher: tuple[int, int] = (0, 0)

    def setting(self, spec: RunSpec) -> Setting:
        """Return the setting of `spec`, without pixels that only use free memory."""
        on_host = self.ranks_of_host
        setting = setting_of_run(spec, self.cfg, self.counts, ranks_of_host=on_host, teacher=self.teacher)
        return setting.with_(pixel_bytes=0.0) if spec.flags.pixel_cache_gb == "auto" else setting

    def parts(self, spec: RunSpec) -> dict[str, float]:
        """Return {part: bytes per rank} of device memory, with "peak"; on a CPU also host memory, as "host"."""
        setting = self.setting(spec)
        parts = memory_of(setting)
        if setting.on_cpu:
            host = sum(host_parts(setting).values())
            parts |= {"host": host, "peak": parts["peak"] + host}
        return parts

    def check(self) -> None:
        """Raise ValueError with the numbers and a suggestion if the run cannot fit, unless --skip-memory-check."""
        if self.spec.flags.skip_memory_check:
            return
        parts = self.parts(self.spec)
        if parts["peak"] > self.capacity:
            raise self._error(parts, f"{shown_bytes(parts['peak'])} per rank", self.capacity, self._suggestion())
        setting = self.setting(self.spec)
        needed = host_bytes(setting, self.ranks_of_host)
        if self.spec.device != "cpu" and needed > self.host:
            where = f"{shown_bytes(needed)} of host memory for {counted(self.ranks_of_host, 'rank')}"
            raise self._error(host_parts(setting), where, self.host, _LESS_HOST_MEMORY)

    def _error(self, parts: dict[str, float], needed: str, available: float, suggestion: str) -> ValueError:
        largest = sorted(((size, name) for name, size in parts.items() if name != "peak"), reverse=True)[:3]
        named = ", ".join(f"{name} {shown_bytes(size)}" for size, name in largest)
        return ValueError(
            f"{self.spec.flags.model} needs {needed}, {shown_bytes(available)} is available ({named}). "
            f"{suggestion} or --skip-memory-check."
        )

    def choose(self) -> RunSpec:
        """Return the run with the largest micro-batch that fits and divides a rank's share.

        With --skip-memory-check it is the smallest micro-batch if none fits.

        Raises:
            ValueError: not even the smallest micro-batch fits.
        """
        parts = self.spec.flags.tensor_parallel_size
        least = self.spec.change(batch_size=parts)
        for size in least.batch.divisors(_LARGEST, parts):
            other = self.spec.change(batch_size=size)
            if self.parts(other)["peak"] <= _ROOM * self.capacity:
                dataclasses.replace(self, spec=other).check()
                return other
        dataclasses.replace(self, spec=least).check()
        return least

    def _suggestion(self) -> str:
        """Return the smallest change that fits: smaller micro-batches of the same batch, checkpointing, then ZeRO-3."""
        spec, config, batch = self.spec, self.spec.flags, self.spec.batch
        in_zero_3 = dataclasses.replace(spec, preset=shipped_preset("zero3"))
        for way, checkpointing in ((spec, config.grad_checkpointing), (spec, True), (in_zero_3, True)):
            for size in batch.divisors(batch.micro_batch_size, config.tensor_parallel_size):
                accumulate = {"accum_freq": batch.rank_batch_size // size} if config.global_batch_size is None else {}
                changes: dict[str, Any] = {"batch_size": size, "grad_checkpointing": checkpointing, **accumulate}
                peak = self.parts(way.change(**changes))["peak"]
                if peak <= _ROOM * self.capacity:
                    flags = [f"--batch-size {size}"]
                    flags += [f"--accum-freq {accumulate['accum_freq']}"] if accumulate else []
                    flags += ["--grad-checkpointing"] if checkpointing else []
                    if way is in_zero_3:  # with the precision if the current preset sets it
                        in_preset = config.precision is None and spec.precision.half_parameters
                        flags += ["--deepspeed_config zero3"]
                        flags += [f"--precision {spec.precision}"] if in_preset else []
                    return f"Try {' '.join(flags)} ({shown_bytes(peak)})"
        return "No micro-batch size, checkpointing or ZeRO stage fits: use more GPUs, offloading"


def fits_gpu(setting: Setting) -> bool:
    """Return whether a setting fits in its GPUs."""
    return memory_of(setting)["peak"] <= setting.gpu.usable_bytes


def largest_batch(setting: Setting) -> int:
    """Return the largest global batch that fits, a multiple of one micro-batch per rank; 0 if none fits."""
    unit = setting.dp_size * setting.micro_batch
    multiples = range(unit, unit * 2**40, unit)
    return unit * bisect_left(multiples, True, key=lambda size: not fits_gpu(setting.with_(global_batch=size)))


def with_cached_activations(setting: Setting) -> Setting:
    """Return the setting with as many cached activations as --resident-micro-batches auto keeps.

    The trainer (train/resident.py) measures the bytes of a graph and the free memory after parameters and optimizer;
    here both are estimates. Graphs are those of captions of full length (a row has room for two).
    """
    longest = setting
    if setting.caption_row is not None:
        longest = setting.with_(model=setting.model.with_overrides(context_length=setting.caption_row // 2))
    longest, parts = longest.with_(resident=1), memory_of(longest.with_(resident=1))
    room = setting.gpu.memory_gib * 2**30 * (1 - HEADROOM) - _CONTEXT_BYTES - parts["parameters"] - parts["optimizer"]
    cached = int((room - reserved_bytes(longest)) // parts["activations"])
    return setting.with_(resident=max(1, min(cached, setting.num_micro_batches)))
