"""The step that every engine must reproduce: one process in float64 on the whole batch; no ring, cache or ZeRO."""

import math

import torch
from torch import nn

LR, EPS = 1e-2, 1e-3  # a large epsilon: Adam's usual one would hide a wrong gradient scale


class ToyCLIP(nn.Module):
    """Two MLP towers that return what infcl.models.clip.CLIP does: a dict of unit-norm f32 features and scalars [1]."""

    def __init__(self, logit_scale: float = math.log(10.0), dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.visual, self.text = (
            nn.Sequential(nn.Linear(width, 20), nn.LayerNorm(20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, 8))
            for width in (12, 10)
        )
        self.logit_scale = nn.Parameter(torch.tensor([logit_scale]))

    def encode_text(self, texts):
        return self.text(texts.to(self.logit_scale.dtype))

    def forward(self, images, texts):
        return {
            "image_features": nn.functional.normalize(self.visual(images.to(self.logit_scale.dtype)).float(), dim=-1),
            "text_features": nn.functional.normalize(self.encode_text(texts).float(), dim=-1),
            "logit_scale": self.logit_scale.float() + 0,
        }


def global_batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator), torch.randn(size, 10, generator=generator)


def features_of(model, images, texts) -> list[torch.Tensor]:
    """Return the unit-norm image and text features in the dtype of the parameters, which `forward` rounds to f32."""
    images = images.to(model.logit_scale.dtype) if images.is_floating_point() else images
    return [nn.functional.normalize(side, dim=-1) for side in (model.visual(images), model.encode_text(texts))]


def dense_loss(image_features, text_features, scale) -> torch.Tensor:
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def whole_batch_gradients(model, micro_batches, seeds):
    """Return the loss and {name: gradient} of all micro-batches in one graph, each with its own seed."""
    model.zero_grad()
    outputs = []
    for batch, seed in zip(micro_batches, seeds):
        torch.manual_seed(seed)
        outputs.append(features_of(model, *batch))
    loss = dense_loss(*map(torch.cat, zip(*outputs)), model.logit_scale.exp())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def adamw(groups):
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=EPS)


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
