"""The reference tile equals the dense formulas for rectangular blocks, and its memory is bounded."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from infcl.kernels import select_tile, torch_tile
from infcl.kernels.tile import Blocks, Gradients
from tests.lib.live_bytes import TILED_LOSSES, require_constant_bytes_per_row


def _block(rows, columns, dim=24):
    generator = torch.Generator().manual_seed(0)
    r = F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)
    c = F.normalize(torch.randn(columns, dim, generator=generator, dtype=torch.float64), dim=1)
    return r, c, torch.tensor(20.0, dtype=torch.float64)


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 7), (13, 5), (5, 13)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("workspace_bytes", [1, 700, 10**6])
def test_tiles_of_rectangular_blocks_equal_the_dense_formulas(rows, columns, masked, workspace_bytes):
    r, c, scale = _block(rows, columns)
    bias = torch.tensor(-3.0, dtype=torch.float64)
    blocks = Blocks(r, c, scale, masked, workspace_bytes)
    dense, eye = scale * r @ c.T, torch.eye(rows, columns, dtype=torch.bool) & masked
    logits = dense.masked_fill(eye, -math.inf)
    torch.testing.assert_close(torch_tile.softmax_forward(blocks), (logits.logsumexp(1), logits.logsumexp(0)))

    # Statistics of a larger batch: this block's probabilities sum to less than one.
    row_lse, col_lse = dense.logsumexp(1) + 0.5, dense.logsumexp(0) + 1.0
    d_logits = ((logits - row_lse[:, None]).exp() + (logits - col_lse).exp()) / 2
    gradients = Gradients(torch.ones_like(r), torch.ones_like(c), torch.ones_like(scale))
    torch_tile.softmax_backward(blocks, row_lse, col_lse, gradients)
    torch.testing.assert_close(gradients[:2], (1 + d_logits @ c, 1 + d_logits.T @ r))
    torch.testing.assert_close(gradients.scale, 1 + (d_logits * (r @ c.T)).sum())

    logits = logits + bias
    gradients = Gradients(torch.zeros_like(r), torch.zeros_like(c), torch.zeros_like(scale))
    sums = torch_tile.sigmoid_gradients(blocks, bias, gradients)
    torch.testing.assert_close(sums, (-F.logsigmoid(-logits).sum(), logits.sigmoid().sum()))
    torch.testing.assert_close(gradients[:2], (logits.sigmoid() @ c, logits.sigmoid().T @ r))
    torch.testing.assert_close(gradients.scale, (logits.sigmoid() * (r @ c.T)).sum())


@pytest.mark.long
def test_the_scale_gradient_of_a_large_chunk_is_summed_precisely():
    """Its sixteen million float32 terms lose digits one after another, and what is left cancels with the matches'."""
    sums = []
    for dtype in (torch.float32, torch.float64):
        r, c, scale = (t.to(dtype) for t in _block(4096, 4096, dim=16))
        lse, gradients = r.new_full((4096,), 10.0), Gradients(None, None, torch.zeros_like(scale))
        blocks = Blocks(r, c, scale, True, 2**29)
        torch_tile.softmax_backward(blocks, lse, lse, gradients)
        torch_tile.sigmoid_gradients(blocks, scale - 30, gradients)
        sums.append(gradients.scale.double())
    torch.testing.assert_close(*sums, rtol=3e-7, atol=0)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", TILED_LOSSES)
def test_bytes_per_row_are_constant(name):
    require_constant_bytes_per_row(name, "torch")


def test_a_tile_keeps_the_features_precision_by_default():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert select_tile(torch.zeros(2, 2, dtype=dtype)).operand_dtype == dtype
    assert select_tile(torch.zeros(2, 2), tile_dtype="bf16").operand_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no float64"):
        select_tile(torch.zeros(2, 2, dtype=torch.float64), tile="triton")


def test_the_triton_tile_rejects_features_on_another_gpu_than_the_current_one():
    features = mock.Mock(spec=torch.Tensor, is_cuda=True, dtype=torch.bfloat16, device="cuda:1", get_device=lambda: 1)
    with mock.patch("torch.cuda.current_device", return_value=0), pytest.raises(ValueError, match="cuda:1.*cuda:0"):
        select_tile(features)
