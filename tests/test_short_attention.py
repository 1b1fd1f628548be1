"""The draft of benchmarks.attention, one tile a sequence and head, equals torch's attention in float64.

In a process of its own, since TRITON_INTERPRET must be set before Triton is imported; on a GPU with its marker.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.loss_oracle import relative_error


def check(device: str, dtype: torch.dtype, bound: float, *, width: int) -> None:
    from benchmarks.attention import Case, by_torch, in_one_tile, inputs

    for case in (
        Case("images", 3, 50, 2),
        Case("a class token and a patch", 2, 2, 1),
        Case("captions", 2, 77, 3, causal=True),
        Case("packed", 9, 77, 2, causal=True, packed=True),
        Case("packed, one head", 40, 128, 1, causal=True, packed=True),
    ):
        torch.manual_seed(0)
        qkv, lengths, starts, mask = inputs(case._replace(width=width), device, dtype)
        counted = torch.zeros(qkv.shape[:2].numel(), dtype=torch.bool, device=device)  # others are not asked for
        for start, length in zip(starts.tolist(), lengths.tolist()):
            counted[start : start + length] = True
        d_out = torch.randn_like(qkv[:, :, 0]) * counted.view(*qkv.shape[:2], 1, 1)
        true_qkv = qkv.detach().double().requires_grad_()
        truth = by_torch(case, mask)(true_qkv)
        truth.backward(d_out.double())
        result = in_one_tile(case._replace(width=width), starts, lengths)(qkv)
        result.backward(d_out)
        error = relative_error(result.detach().flatten(0, 1)[counted], truth.detach().flatten(0, 1)[counted])
        error = max(error, relative_error(qkv.grad, true_qkv.grad))
        assert error < bound, (case, error)
        print(case.name, error)


def check_lengths_of_every_tile(device: str, dtype: torch.dtype, bound: float, *, width: int) -> None:
    from benchmarks.short_attention import ShortAttention

    torch.manual_seed(0)
    lengths, gap = torch.tensor([65, 1, 128, 32, 64, 33]), 3
    starts = torch.cumsum(lengths + gap, 0) - lengths
    places = int(starts[-1] + lengths[-1]) + gap
    for causal in (False, True):
        qkv = torch.randn(places, 3, 2, width, device=device, dtype=dtype).requires_grad_()
        d_out = torch.randn(places, 2, width, device=device, dtype=dtype)
        out = ShortAttention.apply(qkv, starts.to(device), lengths.to(device), 128, causal)
        out.backward(d_out)
        true_qkv, truth = qkv.detach().double().requires_grad_(), torch.zeros_like(out, dtype=torch.float64)
        for start, length in zip(starts.tolist(), lengths.tolist()):
            here = slice(start, start + length)
            q, k, v = true_qkv[here].permute(1, 2, 0, 3)
            truth[here] = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)
        truth.backward(d_out.double())
        error = max(relative_error(out.detach(), truth.detach()), relative_error(qkv.grad, true_qkv.grad))
        assert error < bound, (causal, error)
        print("lengths of every tile", error)


def test_results_and_gradients_are_those_of_torch():
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_short_attention"],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 7


@pytest.mark.parametrize(("width", "longest", "why"), [(16, 129, "one tile has 128"), (80, 50, "a power of two")])
def test_what_no_tile_holds_is_refused(width, longest, why):
    from benchmarks.short_attention import ShortAttention

    with pytest.raises(ValueError, match=why):
        ShortAttention.apply(
            torch.zeros(longest, 3, 1, width), torch.tensor([0]), torch.tensor([longest]), longest, False
        )


@pytest.mark.gpu
def test_results_and_gradients_are_those_of_torch_on_a_gpu():
    check("cuda", torch.bfloat16, 5e-3, width=64)
    check_lengths_of_every_tile("cuda", torch.bfloat16, 5e-3, width=64)


if __name__ == "__main__":
    check("cpu", torch.float32, 1e-5, width=16)
    check_lengths_of_every_tile("cpu", torch.float32, 1e-5, width=16)
