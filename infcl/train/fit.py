"""Check that a run's flags fit into memory, and choose the micro-batch size of --batch-size auto.

The check rejects only what is known before the start: an estimate above the full memory of the device or of the host.
Pixels of --pixel-cache-gb auto use what is left there, so they count as nothing.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from infcl.config import BatchPlan, TrainConfig
from infcl.config.preset import STAGE_3_BUCKET, offloads, read_preset, zero_stage
from infcl.config.settings import shipped_preset
from infcl.models.config import CLIPConfig
from infcl.parallel import Parallel, max_over, ranks_of_host
from infcl.parallel.host_limits import host_memory_bytes
from infcl.plan.host import host_bytes, host_parts
from infcl.plan.loads import load_of_run
from infcl.plan.memory import Load, parameter_counts, parts_of
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config

_ROOM = 0.90  # share of the memory that --batch-size auto and a suggestion may use
_LARGEST = 4096  # largest micro-batch that --batch-size auto tries
# What memory follows from in ds_configs/zero3.json
_ZERO_3 = {"zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": STAGE_3_BUCKET}}


def fit_to_memory(config: TrainConfig, parallel: Parallel) -> TrainConfig:
    """Check the memory of a run and choose the micro-batch size where it is auto. Collective.

    Args:
        config: the flags; a `batch_size` of 0 means auto.
        parallel: the ranks. All decide by the least memory among them.

    Returns:
        `config` with a micro-batch size.

    Raises:
        ValueError: on every rank, with the numbers and a suggestion, when the run cannot fit.
    """
    if config.skip_memory_check and config.batch_size:
        return config
    _, cfg = build_tokenizer_and_model_config(config)
    counts = parameter_counts(build_meta_model(config, cfg))
    preset, precision = read_preset(config, parallel.device.type, parallel.dp_size, parallel.hosts)
    on_cpu, own = parallel.device.type == "cpu", [-memory_of_device(parallel), -host_memory_bytes()]
    capacity, host = (-most for most in max_over(dist.group.WORLD, own, parallel.device))  # the least of all ranks
    ranks = ranks_of_host(parallel)
    fit = Fit(config, cfg, counts, precision, preset, parallel.dp_size, capacity, on_cpu, host, ranks)
    if config.batch_size == 0:
        return fit.choose()
    fit.check()
    return config


def memory_of_device(parallel: Parallel) -> float:
    """Return the bytes that a rank may use: the GPU's memory, or on a CPU its share of the host's or cgroup's."""
    if parallel.device.type == "cuda":
        return float(torch.cuda.get_device_properties(parallel.device).total_memory)
    return host_memory_bytes() / ranks_of_host(parallel)


@dataclasses.dataclass
class Fit:
    """One run on `dp_size` data-parallel ranks with `capacity` bytes each and `host` bytes per node.

    On a CPU `capacity` is a rank's share of the host, which holds everything.
    """

    config: TrainConfig
    cfg: CLIPConfig
    counts: dict[str, tuple[int, int]]
    precision: str
    preset: dict
    dp_size: int
    capacity: float
    on_cpu: bool = False
    host: float = float("inf")
    ranks_of_host: int = 1

    def load(self, config: TrainConfig) -> Load:
        """Return the load of `config` under this preset, without the pixels that only use free memory."""
        if config.pixel_cache_gb == "auto" and config.pixel_cache == "host":
            config = dataclasses.replace(config, pixel_cache_gb="0")
        return load_of_run(
            self.cfg,
            BatchPlan.of(config, self.dp_size),
            config,
            self.counts,
            self.precision,
            self.preset.get("zero_optimization", {}),
            stage=zero_stage(self.preset),
            offloads=tuple(part for part in ("optimizer", "param") if offloads(self.preset, part)),
            on_cpu=self.on_cpu,
            ranks_of_host=self.ranks_of_host,
        )

    def parts(self, config: TrainConfig) -> dict[str, float]:
        """Return {part: bytes per rank} of the device with its "peak"; on a CPU also host memory, as "host"."""
        load = self.load(config)
        parts = parts_of(load)
        if self.on_cpu:
            beside = sum(host_parts(load).values())
            parts |= {"host": beside, "peak": parts["peak"] + beside}
        return parts

    def check(self) -> None:
        """Raise ValueError with the numbers and a suggestion for what cannot fit, unless --skip-memory-check."""
        if self.config.skip_memory_check:
            return
        parts = self.parts(self.config)
        if parts["peak"] > self.capacity:
            raise self._error(parts, f"{_gib(parts['peak'])} per rank", self.capacity, self._suggestion())
        load = self.load(self.config)
        needed = host_bytes(load, self.ranks_of_host)
        if not self.on_cpu and needed > self.host:
            where = f"{_gib(needed)} of host memory for {self.ranks_of_host} ranks"
            raise self._error(host_parts(load), where, self.host, self._host_suggestion())

    def _error(self, parts: dict[str, float], needed: str, available: float, suggestion: str) -> ValueError:
        largest = sorted(((size, name) for name, size in parts.items() if name != "peak"), reverse=True)[:3]
        named = ", ".join(f"{name} {_gib(size)}" for size, name in largest)
        return ValueError(
            f"{self.config.model} needs {needed}, {_gib(available)} is available ({named}). "
            f"{suggestion} or --skip-memory-check."
        )

    def choose(self) -> TrainConfig:
        """Return the flags with the largest micro-batch that fits and divides a rank's share.

        With --skip-memory-check that is at least one sample; otherwise ValueError when not even one fits.
        """
        parts = self.config.tensor_parallel_size
        least = dataclasses.replace(self.config, batch_size=parts)
        for size in BatchPlan.of(least, self.dp_size).divisors(_LARGEST, parts):
            other = dataclasses.replace(self.config, batch_size=size)
            if self.parts(other)["peak"] <= _ROOM * self.capacity:
                dataclasses.replace(self, config=other).check()
                return other
        dataclasses.replace(self, config=least).check()
        return least

    def _suggestion(self) -> str:
        """Return the least change that fits: smaller micro-batches of the same batch, checkpointing, then ZeRO-3."""
        config = self.config
        batch = BatchPlan.of(config, self.dp_size)
        for preset, checkpointing in ((self.preset, config.grad_checkpointing), (self.preset, True), (_ZERO_3, True)):
            question = dataclasses.replace(self, preset=preset)
            for size in batch.divisors(batch.micro_batch_size, config.tensor_parallel_size):
                accumulate = {"accum_freq": batch.rank_batch_size // size} if config.global_batch_size is None else {}
                changes: dict[str, Any] = {"batch_size": size, "grad_checkpointing": checkpointing, **accumulate}
                peak = question.parts(dataclasses.replace(config, **changes))["peak"]
                if peak <= _ROOM * self.capacity:
                    flags = [f"--batch-size {size}"]
                    flags += [f"--accum-freq {accumulate['accum_freq']}"] if accumulate else []
                    flags += ["--grad-checkpointing"] if checkpointing else []
                    flags += self._zero_3_flags() if preset is _ZERO_3 else []
                    return f"Try {' '.join(flags)} ({_gib(peak)})"
        return "No micro-batch size, checkpointing or ZeRO stage fits: use more GPUs, offloading"

    def _host_suggestion(self) -> str:
        """Return the least change that fits into the host: fewer pixels, nothing pinned, nothing offloaded."""
        if host_bytes(dataclasses.replace(self.load(self.config), pixels=0.0), self.ranks_of_host) <= self.host:
            return "Try --pixel-cache-gb auto, which uses what is left,"
        load = self.load(dataclasses.replace(self.config, pixel_cache_gb="0"))
        zero: dict[str, Any] = {
            name: value | {"pin_memory": False} if name.startswith("offload_") else value
            for name, value in load.zero.items()
        }
        if (unpinned := host_bytes(dataclasses.replace(load, zero=zero), self.ranks_of_host)) <= self.host:
            return f'Try "pin_memory": false in {self.config.deepspeed_config} ({_gib(unpinned)})'
        there = dataclasses.replace(self, preset=_ZERO_3)
        peak, rest = there.parts(self.config)["peak"], host_bytes(there.load(self.config), self.ranks_of_host)
        if peak <= _ROOM * self.capacity and rest <= self.host:
            flags = " ".join(self._zero_3_flags())
            return f"Try {flags} ({_gib(peak)} on the GPU, {_gib(rest)} of host memory)"
        return "Use more hosts, more memory in them"

    def _zero_3_flags(self) -> list[str]:
        """Return the flags of ZeRO-3, with the precision where today's preset sets it."""
        in_preset = any(self.preset.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        precision = [f"--precision {self.precision}"] if in_preset else []
        return [f"--deepspeed_config {shipped_preset('zero3')}", *precision]


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
