"""What a step says about itself: the sample's losses, MFU's arithmetic. tests/engine/test_engine.py has the norms."""

import math

import pytest
import torch
import torch.nn.functional as F

from infcl.config.precision import PRECISIONS
from infcl.models.clip import CLIP
from infcl.models.config import load_model_config
from infcl.models.flops import forward_flops
from infcl.report import read_metrics
from infcl.train.diagnostics import (
    SampledLoss,
    left_out_share,
    micro_batch_metrics,
    model_flops,
    peak_flops,
    trained_shares,
    utilisation,
)
from tests.lib.ranks import run_ranks
from tests.lib.training import demo_config, fit


def features(rows: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_the_sample_has_the_losses_and_the_accuracy_of_its_rows():
    images, texts, scale = features(7), features(7, seed=1), torch.tensor([20.0])
    logits = (20.0 * images.double() @ texts.double().T).tolist()

    def loss(rows):
        return sum(math.log(sum(map(math.exp, row))) - row[i] for i, row in enumerate(rows)) / len(rows)

    def accuracy(rows):
        return sum(max(row) == row[i] for i, row in enumerate(rows)) / len(rows)

    columns = [list(column) for column in zip(*logits)]
    spread = min(float(x.var(0, correction=0).sum()) for x in (images, texts))
    expected = [loss(logits), loss(columns), (accuracy(logits) + accuracy(columns)) / 2, spread]
    assert micro_batch_metrics(images, texts, scale).tolist() == pytest.approx(expected, rel=1e-5)
    assert micro_batch_metrics(torch.eye(6), torch.eye(6), scale)[2] == 1
    collapsed = torch.ones(6, 6) / math.sqrt(6)
    assert micro_batch_metrics(collapsed, collapsed, scale)[2:].tolist() == pytest.approx([0, 0], abs=1e-6)


def test_the_sampled_loss_is_the_loss_and_looks_at_the_first_rows_only():
    images, texts, scale = features(9).requires_grad_(), features(9, seed=1), torch.tensor(5.0)
    sampled = SampledLoss(lambda image, text, scale, bias, **given: (image * text).sum() * scale, rows=4)
    value = sampled(images, texts, scale)
    assert value.item() == pytest.approx(((images * texts).sum() * 5).item())
    assert torch.equal(sampled.values, micro_batch_metrics(images[:4], texts[:4], scale))
    assert not sampled.values.requires_grad


def test_what_a_step_logs(demo_folder, tmp_path):
    run_ranks(fit, 2, demo_config(demo_folder, tmp_path, steps=2, batch_size=16))
    record = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")[-1]
    wanted = "loss logit_scale lr grad_norm samples_per_second data_wait peak_memory_mb skipped_steps"
    assert set(wanted.split()) | set(SampledLoss.names) <= set(record)
    assert {f"seconds_{phase}" for phase in ("data", "encode", "loss", "replay", "step")} <= set(record)
    assert "mfu" not in record  # no peak of a CPU is known
    towers = math.hypot(record["grad_norm_image"], record["grad_norm_text"])
    assert 0.95 * record["grad_norm"] < towers <= record["grad_norm"] * 1.0001  # there is logit_scale too
    assert 0 <= record["data_wait"] <= 1 and record["skipped_samples"] == 0
    directions = (record["micro_loss_image_to_text"] + record["micro_loss_text_to_image"]) / 2
    assert directions == pytest.approx(math.log(16), rel=0.3) and record["loss"] > directions


@pytest.mark.parametrize(
    ("locks", "shares", "mfu", "hfu"),  # in forward passes of a tower: image and text, 12 blocks each
    [
        ({}, (1, 1), (3, 3), (4, 4)),
        ({"image": 0}, (0, 1), (1, 3), (1, 4)),
        ({"image": 4}, (0.25, 1), (1.5, 3), (2.5, 4)),
        ({"image": 1, "text": 0}, (0, 0), (1, 1), (2, 1)),
    ],
)
def test_flops_of_locked_towers_are_of_what_is_trained(locks, shares, mfu, hfu):
    from benchmarks.step import executed_flops

    cfg = load_model_config("ViT-B-16")
    with torch.device("meta"):
        model = CLIP(cfg)
    for tower, unlocked in locks.items():
        {"image": model.lock_image_tower, "text": model.lock_text_tower}[tower](unlocked)
    found, forward = trained_shares(model), forward_flops(cfg)
    assert (found["image"], found["text"]) == shares
    flops = forward["image"], forward["text"]
    assert model_flops(cfg, found) == pytest.approx(sum(a * b for a, b in zip(flops, mfu)))
    executed = executed_flops(model, cfg, again=1.0, checkpointing=False)
    assert executed == pytest.approx(sum(a * b for a, b in zip(flops, hfu)))
    assert utilisation(cfg, torch.device("cpu"), PRECISIONS["amp_bf16"])(1e6, 1.0) is None


def test_peaks_by_device_name():
    known = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12}
    known |= {"NVIDIA A10": 125e12, "NVIDIA L40S": 362e12, "NVIDIA GeForce RTX 4090": 165e12, "Other": None}
    assert {name: peak_flops(name, PRECISIONS["amp_bf16"]) for name in known} == known
    assert peak_flops("NVIDIA H200", PRECISIONS["fp32"]) is None


def test_the_share_left_out_is_that_of_the_losses():
    """Of a softmax the mean of rows and columns, of a sigmoid the union; duplicates and equal cosines do not count."""
    texts = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    images = torch.tensor([[0.8, 0.6], [0.8, 0.6], [0.8, 0.6]])  # cosines 0.8, 1, 0.6 in each row
    assert float(left_out_share(images, texts, 0.1)) == pytest.approx((1 + 2) / 6 / 2)
    assert float(left_out_share(images, texts, 0.1, sigmoid=True)) == pytest.approx(3 / 6)
    assert float(left_out_share(images, texts, 0.1, ids=torch.tensor([7, 7, 8]))) == pytest.approx((0 + 2) / 4 / 2)
    assert float(left_out_share(images, texts, 0.1, ids=torch.tensor([7, 7, 7]))) == 0
    assert float(left_out_share(images, texts, 1.0)) == 0
    equal = features(1).expand(33, 8)
    assert float(left_out_share(equal + 1e-7 * features(33, seed=1), equal, 0.0)) == 0
