"""Precision of the losses on a GPU: errors against float64 on the same inputs (`python -m benchmarks.loss --check`).

There are four kinds of features: random unit vectors; pairs as in the middle of a training (scale 100, a loss of about
2); separated pairs (a loss of 1e-5); matched pairs of cosine 1. An error is the norm of the difference, divided by the
norm of the float64 gradient. If that gradient vanishes (1e-36 at a perfect match), the divisor is 0.1 scale / sqrt(b),
a tenth of its size in the first steps of a training, or 1e-2 for the scale's gradient.

The loss of float16 features is multiplied by 2^16, as loss scaling does in training. Their gradients are float16 too:
an entry of 1e-8, as for separated pairs, would underflow without that factor.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_impls import make

_ROWS = (  # implementation, dtype of the features, dtype of the tile's operands
    ("inf_cl", torch.bfloat16, None),
    ("inf_cl", torch.float16, None),
    ("inf_cl", torch.float32, "bf16"),
    ("inf_cl", torch.float32, "tf32"),
    ("inf_cl", torch.float32, "fp32"),
    ("clip", torch.bfloat16, None),
    ("clip", torch.float32, None),
    ("official", torch.bfloat16, None),
    ("official", torch.float32, None),
)
_FLOAT16_LOSS_SCALE = 2.0**16


def check(rows: int, dim: int) -> Iterator[dict]:
    """Yield one row per kind of features, implementation and precision, of the installed implementations."""
    for kind, scale, images, texts in _kinds(rows, dim):
        for name, dtype, tile_dtype in _ROWS:
            inputs = [x.to("cuda", dtype) for x in (images, texts)]
            truth = _evaluate(make("clip", None, {}, None), [x.double() for x in inputs], scale)
            try:
                loss = make(name, None, {"tile_dtype": tile_dtype} if name == "inf_cl" else {}, None)
                result = _evaluate(loss, inputs, scale)
            except ImportError:  # not installed
                continue
            floor = 0.1 * scale / rows**0.5
            yield {
                "features": kind,
                "impl": name,
                "dtype": str(dtype).removeprefix("torch."),
                "tile_dtype": tile_dtype or "",
                "loss": result[0].item(),
                "loss_error": (result[0].double() - truth[0]).abs().item(),
                "image_gradient_error": _relative(result[1], truth[1], floor),
                "text_gradient_error": _relative(result[2], truth[2], floor),
                "scale_gradient_error": _relative(result[3], truth[3], 1e-2),
            }


def _kinds(rows: int, dim: int) -> Iterator[tuple[str, float, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images, noise = (
        F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    yield "random", 50.0, images, noise
    yield "training", 100.0, images, F.normalize(0.14 * images + noise, dim=1)
    yield "told apart", 100.0, images, F.normalize(0.3 * images + 0.95 * noise, dim=1)
    yield "matched", 100.0, images, images.clone()


def _evaluate(loss, features: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    """Return the loss and its gradients with respect to images, texts and the scale."""
    inputs = [x.clone().requires_grad_() for x in features]
    inputs.append(torch.tensor(scale, device="cuda", dtype=torch.promote_types(features[0].dtype, torch.float32)))
    inputs[-1].requires_grad_()
    value = loss(*inputs, torch.zeros((), device="cuda"))
    factor = _FLOAT16_LOSS_SCALE if features[0].dtype == torch.float16 else 1.0
    gradients = torch.autograd.grad(value * factor, inputs)
    return value.detach(), *(gradient.double() / factor for gradient in gradients)


def _relative(value: Tensor, truth: Tensor, floor: float) -> float:
    size = truth.double().norm().item()
    return (value.double() - truth.double()).norm().item() / (size if size > 1e-9 * floor else floor)
