"""infcl.train.graphs, on CPUs with a recorder that computes again where a GPU would replay."""

import pytest
import torch

from infcl.train.compiled import compile_blocks
from infcl.train.graphs import CudaGraphs, graph_towers
from tests.tensor_parallel import global_batch, new_model


class Recomputing:
    """CudaGraphs' interface: what is recorded runs again and writes its results over the first ones."""

    keeps_nothing = False
    replays = 0

    def warm_up(self, function):
        function()

    def record(self, function):
        outputs = [None if output is None else output.clone() for output in function()]

        def replay():
            Recomputing.replays += 1
            for output, new in zip(outputs, function()):
                if output is not None:
                    output.copy_(new)

        return outputs, replay


def train(model, *, watch=False):
    """Three accumulated micro-batches, two of them alive at once, an odd one and an evaluation -> results."""
    seen, values = [], []
    if watch:
        model.visual.transformer.on_input_gradient = lambda gradient: seen.append(gradient.norm())
    sides = [side.split(4) for side in global_batch(14, seed=3)]
    batches = list(zip(*sides))  # of 4, 4, 4 and 2
    dtype = model.logit_scale.dtype

    def loss(batch):
        out = model(batch[0].to(dtype), batch[1])
        return (out["image_features"].to(dtype) * out["text_features"].to(dtype).roll(1, 0)).pow(3).sum()

    with torch.no_grad():
        values += [loss(batches[0]), loss(batches[1])]
    first, second = loss(batches[1]), loss(batches[2])
    for value in (first, second, loss(batches[0])):
        value.backward()
        values.append(value.detach())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0
    for batch in (batches[3], batches[0]):
        value = loss(batch)
        value.backward()
        values.append(value.detach())
    model.eval()
    values.append(loss(batches[0]).detach())
    return torch.stack(values), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=["plain", "checkpointing"])
def test_graphed_towers_compute_what_plain_ones_do(options):
    values, gradients, seen = train(new_model(**options).double(), watch=True)
    model, Recomputing.replays = new_model(**options).double(), 0
    graph_towers(model, Recomputing)
    graphed_values, graphed_gradients, graphed_seen = train(model, watch=True)
    # Two towers: two encodings, and two forwards with backwards. For others the place was taken, or the shape another.
    assert Recomputing.replays == 2 * (2 + 2 * 2)
    torch.testing.assert_close(graphed_values, values, rtol=0, atol=1e-12)
    torch.testing.assert_close(graphed_gradients, gradients, rtol=0, atol=1e-12)
    assert sorted(map(float, graphed_seen)) == pytest.approx(sorted(map(float, seen)), rel=1e-12)


def test_partly_frozen_towers_can_be_graphed():
    plain, graphed = new_model(), new_model()
    for model in (plain, graphed):
        model.lock_image_tower(2, keep_trunk=False)
        model.lock_text_tower(1)
    graph_towers(graphed, Recomputing)
    for got, expected in zip(train(graphed)[:2], train(plain)[:2]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_graphed_forward_is_sent_backward_once():
    model = new_model()
    graph_towers(model, Recomputing)
    images, texts = global_batch(4, seed=0)
    loss = model(images, texts)["image_features"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="sent backward before"):
        loss.backward()


@pytest.mark.slow
def test_compiled_blocks_can_be_graphed():
    plain, model = new_model(), new_model()
    assert compile_blocks(model, torch.device("cpu"), "fp32", {4})
    graph_towers(model, Recomputing)
    for got, expected in zip(train(model)[:2], train(plain)[:2]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_cuda_graphs_compute_what_plain_towers_do(compiles):
    results = []
    for graphed in (False, True):
        with torch.device("cpu"):
            model = new_model().cuda()
        if compiles:
            assert compile_blocks(model, torch.device("cuda"), "fp32", {4})
        if graphed:
            graph_towers(model, CudaGraphs)
        images, texts = global_batch(4, seed=0)
        values = []
        for step in range(4):
            out = model(images.cuda() + step, texts.cuda())
            value = (out["image_features"] * out["text_features"]).pow(3).sum()
            value.backward()
            values.append(value.detach())
        results.append((torch.stack(values), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    for got, expected in zip(results[1], results[0]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
