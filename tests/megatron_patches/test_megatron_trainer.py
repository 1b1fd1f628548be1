"""--tensor-parallel-size through the whole trainer: losses, resume under another T, files on disk, rejections."""

import dataclasses
import json
from unittest import mock

import pytest
import torch

from infcl.checkpoint.load import consolidated_state_dict
from infcl.convert.export import load_exported
from infcl.models import load_model_config
from tests.lib.entry import ON_CPU, alone, command, launch, losses
from tests.lib.ranks import rejected, run_ranks
from tests.lib.teachers import write_teacher
from tests.lib.training import demo_config, rejection, run_losses


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's model with heads that four ranks can share."""
    fields = load_model_config("demo").to_dict()
    fields["vision_cfg"] |= {"head_width": 24}
    fields["text_cfg"] |= {"heads": 4}
    path = tmp_path_factory.mktemp("model") / "four_heads.json"
    path.write_text(json.dumps(fields))
    return str(path)


def config_of(demo_folder, logs, model, size, copies, **changes):
    """A global batch of 32 pairs on T x D ranks."""
    flags = {"model": model, "batch_size": 8, "accum_freq": 4 // copies, "steps": 4, "force_patch_dropout": 0.25}
    return demo_config(demo_folder, logs, **{"tensor_parallel_size": size} | flags | changes)


DISTILLED = {"distill_weight": 2.0, "eps": 1e-3, "force_patch_dropout": None}  # ranks divide the teacher's samples
LOCKED = {"lock_image": True, "resident_micro_batches": "2", "ema_decay": 0.9, "eps": 1e-3, "force_patch_dropout": None}
READ_TWICE = {
    "distill_weight": 2.0,
    "pixel_cache_gb": "0",
    "grad_checkpointing": True,
    "deepspeed_config": "ds_configs/zero3.json",
}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("copies", "flags"),
    [(1, DISTILLED), (1, LOCKED | {"deepspeed_config": "ds_configs/zero3.json"}), (2, READ_TWICE)],
    ids=["distilled", "locked", "read twice"],
)
def test_a_tensor_parallel_run_trains_evaluates_and_exports_as_a_plain_one(demo_folder, tmp_path, model, copies, flags):
    """Seeds of patch dropout are those of the data-parallel ranks. Nothing is read by two ranks."""
    flags = {"val_data": str(demo_folder / "val"), "zeroshot_data": str(demo_folder / "zeroshot")} | flags
    flags["pack_captions"] = "on"
    if "distill_weight" in flags:
        flags["distill_model"] = write_teacher(tmp_path / "teacher", demo_folder)
    losses, evaluations, exports = [], [], []
    for size in (1, 2):
        run = tmp_path / str(size) / "run"
        losses.append(run_losses(size * copies, config_of(demo_folder, run.parent, model, size, copies, **flags)))
        summary = json.loads((run / "summary.json").read_text())
        assert summary["data"]["samples"] == summary["samples_seen"] == 4 * 32
        evaluations.append(summary["evaluation"])
        exports.append(load_exported(run / "export")[0].state_dict())
        trained = consolidated_state_dict(run, ema="ema_decay" in flags)
        assert all(torch.equal(trained[n].reshape(-1), exports[-1][n].reshape(-1)) for n in exports[-1])
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    for name, value in exports[0].items():
        if not name.endswith("in_proj_bias"):  # keys' biases cancel in the softmax: their gradient is rounding
            assert float((exports[1][name] - value).norm()) <= 1e-3 * float(value.norm()), name
    assert evaluations[1]["retrieval"]["val_loss"] == pytest.approx(evaluations[0]["retrieval"]["val_loss"], rel=1e-4)
    for task in evaluations[0]:
        assert evaluations[1][task] == pytest.approx(evaluations[0][task], abs=0.02), task


@pytest.mark.multigpu
def test_over_nccl_two_tensor_parallel_ranks_follow_one_gpu(demo_folder, tmp_path, model):
    """Their parts of a micro-batch meet on the GPU, in both passes, or on the host, as captions that are packed do;
    blocks are cut and placed as they are made.
    """
    environment = {} if torch.cuda.is_available() else ON_CPU
    flags = ["--model", model, "--steps", "10", "--precision", "fp32", "--pixel-cache-gb", "0"]
    flags += ["--compile-blocks", "off"]  # compiling takes longer than all else
    curves = []
    for size, pack in ((1, "off"), (2, "off"), (2, "on")):
        logs = tmp_path / f"{size}_{pack}"
        own = ["--tensor-parallel-size", str(size), "--pack-captions", pack]
        arguments = command(demo_folder, logs, *flags, *own)
        finished = launch(arguments, 2, environment) if size == 2 else alone(arguments, environment)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        curves.append(losses(logs))
    assert len(curves[0]) == 10
    for split in curves[1:]:
        assert split == pytest.approx(curves[0], rel=2e-3)


# ---- rejections ----


def warnings_of_hosts(rank, world_size, sizes):
    """Messages where hosts of so many ranks each are divided into pairs."""
    from infcl.parallel.rendezvous import Node
    from megatron_patches import groups
    from tests.lib.tensor_parallel import layout

    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = tuple(Node(f"host{i}", first, size) for i, (first, size) in enumerate(zip(firsts, sizes)))
    parallel = dataclasses.replace(layout(2), nodes=nodes)
    with mock.patch.object(groups, "_log") as log:
        groups.init_tensor_parallel(parallel, 2)
    return [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


@pytest.mark.parametrize(
    ("sizes", "hosts"),
    [([2, 2], None), ([1, 3], "of host0 (rank 0):"), ([2, 1, 1], "of host1 (rank 2):")],
)
def test_layers_that_hosts_share_are_warned_of_once(sizes, hosts):
    first, *others = run_ranks(warnings_of_hosts, 4, sizes)
    assert others == [[]] * 3 and len(first) == (hosts is not None)
    assert all("--tensor-parallel-size 2 shares layers between hosts" in one and hosts in one for one in first)


def layout_rejection(rank, world_size, size):
    from tests.lib.tensor_parallel import layout

    return rejected(layout, size)


def test_sizes_that_do_not_fit_are_rejected_with_the_numbers(demo_folder, tmp_path, model):
    first, second = run_ranks(layout_rejection, 2, 4)
    assert first == second and "--tensor-parallel-size 4 does not divide the number of ranks, 2" in first
    assert "deepspeed --num_gpus 4" in first and first.endswith("or use --tensor-parallel-size 1 or 2")
    for locked in (False, True):
        heads = demo_config(demo_folder, tmp_path, tensor_parallel_size=2, lock_image=locked)
        assert "the 3 heads of the image tower" in run_ranks(rejection, 2, heads)[0]
