"""The ring over T x D ranks equals the float64 loss of the whole batch, and each rank computes 1 / T of it."""

import pytest
import torch

from infcl.loss.contrastive import LOSSES
from tests.lib.loss_oracle import (
    Case,
    Evaluation,
    averaged,
    global_batch,
    oracle,
    relative_error,
)  # fmt: skip
from tests.lib.ranks import rejected, run_ranks
from tests.lib.tensor_parallel import LAYOUTS, layout

ROWS = 8
CASES = [Case(name, ROWS, 12, 30.0, bias=-7.0, dtype=torch.float64) for name in LOSSES]
CASES.append(
    Case("inf_cl", ROWS, 12, 30.0, columns=3 * ROWS, captions=2, duplicates="positive", ids="few", dtype=torch.float64)
)
CASES += [Case(name, ROWS, 12, 30.0, bias=-7.0, dtype=torch.float64, margin=0.05) for name in ("inf_cl", "siglip")]


def losses_of(rank, world_size, size):
    """-> of each case, the evaluation of this rank's ROWS pairs, and how many of them the inner loss saw."""
    from infcl.loss.contrastive import ContrastiveLoss
    from megatron_patches.loss import TensorParallelLoss

    parallel, results = layout(size), []
    for case in CASES:
        group, seen = torch.distributed.group.WORLD, []
        options = {"captions": case.captions, "duplicates": case.duplicates, "margin": case.margin}
        inner = ContrastiveLoss(case.name, group=group, **options)
        inner.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(len(args[0])))
        loss = TensorParallelLoss(inner, parallel.tp_group) if size > 1 else inner
        batch = global_batch(case.on(parallel.dp_size))
        images, texts, ids = (side.chunk(parallel.dp_size)[parallel.dp_rank].clone() for side in batch[:3])
        leaves = [images.requires_grad_(), texts.requires_grad_()]
        leaves += [torch.tensor([x], dtype=case.dtype, requires_grad=True) for x in (case.scale, case.bias)]
        value = loss(*leaves, ids=ids)
        value.backward()
        gradients = [torch.zeros(1) if leaf.grad is None else leaf.grad for leaf in leaves]
        results.append((Evaluation(value.detach(), *gradients[:2], *(g.squeeze() for g in gradients[2:])), seen))
    return results


@pytest.mark.first(2)
@pytest.mark.parametrize(("size", "copies"), LAYOUTS)
def test_gradients_average_over_the_data_parallel_group_to_the_whole_ones(size, copies):
    per_rank = run_ranks(losses_of, size * copies, size)
    for index, case in enumerate(CASES):
        results = [rank[index] for rank in per_rank]
        mean, reference = averaged([evaluation for evaluation, _ in results[::size]]), oracle(case.on(copies))
        for field in reference._fields[: 5 if case.name == "siglip" else 4]:
            assert relative_error(getattr(mean, field), getattr(reference, field)) < 1e-10, (case, field)
        for first in range(0, size * copies, size):  # equal to the bit within a tensor-parallel group
            own, seen = results[first]
            for other, also_seen in results[first : first + size]:
                assert seen == also_seen == [ROWS // size] and all(map(torch.equal, own, other))


def rejections(rank, world_size, rows):
    """What is rejected of several calls on this rank; rows: (images, texts) of the data-parallel ranks in each call."""
    from infcl.loss.contrastive import ContrastiveLoss
    from megatron_patches.loss import TensorParallelLoss

    parallel, raised = layout(2), []
    for fixed_shape in (False, True):
        inner = ContrastiveLoss("inf_cl", group=torch.distributed.group.WORLD, fixed_shape=fixed_shape)
        loss = TensorParallelLoss(inner, parallel.tp_group)
        for call in rows:
            images, texts = (torch.ones(count, 4) for count in call[parallel.dp_rank])
            raised.append(rejected(loss, images, texts, torch.ones(1)))
    return raised


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(4, 4), (3, 3)], "the same number of images on every rank; ranks 0.. have [4, 4, 3, 3]"),
        ([(4, 4), (4, 3)], "the same number of texts on every rank; ranks 0.. have [4, 4, 3, 3]"),
        ([(3, 3), (3, 3)], "3 images do not divide among 2 tensor-parallel ranks"),
        ([(4, 2), (4, 2)], "needs two sets of features of one shape"),
    ],
)
def test_rows_that_cannot_be_shared_out_are_rejected_on_all_ranks_also_where_one_group_has_them(rows, message):
    """A rank that rejected them alone would leave the others in the ring. Then the ranks can continue."""
    for wrong, right, wrong_of_a_fixed_shape, then_right in run_ranks(rejections, 4, [rows, [(4, 4)] * 2]):
        assert message in wrong and message in wrong_of_a_fixed_shape and right is then_right is None
