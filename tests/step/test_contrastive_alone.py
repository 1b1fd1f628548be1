"""contrastive_step in one process: the model's buffers, random numbers, inputs, outputs; what it rejects."""

import random
import sys

import pytest
import torch
from torch import nn

from infcl import Encoders, contrastive_step, split_batch
from tests.lib.step_oracle import dense_loss


class Noisy(nn.Module):
    """A layer whose forward depends on what torch does not know of, or changes a buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 4), kind
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, values):
        if self.kind == "buffer":
            self.calls += 1
        noise = random.random() if self.kind == "random" else 0.0
        return self.linear(values) + noise * torch.arange(4)


class ZeroSide(Noisy):
    """As Noisy, with a second output that is all zero."""

    def forward(self, values):
        return super().forward(values), 0 * self.linear(values)


def dense_clip(queries, documents, scale=1.0):
    return dense_loss(queries, documents, scale)


def batch_of(rows: int, *shape: int):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, *(shape or (6,)), generator=generator) for _ in range(2))


def test_running_statistics_move_once_by_the_mean_over_micro_batches():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.3))
    micro_batches = split_batch(batch_of(6), 3)
    values = [encoder[0](side).detach() for micro_batch in micro_batches for side in micro_batch]
    statistics = [torch.stack([each.mean(0), each.var(0)]) for each in values]
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    mean, variance = 0.3 * torch.stack(statistics).mean(0) + 0.7 * torch.stack([torch.zeros(4), torch.ones(4)])
    torch.testing.assert_close(encoder[1].running_mean, mean)
    torch.testing.assert_close(encoder[1].running_var, variance)
    assert encoder[1].num_batches_tracked == 1 and encoder[1].momentum == 0.3


@pytest.mark.parametrize("bad", [0, 1])
def test_running_statistics_that_are_not_finite_are_not_published(bad):
    """Nor is any of a step that raises an error."""
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    micro_batches = split_batch(batch_of(6), 3)
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    before = {key: value.clone() for key, value in encoder[1].state_dict().items()}

    def fails(*_):
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        contrastive_step(Encoders(encoder), micro_batches, fails)
    micro_batches[bad][0][1] = float("nan")
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    for key, value in encoder[1].state_dict().items():
        assert torch.equal(value, before[key]), key


def test_autocast_loses_no_gradient():
    torch.manual_seed(0)
    model = Encoders(nn.Linear(6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        contrastive_step(model, split_batch(batch_of(8), 2), dense_clip)
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in model.parameters())


def test_random_numbers_after_a_step_are_those_after_its_first_pass():
    model = Encoders(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)))
    micro_batches, states = split_batch(batch_of(8), 2), []
    for run in (lambda: contrastive_step(model, micro_batches, dense_clip), lambda: [model(*m) for m in micro_batches]):
        torch.manual_seed(3)
        run()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def linear(*shape):
    return Encoders(nn.Linear(*(shape or (6, 4))))


def returning(forward):
    module = nn.Linear(6, 6)
    module.forward = forward
    return Encoders(module)


THREE_DIMENSIONS = split_batch(batch_of(4, 2, 6), 2)
PAIRS = split_batch(batch_of(8), 2)


@pytest.mark.parametrize(
    ("model", "micro_batches", "message"),
    [
        (Encoders(Noisy("random")), PAIRS, "pass 2 gives other features than pass 1"),
        (ZeroSide("random"), [rows for rows, _ in PAIRS], "pass 2 gives other features than pass 1"),
        (Encoders(Noisy("buffer")), PAIRS, "changes the buffer encoders.0.calls"),
        (linear(6, 6), THREE_DIMENSIONS, r"encoder 0 \(Linear\) gives a tensor \(2, 2, 6\)"),
        (returning(lambda rows: (rows,)), THREE_DIMENSIONS, r"\(Linear\) gives tuple\(a tensor \(2, 2, 6\)"),
        (returning(lambda rows: {"pooled": rows}), PAIRS, r"\(Linear\) gives dict\(pooled\)"),
        (nn.Bilinear(6, 6, 1), [tuple(torch.zeros(2, 6))] * 2, "Bilinear returns no features"),
        (
            Encoders(nn.Linear(6, 4), nn.Linear(6, 5)),
            PAIRS,
            r"widths: encoder 0 \(Linear\) \[2, 4\], encoder 1 \(Linear\) \[2, 5\]",
        ),
        (Encoders(*[nn.Linear(6, 6)] * 3), PAIRS, "2 inputs for 3 encoders"),
        (linear().requires_grad_(False), PAIRS, "no parameter of Encoders requires a gradient"),
        (linear(), [], "at least one micro-batch"),
    ],
)
def test_models_and_batches_that_cannot_train_are_rejected_by_name(model, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        contrastive_step(model, micro_batches, dense_clip)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_an_exception_says_where_it_happened():
    with pytest.raises(RuntimeError) as raised:
        contrastive_step(Encoders(nn.Linear(6, 4), nn.Linear(5, 4)), split_batch(batch_of(4), 2), dense_clip)
    notes = raised.value.__notes__
    assert notes == ["in encoder 1 (Linear)", "in Encoders, micro-batch 0 of 2, contrastive_step"]


def test_a_model_may_return_a_mapping_and_take_nested_inputs():
    class Model(nn.Linear):
        def forward(self, pair, options):
            images, texts = super().forward(pair[0]), super().forward(pair[1]["x"])
            return {"texts": texts, "images": images, "scale": images.new_tensor(2.0)}

    def loss(*, images, texts, scale):
        return dense_loss(images, texts, scale)

    images, texts = batch_of(5)
    model, gradients = Model(6, 4), []
    for size in (2, 5):
        batch = {"pair": (images, {"x": texts, "names": list("abcde")}), "options": None}
        contrastive_step(model, split_batch(batch, size), loss)
        gradients.append(model.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients)
