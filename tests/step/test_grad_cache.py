"""The gradient cache gives the gradients of the whole batch at once, randomness included, with 2 M - 1 encodings."""

import pytest
import torch

from infcl.step.grad_cache import by_name, cached_step
from tests.lib.step_oracle import ToyCLIP, dense_loss, global_batch, whole_batch_gradients, worst_error


def cached_gradients(model, micro_batches, seeds, encode=None, **options):
    model.zero_grad()
    output = cached_step(
        micro_batches,
        encode=encode or model,
        loss=by_name(lambda image, text, scale, bias: dense_loss(image, text, scale)),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=seeds,
        **options,
    )
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


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


def test_a_replay_under_another_seed_is_noticed():
    model = ToyCLIP(dropout=0.3).train()
    images, texts = global_batch(12)
    micro_batches = list(zip(images.split(4), texts.split(4)))

    def forgetful_encode(*batch):
        if torch.is_grad_enabled():
            torch.manual_seed(99)
        return model(*batch)

    _, wrong = cached_gradients(model, micro_batches, [1, 2, 3], encode=forgetful_encode)
    _, whole = whole_batch_gradients(model, micro_batches, [1, 2, 3])
    assert worst_error(wrong, whole) > 0.1


@pytest.mark.parametrize(
    ("num_micro_batches", "options", "without_graph", "with_graph"),
    [
        (1, {}, 0, 1),
        (2, {}, 1, 2),
        (5, {}, 4, 5),
        (5, {"resident": 3}, 2, 5),
        (5, {"resident": 7}, 0, 5),
    ],
)
def test_resident_micro_batches_are_encoded_once_the_others_twice(
    num_micro_batches, options, without_graph, with_graph
):
    model, calls = ToyCLIP(), []
    images, texts = global_batch(2 * num_micro_batches)

    def encode(*batch):
        calls.append(torch.is_grad_enabled())
        return model(*batch)

    micro_batches = list(zip(images.split(2), texts.split(2)))
    cached_gradients(model, micro_batches, [0] * num_micro_batches, encode=encode, **options)
    assert calls == [False] * without_graph + [True] * with_graph


def test_master_values_go_into_the_loss_and_gradients_into_the_parameter():
    """As with bf16 parameters: the loss sees logit_scale from its fp32 master, not the rounded copy."""
    model = ToyCLIP()
    master = model.logit_scale.detach() + 0.01
    images, texts = global_batch(6)
    cached_step(
        [(images, texts)],
        encode=model,
        loss=by_name(lambda image, text, scale, bias: dense_loss(image, text, scale)),
        backward=lambda surrogate, is_last: surrogate.backward(),
        seeds=[0],
        scalar_values=lambda returned: {"logit_scale": master},
    )
    reference = ToyCLIP(logit_scale=master.item())
    loss, expected = whole_batch_gradients(reference, [(images, texts)], [0])
    got = {name: p.grad for name, p in model.named_parameters()}
    assert worst_error(got, expected) < 1e-5


def test_seeds_and_micro_batches_must_match_in_number():
    with pytest.raises(ValueError, match="2 seeds for 1 micro-batches"):
        cached_gradients(ToyCLIP(), [global_batch(4)], [1, 2])
