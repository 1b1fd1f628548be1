"""Compiled blocks: what cannot be compiled stays eager and says why; batches of other sizes run eagerly."""

import logging
from unittest import mock

import pytest
import torch

from infcl.models.clip import CLIP
from infcl.models.config import load_model_config
from infcl.models.transformer import ResidualBlock
from infcl.train import compile as compiled
from tests.lib.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CLIP(load_model_config("demo"))


def inputs(model, size):
    side, length = model.cfg.vision_cfg.image_size, model.context_length
    return torch.randint(256, (size, 3, side, side), dtype=torch.uint8), torch.randint(model.vocab_size, (size, length))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_failed_compile_says_its_cause_and_leaves_the_blocks_eager(model, monkeypatch, caplog, phase):
    class FailingBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no kernel for this\nand a long story")

    def failing(function, **_):
        def run(block, x):
            if phase == "forward":
                raise RuntimeError("no kernel for this\nand a long story")
            return FailingBackward.apply(function(block, x))

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with caplog.at_level(logging.WARNING):
        assert not compiled.compile_blocks(model, CPU, "fp32", {4})
    assert caplog.messages == ["the towers' blocks run eagerly, torch.compile failed: RuntimeError: no kernel for this"]
    assert all("forward" not in vars(block) for block in model.modules() if isinstance(block, ResidualBlock))
    model(*inputs(model, 4))["image_features"].sum().backward()


class Doubled(torch.autograd.Function):
    """Right forward, wrong backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def wrong(where: str):
    """In the place of torch.compile: what it gives is wrong in one of its two passes."""

    def compiling(function, **_):
        return lambda blocks, x: Doubled.apply(function(blocks, x)) if where == "backward" else function(blocks, x) + 1

    return compiling


@pytest.mark.parametrize(("where", "named"), [("forward", "output is"), ("backward", " is 1 off")])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_compiled_blocks_that_compute_something_else_are_not_taken(model, monkeypatch, caplog, where, named, precision):
    monkeypatch.setattr(torch, "compile", wrong(where))
    with caplog.at_level(logging.WARNING):
        assert not compiled.compile_blocks(model, CPU, precision, {4})
    assert "compiled code computes something else than eager code" in caplog.text and named in caplog.text


def _compiled_where_one_fails(rank, world_size):
    torch.manual_seed(0)
    model = CLIP(load_model_config("demo"))
    compiling = wrong("forward") if rank == 1 else lambda function, **_: function
    with mock.patch.object(torch, "compile", compiling):  # this process serves other tests after this one
        return compiled.compile_blocks(model, CPU, "fp32", {4})


def test_blocks_are_compiled_on_all_ranks_or_on_none():
    assert run_ranks(_compiled_where_one_fails, 2) == [False, False]


def test_only_the_batches_of_training_run_compiled(model, monkeypatch):
    sizes = []

    def counting(function, **_):
        def run(block, x):
            sizes.append(len(x))
            return function(block, x)

        return run

    monkeypatch.setattr(torch, "compile", counting)
    assert compiled.compile_blocks(model, CPU, "fp32", {4, 8})
    sizes.clear()
    for size in (3, 4, 8, 9):
        model(*inputs(model, size))
    blocks = sum(isinstance(module, ResidualBlock) for module in model.modules())
    assert sizes == [4] * blocks + [8] * blocks


def test_a_block_of_odd_size_is_not_compiled(model, caplog):
    block = model.transformer.resblocks[0]
    block.ln_1.bias = torch.nn.Parameter(torch.zeros(97))
    with caplog.at_level(logging.WARNING):
        assert not compiled.compile_blocks(model, CPU, "fp32", {4})
    assert "transformer.resblocks.0.ln_1.bias is no multiple of 8" in caplog.text
