"""The LSE that the fused statistics cannot give: rows and columns whose logits all lie far below the reference.

In: features, and the LSE with NaN where they are not known. Out: the same with those computed by an online softmax of
their own. Rare (for normalised features and scale 100 where no cosine exceeds -0.19), so simple rather than fast.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infcl.kernels.groups import Groups
from infcl.kernels.shapes import ceil_div
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
    """Compute the LSE that are NaN by an online softmax of their own; programs that find none return at once."""
    launch = launch_options(_LAUNCH, rows, tf32) | {"BLOCK_N": 64, "num_warps": 4}
    block = [launch["BLOCK_N"], launch["BLOCK_K"]]
    row_operand, column_operand = aligned(rows), aligned(columns)
    _repair_kernel[(ceil_div(len(rows), block[0]) + ceil_div(len(columns), block[0]),)](
        TensorDescriptor.from_tensor(row_operand, block),
        TensorDescriptor.from_tensor(column_operand, block),
        scale,
        row_lse,
        col_lse,
        *ids_of(groups, scale),
        len(rows),
        len(columns),
        GROUPED=0 if groups is None else len(groups.rows),
        DIM=walked_dim(row_operand, launch),
        MASKED=masked,
        **launch,
    )


@triton.jit(do_not_specialize=["row_stride", "col_stride", "num_rows", "num_columns"])
def _repair_kernel(
    rows_desc,  # [r, D] operand type, read
    columns_desc,  # [c, D] operand type, read
    scale_ptr,  # f32, read
    row_lse_ptr,  # f32 [r], read, written where NaN
    col_lse_ptr,  # f32 [c], read, written where NaN
    row_ids_ptr,  # i32 [GROUPED, r], read
    row_stride,  # elements between kinds of ids
    col_ids_ptr,  # i32 [GROUPED, c], read
    col_stride,
    num_rows,
    num_columns,
    GROUPED: tl.constexpr,  # kinds of ids; entries that share one are left out
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    scale2 = tl.load(scale_ptr).to(tl.float32) * LOG2E
    block = tl.program_id(0)
    blocks = tl.cdiv(num_rows, BLOCK_N)
    if block < blocks:
        _repair_block(
            rows_desc,
            columns_desc,
            scale2,
            row_lse_ptr,
            row_ids_ptr,
            row_stride,
            col_ids_ptr,
            col_stride,
            block,
            num_rows,
            num_columns,
            GROUPED,
            DIM,
            MASKED,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
    else:
        block -= blocks
        _repair_block(
            columns_desc,
            rows_desc,
            scale2,
            col_lse_ptr,
            col_ids_ptr,
            col_stride,
            row_ids_ptr,
            row_stride,
            block,
            num_columns,
            num_rows,
            GROUPED,
            DIM,
            MASKED,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )


@triton.jit
def _repair_block(
    own_desc,
    other_desc,
    scale2,
    lse_ptr,
    own_ids_ptr,
    own_stride,
    other_ids_ptr,
    other_stride,
    block,
    num_own,
    num_other,
    GROUPED: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    own = block * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + own, mask=own < num_own, other=0.0)
    unknown = lse != lse
    if tl.max(unknown.to(tl.int32), 0) > 0:
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_other, BLOCK):
            logits = tl.zeros([BLOCK, BLOCK], tl.float32)
            for k in range(0, DIM, BLOCK_K):
                a = own_desc.load([block * BLOCK, k])
                b = other_desc.load([first, k])
                logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
            other = first + tl.arange(0, BLOCK)
            logits = tl.where((other < num_other)[None, :], logits * scale2, float("-inf"))
            if MASKED:
                logits = tl.where(own[:, None] == other[None, :], float("-inf"), logits)
            if GROUPED > 0:
                same = same_ids(
                    own_ids_ptr, own_stride, other_ids_ptr, other_stride, own, other, num_own, num_other, GROUPED
                )
                logits = tl.where(same, float("-inf"), logits)
            new_maxima = tl.maximum(maxima, tl.max(logits, 1))
            shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # nothing but what is masked so far
            sums = sums * tl.exp2(maxima - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
            maxima = new_maxima
        tl.store(lse_ptr + own, (maxima + tl.log2(sums)) / LOG2E, mask=unknown & (own < num_own))
