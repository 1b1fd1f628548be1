"""Check that a run's flags fit into memory, and choose the micro-batch size of --batch-size auto.

The check rejects only an estimate above the full memory of the device or the host. Pixels of --pixel-cache-gb auto
use the remaining host memory, so they count as 0.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from infcl.config import RunSpec
from infcl.config.preset import STAGE_3_BUCKET
from infcl.models.config import CLIPConfig
from infcl.models.open_clip_config import OpenClipConfig
from infcl.parallel import Parallel, max_over, ranks_of_host
from infcl.parallel.host_limits import host_memory_bytes
from infcl.plan.memory import host_bytes, host_parts, memory_of
from infcl.plan.setting import Setting, parameter_counts, setting_of_run
from infcl.train.build import Inputs, build_meta_model

_ROOM = 0.90  # share of the memory that --batch-size auto and a suggestion may use
_LARGEST = 4096  # largest micro-batch that --batch-size auto tries
# The keys of ds_configs/zero3.json that determine memory
_ZERO_3 = {"zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": STAGE_3_BUCKET}}
_LESS_HOST_MEMORY = 'Try --pixel-cache-gb auto, "pin_memory": false or no offloading in --deepspeed_config, more hosts'


def fit_to_memory(inputs: Inputs, parallel: Parallel) -> Inputs:
    """Check the memory of a run and choose the micro-batch size where it is auto. Collective.

    Args:
        inputs: a `batch_size` of 0 in the flags means auto.
        parallel: the ranks. All use the smallest memory among them.

    Returns:
        `inputs` with a micro-batch size.

    Raises:
        ValueError: on every rank, with the numbers and a suggestion, when the run cannot fit.
    """
    spec, cfg = inputs.spec, inputs.model_config
    if spec.flags.skip_memory_check and spec.flags.batch_size:
        return inputs
    if isinstance(cfg, OpenClipConfig):  # the memory of their activations is not known before a run
        if spec.flags.batch_size == 0:
            raise ValueError(
                f"--batch-size auto: the memory of {cfg.source} cannot be planned; give a number of samples"
            )
        return inputs
    counts = parameter_counts(build_meta_model(spec.flags, cfg))
    own = [-memory_of_device(parallel), -host_memory_bytes()]
    capacity, host = (-most for most in max_over(dist.group.WORLD, own, parallel.device))  # minimum over ranks
    fit = Fit(spec, cfg, counts, capacity, host, ranks_of_host(parallel))
    if spec.flags.batch_size == 0:
        return dataclasses.replace(inputs, spec=fit.choose())
    fit.check()
    return inputs


def memory_of_device(parallel: Parallel) -> float:
    """Return the bytes that a rank may use: the GPU's memory, or on a CPU its share of the host's or cgroup's."""
    if parallel.device.type == "cuda":
        return float(torch.cuda.get_device_properties(parallel.device).total_memory)
    return host_memory_bytes() / ranks_of_host(parallel)


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

    def setting(self, spec: RunSpec) -> Setting:
        """Return the setting of `spec`, without pixels that only use free memory."""
        setting = setting_of_run(spec, self.cfg, self.counts, ranks_of_host=self.ranks_of_host)
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
            raise self._error(parts, f"{_gib(parts['peak'])} per rank", self.capacity, self._suggestion())
        setting = self.setting(self.spec)
        needed = host_bytes(setting, self.ranks_of_host)
        if self.spec.device != "cpu" and needed > self.host:
            where = f"{_gib(needed)} of host memory for {self.ranks_of_host} ranks"
            raise self._error(host_parts(setting), where, self.host, _LESS_HOST_MEMORY)

    def _error(self, parts: dict[str, float], needed: str, available: float, suggestion: str) -> ValueError:
        largest = sorted(((size, name) for name, size in parts.items() if name != "peak"), reverse=True)[:3]
        named = ", ".join(f"{name} {_gib(size)}" for size, name in largest)
        return ValueError(
            f"{self.spec.flags.model} needs {needed}, {_gib(available)} is available ({named}). "
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
        in_zero_3 = dataclasses.replace(spec, preset=_ZERO_3)
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
                        in_preset = any(spec.preset.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
                        flags += ["--deepspeed_config zero3"]
                        flags += [f"--precision {spec.precision}"] if in_preset else []
                    return f"Try {' '.join(flags)} ({_gib(peak)})"
        return "No micro-batch size, checkpointing or ZeRO stage fits: use more GPUs, offloading"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
