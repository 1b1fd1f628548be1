"""Relational distillation: the student's softmax over the global batch follows that of a teacher.

In: image and text features of the student [b, D] and of the teacher [b, E] on this rank, and a scale for each. Out: the
loss; backward gives the student's gradients.

    p = softmax(teacher_scale * teacher_images @ teacher_texts.T, dim)               # [B, B], never formed
    q = softmax(logit_scale * image_features @ text_features.T, dim)
    loss = mean over rows and over columns of KL(p || q) = sum(p * (log p - log q))

With n = logits of the teacher minus logits of the student, the sum over all rows and columns is

    sum(lse_student) - sum(lse_teacher) + <p_rows + p_columns, n>
    dS = (q_rows - p_rows + q_columns - p_columns) / 2

The first pass around the ring computes the LSE, the second one the inner product and the gradients. The backward only
multiplies them by the incoming gradient. Memory is linear in b; 12 B^2 D flops if E = D, Inf-CL's are 8.
Communication: 2 (W - 1) hops of b (D + E) operands, 2 W hops of b float32, W hops of b*D float32 gradients.
Sources: MobileCLIP, arXiv 2311.17049, section 3.2; open_clip's DistillClipLoss, which leaves out the teacher's entropy.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels.tile import Blocks, Gradients, Teacher
from infcl.loss.gradients import ring_gradients
from infcl.loss.inf_cl import merge_lse
from infcl.loss.inputs import (
    DEFAULT_OPTIONS,
    RingOptions,
    Setup,
    outside_graphs,
    reject_double_backward,
    scalar_like,
    set_up,
)


@outside_graphs
def distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    teacher_image_features: Tensor | Sequence[Tensor],
    teacher_text_features: Tensor | Sequence[Tensor],
    teacher_scale: Tensor | float | Sequence[Tensor | float],
    teacher_weights: Sequence[float] | None = None,
    group: dist.ProcessGroup | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the mean of KL(teacher || student) over the rows and the columns of the group's global batch.

    Args:
        image_features, text_features: [b, D], of the student; usually L2-normalised.
        logit_scale: of the student, as in `inf_cl_loss`.
        teacher_image_features, teacher_text_features: [b, E] of any width, of the same samples; or a list with those of
            each member of a teacher. They get no gradient.
        teacher_scale: factor of the teacher's cosines; a list for several members.
        teacher_weights: at least 0, of the members' losses, which are added; equal with sum 1 by default. Each member
            costs a complete loss.
        group, options: as in `inf_cl_loss`.

    Returns:
        The loss, 0-dim, float32 or wider. Double backward is not supported.

    Raises:
        ValueError: the teacher's rows are not the student's or shapes differ between ranks (raised on every rank), the
            lists' lengths differ, or a weight is negative or not finite.
    """
    images, texts, scales = (_members(of) for of in (teacher_image_features, teacher_text_features, teacher_scale))
    weights = [1 / len(images) for _ in images] if teacher_weights is None else list(teacher_weights)
    if not 0 < len(images) == len(texts) == len(scales) == len(weights):
        raise ValueError(
            f"distillation: {len(images)} members have {len(texts)} sets of text features, {len(scales)} scales and "
            f"{len(weights)} weights"
        )
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"distillation: teacher_weights {weights} must be finite and at least 0")
    setup = set_up("distillation", image_features, text_features, group, options)
    student = image_features, text_features, scalar_like(image_features, logit_scale)
    losses = []
    for rows, columns, scale, weight in zip(images, texts, scales, weights):
        counts = f"{len(rows)} images and {len(columns)} texts, the student {len(image_features)} samples"
        fits = len(rows) == len(columns) == len(image_features)
        invalid = "" if fits else f"distillation: the teacher has {counts}"
        given = rows.detach(), columns.detach()
        set_up("distillation's teacher", *given, group, options, sizes=("images", "texts"), invalid=invalid)
        teacher = *given, scalar_like(image_features, scale, "teacher_scale").detach()
        losses.append(weight * _Distillation.apply(*student, *teacher, setup))
    return torch.stack(losses).sum()


def _members(of_teacher: Any) -> list:
    """Return a list of the members' tensors or numbers; a single one is one member."""
    return list(of_teacher) if isinstance(of_teacher, list | tuple) else [of_teacher]


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, row_features, column_features, scale, teacher_rows, teacher_columns, teacher_scale, setup: Setup):
        with torch.autocast(row_features.device.type, enabled=False):
            rows, columns = setup.operands(row_features, column_features)
            their_rows, their_columns = setup.operands(teacher_rows, teacher_columns)
            loss, gradients = ring_loss_and_gradients(
                rows, columns, scale, their_rows, their_columns, teacher_scale, setup
            )
        ctx.save_for_backward(scale, *gradients)
        ctx.dtypes, ctx.rows = (row_features.dtype, column_features.dtype), len(rows)
        return loss / len(rows)

    @staticmethod
    def backward(ctx, d_loss):
        reject_double_backward("distillation")
        scale, *sides, d_scale = ctx.saved_tensors
        factor = d_loss / ctx.rows
        sides = [None if g is None else (g * (factor * scale)).to(dtype) for g, dtype in zip(sides, ctx.dtypes)]
        return *sides, factor * d_scale, None, None, None, None


def ring_loss_and_gradients(
    rows: Tensor, columns: Tensor, scale: Tensor, teacher_rows: Tensor, teacher_columns: Tensor, teacher_scale: Tensor,
    setup: Setup,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """Return half the sum of the losses of own rows and columns, and its `ring_gradients`."""
    row_lse, col_lse = _ring_lse(rows, columns, scale, setup)
    teacher_row_lse, teacher_col_lse = _ring_lse(teacher_rows, teacher_columns, teacher_scale, setup)
    loss = (row_lse + col_lse - teacher_row_lse - teacher_col_lse).sum() / 2
    workspace = setup.options.workspace_bytes

    def add_tile(hop: int, block: Tensor, its: list[Tensor], gradients: Gradients) -> None:
        block_lse, teacher_block, teacher_block_lse = its
        given = Blocks(teacher_rows, teacher_block, teacher_scale, False, workspace, tf32=setup.tile.tf32)
        teacher = Teacher(given, teacher_row_lse, teacher_block_lse)
        blocks = Blocks(rows, block, scale, False, workspace, tf32=setup.tile.tf32)
        loss.add_(setup.tile.distill_gradients(blocks, row_lse, block_lse, teacher, gradients))

    nothing = torch.zeros_like(row_lse)
    travelling = col_lse, teacher_columns, teacher_col_lse
    gradients = ring_gradients(add_tile, rows, columns, setup, slopes=nothing, cosines=nothing, travelling=travelling)
    return loss, gradients


def _ring_lse(rows: Tensor, columns: Tensor, scale: Tensor, setup: Setup) -> tuple[Tensor, Tensor]:
    """Return the LSE of the logits of own rows and of own columns over the group's global batch."""
    ring = setup.ring()
    row_lse = torch.full_like(rows[:, 0], -math.inf, dtype=torch.promote_types(rows.dtype, torch.float32))
    for hop, (block,) in ring.blocks(columns):
        blocks = Blocks(rows, block, scale, False, setup.options.workspace_bytes, tf32=setup.tile.tf32)
        row_part, column_part = setup.tile.softmax_forward(blocks)
        merge_lse(row_lse, row_part)
        ring.carry("col_lse", hop, column_part, merge_lse)
    return row_lse, ring.home("col_lse", merge_lse)
