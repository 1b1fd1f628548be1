"""How many micro-batches may keep their graphs: what a step needs besides is left to it."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from infcl.config import BatchPlan, TrainConfig
from infcl.models import load_model_config
from infcl.train.resident import _needed_bytes, resident_micro_batches
from tests.lib.specs import spec_of


def needed(batch: BatchPlan, **flags) -> float:
    """Bytes that graphs of ViT-B-32 leave next to a model without parameters."""
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, **flags)
    engine = SimpleNamespace(state=SimpleNamespace(parameters=list))
    ranks = {"world_size": batch.dp_size, "dp_size": batch.dp_size, "ranks_per_node": None, "hosts": 1}
    parallel = SimpleNamespace(device=torch.device("cuda"), **ranks)
    cfg = load_model_config("ViT-B-32")
    spec = dataclasses.replace(spec_of(config, parallel, batch), preset={"zero_optimization": {"stage": 1}})
    return _needed_bytes(spec, engine, cfg, parallel, 0, 0)


def test_pixels_are_left_their_room():
    """Three micro-batches of pixels on their way."""
    pixels = 3 * 224**2 * 1024
    moving = needed(BatchPlan(2, 4, 1024))
    assert moving >= 3 * pixels
    assert needed(BatchPlan(2, 4, 1024), pixel_cache_gb="gpu") - moving == pytest.approx(3 * pixels)


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", True)])
def test_auto_is_one_where_there_is_no_gpu_and_where_sums_are_to_repeat(device, deterministic):
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, deterministic=deterministic)
    assert config.resident_micro_batches == "auto"
    parallel = SimpleNamespace(device=torch.device(device), world_size=1, dp_size=1, hosts=1)
    spec = spec_of(config, parallel, BatchPlan(1, 4, 8))
    number, stored = resident_micro_batches(spec, None, None, parallel)
    assert number == 1 and not stored["measured"]  # no bound for one that continues on a GPU


OURS = [2, 4, 8]  # ranks, micro-batches, their size


@pytest.mark.parametrize(
    ("began", "expected", "said"),
    [
        (None, 3, 3),
        ({"kept": 2, "measured": True, "of": OURS}, 2, 2),
        ({"kept": 4, "measured": True, "of": OURS}, 3, 4),  # where four fit again, it is four again
        ({"kept": 1, "measured": False, "of": OURS}, 3, 3),
        ({"kept": 2, "measured": True, "of": [2, 2, 16]}, 3, 3),
    ],
)
def test_a_run_that_continues_keeps_as_many_graphs_as_it_began_with_where_they_fit(began, expected, said, caplog):
    """Of 5 graphs that would fit on one rank and 3 on the other, in batches of four micro-batches."""
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1)
    parallel = SimpleNamespace(device=torch.device("cuda"), world_size=2, rank=0, dp_size=2, hosts=1)
    before = None if began is None else {"graphs": began}
    spec = spec_of(config, parallel, BatchPlan(2, 4, 8))
    with (
        mock.patch("infcl.train.resident.texts_for_model", lambda *given, pack: lambda texts: texts),
        mock.patch("infcl.train.resident.longest", lambda *given: None),
        mock.patch("infcl.train.resident._graph_bytes", lambda *given: 10),
        mock.patch("infcl.train.resident._free_bytes", lambda *given: 57.0),
        mock.patch("infcl.train.resident._needed_bytes", lambda *given: 2.0),
        mock.patch("infcl.train.resident.max_over", lambda group, values, device: [max(values[0], -3)]),
    ):
        kept, stored = resident_micro_batches(spec, None, SimpleNamespace(text_cfg=None), parallel, before=before)
    assert (kept, stored["kept"]) == (expected, said)
    means = {2: "they stay so many, for the same sums", 3: None, 4: "gradients are summed in another order"}[said]
    printed = [record.getMessage() for record in caplog.records]
    assert printed == ([f"3 micro-batches' graphs fit on the GPU, the run began with {said}: {means}"] if means else [])
