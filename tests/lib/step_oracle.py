"""A small CLIP-like model, the loss in one line, and the step that every engine must reproduce.

The reference is one process in float64 that sees the whole global batch at once: no ring, no cache, no ZeRO.
"""

import math

import torch
from torch import nn

LR, EPS = 1e-2, 1e-3  # a large epsilon: Adam's usual one would hide a wrong gradient scale


class ToyCLIP(nn.Module):
    """Two MLP towers that return what infcl.models.clip.CLIP does: a dict of unit-norm f32 features and scalars [1]."""

    def __init__(self, logit_scale: float = math.log(10.0), dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(
            nn.Linear(12, 20), nn.LayerNorm(20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, 8)
        )
        self.text = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, 8))
        self.logit_scale = nn.Parameter(torch.tensor([logit_scale]))

    def forward(self, images, texts):
        dtype = self.image[0].weight.dtype
        return {
            "image_features": nn.functional.normalize(self.image(images.to(dtype)).float(), dim=-1),
            "text_features": nn.functional.normalize(self.text(texts.to(dtype)).float(), dim=-1),
            "logit_scale": self.logit_scale.float() + 0,
        }


def global_batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator), torch.randn(size, 10, generator=generator)


def dense_loss(image_features, text_features, scale) -> torch.Tensor:
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def whole_batch_gradients(model, micro_batches, seeds):
    """Return the loss and {name: gradient} of all micro-batches in one graph, each with its own seed."""
    model.zero_grad()
    outputs = []
    for batch, seed in zip(micro_batches, seeds):
        torch.manual_seed(seed)
        outputs.append(model(*batch))
    image, text = (torch.cat([o[name] for o in outputs]) for name in ("image_features", "text_features"))
    loss = dense_loss(image, text, sum(o["logit_scale"] for o in outputs).div(len(outputs)).exp())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def adamw(groups):
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=EPS)


def oracle_steps(batches, *, seeds=None, logit_scale: float = math.log(10.0), dropout: float = 0.0, **options):
    """Run `train_in_float64` on a ToyCLIP. With dropout, `seeds` has a seed per batch and micro-batch."""
    seeded = list(zip(batches, seeds or [[0]] * len(batches), strict=True))
    return train_in_float64(ToyCLIP(logit_scale, dropout), seeded, _encode_seeded, **options)


def _encode_seeded(model, seeded):
    """Return the (image, text) outputs of the whole batch, whose len(seeds) micro-batches use these seeds."""
    batch, seeds = seeded
    outputs = []
    for seed, images, texts in zip(seeds, *(side.double().chunk(len(seeds)) for side in batch), strict=True):
        torch.manual_seed(seed)
        outputs.append((model.image(images), model.text(texts)))
    return (torch.cat(side) for side in zip(*outputs))


def train_in_float64(
    model,
    batches,
    encode,
    *,
    grad_clip_norm: float | None,
    weight_decay: float,
    max_logit_scale: float = math.inf,
    optimizer=adamw,
    before_clip=lambda model: None,
    after_step=lambda model: None,
):
    """Train one step per whole batch; return losses, gradient norms and the state dict.

    Args:
        encode: (model, batch) -> (image, text) outputs, not yet normalised.
        optimizer: parameter groups -> torch optimizer.
        before_clip: called with the model when the step's gradients are complete.
        after_step: called with the model at the end of the step.
    """
    from infcl.config import TrainConfig
    from infcl.engine.parameter_groups import parameter_groups

    model = model.double()
    optimizer = optimizer(parameter_groups(model, TrainConfig(wd=weight_decay), LR))
    losses, norms = [], []
    for batch in batches:
        image_features, text_features = (nn.functional.normalize(side, dim=-1) for side in encode(model, batch))
        loss = dense_loss(image_features, text_features, model.logit_scale.exp())
        optimizer.zero_grad()
        loss.backward()
        before_clip(model)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), grad_clip_norm or math.inf)))
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=max_logit_scale)
        after_step(model)
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def worst_error(state, reference):
    """Return the largest error of a parameter relative to the parameter; NaN if any error is NaN."""
    assert set(state) == set(reference)
    return _largest((state[n].double() - reference[n]).norm() / reference[n].norm() for n in reference)


def worst_update_error(state, reference, start):
    """Return the largest error of a parameter relative to its update: 1 if a parameter did not move.

    The weight of a norm moves by only hundredths of itself, so a small `worst_error` may be its full update.
    """
    assert set(state) == set(reference) == set(start)
    return _largest((state[n].double() - reference[n]).norm() / (reference[n] - start[n]).norm() for n in reference)


def update_error(state, reference, start):
    """Return the error of all parameters together relative to their update."""

    def distance(to):
        return torch.cat([(to[name].double() - reference[name].double()).flatten() for name in reference]).norm()

    return float(distance(state) / distance(start))


def _largest(errors) -> float:
    return float(torch.stack(list(errors)).max())  # Python's max would skip a NaN
