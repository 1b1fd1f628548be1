"""The pixel cache: whatever it keeps, the gradients are the same to the last bit, and it holds no more than it may."""

import dataclasses
import gc
import weakref

import pytest
import torch

from infcl.step.batches import StepBatches
from infcl.step.grad_cache import by_name, cached_step
from infcl.step.pixels import PixelCache, checksum
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import dense_loss
from tests.lib.training import demo_config, rejection, run_losses

M, ROWS, SIDE = 5, 3, 5
CPU = torch.device("cpu")


class PixelModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = torch.nn.Linear(3 * SIDE * SIDE, 4), torch.nn.Embedding(10, 4)
        self.logit_scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, images, texts, ids=None):
        image = self.image(images.flatten(1).float() / 255)
        text = self.text(texts).mean(dim=1)
        normalize = torch.nn.functional.normalize
        features = {"image_features": normalize(image, dim=1), "text_features": normalize(text, dim=1)}
        return features | {"logit_scale": self.logit_scale + 0}


def decode(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "images": torch.randint(256, (ROWS, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator),
        "texts": torch.randint(10, (ROWS, 4), generator=generator),
        "ids": torch.arange(ROWS) + index * ROWS,
    }


def step_batches(kept, *, resident=1) -> StepBatches:
    pixels = PixelCache(CPU, (ROWS, 3, SIDE, SIDE), replayed=M - resident, kept=kept)
    return StepBatches(pixels, M, device=CPU)


def gradients(batches, items, *, resident=1):
    model = PixelModel()
    if isinstance(batches, StepBatches):
        batches.begin(iter(items))
    cached_step(
        batches,
        encode=model,
        loss=by_name(lambda image, text, scale, bias: dense_loss(image, text, scale)),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=[0] * M,
        resident=resident,
    )
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("resident", [1, 2, M])
def test_what_is_kept_changes_no_bit_of_the_gradients(resident):
    expected = gradients([decode(i) for i in range(M)], [], resident=resident)
    for kept in range(M + 2):
        batches = step_batches(kept, resident=resident)
        pixels = batches.pixels
        assert len(pixels.kept) == min(kept, M - resident) and len(pixels.again) == max(0, M - resident - kept)
        items = (decode(i) for i in (*range(M), *pixels.again))
        for got, wanted in zip(gradients(batches, items, resident=resident), expected):
            assert torch.equal(got, wanted)
        batches.check()
        assert next(items, None) is None, "the step must take all that the loader yields for it"


@pytest.mark.parametrize("kept", [0, 2, M])
def test_pixels_that_are_not_kept_are_freed(kept, request):
    """Besides the buffer of exactly `kept` micro-batches, at most two micro-batches' pixels are alive at a time."""
    gc.freeze()  # a collection looks at this test's objects only, else it takes half a second
    request.addfinalizer(gc.unfreeze)
    alive: list[weakref.ref] = []
    most = 0

    def items(pixels):
        nonlocal most
        for index in (*range(M), *pixels.again):
            gc.collect()
            most = max(most, sum(reference() is not None for reference in alive))
            batch = decode(index)
            alive.append(weakref.ref(batch["images"]))
            yield batch

    batches = step_batches(kept)
    pixels = batches.pixels
    gradients(batches, items(pixels))
    assert pixels.kept.numel() == min(kept, M - 1) * ROWS * 3 * SIDE * SIDE
    assert most <= 2


def test_another_second_reading_ends_the_step():
    batches = step_batches(1)
    items = [decode(i) for i in (*range(M), *batches.pixels.again)]
    items[-1]["images"][ROWS - 1, 2, SIDE - 1, SIDE - 1] ^= 1
    gradients(batches, items)
    with pytest.raises(RuntimeError, match=r"micro-batch 3 \(samples 9, 10, 11\) had other pixels"):
        batches.check()
    items[-1]["ids"][0] = 77
    with pytest.raises(RuntimeError, match=r"micro-batch 3 had samples 9, 10, 11 and has \[77, 10, 11\]"):
        gradients(batches, items)


@pytest.mark.parametrize("size", [1, 8, 75])
def test_a_checksum_notices_any_changed_byte_and_any_exchange(size):
    data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    whole = checksum(data)
    for place in range(size):
        other = data.clone()
        other[place] += 1
        assert checksum(other) != whole
    if size >= 16:
        assert checksum(torch.cat([data[8:16], data[:8], data[16:]])) != whole


def test_a_run_has_the_same_losses_whatever_is_kept(demo_folder, tmp_path):
    """Real shards, two ranks, patch dropout, augmentation, from one epoch (2 steps) into the next; one of three
    micro-batches is kept."""
    flags = {
        "batch_size": 8, "accum_freq": 4, "steps": 3, "train_num_samples": 128, "force_patch_dropout": 0.25,
        "aug_cfg": {"scale": (0.7, 1.0), "ratio": (0.9, 1.1)},
    }  # fmt: skip
    one = 8 * 3 * 32 * 32 / 1e9  # GB of a micro-batch
    kept, read_again = (
        run_losses(2, demo_config(demo_folder, tmp_path / gigabytes, pixel_cache_gb=gigabytes, **flags))
        for gigabytes in ("auto", str(1.5 * one))
    )
    assert len(kept) == 3 and read_again == kept


def test_a_cache_too_small_for_a_streaming_reader_is_rejected(demo_folder, tmp_path):
    config = demo_config(demo_folder, tmp_path, accum_freq=4, batch_size=16, dataset_type="streaming")
    config = dataclasses.replace(config, pixel_cache_gb="0", train_num_samples=512)
    assert "cannot read a step twice" in run_ranks(rejection, 1, config)[0]
