"""Compiled blocks: only batches of training's size run compiled."""

import logging

import pytest
import torch

from infcl.models.clip import CLIP
from infcl.models.config import load_model_config
from infcl.models.transformer import ResidualBlock
from infcl.train.compile import compile_blocks


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CLIP(load_model_config("demo"))


def inputs(model, size):
    side, length = model.cfg.vision_cfg.image_size, model.context_length
    return torch.randint(256, (size, 3, side, side), dtype=torch.uint8), torch.randint(model.vocab_size, (size, length))


def test_only_the_batches_of_training_run_compiled(model, monkeypatch):
    sizes = []

    def counting(function, **_):
        def run(x, block):
            sizes.append(len(x))
            return function(x, block)

        return run

    monkeypatch.setattr(torch, "compile", counting)
    assert compile_blocks(model, {4, 8})
    for size in (3, 4, 8, 9):
        model(*inputs(model, size))
    blocks = sum(isinstance(module, ResidualBlock) for module in model.modules())
    assert sizes == [4] * blocks + [8] * blocks


def test_a_block_of_odd_size_is_not_compiled(model, caplog):
    block = model.transformer.resblocks[0]
    block.ln_1.bias = torch.nn.Parameter(torch.zeros(97))
    with caplog.at_level(logging.WARNING):
        assert not compile_blocks(model, {4})
    assert "ResidualBlock.ln_1.bias is not a multiple of 8" in caplog.text
