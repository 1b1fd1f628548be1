"""RunSpec: a run's flags and the settings derived from them, resolved once at the start and passed to all parts."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from infcl.config.batch import BatchPlan
from infcl.config.precision import Precision
from infcl.config.preset import offloads, read_preset, stage_over, zero_stage
from infcl.config.settings import TrainConfig


@dataclass(frozen=True)
class RunSpec:
    """A resolved run. Other modules do not read the preset or multiply batch sizes again.

    Attributes:
        flags: as parsed; batch_size is 0 (auto) until `fit_to_memory` chooses it.
        device: "cuda" or "cpu".
        ranks: data-parallel ranks.
        hosts: nodes of the run.
        preset: contents of --deepspeed_config, with the ZeRO stage that runs.
        asked_stage: the ZeRO stage in the file; a single rank runs stage 0 instead of 1 and 2.
        precision: of parameters and matmuls.
        packs_captions: whether the text tower receives packed captions.
    """

    flags: TrainConfig
    device: str
    ranks: int
    hosts: int
    preset: dict
    asked_stage: int
    precision: Precision
    packs_captions: bool

    def change(self, **flags: object) -> "RunSpec":
        """Return the run with other flags; only those that affect neither the preset nor the precision."""
        return dataclasses.replace(self, flags=dataclasses.replace(self.flags, **flags))  # type: ignore[arg-type]

    @cached_property
    def batch(self) -> BatchPlan:
        return BatchPlan.of(self.flags, self.ranks)

    @property
    def zero_stage(self) -> int:
        return zero_stage(self.preset)

    @property
    def zero_optimization(self) -> dict:
        return self.preset.get("zero_optimization", {})

    @property
    def offloads(self) -> tuple[str, ...]:
        """State in host memory: a subset of "optimizer" and "param"."""
        return tuple(part for part in ("optimizer", "param") if offloads(self.preset, part))

    @property
    def compiles_blocks(self) -> bool:
        return self.flags.compile_blocks == "on" or (self.flags.compile_blocks == "auto" and self.device == "cuda")

    @property
    def tile_dtype(self) -> str | None:
        """Precision of the loss's matmuls; None: that of the features, which the towers return in fp32.

        A GPU multiplies 40 times faster in half precision, and autocast's features are no more accurate.
        """
        if self.flags.tile_dtype != "auto":
            return self.flags.tile_dtype
        return self.precision.short_name if self.device == "cuda" and self.precision.half_matmuls else None

    @property
    def zero_in_words(self) -> str:
        """The ZeRO stage that runs, and the preset's if that differs."""
        asked = "" if self.asked_stage == self.zero_stage else f" (stage {self.asked_stage} over one rank)"
        return f"ZeRO-{self.zero_stage}{asked}"


def resolve(flags: TrainConfig, *, device: str, ranks: int = 1, hosts: int = 1, unpackable: str = "") -> RunSpec:
    """Resolve the flags for these ranks. Reads the preset's file.

    Args:
        unpackable: why the text tower's captions cannot be packed; "" if they can.

    Raises:
        ValueError: the preset is invalid or contradicts the flags, or the ranks cannot divide the batch.
    """
    preset, precision = read_preset(flags, device, hosts)
    asked, offloaded = zero_stage(preset), offloads(preset, "optimizer")
    # only sharding stages sum gradients in other dtypes
    if preset.get("data_types", {}).get("grad_accum_dtype", "fp32") == "fp32":
        runs = stage_over(ranks, asked, precision, offloads=offloaded)
        preset = preset | {"zero_optimization": preset.get("zero_optimization", {}) | {"stage": runs}}
    if flags.pack_captions == "on" and unpackable:
        raise ValueError(f"--pack-captions on: the text tower of {flags.model} {unpackable}; auto packs where it can")
    packs = may_pack(flags) and not unpackable
    spec = RunSpec(flags, device, ranks, hosts, preset, asked, precision, packs)
    if flags.cuda_graphs and (why := _why_no_graphs(spec)):
        raise ValueError(f"--cuda-graphs {why}")
    if flags.batch_size:
        _ = spec.batch  # raises if the ranks cannot divide it
    return spec


def _why_no_graphs(spec: RunSpec) -> str:
    """Return why the towers cannot run as CUDA graphs, or "" if they can."""
    flags, cached = spec.flags, spec.flags.resident_micro_batches
    reasons = {
        f"caches no activations: leave out --resident-micro-batches {cached}": cached != "1",
        "needs a GPU": spec.device != "cuda",
        "needs parameters that stay where they are, and ZeRO-3 gathers them: use zero1 or zero2": spec.zero_stage == 3,
        f"is not for --tensor-parallel-size {flags.tensor_parallel_size}": flags.tensor_parallel_size > 1,
        f"is for our own towers, not for --model {flags.model}": flags.model.startswith("open_clip:"),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def may_pack(flags: TrainConfig) -> bool:
    """Return whether the flags ask for packed captions, for a text tower that supports them.

    `auto` does not under tensor parallelism, where it has not been timed.
    """
    return flags.pack_captions == "on" or (flags.pack_captions == "auto" and flags.tensor_parallel_size == 1)
