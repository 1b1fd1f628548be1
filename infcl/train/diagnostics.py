"""Metrics of a step in addition to its loss: both directions and accuracy on a sample, and the GPUs' utilisation.

In: the features that the loss sees, and a step's seconds. Out: a few numbers for metrics.jsonl.

The loss over the global batch never holds its matrix, so the directions and the accuracy of the global batch are not
available. They are taken on a sample instead: the first micro-batch of every rank (m rows against the same m
columns, at most 1024), averaged over ranks. Names begin with micro_, since a value depends on m: chance is 1 / m.

Shapes: b rows per rank, m rows of the sample, D embedding width.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl.models.clip import CLIP
from infcl.models.config import CLIPConfig
from infcl.models.flops import forward_flops
from infcl.models.open_clip_config import OpenClipConfig

WHOLE = {"image": 1.0, "text": 1.0}  # no tower is locked
MAX_SAMPLE_ROWS = 1024  # [m, m] f32 is 4 MiB at most

# Dense bf16 FLOP/s by device name; the first name that is a word of the device's wins. Vendor data sheets, no sparsity.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


class SampledLoss:
    """A loss that also looks at its first m rows: `sampled(...)` is `loss(...)`, `sampled.values` the sample's metrics.

    values: [3] f32 of the last call, in the order of `names`; on the device, so that asking for it waits for nothing.
    Cost: one [m, m] matmul per step, without gradient and without communication.
    """

    values: torch.Tensor
    names = ("micro_loss_image_to_text", "micro_loss_text_to_image", "micro_accuracy")

    def __init__(self, loss: Callable[..., torch.Tensor], rows: int):
        self.loss, self.rows = loss, min(rows, MAX_SAMPLE_ROWS)

    def __call__(self, image_features, text_features, logit_scale, logit_bias=None, **ids) -> torch.Tensor:
        first_texts = text_features[:: len(text_features) // len(image_features)]  # of several of each image
        self.values = micro_batch_metrics(image_features[: self.rows], first_texts[: self.rows], logit_scale)
        return self.loss(image_features, text_features, logit_scale, logit_bias, **ids)


@torch.no_grad()
def micro_batch_metrics(
    image_features: torch.Tensor, text_features: torch.Tensor, logit_scale: torch.Tensor
) -> torch.Tensor:
    """[loss image->text, loss text->image, accuracy] f32 of [m, D] features among themselves.

    A loss is the softmax cross entropy of one direction, whatever loss is trained. The accuracy is the mean over both
    directions of how often the partner scores strictly higher than all others (a collapsed model gets 0).
    """
    with torch.autocast(image_features.device.type, enabled=False):
        logits = logit_scale.float() * (image_features.float() @ text_features.float().T)  # [m, m] f32
    own = logits.diagonal()
    others = logits.clone().fill_diagonal_(-torch.inf)
    accuracy = ((own > others.amax(1)).float().mean() + (own > others.amax(0)).float().mean()) / 2
    labels = torch.arange(len(logits), device=logits.device)
    return torch.stack([F.cross_entropy(logits, labels), F.cross_entropy(logits.T, labels), accuracy])


def share_of_duplicates(ids: torch.Tensor, group: dist.ProcessGroup) -> float:
    """The share of the global batch's samples whose id another one has too. ids: int64 [b]. Collective."""
    everyone = [torch.empty_like(ids) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, ids, group=group)
    counts = torch.cat(everyone).unique(return_counts=True)[1]
    return 1 - int((counts == 1).sum()) / int(counts.sum())


def trained_shares(model: Any) -> dict[str, float]:
    """{"image", "text"}: the share of a tower's blocks that are trained: 1 unless it is locked."""
    if not isinstance(model, CLIP):
        return {name: 0.0 if frozen else 1.0 for name, frozen in model.frozen.items()}
    blocks = {"image": model.visual.transformer, "text": model.transformer}
    return {name: max(0, 1 - tower.first_trained / len(tower.resblocks)) for name, tower in blocks.items()}


def model_flops(
    cfg: CLIPConfig | OpenClipConfig, trained: Mapping[str, float] = WHOLE, text_share: float = 1.0
) -> float:
    """FLOPs that training on one pair needs: the towers forward once, and backward what is trained (trained_shares).

    text_share: share of token positions that are computed; packed captions have no padding.
    What the gradient cache encodes a second time, what activation checkpointing recomputes and the loss are not in it.
    """
    flops = forward_flops(cfg)
    return flops["image"] * (1 + 2 * trained["image"]) + text_share * flops["text"] * (1 + 2 * trained["text"])


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU by its name; None where it is unknown, on CPUs, and for fp32 (no tensor cores)."""
    if precision == "fp32":
        return None
    for name, flops in PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return flops
    return None


def utilisation(
    cfg: CLIPConfig | OpenClipConfig, device: torch.device, precision: str, trained: Mapping[str, float] = WHOLE
) -> Callable[..., float | None]:
    """Return a function: samples per second and GPU, text_share -> model FLOPs utilisation (MFU) in 0..1.

    None where the peak is unknown.
    """
    peak = peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None

    def mfu(pairs_per_second: float, text_share: float = 1.0) -> float | None:
        return None if peak is None else model_flops(cfg, trained, text_share) * pairs_per_second / peak

    return mfu
