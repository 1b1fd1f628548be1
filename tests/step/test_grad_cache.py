"""The gradient cache gives the gradients of the whole batch at once, randomness included, with 2 M - 1 encodings.

A frozen tower is encoded once.
"""

import dataclasses

import pytest
import torch

from infcl.models import CLIP, load_model_config
from infcl.step.batches import StepBatches
from infcl.step.grad_cache import by_name, cached_step
from infcl.step.pixels import PixelCache
from tests.lib.step_oracle import ToyCLIP, dense_loss, global_batch, whole_batch_gradients, worst_error


def cached_gradients(model, micro_batches, seeds, plus=0.0, **options):
    model.zero_grad()
    output = cached_step(
        micro_batches,
        encode=model,
        loss=by_name(lambda image, text, scale, bias: dense_loss(image, text, scale) + plus),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=seeds,
        **options,
    )
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sizes", [[7], [5, 5, 5], [3, 4, 1, 5], [2, 3, 2, 1, 3, 2, 2]])
@pytest.mark.parametrize(("dropout", "resident"), [(0.0, 1), (0.3, 1), (0.3, 2), (0.3, 3), (0.3, 9)])
def test_cached_gradients_equal_those_of_the_whole_batch(sizes, dropout, resident):
    model = ToyCLIP(dropout=dropout).train()
    images, texts = global_batch(sum(sizes))
    micro_batches = list(zip(images.split(sizes), texts.split(sizes)))
    seeds = list(range(11, 11 + len(sizes)))
    output, cached = cached_gradients(model, micro_batches, seeds, resident=resident)
    loss, whole = whole_batch_gradients(model, micro_batches, seeds)
    assert float(output.loss) == pytest.approx(float(loss), rel=1e-6)
    assert worst_error(cached, whole) < 1e-5


def test_master_values_go_into_the_loss_and_gradients_into_the_parameter():
    """As with bf16 parameters: the loss sees logit_scale from its fp32 master, not the rounded copy."""
    model, batches = ToyCLIP(), [global_batch(6)]
    master = model.logit_scale.detach() + 0.01
    _, got = cached_gradients(model, batches, [0], scalar_values=lambda returned: {"logit_scale": master})
    _, expected = whole_batch_gradients(ToyCLIP(logit_scale=master.item()), batches, [0])
    assert worst_error(got, expected) < 1e-5


def test_a_loss_that_is_not_finite_gives_the_scalars_gradients_that_are_not():
    """The norm of all gradients shows it then, also where the features' gradients are finite."""
    _, got = cached_gradients(ToyCLIP(), [global_batch(6)], [0], plus=torch.inf)
    assert got["logit_scale"].isnan().all() and got["visual.0.weight"].isfinite().all()


def test_seeds_and_micro_batches_must_match_in_number():
    with pytest.raises(ValueError, match="2 seeds for 1 micro-batches"):
        cached_gradients(ToyCLIP(), [global_batch(4)], [1, 2])


SIZES = [3, 4, 1, 5]


def locked(image: int | None, text: int | None, patch_dropout: float) -> CLIP:
    """The demo's model with three blocks in each tower; the groups that are unlocked in each, None: all."""
    torch.manual_seed(0)
    cfg = load_model_config("demo")
    towers = {name: dataclasses.replace(getattr(cfg, name), layers=3) for name in ("vision_cfg", "text_cfg")}
    model = CLIP(dataclasses.replace(cfg, **towers), patch_dropout=patch_dropout)
    for lock, unlocked in ((model.lock_image_tower, image), (model.lock_text_tower, text)):
        if unlocked is not None:
            lock(unlocked)
    return model.double().train()


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (sum(SIZES), 3, 32, 32), generator=generator, dtype=torch.uint8)
    texts = torch.randint(1, 300, (sum(SIZES), 20), generator=generator)
    return list(zip(images.split(SIZES), texts.split(SIZES)))


class AsTheTrainers(StepBatches):
    """The micro-batches of a step as the trainer gives them, of any sizes, in memory."""

    def __init__(self, batches, frozen):
        side = batches[0][0].shape[-1]
        pixels = PixelCache(torch.device("cpu"), (0, 3, side, side), replayed=0, kept=0)
        super().__init__(pixels, len(batches), device=torch.device("cpu"), frozen=frozen)
        pixels.second = lambda index, _: batches[index][0]
        self.begin({"images": one, "texts": two, "ids": torch.arange(len(one))} for one, two in batches)


@pytest.mark.first(12)
@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize(
    ("image", "text"),
    [(0, None), (None, 0), (3, None), (None, 3), (0, 2), (1, 1)]
    + [(2, 0), *(pair for n in (1, 2, 4, 5) for pair in ((n, None), (None, n)))],
)
def test_a_frozen_tower_runs_once_and_gradients_are_those_of_the_whole_batch(image, text, resident):
    """Of groups: embeddings, three blocks (the last with its norm), projection; the first block is counted."""
    model = locked(image, text, 0.25 if image is None else 0.0)
    calls = {"image": 0, "text": 0}
    for side, owner in (("image", model.visual), ("text", model)):
        block = owner.transformer.resblocks[0]
        block.register_forward_hook(lambda *_, side=side: calls.__setitem__(side, calls[side] + 1))

    batches, seeds = micro_batches(), list(range(len(SIZES)))
    output, cached = cached_gradients(model, AsTheTrainers(batches, model.frozen), seeds, resident=resident)
    twice = 2 * len(SIZES) - resident
    assert calls == {"image": len(SIZES) if image == 0 else twice, "text": len(SIZES) if text == 0 else twice}
    loss, trained = whole_batch_gradients(model, batches, seeds)
    assert float(output.loss) == pytest.approx(loss.item(), rel=1e-6)
    assert set(cached) == set(trained) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name in trained:
        assert float((cached[name] - trained[name]).norm()) <= 1e-5 * float(trained[name].norm()), name


@pytest.mark.parametrize(("unlocked", "in_eval"), [(0, True), (1, True), (4, True), (5, False)])
def test_the_image_tower_is_in_eval_mode_while_its_embeddings_are_frozen(unlocked, in_eval):
    model = locked(unlocked, None, 0.5)
    assert model.visual.training != in_eval and model.training
    images = micro_batches()[1][0]
    assert torch.equal(model(images)["image_features"], model(images)["image_features"]) == in_eval
