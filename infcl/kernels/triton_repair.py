"""Recomputation of the LSE of rows and columns whose logits are all far below the reference.

In: features, and LSE that are NaN where the fused statistics failed. Out: the LSE, with NaN replaced by the result of
an online softmax. This is rare (with normalised features and scale 100, if no cosine of a row exceeds -0.19), so the
kernel is simple rather than fast.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.torch_tile import Groups
from infcl.kernels.triton_groups import ids_of, same_ids
from infcl.kernels.triton_launch import aligned, launch_options, walked_dim
from infcl.kernels.triton_statistics import LOG2E

# Launch options by operand size in bytes.
_LAUNCH = {
    2: {"BLOCK_K": 64, "num_stages": 3},
    4: {"BLOCK_K": 32, "num_stages": 3},
}


def repair(
    row_lse: Tensor,
    col_lse: Tensor,
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    *,
    tf32: bool,
    masked: bool,
    groups: Groups | None,
) -> None:
    """Replace LSE that are NaN, in place, by an online softmax. Programs without a NaN return at once.

    Args:
        row_lse, col_lse: f32 [r] and [c].
        rows, columns, scale, masked, groups: as in torch_tile.softmax_forward.
        tf32: whether float32 matmuls use tf32.
    """
    launch = launch_options(_LAUNCH, rows, tf32) | {"BLOCK_N": 64, "num_warps": 4}
    block = [launch["BLOCK_N"], launch["BLOCK_K"]]
    sides = [TensorDescriptor.from_tensor(aligned(side), block) for side in (rows, columns)]
    ids = ids_of(groups, scale)
    for lse, own, other, *ids_here in (
        (row_lse, *sides, *ids),
        (col_lse, *reversed(sides), *ids[2:], *ids[:2]),
    ):
        _repair_kernel[(triton.cdiv(len(lse), block[0]),)](
            own,
            other,
            scale,
            lse,
            *ids_here,
            len(lse),
            len(rows) + len(columns) - len(lse),
            GROUPED=0 if groups is None else len(groups.rows),
            DIM=walked_dim(rows, launch),
            MASKED=masked,
            **launch,
        )


@triton.jit(do_not_specialize=["own_stride", "other_stride", "num_own", "num_other"])
def _repair_kernel(
    own_desc,  # [n, D] operand type, read
    other_desc,  # [m, D] operand type, read
    scale_ptr,  # f32, read
    lse_ptr,  # f32 [n], read, written where NaN
    own_ids_ptr,  # i32 [GROUPED, n], read
    own_stride,  # elements between kinds of ids
    other_ids_ptr,  # i32 [GROUPED, m], read
    other_stride,
    num_own,
    num_other,
    GROUPED: tl.constexpr,  # number of kinds of ids; entries that share one are excluded
    DIM: tl.constexpr,
    MASKED: tl.constexpr,  # exclude the entries (i, i)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute `where(lse.isnan(), (scale * own @ other.T).logsumexp(1), lse)` for BLOCK_N of `own`, with exclusions."""
    scale2 = tl.load(scale_ptr).to(tl.float32) * LOG2E
    first_own = tl.program_id(0) * BLOCK_N
    own = first_own + tl.arange(0, BLOCK_N)
    lse = tl.load(lse_ptr + own, mask=own < num_own, other=0.0)
    unknown = lse != lse
    if tl.max(unknown.to(tl.int32), 0) == 0:
        return
    maxima = tl.full([BLOCK_N], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, num_other, BLOCK_N):
        logits = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
        for k in range(0, DIM, BLOCK_K):
            a = own_desc.load([first_own, k])
            b = other_desc.load([first, k])
            logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
        other = first + tl.arange(0, BLOCK_N)
        logits = tl.where((other < num_other)[None, :], logits * scale2, float("-inf"))
        if MASKED:
            logits = tl.where(own[:, None] == other[None, :], float("-inf"), logits)
        if GROUPED > 0:
            same = same_ids(
                own_ids_ptr, own_stride, other_ids_ptr, other_stride, own, other, num_own, num_other, GROUPED
            )
            logits = tl.where(same, float("-inf"), logits)
        new_maxima = tl.maximum(maxima, tl.max(logits, 1))
        shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # -inf: only excluded entries so far
        sums = sums * tl.exp2(maxima - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
        maxima = new_maxima
    tl.store(lse_ptr + own, (maxima + tl.log2(sums)) / LOG2E, mask=unknown & (own < num_own))
