"""The ring loss equals the dense float64 loss: value, feature gradients, logit_scale gradient."""

import pytest
import torch

from infcl import InfCLLoss, inf_cl_loss
from infcl.loss.contrastive import LOSSES, TILED
from tests.lib.loss_oracle import Case, evaluate, features, oracle, relative_error

GRADIENTS = ("d_images", "d_texts", "d_scale")


def test_loss_and_gradients_are_finite_for_huge_norms():
    for norm in (1e3, 1e6, 1e15):
        images, texts = (norm * f for f in features("random", 20, 24))
        images.requires_grad_(), texts.requires_grad_()
        scale = torch.tensor(100.0, requires_grad=True)
        loss = inf_cl_loss(images, texts, scale)
        loss.backward()
        assert loss.isfinite() and loss >= 0
        for gradient in (images.grad, texts.grad, scale.grad):
            assert gradient.isfinite().all()


def test_upstream_gradient_multiplies_all_gradients():
    case = Case("inf_cl", 9, 24, 20.0)
    reference = oracle(case)
    images, texts = (f.requires_grad_() for f in features(case.kind, case.rows, case.dim))
    scale = torch.tensor(case.scale, requires_grad=True)
    (1024 * InfCLLoss()(images, texts, scale)).backward()
    for name, leaf in zip(GRADIENTS, (images, texts, scale)):
        assert relative_error(leaf.grad, 1024 * getattr(reference, name)) < 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    case, values = Case(name, 13, 24, 50.0, bias=-2.0), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            values.append(evaluate(case))
    # the backward of the dense baselines follows autocast, as open_clip's does
    for plain, cast in list(zip(*values))[: 5 if name in TILED else 1]:
        assert plain.dtype == cast.dtype == torch.float32 and torch.equal(plain, cast)


def test_double_backward_says_that_it_is_not_supported():
    images, texts = (f.requires_grad_() for f in features("random", 5, 24))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(inf_cl_loss(images, texts, 10.0), images, create_graph=True)


def test_low_precision_tiles_return_float32_gradients_for_float32_features():
    case = Case("inf_cl", 33, 64, 20.0)
    reference, result = oracle(case), evaluate(case, tile_dtype="bf16")
    assert result.d_images.dtype == torch.float32
    assert 1e-5 < relative_error(result.d_images, reference.d_images) < 2e-2
