"""How many micro-batches may keep their graphs: what a step needs besides is left to it."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.paper import raw
from infcl.config import BatchPlan, TrainConfig
from infcl.plan.activations import graph_bytes
from infcl.towers import load_model_config
from infcl.train.resident import _free_bytes, _passing_bytes, graphs_to_keep, resident_micro_batches

TOTAL = 140 * 2**30


def room(
    loss: str,
    rows: int,
    ranks: int,
    width: int,
    tensor_parallel: int = 1,
    on_host: int | None = None,
    **flags,
) -> float:
    """Bytes for graphs on an empty GPU of TOTAL bytes, beside a model without parameters."""
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, loss=loss, **flags)
    nothing = SimpleNamespace(parameters=list), SimpleNamespace(trunk_numbers=lambda: 0)
    engine = SimpleNamespace(state=nothing[0], module=nothing[1], precision="amp_bf16")
    parallel = SimpleNamespace(
        device=torch.device("cuda"), tp_size=tensor_parallel, world_size=ranks, ranks_per_node=on_host
    )
    batch = BatchPlan(ranks // tensor_parallel, 1, rows * tensor_parallel)
    with (
        mock.patch("torch.cuda.empty_cache"),
        mock.patch("torch.cuda.mem_get_info", lambda device: (TOTAL, TOTAL)),
        mock.patch("torch.cuda.memory_reserved", lambda device: 0),
        mock.patch("torch.cuda.memory_allocated", lambda device: 0),
    ):
        return _free_bytes(config, engine, batch, SimpleNamespace(embed_dim=width), parallel)


def measured() -> list[tuple[str, int, int, int, float]]:
    """(loss, rows, ranks, width, bytes above the features) of the losses that hold their logits."""
    found = []
    for row in raw.rows("loss_h200.csv"):
        if row["impl"] in ("clip", "open_clip", "disco") and row["extra_mib"]:
            ranks = row["gpus"]
            found.append((row["impl"], row["global_batch"] // ranks, ranks, row["dim"], row["extra_mib"] * 2**20))
    return found


def test_graphs_leave_the_room_that_a_dense_loss_was_measured_to_take():
    largest = {}
    for name, *sizes, extra in measured():
        assert room(name, *sizes) + extra <= TOTAL, (name, sizes)
        largest[name] = max(extra - (TOTAL - room("inf_cl", *sizes)), largest.get(name, -TOTAL))
    assert set(largest) == {"clip", "open_clip", "disco"}
    assert all(missing > 0 for missing in largest.values()), "a tiled loss's room is not enough for them"


@pytest.mark.parametrize("name", ["inf_cl", "siglip", "open_clip", "disco"])
def test_tensor_parallel_ranks_count_their_share_of_the_pairs_and_the_features_of_all(name):
    """The loss is that of as many ranks without tensor parallelism; beside it lie the rows of the others."""
    alone, split = room(name, 4096, 8, 64), room(name, 4096, 8, 64, tensor_parallel=2)
    assert alone - split == 4 * 4096 * 64 * 4


def test_a_ring_of_nodes_is_left_the_room_for_its_further_buffers():
    """Two of a block in 16 bits, three of a float32 result, a lap's first part: counted in test_plan_memory."""
    sizes = 4096, 4, 64
    alone, nodes = room("inf_cl", *sizes), room("inf_cl", *sizes, on_host=2)
    assert alone - nodes == 4096 * 64 * (2 * 2 + 4 * 4)
    assert room("inf_cl", *sizes, on_host=2, ring="flat") == room("inf_cl", *sizes, on_host=4) == alone
    assert room("open_clip", 4096, 4, 64, on_host=2) == room("open_clip", 4096, 4, 64)


def passing(batch: BatchPlan, **flags) -> float:
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, **flags)
    engine = SimpleNamespace(precision="amp_bf16", zero_stage=1)
    return _passing_bytes(config, engine, batch, load_model_config("ViT-B-32"))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_pixels_on_the_gpu_are_left_their_room(tensor_parallel):
    """Three micro-batches on their way; with --pixel-cache gpu three of four that wait, the last one's never do."""
    own = 3 * 224**2 * 1024 / tensor_parallel
    batch, flags = BatchPlan(2, 4, 1024), {"tensor_parallel_size": tensor_parallel}
    moving = passing(batch, **flags)
    assert moving >= 3 * own
    assert passing(batch, **flags, pixel_cache="gpu") - moving == pytest.approx(3 * own)
    assert passing(batch, **flags, pixel_cache="gpu", pixel_cache_gb=str(2.5 * own / 1e9)) - moving == pytest.approx(
        2 * own
    )
    assert passing(BatchPlan(2, 1, 1024), **flags, pixel_cache="gpu") == pytest.approx(moving)


def test_blocks_that_are_computed_again_are_left_their_room():
    """Of ViT-B-32, 8192 pairs: three quarters of what a checkpointed graph holds."""
    sizes = {"precision": "amp_bf16", "tensor_parallel": 1, "sequence_parallel": False, "micro_batch_size": 8192}
    graphs = graph_bytes(
        load_model_config("ViT-B-32"), 0, checkpointing=True, compiled=True, blocks={"image": 12, "text": 12},
        blocks_of_a_graph=1, **sizes,
    )  # fmt: skip
    assert graphs["backward"] > 0.5 * graphs["activations"]
    batch = BatchPlan(1, 8, 8192)
    assert passing(batch, grad_checkpointing=True) == pytest.approx(graphs["backward"] + 3 * 8192 * 3 * 224**2)


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", True)])
def test_auto_is_one_where_there_is_no_gpu_and_where_sums_are_to_repeat(device, deterministic):
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, deterministic=deterministic)
    assert config.resident_micro_batches == "auto"
    batch, parallel = BatchPlan(1, 4, 8), SimpleNamespace(device=torch.device(device), world_size=1)
    assert resident_micro_batches(config, None, batch, None, parallel) == 1
    assert not graphs_to_keep(config, batch, parallel, 1, None)["measured"]  # no bound for one that goes on on a GPU


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
    parallel = SimpleNamespace(device=torch.device("cuda"), world_size=2, rank=0)
    before = None if began is None else {"graphs": began}
    inputs = config, BatchPlan(2, 4, 8), parallel
    with (
        mock.patch("infcl.train.resident.texts_for_model", lambda *given: lambda texts: texts),
        mock.patch("infcl.train.resident.longest", lambda *given: None),
        mock.patch("infcl.train.resident._graph_bytes", lambda *given: 10),
        mock.patch("infcl.train.resident._free_bytes", lambda *given: 57.0),
        mock.patch("infcl.train.resident._passing_bytes", lambda *given: 2.0),
        mock.patch("infcl.train.resident.max_over", lambda group, values, device: [max(values[0], -3)]),
    ):
        engine, model_config = SimpleNamespace(precision="amp_bf16"), SimpleNamespace(text_cfg=None)
        kept = resident_micro_batches(config, engine, inputs[1], model_config, parallel, before=before)
    assert (kept, graphs_to_keep(*inputs, kept, before)["kept"]) == (expected, said)
    means = {2: "they stay so many, for the same sums", 3: None, 4: "gradients are summed in another order"}[said]
    told = [record.getMessage() for record in caplog.records]
    assert told == ([f"3 micro-batches' graphs fit on the GPU, the run began with {said}: {means}"] if means else [])
