"""Patches of Megatron's modules: one symbol, once, logged; not where the need is gone; refused where it differs."""

import importlib
import logging

import pytest
import torch
import torch.distributed as dist

from megatron_patches.patches import ALWAYS, ON_CPU, Patch, apply_patches
from tests.ranks import run_ranks
from tests.tensor_parallel import layout

PATCHES = ALWAYS + ON_CPU


def summed_though_not_contiguous(rank, world_size):
    from megatron.core.tensor_parallel import mappings

    group = layout(world_size).tp_group
    x = torch.arange(6.0).view(2, 3).T * (rank + 1)
    return mappings._reduce(x, group).tolist(), mappings._gather_along_first_dim(x, group).shape


def test_sums_reach_inputs_that_are_not_contiguous_and_gathers_run_on_a_cpu():
    for summed, gathered in run_ranks(summed_though_not_contiguous, 2):
        assert summed == (torch.arange(6.0).view(2, 3).T * 3).tolist() and gathered == (6, 2)


def test_patches_are_applied_once():
    apply_patches(torch.device("cpu"))
    before = [_installed(patch) for patch in PATCHES]
    assert set(apply_patches(torch.device("cpu")).values()) == {"already applied"}
    assert [_installed(patch) for patch in PATCHES] == before


def _installed(patch: Patch):
    module, _, name = patch.symbol.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `patched` with a function of two arguments."""
    (tmp_path / "patched.py").write_text("def add(a, b):\n    return a + b  # needs help\n")
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
        assert patch_of(gone=lambda source: "needs help" in source).apply() == "not needed"
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


# ---- the layout that megatron-core was given ----


def layout_errors(rank, world_size):
    from megatron.core import parallel_state

    from infcl.parallel import init_parallel
    from megatron_patches.groups import init_tensor_parallel

    errors = []
    for sizes, wanted in (({"pipeline_model_parallel_size": 2}, 1), ({"tensor_model_parallel_size": 1}, 2)):
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        try:
            init_tensor_parallel(init_parallel("cpu"), wanted)
        except ValueError as error:
            errors.append(str(error))
    parallel_state.destroy_model_parallel()
    assert dist.is_initialized()
    return errors


def test_a_layout_that_was_made_otherwise_is_refused_with_the_numbers():
    for errors in run_ranks(layout_errors, 2):
        assert len(errors) == 2 and "pipeline-parallel size 2" in errors[0]
        assert "initialised with tensor-parallel size 1, not 2" in errors[1]
