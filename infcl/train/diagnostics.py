"""What a step measures in addition to its loss: seconds per phase, peak memory, GPU utilisation, a sample's accuracy.

The loss never stores the logits of the global batch, so its directions and accuracy are not available. They are
computed on a sample instead: the first micro-batch of every rank (m rows against the same m columns, at most 1024),
averaged over ranks. Their names begin with micro_, since the values depend on m: chance accuracy is 1 / m.

Shapes: b rows per rank, m rows of the sample, D embedding width.
"""

import contextlib
import re
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl.config.precision import Precision
from infcl.loss.inputs import limits_of
from infcl.models.config import ModelConfig
from infcl.models.flops import forward_flops

WHOLE = {"image": 1.0, "text": 1.0}  # no tower is locked
MAX_SAMPLE_ROWS = 1024  # [m, m] f32 is 4 MiB at most

# Dense BF16 TFLOP/s by device name, from vendor data sheets. The first key that is a word of the device's name is used.
PEAK_BF16_TFLOPS = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


class PhaseTimer:
    """Measure the seconds of each phase of a step; the phases are ranges in torch's profiler too.

    `mark(name)` begins a phase; `read()` ends the last one and waits for the device.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # CUDA events, or seconds
        self.range = contextlib.ExitStack()

    def mark(self, name: str) -> None:
        self.range.close()
        self.range.enter_context(torch.profiler.record_function(f"phase/{name}"))
        now: Any = time.perf_counter()
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((name, now))

    def read(self) -> dict[str, float]:
        self.mark("end")
        self.range.close()
        marks, self.marks = self.marks, []
        if self.on_gpu:
            marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (name, start), (_, end) in zip(marks, marks[1:]):
            elapsed = start.elapsed_time(end) / 1000 if self.on_gpu else end - start
            seconds[name] = seconds.get(name, 0.0) + elapsed
        return seconds


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak device memory of this process on a GPU, its peak resident memory on a CPU; MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class SampledLoss:
    """A loss that also computes metrics on its first m rows: `sampled(...)` returns `loss(...)` and sets `values`.

    Cost: one [m, m] matmul per step, without gradient and without communication.

    Args:
        margin: also compute the share of negatives that --false-negative-margin leaves out.
        sigmoid: an entry has one term, which either of its limits leaves out.
        distills: also compute the distillation loss, of calls with a teacher.

    Attributes:
        values: [4 to 6] f32, metrics of the last call in the order of `names`; on the device, so reading does not wait.
    """

    values: torch.Tensor
    names: tuple[str, ...] = (
        "micro_loss_image_to_text", "micro_loss_text_to_image", "micro_accuracy", "feature_spread",
    )  # fmt: skip

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        rows: int,
        margin: float | None = None,
        sigmoid: bool = False,
        distills: bool = False,
    ):
        self.loss, self.rows, self.margin, self.sigmoid = loss, min(rows, MAX_SAMPLE_ROWS), margin, sigmoid
        if margin is not None:
            self.names = *self.names, "micro_left_out_share"
        if distills:
            self.names = *self.names, "micro_distillation_loss"

    def __call__(
        self, image_features, text_features, logit_scale, logit_bias=None, *, teacher=None, ids=None
    ) -> torch.Tensor:
        first_texts = text_features[:: len(text_features) // len(image_features)]  # an image may have several texts
        sample = image_features[: self.rows], first_texts[: self.rows]
        self.values = micro_batch_metrics(*sample, logit_scale)
        if self.margin is not None:
            of_sample = None if ids is None else ids.view(len(ids), -1)[: self.rows, 0]
            share = left_out_share(*sample, self.margin, ids=of_sample, sigmoid=self.sigmoid)
            self.values = torch.cat([self.values, share])
        if teacher is not None:
            images, texts, scale = teacher
            their_sample = images[: self.rows], texts[: self.rows], scale
            self.values = torch.cat([self.values, divergence(*sample, logit_scale, *their_sample)])
        return self.loss(image_features, text_features, logit_scale, logit_bias, ids=ids, teacher=teacher)


@torch.no_grad()
def micro_batch_metrics(
    image_features: torch.Tensor, text_features: torch.Tensor, logit_scale: torch.Tensor
) -> torch.Tensor:
    """Return [loss image->text, loss text->image, accuracy, spread] f32 of [m, D] features against each other.

    The losses are softmax cross entropies of one direction, for every --loss. The accuracy is how often the partner
    scores strictly higher than all others, averaged over both directions (a collapsed model gets 0). The spread is the
    variance of a tower's unit-norm features, 1 - |mean|^2, of the tower with less: 0 if its features are all equal.
    """
    with torch.autocast(image_features.device.type, enabled=False):
        logits = logit_scale.float() * (image_features.float() @ text_features.float().T)  # [m, m] f32
    own = logits.diagonal()
    others = logits.clone().fill_diagonal_(-torch.inf)
    accuracy = ((own > others.amax(1)).float().mean() + (own > others.amax(0)).float().mean()) / 2
    labels = torch.arange(len(logits), device=logits.device)
    spreads = [1 - features.float().mean(0).square().sum() for features in (image_features, text_features)]
    losses = [F.cross_entropy(logits, labels), F.cross_entropy(logits.T, labels)]
    return torch.stack([*losses, accuracy, torch.minimum(*spreads)])


@torch.no_grad()
def left_out_share(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    margin: float,
    *,
    ids: torch.Tensor | None = None,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Return the share of negatives that the margin leaves out, [1] f32: the mean of rows and columns of a softmax.

    Entries whose row and column share an id, int64 [m], are no negatives.
    """
    cosines = image_features.float() @ text_features.float().T  # [m, m]
    limits = limits_of(cosines.diagonal(), margin)
    ids = torch.arange(len(cosines), device=cosines.device) if ids is None else ids
    negatives = ids[:, None] != ids
    beyond = torch.stack([cosines > limits[:, None], cosines > limits])
    beyond = beyond.any(0, keepdim=True) if sigmoid else beyond
    return ((beyond & negatives).sum() / (len(beyond) * negatives.sum()).clamp(min=1)).view(1)


@torch.no_grad()
def divergence(image_features, text_features, logit_scale, teacher_images, teacher_texts, teacher_scale):
    """Return `distillation_loss` of [m, D] features and of a teacher's [m, E], in float32, [1] f32.

    The library's own needs a group of all ranks, and a sample is of one rank.
    """
    own = logit_scale.float() * (image_features.float() @ text_features.float().T)  # [m, m] f32
    wanted = teacher_scale * (teacher_images @ teacher_texts.T)
    options: dict[str, Any] = {"reduction": "sum", "log_target": True}
    both = [F.kl_div(own.log_softmax(dim), wanted.log_softmax(dim), **options) for dim in (0, 1)]
    return torch.stack(both).sum().view(1) / (2 * len(own))


def duplicate_shares(ids: torch.Tensor, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the share of samples in the global batch whose id another sample has too. Collective.

    With ids of hard negatives, int64 [b, 1 + n], also return the share of them that have the id of a sample.
    """
    everyone = [torch.empty_like(ids) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, ids, group=group)
    samples, negatives = torch.cat(everyone).split((1, ids.shape[1] - 1), 1)
    known, counts = samples.unique(return_counts=True)
    shares = {"duplicate_share": 1 - int((counts == 1).sum()) / int(counts.sum())}
    if negatives.numel():
        shares["duplicate_negatives"] = float(torch.isin(negatives, known).double().mean())
    return shares


def trained_shares(model: Any) -> dict[str, float]:
    """Return {"image", "text"}: the share of each tower's blocks that are trained; 1 unless it is locked."""
    towers = {name: 1 - tower.first_trained / len(tower.resblocks) for name, tower in model.transformers.items()}
    return {name: 0.0 if frozen else 1.0 for name, frozen in model.frozen.items()} | towers


def model_flops(cfg: ModelConfig, trained: Mapping[str, float] = WHOLE, text_share: float = 1.0) -> float:
    """Return the FLOPs to train on one image-text pair: one forward of the towers, and a backward of trained blocks.

    It excludes the gradient cache's second encoding, activation checkpointing's recomputation and the loss.

    Args:
        text_share: share of token positions that are computed; packed captions have no padding.
    """
    flops = forward_flops(cfg)
    return flops["image"] * (1 + 2 * trained["image"]) + text_share * flops["text"] * (1 + 2 * trained["text"])


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None for unknown devices and for fp32 (no tensor cores)."""
    known = (tera * 1e12 for name, tera in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next(known, None) if precision.half_matmuls else None


def utilisation(
    cfg: ModelConfig, device: torch.device, precision: Precision, trained: Mapping[str, float] = WHOLE
) -> Callable[..., float | None]:
    """Return a function from (samples per second per GPU, text_share) to model FLOPs utilisation (MFU) in 0..1.

    That returns None if the device's peak is unknown.
    """
    peak = peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    if peak is None:
        return lambda *_: None
    return lambda rate, text_share: model_flops(cfg, trained, text_share) * rate / peak
