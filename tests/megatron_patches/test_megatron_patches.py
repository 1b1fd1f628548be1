"""Patches of Megatron's modules: one symbol, once, logged; not where the need is gone; refused where it differs."""

import functools
import importlib
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_patches.patches import Patch, apply_patches, describe_patches, patches_of
from tests.lib.ranks import run_ranks
from tests.lib.tensor_parallel import layout

CPU = torch.device("cpu")


def summed_though_not_contiguous(rank, world_size):
    from megatron.core.tensor_parallel import mappings

    group = layout(world_size).tp_group
    x = torch.arange(6.0).view(2, 3).T * (rank + 1)
    return mappings._reduce(x, group).tolist(), mappings._gather_along_first_dim(x, group).shape


def test_sums_reach_inputs_that_are_not_contiguous_and_gathers_run_on_a_cpu():
    for summed, gathered in run_ranks(summed_though_not_contiguous, 2):
        assert summed == (torch.arange(6.0).view(2, 3).T * 3).tolist() and gathered == (6, 2)


def outcomes_of_a_second_time(rank, world_size):
    group = layout(world_size).tp_group
    patches = patches_of(group, CPU)
    before = [_installed(patch) for patch in patches]
    outcomes = apply_patches(group, CPU)
    return [(outcomes[patch.symbol], _installed(patch) is one) for patch, one in zip(patches, before)]


def test_patches_are_applied_once():
    assert run_ranks(outcomes_of_a_second_time, 2) == [[("already applied", True)] * 2] * 2


def in_words(rank, world_size):
    from megatron.core.tensor_parallel import mappings

    layout(world_size)
    with mock.patch.object(mappings, "_reduce", sum_of_a_copy):
        later = describe_patches()
    return describe_patches(), later


def test_what_is_patched_is_said():
    for both, one in run_ranks(in_words, 2):
        assert both.endswith("patched: " + ", ".join(f"megatron.core.tensor_parallel.mappings.{n}" for n in LATER))
        assert one.endswith("patched: megatron.core.tensor_parallel.mappings._gather_along_first_dim")


def _installed(patch: Patch):
    module, _, name = patch.symbol.rpartition(".")
    return getattr(importlib.import_module(module), name)


# Functions of a later megatron-core: written differently, some of them fixed.


def sum_that_forgets_the_copy(input_, group):
    copied = input_.contiguous()
    dist.all_reduce(copied, group=group)
    return input_


def sum_of_a_copy(input_, group):
    copied = input_.contiguous()
    dist.all_reduce(copied, group=group)
    return copied


def sum_with_another_argument(input_, group, in_place):
    return input_


def gather_on_the_gpu(input_, group, output_split_sizes=None, use_global_buffer=False):
    device = torch.device("cuda", torch.cuda.current_device())
    gathered = torch.empty(group.size() * len(input_), *input_.shape[1:], device=device)
    dist.all_gather_into_tensor(gathered, input_.contiguous(), group=group)
    return gathered


def gather_beside_the_input(input_, group, output_split_sizes=None, use_global_buffer=False):
    """On a GPU it asks torch.cuda.current_device()."""
    gathered = input_.new_empty(group.size() * len(input_), *input_.shape[1:])
    dist.all_gather_into_tensor(gathered, input_.contiguous(), group=group)
    return gathered


LATER = {
    "_reduce": [sum_that_forgets_the_copy, sum_of_a_copy, sum_with_another_argument],
    "_gather_along_first_dim": [gather_on_the_gpu, gather_beside_the_input],
}


def outcomes_of_later_versions(rank, world_size):
    """As on a host with GPUs, which a run on the CPU is not to touch."""
    from megatron.core.tensor_parallel import mappings

    outcomes = {}
    with mock.patch("torch.cuda.current_device", side_effect=lambda: outcomes.update(touched=True) or 0):
        outcomes.update(_outcomes(mappings, world_size))
    return outcomes


def _outcomes(mappings, world_size) -> dict[str, str]:
    outcomes = {}
    for patch in patches_of(layout(world_size).tp_group, CPU):
        name = patch.symbol.rpartition(".")[2]
        for later in LATER[name]:
            with mock.patch.object(mappings, name, later):
                try:
                    outcomes[later.__name__] = patch.apply()
                except RuntimeError as error:
                    outcomes[later.__name__] = str(error)
    return outcomes


def test_a_later_version_is_judged_by_what_it_does_and_not_by_how_it_is_written():
    for outcomes in run_ranks(outcomes_of_later_versions, 2):
        assert "expected (input_, group)" in outcomes.pop("sum_with_another_argument")
        assert outcomes == {
            "sum_that_forgets_the_copy": "applied",
            "sum_of_a_copy": "not needed",
            "gather_on_the_gpu": "applied",
            "gather_beside_the_input": "not needed",
        }


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `patched` with a function of two arguments."""
    (tmp_path / "patched.py").write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("patched")
    importlib.sys.modules.pop("patched")


def patch_of(symbol="patched.add", parameters=("a", "b"), **options) -> Patch:
    return Patch(symbol, "adds one", parameters, replace=lambda add: lambda a, b: add(a, b) + 1, **options)


def test_a_patch_replaces_its_symbol_once_and_says_so(module, caplog):
    with caplog.at_level(logging.INFO):
        assert [patch_of().apply(), patch_of().apply()] == ["applied", "already applied"]
    assert module.add(1, 2) == 4
    assert len(caplog.records) == 1 and "patched.add" in caplog.text and "adds one" in caplog.text


def test_a_patch_whose_reason_is_gone_leaves_the_symbol_alone(module, caplog):
    with caplog.at_level(logging.INFO):
        assert patch_of(gone=lambda add: add(1, 2) == 3).apply() == "not needed"
    assert module.add(1, 2) == 3 and "not needed any more" in caplog.text


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (patch_of(symbol="patched.subtract"), "there is no patched.subtract"),
        (patch_of(symbol="nowhere.add"), "there is no nowhere.add"),
        (patch_of(parameters=("a", "b", "c")), r"patched.add\(a, b\) .* expected \(a, b, c\)"),
    ],
)
def test_an_incompatible_version_is_refused_with_the_expected_path(module, patch, message):
    with pytest.raises(RuntimeError, match=message):
        patch.apply()
    assert module.add(1, 2) == 3


def refusals_of_other_versions(rank, world_size):
    """What a megatron-core is refused with whose groups are made otherwise, or whose mappings take no group."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    def initialize(tensor_parallel, timeout=None):
        raise AssertionError("not to be called")

    errors = []
    for module, name, other in (
        (parallel_state, "initialize_model_parallel", initialize),
        (mappings, "reduce_from_tensor_model_parallel_region", lambda input_: input_),
    ):
        with mock.patch.object(module, name, other), pytest.raises(RuntimeError) as raised:
            layout(world_size)
        errors.append(str(raised.value))
    return errors


def test_a_version_whose_functions_take_other_arguments_is_refused_before_they_are_called():
    for groups, mapping in run_ranks(refusals_of_other_versions, 2):
        assert "megatron.core.parallel_state.initialize_model_parallel(tensor_parallel, timeout) in megatron" in groups
        assert "expected tensor_model_parallel_size, distributed_timeout_minutes, create_gloo" in groups
        assert "mappings.reduce_from_tensor_model_parallel_region(input_) in megatron" in mapping
        assert "expected group among its arguments, as of the tested version 0.16.1" in mapping


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


def test_a_layout_that_was_made_otherwise_is_refused_with_the_numbers_on_all_ranks_before_data_are_read():
    """The first rank is no pipeline's last one, which alone comes to the loss."""
    for errors, read in run_ranks(layout_errors, 2):
        assert len(errors) == 11 and read == []
        assert all("pipeline-model-parallel size 2" in error for error in errors[:5])
        assert all("--context-parallel-size 1" in error for error in errors[5:10])
        assert "initialised with tensor-parallel size 1, not 2" in errors[10]
