"""Patches of Megatron's modules: one symbol, once, logged; rejected where its arguments differ."""

import functools
import importlib
import logging

import pytest
import torch
import torch.distributed as dist

from tests.lib.ranks import run_ranks
from tests.lib.tensor_parallel import layout


def summed_though_not_contiguous(rank, world_size):
    from megatron.core.tensor_parallel import mappings

    from megatron_patches.patches import describe_patches

    group = layout(world_size).tp_group
    x = torch.arange(6.0).view(2, 3).T * (rank + 1)
    return mappings._reduce(x, group).tolist(), mappings._gather_along_first_dim(x, group).shape, describe_patches()


def test_sums_reach_inputs_that_are_not_contiguous_and_gathers_run_on_a_cpu():
    mappings = "megatron.core.tensor_parallel.mappings"
    for summed, gathered, described in run_ranks(summed_though_not_contiguous, 2):
        assert summed == (torch.arange(6.0).view(2, 3).T * 3).tolist() and gathered == (6, 2)
        assert described.endswith(f"patched: {mappings}._reduce, {mappings}._gather_along_first_dim")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `patched` with a function of two arguments."""
    importlib.import_module("megatron_patches.patches")  # logs patches of its own
    (tmp_path / "patched.py").write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("patched")
    importlib.sys.modules.pop("patched")


def add_one(symbol="patched.add", parameters=("a", "b")) -> None:
    from megatron_patches.patches import patch

    patch(symbol, parameters, lambda add: lambda a, b: add(a, b) + 1, "adds one")


def test_a_patch_replaces_its_symbol_once_and_says_so(module, caplog):
    with caplog.at_level(logging.INFO):
        add_one()
        add_one()
    assert module.add(1, 2) == 4
    assert len(caplog.records) == 1 and "patched.add" in caplog.text and "adds one" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("patched.subtract",), "there is no patched.subtract"),
        (("nowhere.add",), "there is no nowhere.add"),
        (("patched.add", ("a", "b", "c")), r"patched.add\(a, b\) .* expected \(a, b, c\)"),
    ],
)
def test_an_incompatible_version_is_rejected_with_the_expected_path(module, given, message):
    with pytest.raises(RuntimeError, match=message):
        add_one(*given)
    assert module.add(1, 2) == 3


# ---- the layout that megatron-core was given ----


def layout_errors(rank, world_size):
    """What is raised with a layout that was made before; and whether the loop of Megatron-LM came to read its data."""
    from megatron.core import parallel_state

    from infcl.parallel import init_parallel
    from megatron_patches.groups import init_tensor_parallel
    from megatron_patches.megatron_lm import ContrastiveStep, share_one_loss
    from tests.lib.megatron_stub import stub_training_package

    training, errors, read = stub_training_package(), [], []
    for sizes, wanted in (
        ({"pipeline_model_parallel_size": 2}, 1),
        ({"context_parallel_size": 2}, 1),
        ({"tensor_model_parallel_size": 1}, 2),
    ):
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        if wanted == 1:  # both wait for the groups
            step = ContrastiveStep(read.append, None)
            share_one_loss()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        ways = [lambda wanted=wanted: init_tensor_parallel(init_parallel("cpu"), wanted)]
        if wanted == 1:
            schedule = training.get_forward_backward_func()  # other steps are as before
            ways += [functools.partial(schedule, forward_step_func=step), lambda step=step: step(None, None)]
            ways += [lambda: ContrastiveStep(read.append, None), share_one_loss]
        for way in ways:
            with pytest.raises(ValueError) as raised:
                way()
            errors.append(str(raised.value))
    parallel_state.destroy_model_parallel()
    assert dist.is_initialized()
    return errors, read


def test_another_layout_is_rejected_with_the_numbers_on_all_ranks_before_data_are_read():
    """The first rank is no pipeline's last one, which alone comes to the loss."""
    for errors, read in run_ranks(layout_errors, 2):
        assert len(errors) == 11 and read == []
        assert all("pipeline-model-parallel size 2" in error for error in errors[:5])
        assert all("--context-parallel-size 1" in error for error in errors[5:10])
        assert "initialised with tensor-parallel size 1, not 2" in errors[10]
