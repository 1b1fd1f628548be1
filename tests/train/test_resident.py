"""How many micro-batches may keep their graphs: what a step needs besides is left to it."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.rows import rows
from infcl.config import BatchPlan, TrainConfig
from infcl.models import load_model_config
from infcl.plan.activations import graph_bytes
from infcl.plan.memory import HEADROOM
from infcl.train.resident import _needed_bytes, graphs_to_keep, resident_micro_batches
from tests.lib.specs import load, spec_of

H200 = 140 * 2**30  # bytes


def needed(batch: BatchPlan, *, width: int = 512, on_host: int | None = None, **flags) -> float:
    """Bytes that graphs of ViT-B-32 leave next to a model without parameters."""
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, **flags)
    engine = SimpleNamespace(state=SimpleNamespace(parameters=list))
    ranks = batch.dp_size * config.tensor_parallel_size
    parallel = SimpleNamespace(device=torch.device("cuda"), world_size=ranks, ranks_per_node=on_host)
    cfg = dataclasses.replace(load_model_config("ViT-B-32"), embed_dim=width)
    parallel.dp_size, parallel.hosts = batch.dp_size, 1
    spec = spec_of(config, parallel, batch)
    return _needed_bytes(
        dataclasses.replace(spec, preset={"zero_optimization": {"stage": 1}}), engine, cfg, parallel, 0
    )


def beside_towers(loss: str, rows: int, ranks: int, width: int, **flags) -> float:
    """Of `rows` pairs a rank."""
    share = flags.get("tensor_parallel_size", 1)
    with (
        mock.patch("infcl.plan.memory.graph_bytes", lambda load: {"backward": 0.0}),
        mock.patch("infcl.plan.memory.pixels_on_device", lambda load: 0.0),
    ):
        return needed(BatchPlan(ranks // share, 1, rows * share), width=width, loss=loss, **flags)


def measured() -> list[tuple[str, int, int, int, float]]:
    """(loss, rows, ranks, width, bytes above the features) of the losses that hold their logits."""
    found = []
    for row in rows("loss_h200.csv"):
        if row["impl"] in ("clip", "open_clip", "disco") and row["extra_mib"]:
            ranks = row["gpus"]
            found.append((row["impl"], row["global_batch"] // ranks, ranks, row["dim"], row["extra_mib"] * 2**20))
    return found


def test_graphs_leave_the_room_that_a_dense_loss_was_measured_to_take():
    largest = {}
    for name, *sizes, extra in measured():
        assert extra <= beside_towers(name, *sizes) + HEADROOM * H200, (name, sizes)
        largest[name] = max(extra - beside_towers("inf_cl", *sizes), largest.get(name, 0.0))
    assert set(largest) == {"clip", "open_clip", "disco"}
    assert all(missing > 0 for missing in largest.values()), "a tiled loss's room is not enough for them"


@pytest.mark.parametrize("name", ["inf_cl", "siglip", "open_clip", "disco"])
def test_tensor_parallel_ranks_count_their_share_of_the_pairs_and_the_features_of_all(name):
    """The loss is that of as many ranks without tensor parallelism; next to it are the rows of the others."""
    alone, split = beside_towers(name, 4096, 8, 64), beside_towers(name, 4096, 8, 64, tensor_parallel_size=2)
    assert split - alone == 4 * 4096 * 64 * 4


def test_a_ring_of_nodes_is_left_the_room_for_its_further_buffers():
    """Two of a block in BF16, three of a float32 result, a lap's first part: counted in test_plan_memory."""
    sizes = 4096, 4, 64
    alone, nodes = beside_towers("inf_cl", *sizes), beside_towers("inf_cl", *sizes, on_host=2)
    assert nodes - alone == 4096 * 64 * (2 * 2 + 4 * 4)
    one_node = beside_towers("inf_cl", *sizes, on_host=4)
    assert one_node == alone
    assert beside_towers("open_clip", 4096, 4, 64, on_host=2) == beside_towers("open_clip", 4096, 4, 64)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_pixels_on_the_gpu_are_left_their_room(tensor_parallel):
    """Three micro-batches on their way; with --pixel-cache-gb gpu three of four that wait, the last one's never do."""
    own = 3 * 224**2 * 1024 / tensor_parallel
    batch, flags = BatchPlan(2, 4, 1024), {"tensor_parallel_size": tensor_parallel}
    moving = needed(batch, **flags)
    assert moving >= 3 * own
    assert needed(batch, **flags, pixel_cache_gb="gpu") - moving == pytest.approx(3 * own)
    one = BatchPlan(2, 1, 1024)
    assert needed(one, **flags, pixel_cache_gb="gpu") == needed(one, **flags)


def test_blocks_that_are_computed_again_are_left_their_room():
    """Of ViT-B-32, 8192 pairs: three quarters of what a checkpointed graph holds."""
    graphs = graph_bytes(load(load_model_config("ViT-B-32"), micro_batch_size=8192, checkpointing=True))
    assert graphs["backward"] > 0.5 * graphs["activations"]
    batch = BatchPlan(1, 8, 8192)
    left = graphs["backward"] + 3 * 8192 * 3 * 224**2 + beside_towers("inf_cl", 8 * 8192, 1, 512)
    assert needed(batch, grad_checkpointing=True) == pytest.approx(left)


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", True)])
def test_auto_is_one_where_there_is_no_gpu_and_where_sums_are_to_repeat(device, deterministic):
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, deterministic=deterministic)
    assert config.resident_micro_batches == "auto"
    parallel = SimpleNamespace(device=torch.device(device), world_size=1, dp_size=1, hosts=1)
    spec = spec_of(config, parallel, BatchPlan(1, 4, 8))
    assert resident_micro_batches(spec, None, None, parallel) == 1
    assert not graphs_to_keep(spec, parallel, 1, None)["measured"]  # no bound for one that continues on a GPU


OURS = [2, 4, 8]  # ranks, micro-batches, their size


@pytest.mark.parametrize(
    ("began", "expected", "said"),
    [
        (None, 3, 3),
        ({"kept": 2, "measured": True, "of": OURS}, 2, 2),
        ({"kept": 4, "measured": True, "of": OURS}, 3, 4),  # where four fit again, it is four again
        ({"kept": 1, "measured": False, "of": OURS}, 3, 3),
        ({"kept": 2, "measured": True, "of": [4, 4, 8]}, 3, 3),
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
        kept = resident_micro_batches(spec, None, SimpleNamespace(text_cfg=None), parallel, before=before)
    assert (kept, graphs_to_keep(spec, parallel, kept, before)["kept"]) == (expected, said)
    means = {2: "they stay so many, for the same sums", 3: None, 4: "gradients are summed in another order"}[said]
    printed = [record.getMessage() for record in caplog.records]
    assert printed == ([f"3 micro-batches' graphs fit on the GPU, the run began with {said}: {means}"] if means else [])
