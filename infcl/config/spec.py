"""RunSpec: a run's flags and all that follows from them on its ranks, resolved once in the entry and handed down."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from infcl.config.batch import BatchPlan
from infcl.config.preset import offloads, read_preset, stage_in_words, stage_over, sums_of, zero_stage
from infcl.config.settings import TrainConfig


@dataclass(frozen=True)
class RunSpec:
    """What runs. Nobody below the entry reads the preset or multiplies batch sizes again.

    Attributes:
        flags: as parsed; a batch_size of 0 (auto) until `fit_to_memory` has chosen it.
        device: "cuda" or "cpu".
        ranks: data-parallel ranks.
        hosts: nodes of the run.
        preset: what --deepspeed_config says, with the ZeRO stage that runs.
        asked_stage: the ZeRO stage in the file; a single rank runs stage 0 instead of 1 and 2.
        precision: fp32, amp_bf16, bf16 or fp16.
        packs_captions: whether captions reach the text tower packed.
    """

    flags: TrainConfig
    device: str
    ranks: int
    hosts: int
    preset: dict
    asked_stage: int
    precision: str
    packs_captions: bool

    def change(self, **flags: object) -> "RunSpec":
        """The run with other flags, of those that neither the preset nor the precision follows from."""
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
        """What is kept in host memory: of "optimizer" and "param"."""
        return tuple(part for part in ("optimizer", "param") if offloads(self.preset, part))

    @property
    def compiles_blocks(self) -> bool:
        return self.flags.compile_blocks == "on" or (self.flags.compile_blocks == "auto" and self.device == "cuda")

    @property
    def tile_dtype(self) -> str | None:
        """Precision of the loss's matmuls. None: that of the features, which leave the towers in fp32.

        Under bf16 and autocast the features carry no more than half precision, and a GPU multiplies that 40 times as
        fast.
        """
        if self.flags.tile_dtype != "auto":
            return self.flags.tile_dtype
        if self.device != "cuda":
            return None
        return {"amp_bf16": "bf16", "bf16": "bf16", "fp16": "fp16"}.get(self.precision)

    @property
    def zero_in_words(self) -> str:
        """The ZeRO stage that runs, and the one that was asked for if it is another."""
        return stage_in_words(self.asked_stage, self.zero_stage)


def resolve(flags: TrainConfig, *, device: str, ranks: int = 1, hosts: int = 1, unpackable: str = "") -> RunSpec:
    """Resolve the flags for these ranks; reads the preset's file.

    Args:
        flags: as parsed.
        device: "cuda" or "cpu".
        ranks: data-parallel ranks.
        hosts: nodes of the run.
        unpackable: why this model's captions cannot be packed; "" if they can.

    Raises:
        ValueError: for a broken preset, for one that contradicts the flags, or for a batch that the ranks cannot share.
    """
    preset, precision = read_preset(flags, device, hosts)
    asked, offloaded = zero_stage(preset), offloads(preset, "optimizer")
    if sums_of(preset) == "fp32":  # others need a sharding stage's sums
        runs = stage_over(ranks, asked, precision, offloads=offloaded)
        preset = preset | {"zero_optimization": preset.get("zero_optimization", {}) | {"stage": runs}}
    if flags.pack_captions == "on" and unpackable:
        raise ValueError(f"--pack-captions on: {unpackable}; auto packs where it can")
    packs = may_pack(flags) and not unpackable
    spec = RunSpec(flags, device, ranks, hosts, preset, asked, precision, packs)
    if flags.batch_size:
        _ = spec.batch  # raises where the ranks cannot share it
    return spec


def may_pack(flags: TrainConfig) -> bool:
    """Whether the flags ask for packed captions, of a text tower that allows it.

    `auto` does not under tensor parallelism: there it has not been timed.
    """
    return flags.pack_captions == "on" or (flags.pack_captions == "auto" and flags.tensor_parallel_size == 1)
