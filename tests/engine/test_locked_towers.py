"""A frozen tower is encoded once a step; the gradients of the rest are those of the whole batch at once."""

import dataclasses

import pytest
import torch

from infcl.models import CLIP, load_model_config
from infcl.step.batches import StepBatches
from infcl.step.grad_cache import by_name, cached_step
from infcl.step.pixels import PixelCache
from tests.lib.step_oracle import dense_loss, whole_batch_gradients

SIZES = [3, 4, 1, 5]


def locked(side: str, unlocked: int, patch_dropout: float = 0.0, **options) -> CLIP:
    """The demo's model with three blocks in each tower."""
    torch.manual_seed(0)
    cfg = load_model_config("demo")
    towers = {name: dataclasses.replace(getattr(cfg, name), layers=3) for name in ("vision_cfg", "text_cfg")}
    model = CLIP(dataclasses.replace(cfg, **towers), patch_dropout=patch_dropout)
    (model.lock_image_tower if side == "image" else model.lock_text_tower)(unlocked, **options)
    return model.double().train()


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (sum(SIZES), 3, 32, 32), generator=generator, dtype=torch.uint8)
    texts = torch.randint(1, 300, (sum(SIZES), 20), generator=generator)
    return list(zip(images.split(SIZES), texts.split(SIZES)))


def calls_of(model):
    """Return {tower: calls of its first block}, which counts from now on."""
    calls = {"image": 0, "text": 0}
    for side, owner in (("image", model.visual), ("text", model)):
        block = owner.transformer.resblocks[0]
        block.register_forward_hook(lambda *_, side=side: calls.__setitem__(side, calls[side] + 1))
    return calls


class AsTheTrainers(StepBatches):
    """The micro-batches of a step as the trainer gives them, of any sizes, in memory."""

    def __init__(self, batches, frozen):
        side = batches[0][0].shape[-1]
        pixels = PixelCache(torch.device("cpu"), (0, 3, side, side), replayed=0, kept=0)
        super().__init__(pixels, len(batches), device=torch.device("cpu"), frozen=frozen)
        pixels.second = lambda index, _: batches[index][0]
        self.begin({"images": one, "texts": two, "ids": torch.arange(len(one))} for one, two in batches)


def calls_of_a_right_step(model, resident) -> dict[str, int]:
    """A step's loss and gradients are the whole batch's -> how often each tower's first block ran in it."""
    batches, seeds = micro_batches(), list(range(len(SIZES)))
    calls = calls_of(model)
    output = cached_step(
        AsTheTrainers(batches, model.frozen),
        encode=model,
        loss=by_name(lambda image, text, scale, bias: dense_loss(image, text, scale)),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=seeds,
        resident=resident,
    )
    ran = dict(calls)
    cached = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss, trained = whole_batch_gradients(model, batches, seeds)
    assert float(output.loss) == pytest.approx(loss.item(), rel=1e-6)
    assert set(cached) == set(trained) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name in trained:
        assert float((cached[name] - trained[name]).norm()) <= 1e-5 * float(trained[name].norm()), name
    return ran


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize(
    ("side", "unlocked"),
    [(side, unlocked) for side in ("image", "text") for unlocked in range(6)],
)
def test_gradients_equal_those_of_the_whole_batch_and_a_frozen_tower_runs_once(side, unlocked, resident):
    """Of groups: embeddings, three blocks (the last with its norm), projection; the first block is counted."""
    dropout = 0.25 if side == "text" else 0.0
    model = locked(side, unlocked, dropout)
    calls = calls_of_a_right_step(model, resident)
    twice = 2 * len(SIZES) - resident
    assert calls[side] == (twice if unlocked else len(SIZES))
    assert calls["text" if side == "image" else "image"] == twice


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize(("image", "text"), [(0, 2), (2, 0), (1, 1)])
def test_both_towers_may_be_locked_where_groups_of_one_are_not(image, text, resident):
    model = locked("image", image)
    model.lock_text_tower(text)
    calls = calls_of_a_right_step(model, resident)
    twice = 2 * len(SIZES) - resident
    assert calls == {"image": twice if image else len(SIZES), "text": twice if text else len(SIZES)}


@pytest.mark.parametrize(("unlocked", "in_eval"), [(0, True), (1, True), (4, True), (5, False)])
def test_the_image_tower_is_in_eval_mode_while_its_embeddings_are_frozen(unlocked, in_eval):
    model = locked("image", unlocked, patch_dropout=0.5)
    assert model.visual.training != in_eval and model.training
    images = micro_batches()[1][0]
    assert torch.equal(model(images)["image_features"], model(images)["image_features"]) == in_eval
