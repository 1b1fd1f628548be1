"""The loss that a recorded graph has computed, differentiated: without a GPU, with a stand-in for the graph.

tests/kernels/test_triton_tile.py holds real graphs to ordinary calls.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

from infcl import inf_cl_loss
from infcl.loss import graphed
from tests.lib.loss_oracle import features, relative_error


class StandIn:
    """What Recorded keeps; `replay` runs the loss instead of a graph."""

    def __init__(self, inputs):
        self.inputs = [x.detach().clone() for x in inputs]
        self.results = torch.zeros(sum(x.numel() for x in inputs) + 1)
        self.graph = SimpleNamespace(replay=self._replay)

    @torch.enable_grad()
    def _replay(self):
        inputs = [x.float().requires_grad_() for x in self.inputs]
        loss = inf_cl_loss(*inputs)
        parts = [*torch.autograd.grad(loss, inputs), loss.detach()]
        self.results.copy_(torch.cat([x.detach().flatten() for x in parts]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_replays_overlap_and_are_differentiated_twice_over(dtype, tolerance):
    batches = [(*features("random", 9, 5, dtype, seed=seed), torch.tensor(10.0 + seed)) for seed in (0, 1)]
    recorded = StandIn(batches[0])
    leaves = [[x.clone().requires_grad_() for x in batch] for batch in batches]
    losses = [graphed.replay(recorded, batch) for batch in leaves]  # the second before the first's backward
    for batch, loss in zip(leaves, losses):
        wide = [x.detach().double().requires_grad_() for x in batch]
        expected_loss = inf_cl_loss(*wide)
        expected = torch.autograd.grad(3 * expected_loss, wide)
        assert relative_error(loss.detach(), expected_loss.detach()) < 1e-5
        for _ in range(2):  # retain_graph: the same gradients again
            for value, truth in zip(torch.autograd.grad(3 * loss, batch, retain_graph=True), expected):
                assert relative_error(value, truth) < max(tolerance, 1e-5)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(loss, batch, create_graph=True)


def test_what_cannot_be_recorded_is_computed_as_ever_and_tried_once(monkeypatch, caplog):
    tried = []

    def fail(record, inputs):
        tried.append(len(inputs[0]))
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphed, "Recorded", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(graphed, "_refused", set())
    inputs = (torch.ones(5, 3), torch.ones(5, 3), torch.ones(()))
    with caplog.at_level(logging.WARNING):
        assert [graphed.find(None, inputs, "options") for _ in range(6)] == [None] * 6
    assert tried == [5]
    assert [r.getMessage() for r in caplog.records] == [
        "the loss of 5 rows is not recorded as a CUDA graph: operation not permitted when stream is capturing"
    ]
