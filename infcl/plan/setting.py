"""What is planned: a frozen record of everything that memory and time follow from, and the profiles of hardware."""

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from infcl.config.preset import BUCKET, STAGE_1_BUCKET, STAGE_3_BUCKET, check_stage, stage_over
from infcl.models import CLIP
from infcl.models.config import CLIPConfig, check_divides, with_overrides
from infcl.models.packing import packs, row_length
from infcl.plan.memory import parameter_counts

_PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Gpu:
    """A GPU and its host, as they perform: sustained rates, not peaks. profiles/*.json; `measure.py` fills one in."""

    name: str
    memory_gib: float  # of the device
    usable: float  # share of it that tensors may take: the rest is the CUDA context, NCCL, libraries and fragments
    matmul_tflops: float  # an 8192^3 bf16 product
    tower_efficiency: float  # share of it that towers reach: eager blocks ...
    compiled_efficiency: float  # ... and compiled ones
    loss_efficiency: float  # share of it that the tiled loss reaches, on 8 b^2 D flops
    hbm_gbs: float  # GB/s of its memory
    link_gbs: float  # GB/s in each direction to the other GPUs of the host (NVLink)
    pcie_gbs: float  # GB/s to host memory
    source: str  # where the figures come from
    multiprocessors: int = 132  # Hopper's
    fp32_tflops: float = 50.0  # products in float32, which tensor cores do not compute: 0.75 of Hopper's data sheet
    host_factor: float = 1.0  # how many times as long its host takes to issue work as those that were measured first
    bf16: bool = True  # whether its tensor cores compute bf16; where not, matmul_tflops is the rate of fp16
    estimated: tuple[str, ...] = ()  # the figures that nobody has measured

    @property
    def usable_bytes(self) -> float:
        return self.memory_gib * 2**30 * self.usable


@dataclass(frozen=True)
class Link:
    """What a GPU sends to other hosts through: its share of the NICs."""

    name: str
    gbs: float  # GB/s in each direction, per GPU
    latency_us: float  # of a message
    source: str
    estimated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """One way to train. Sizes: W gpus, T tensor-parallel ranks, W/T data-parallel ones, B global batch."""

    model: CLIPConfig
    gpu: Gpu
    gpus: int
    global_batch: int
    micro_batch: int
    zero: int = 1
    checkpointing: bool = False
    compiled: bool = True
    resident: int = 1  # micro-batches that keep their graphs between the passes
    offload: bool = False  # optimizer state in host memory
    pixels: str = "host"  # where a step's pixels wait: "host" or "device", as bytes
    loss: str = "inf_cl"
    ring: str = "auto"
    precision: str = "amp_bf16"
    tensor_parallel: int = 1
    sequence_parallel: bool = False  # with tensor_parallel > 1
    gpus_per_node: int = 8
    host_memory_gib: float | None = None  # of a host; None: not known, so anything fits there
    link: Link = dataclasses.field(default_factory=lambda: load_link("nic-400"))  # between hosts
    overlap_comm: bool | None = None  # None: as "auto" of ds_configs, see train/preset.py
    reduce_bucket_size: float | None = None  # elements; None: as the presets of ds_configs say
    attention: str = "auto"  # of the towers, as --attention: "torch" is cuDNN's
    caption_row: int | None = None  # places of a row of packed captions, of context_length tokens each; None: whole

    @property
    def product_rate(self) -> float:
        """Of large matrix products, flops a second."""
        return 1e12 * (self.gpu.fp32_tflops if self.precision == "fp32" else self.gpu.matmul_tflops)

    @property
    def dp_size(self) -> int:
        return self.gpus // self.tensor_parallel

    @property
    def rank_batch(self) -> int:
        """Pairs of a data-parallel rank."""
        return self.global_batch // self.dp_size

    @property
    def loss_rows(self) -> int:
        """Pairs of a rank in the loss: tensor-parallel ranks share theirs."""
        return self.global_batch // self.gpus

    @property
    def num_micro_batches(self) -> int:
        return self.rank_batch // self.micro_batch

    @property
    def overlaps_reductions(self) -> bool:
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.zero == 3 or self.zero > 0 and self.nodes > 1

    @property
    def bucket(self) -> float:
        """Elements of a bucket of gradients."""
        if self.reduce_bucket_size is not None:
            return self.reduce_bucket_size
        if self.zero == 3:
            return BUCKET if self.offload else STAGE_3_BUCKET
        return STAGE_1_BUCKET

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def ranks_of_host(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def two_level(self) -> bool:
        """Whether the ring has two levels; on one host, or with one GPU on each, it is flat whatever is asked for."""
        return self.ring != "flat" and self.nodes > 1 and self.gpus_per_node > 1

    def check(self) -> None:
        """ValueError with the numbers for what cannot be, or what the trainer would refuse."""
        for name in ("gpus", "gpus_per_node", "tensor_parallel", "resident", "micro_batch"):
            if getattr(self, name) < 1:
                option = "resident-micro-batches" if name == "resident" else name.replace("_", "-")
                raise ValueError(f"{option} {getattr(self, name)} must be greater than 0")
        if self.host_memory_gib is not None and not 0 < self.host_memory_gib < float("inf"):
            raise ValueError(f"--host-memory-gib {self.host_memory_gib} must be a number above 0")
        if not self.gpu.bf16 and self.precision in ("amp_bf16", "bf16"):
            raise ValueError(f"{self.gpu.name} does not compute bf16: use --precision fp16 or fp32")
        if self.gpus % self.tensor_parallel:
            raise ValueError(f"{self.gpus} GPUs are no multiple of tensor-parallel {self.tensor_parallel}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("--sequence-parallel shares rows over tensor-parallel ranks: --tensor-parallel-size is 1")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}")
        if self.nodes > 1 and self.gpus_per_node % self.tensor_parallel:
            within = [str(size) for size in range(1, self.gpus_per_node + 1) if self.gpus_per_node % size == 0]
            raise ValueError(
                f"tensor-parallel {self.tensor_parallel} spans hosts of {self.gpus_per_node} GPUs: the sums of each "
                "layer would go through their network cards, which is not planned, and the trainer warns of it; use "
                f"{', '.join(within)} (a whole number of them fills a host), or ZeRO-3"
            )
        check_divides(self.model, self.tensor_parallel)
        check_stage(self.zero, self.precision, offloads=self.offload, source="the plan")
        if self.micro_batch % self.tensor_parallel:
            raise ValueError(
                f"tensor-parallel {self.tensor_parallel} does not divide micro-batch {self.micro_batch}: each of these "
                "ranks takes its share of one"
            )
        if self.global_batch % (self.dp_size * self.micro_batch):
            raise ValueError(
                f"a global batch of {self.global_batch} is no multiple of {self.dp_size} data-parallel ranks x "
                f"micro-batch {self.micro_batch}"
            )

    def with_(self, **changes) -> "Setting":
        return dataclasses.replace(self, **changes)

    def as_run(self) -> "Setting":
        """With the ZeRO stage that the trainer runs where `zero` is asked for."""
        return self.with_(zero=stage_over(self.dp_size, self.zero, self.precision, offloads=self.offload))


def captions_of(model: CLIPConfig, tokens: int | None) -> dict[str, Any]:
    """A Setting's `model` and `caption_row`, captions packed, of so many tokens in the mean (None: whole).

    To the tower they are shorter ones, which attend within rows. ValueError for a tower that sees what follows them.
    """
    if tokens is None:
        return {"model": model}
    if not packs(model.text_cfg):
        raise ValueError("captions are not packed for a text tower that sees what follows one, or pools another place")
    row = row_length(model.text_cfg.context_length)
    return {"model": with_overrides(model, context_length=tokens), "caption_row": row}


def load_gpu(name_or_path: str) -> Gpu:
    """A profile of profiles/gpus, or the JSON file that `--measure` wrote. ValueError naming those that there are.

    Of an older file, without the rate of float32, Hopper's is taken, as an estimate.
    """
    values = _load("gpu", name_or_path, Gpu)
    if "fp32_tflops" not in values:
        values["estimated"] += ("fp32_tflops",)
    return Gpu(**values)


def load_link(name_or_path: str) -> Link:
    """A profile of profiles/links, or a JSON file like them."""
    return Link(**_load("link", name_or_path, Link))


def _load(kind: str, name: str, profile: type) -> dict:
    path = Path(name) if name.endswith(".json") else _PROFILES / f"{kind}s" / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in (_PROFILES / f"{kind}s").glob("*.json")))
        raise ValueError(f"--{kind} {name}: no such profile (known: {known}; or a JSON file)")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--{kind} {name}: no JSON ({error})") from None
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(profile)}
    needed = {field for field, is_needed in fields.items() if is_needed}
    if not isinstance(values, dict) or not needed <= set(values) <= set(fields):
        raise ValueError(f"--{kind} {name}: a profile has {', '.join(fields)} and nothing else")
    figures = {field.name for field in dataclasses.fields(profile) if field.type in (int, float)}
    for field in dataclasses.fields(profile):
        if field.name in values and (wrong := _wrong(field, values[field.name], figures)):
            raise ValueError(f"--{kind} {name}: {field.name} is {values[field.name]!r}, {wrong}")
    return values | {"estimated": tuple(values.get("estimated", ()))}


def _wrong(field: dataclasses.Field, value: Any, figures: set[str]) -> str | None:
    """What a field of a profile should be, where it is not. figures: the names of a profile's numbers."""
    if field.name == "estimated":
        is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return None if is_list and set(value) <= figures else "which is no list of a profile's figures"
    if field.type is str:
        return None if isinstance(value, str) else "which is no text"
    if field.type is bool:
        return None if isinstance(value, bool) else "which is neither true nor false"
    if type(value) is not int and (field.type is int or type(value) is not float):
        return "which is no whole number" if field.type is int else "which is no number"
    if not 0 <= value < float("inf") or (value == 0 and field.name != "latency_us"):
        return "which cannot be: a number above 0"
    return "a share: at most 1" if field.name == "usable" and value > 1 else None


@lru_cache
def parameters_of(model: CLIPConfig) -> int:
    with torch.device("meta"):
        return sum(total for total, _ in parameter_counts(CLIP(model)).values())
