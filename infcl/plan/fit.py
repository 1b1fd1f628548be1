"""Whether a run's flags fit into the memory there is: refused at start with what would fit; --batch-size auto.

Only what can be known beforehand is refused: an estimate above the whole memory of the device.
"""

import dataclasses
import warnings
from typing import Any

import psutil
import torch
import torch.distributed as dist

from infcl.config import BatchPlan, TrainConfig
from infcl.parallel import Parallel, max_over
from infcl.plan.memory import memory_of_run, parameter_counts
from infcl.towers.config import CLIPConfig
from infcl.train.pixels import control_group_bytes
from infcl.train.preset import offloads, read_preset, zero_stage

_ROOM = 0.90  # of the memory, for --batch-size auto and for what is proposed
_LARGEST = 4096  # micro-batch that is considered
_ZERO_3 = {"zero_optimization": {"stage": 3, "overlap_comm": True}}  # ds_configs/zero3.json, of it what memory is for


def fit_to_memory(config: TrainConfig, parallel: Parallel) -> TrainConfig:
    """`config` with its micro-batch size chosen, where it is auto. ValueError, on every rank, when it cannot fit."""
    if config.skip_memory_check and config.batch_size:
        return config
    from infcl.train.build import build_model, build_tokenizer_and_model_config

    _, cfg = build_tokenizer_and_model_config(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")
        counts = parameter_counts(build_model(config, cfg))
    preset, precision = read_preset(config, parallel.device.type)
    on_cpu, own = parallel.device.type == "cpu", memory_of_device(parallel)
    capacity = -max_over(dist.group.WORLD, [-own], parallel.device)[0]  # the least: all need the same micro-batch
    fit = Fit(config, cfg, counts, precision, preset, parallel.dp_size, capacity, on_cpu)
    if config.batch_size == 0:
        return fit.choose()
    fit.check()
    return config


def memory_of_device(parallel: Parallel) -> float:
    """Bytes that a rank may use: the GPU's memory; on a CPU the host's or the control group's, shared by its ranks."""
    if parallel.device.type == "cuda":
        return float(torch.cuda.get_device_properties(parallel.device).total_memory)
    total = min(psutil.virtual_memory().total, control_group_bytes()[0])
    return total / (parallel.ranks_per_node or parallel.world_size)


@dataclasses.dataclass
class Fit:
    """The memory question of one run on `dp_size` ranks with `capacity` bytes each."""

    config: TrainConfig
    cfg: CLIPConfig
    counts: dict[str, tuple[int, int]]
    precision: str
    preset: dict
    dp_size: int
    capacity: float
    on_cpu: bool = False

    def parts(self, config: TrainConfig) -> dict[str, float]:
        """{part: bytes per rank, "peak"} under `config` and this preset."""
        zero = self.preset.get("zero_optimization", {})
        batch = BatchPlan.of(config, self.dp_size)
        return memory_of_run(
            self.cfg,
            batch,
            config,
            self.counts,
            self.precision,
            zero,
            stage=zero_stage(self.preset),
            offloads=tuple(part for part in ("optimizer", "param") if offloads(self.preset, part)),
            on_cpu=self.on_cpu,
        )

    def check(self) -> None:
        parts = self.parts(self.config)
        if parts["peak"] <= self.capacity:
            return
        largest = sorted(((size, name) for name, size in parts.items() if name != "peak"), reverse=True)[:3]
        named = ", ".join(f"{name} {_gib(size)}" for size, name in largest)
        needed = f"{self.config.model} needs about {_gib(parts['peak'])} a rank"
        raise ValueError(
            f"{needed}, {_gib(self.capacity)} are there: {named}. "
            f"{self._proposal()} (--skip-memory-check starts it anyway)"
        )

    def choose(self) -> TrainConfig:
        """The largest micro-batch size that fits and divides a rank's share; ValueError when not even one pair does."""
        parts = self.config.tensor_parallel_size
        least = dataclasses.replace(self.config, batch_size=parts)
        for size in BatchPlan.of(least, self.dp_size).divisors(_LARGEST, parts):
            other = dataclasses.replace(self.config, batch_size=size)
            if self.parts(other)["peak"] <= _ROOM * self.capacity:
                return other
        dataclasses.replace(self, config=least).check()
        return least

    def _proposal(self) -> str:
        """The least change that fits: smaller micro-batches of the same batch, then checkpointing, then ZeRO-3."""
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
                    return f"{' '.join(flags)} fits, with {_gib(peak)}."
        return "No micro-batch size, checkpointing or ZeRO stage fits: it takes more GPUs, or offloading."

    def _zero_3_flags(self) -> list[str]:
        """Those of ZeRO-3 in this precision, where it is the other preset that asks for it."""
        in_preset = any(self.preset.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        return ["--deepspeed_config ds_configs/zero3.json", *([f"--precision {self.precision}"] if in_preset else [])]


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
