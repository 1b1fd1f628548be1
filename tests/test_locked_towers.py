"""A frozen tower is encoded once a step; the gradients of the rest are those of the whole batch at once."""

import pytest
import torch

from infcl.step.grad_cache import grad_cache_step
from infcl.towers import CLIP, load_model_config
from tests.step_oracle import dense_loss

SIZES = [3, 4, 1, 5]


def locked(side: str, unlocked: int, patch_dropout: float = 0.0) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(load_model_config("demo"), patch_dropout=patch_dropout)
    (model.lock_image_tower if side == "image" else model.lock_text_tower)(unlocked)
    return model.double().train()


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (sum(SIZES), 3, 32, 32), generator=generator, dtype=torch.uint8)
    texts = torch.randint(2, 300, (sum(SIZES), 20), generator=generator)
    return list(zip(images.split(SIZES), texts.split(SIZES)))


def trainer_like(model):
    """(encode, encode_again, calls of each tower's first block) as the trainer makes them."""
    calls = {"image": 0, "text": 0}
    for side, owner in (("image", model.visual), ("text", model)):
        block = owner.transformer.resblocks[0]
        block.register_forward_hook(lambda *_, side=side: calls.__setitem__(side, calls[side] + 1))

    def encode_again(batch, kept, first):
        rows = slice(first, first + len(batch[1]))
        drop = [model.frozen[side] or f"{side}_trunk" in kept for side in ("image", "text")]
        given = [None if gone else x for gone, x in zip(drop, batch)]
        return model(*given, **{name: trunk[rows] for name, trunk in kept.items()})

    return lambda batch: model(*batch), encode_again, calls


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize(
    ("side", "unlocked", "runs_once"),
    [("image", 0, True), ("image", 1, True), ("image", 2, False), ("text", 0, True), ("text", 1, True)],
)
def test_gradients_equal_those_of_the_whole_batch_and_the_frozen_tower_runs_once(side, unlocked, runs_once, resident):
    model, batches = locked(side, unlocked, patch_dropout=0.25 if side == "text" else 0.0), micro_batches()
    seeds = list(range(len(SIZES)))
    encode, encode_again, calls = trainer_like(model)
    output = grad_cache_step(
        batches,
        encode=encode,
        encode_again=encode_again,
        loss=lambda image, text, scale, bias: dense_loss(image, text, scale),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=seeds,
        resident=resident,
    )
    twice = 2 * len(SIZES) - resident
    assert calls[side] == (len(SIZES) if runs_once else twice)
    assert calls["text" if side == "image" else "image"] == twice
    cached = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    outputs = []
    for batch, seed in zip(batches, seeds):
        torch.manual_seed(seed)
        outputs.append(model(*batch))
    images, texts = (torch.cat([o[name] for o in outputs]) for name in ("image_features", "text_features"))
    loss = dense_loss(images, texts, sum(o["logit_scale"] for o in outputs).div(len(outputs)).exp())
    loss.backward()
    assert float(output.loss) == pytest.approx(loss.item(), rel=1e-6)
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(cached) == set(trained) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name in trained:
        assert float((cached[name] - trained[name]).norm()) <= 1e-5 * float(trained[name].norm()), name


@pytest.mark.parametrize(("unlocked", "in_eval"), [(0, True), (1, True), (3, True), (4, False)])
def test_the_image_tower_is_in_eval_mode_while_its_embeddings_are_frozen(unlocked, in_eval):
    model = locked("image", unlocked, patch_dropout=0.5)
    assert model.visual.training != in_eval and model.training
    images = micro_batches()[1][0]
    assert torch.equal(model(images)["image_features"], model(images)["image_features"]) == in_eval
