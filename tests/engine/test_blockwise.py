"""Optimizer state in 8 bits: its values survive reading and writing exactly, and train as fp32 ones do."""

import pytest
import torch

from infcl.engine.blockwise import BLOCK, Blockwise


def random_state(count: int, table_index: int) -> tuple[Blockwise, torch.Tensor]:
    from infcl.engine.blockwise import tables

    state = Blockwise(count, tables()[table_index], torch.device("cpu"))
    torch.manual_seed(count)
    values = torch.randn(count) * torch.logspace(-12, 3, count)
    values = values.square() if table_index else values
    state.write(0, values)
    state.settle()
    return state, values


@pytest.mark.parametrize("table_index", [0, 1])
@pytest.mark.parametrize("count", [1, 255, 256, 5000])
def test_values_are_close_and_the_largest_of_a_block_exact(count, table_index):
    state, values = random_state(count, table_index)
    got = state.read(0, count)
    for start in range(0, count, BLOCK):
        block = slice(start, start + BLOCK)
        top = values[block].abs().argmax()
        assert got[block][top] == values[block][top]
        assert float((got[block] - values[block]).abs().max()) <= 0.02 * float(values[block].abs().max())


@pytest.mark.parametrize("table_index", [0, 1])
def test_values_written_again_in_any_parts_have_the_same_codes(table_index):
    state, _ = random_state(3000, table_index)
    again = Blockwise(3000, state.table, torch.device("cpu"))
    for begin, end in ((1000, 1001), (0, 700), (1001, 3000), (700, 1000)):
        again.write(begin, state.read(begin, end - begin))
    again.settle()
    assert torch.equal(again.codes, state.codes) and torch.equal(again.largest, state.largest)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_in_8_bits_follow_torchs_and_their_codes_survive(device):
    """Ten steps of 4097 elements: the way they moved is that of AdamW up to the rounding of the moments."""
    from infcl.engine.optimizers import AdamW8bit

    torch.manual_seed(0)
    ours = torch.randn(4097, device=device).requires_grad_()
    theirs = ours.detach().clone().double().requires_grad_()
    start = theirs.detach().clone()
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6}
    optimizer = AdamW8bit([ours], **options)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.create_state(ours, [], None)
    peer = torch.optim.AdamW([theirs], weight_decay=0.1, **options)
    for _ in range(10):
        ours.grad = torch.randn(4097, device=device)
        theirs.grad = ours.grad.double()
        optimizer.step()
        peer.step()
    moved = theirs.detach() - start
    assert 1e-6 < float((ours.detach() - theirs.detach()).norm() / moved.norm()) < 0.05
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[ours][key]
        codes, largest = state.codes.clone(), state.largest.clone()
        state.write(0, state.read(0, 4097))
        state.settle()
        assert torch.equal(state.largest, largest), key
        assert torch.equal(state.read(0, 4097), state.table[codes.long()] * largest.repeat_interleave(BLOCK)[:4097])
