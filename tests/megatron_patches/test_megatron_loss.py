"""The ring over T x D ranks equals the float64 loss of the whole batch, and each rank computes 1 / T of it."""

import pytest
import torch

from infcl.loss.captions import captions_loss
from infcl.loss.contrastive import LOSSES
from tests.lib.ranks import rejected, run_ranks
from tests.lib.tensor_parallel import LAYOUTS, layout

ROWS, DIM, SCALE = 8, 12, 30.0


def features(copies: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(copies * ROWS, DIM, dtype=torch.float64, generator=generator) for _ in range(2)]
    return [torch.nn.functional.normalize(side, dim=-1) for side in rows]


def loss_of(rank, world_size, size, name):
    """-> (loss, its gradients for this rank's own ROWS pairs and the scalars, pairs that the inner loss saw)."""
    from infcl.loss.contrastive import ContrastiveLoss
    from megatron_patches.loss import TensorParallelLoss

    parallel = layout(size)
    inner = ContrastiveLoss(name, group=torch.distributed.group.WORLD)
    seen = []
    inner.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    loss = TensorParallelLoss(inner, parallel.tp_group) if size > 1 else inner
    own = slice(parallel.dp_rank * ROWS, (parallel.dp_rank + 1) * ROWS)
    leaves = [side[own].clone().requires_grad_() for side in features(world_size // size)]
    leaves += [torch.tensor([SCALE], dtype=torch.float64, requires_grad=True)]
    if name == "siglip":
        leaves += [torch.tensor([-7.0], dtype=torch.float64, requires_grad=True)]
    value = loss(*leaves)
    value.backward()
    return value.item(), [leaf.grad for leaf in leaves], seen


def whole(copies: int, name: str):
    images, texts = (side.requires_grad_() for side in features(copies))
    scalars = [torch.tensor([SCALE], dtype=torch.float64, requires_grad=True)]
    logits = scalars[0] * images @ texts.T
    if name == "siglip":
        scalars.append(torch.tensor([-7.0], dtype=torch.float64, requires_grad=True))
        signs = 2 * torch.eye(len(logits), dtype=torch.float64) - 1
        value = -torch.nn.functional.logsigmoid(signs * (logits + scalars[1])).sum() / len(logits)
    else:
        labels = torch.arange(len(logits))
        value = sum(torch.nn.functional.cross_entropy(side, labels) for side in (logits, logits.T)) / 2
    value.backward()
    return value.item(), images.grad, texts.grad, [scalar.grad for scalar in scalars]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("size", "copies"), LAYOUTS)
def test_gradients_average_over_the_data_parallel_group_to_the_whole_ones(size, copies, name):
    value, d_images, d_texts, d_scalars = whole(copies, name)
    results = run_ranks(loss_of, size * copies, size, name)
    leaders = results[::size]
    assert sum(result[0] for result in leaders) / copies == pytest.approx(value, rel=1e-12)
    for index, expected in enumerate((d_images, d_texts)):
        got = torch.cat([gradients[index] for _, gradients, _ in leaders]) / copies
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-14)
    for index, expected in enumerate(d_scalars, start=2):
        got = sum(gradients[index] for _, gradients, _ in leaders) / copies
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
    for copy in range(copies):  # equal to the bit within a tensor-parallel group; 1 / T of the pairs each
        group = results[copy * size : (copy + 1) * size]
        assert all(torch.equal(a, b) for other in group[1:] for a, b in zip(other[1], group[0][1]))
        assert all(other[0] == group[0][0] and other[2] == [ROWS // size] for other in group)


def captions_of(rank, world_size, size):
    """-> (loss of several captions and a hard negative of each image, ids shared out; gradients of own rows)."""
    from infcl.loss.contrastive import ContrastiveLoss
    from megatron_patches.loss import TensorParallelLoss

    parallel = layout(size)
    inner = ContrastiveLoss("inf_cl", captions=2, duplicates="positive", group=torch.distributed.group.WORLD)
    leaves, ids = captions_batch(world_size // size)
    own = [side.chunk(world_size // size)[parallel.dp_rank].clone().requires_grad_() for side in leaves]
    value = TensorParallelLoss(inner, parallel.tp_group)(*own, SCALE, image_ids=ids.split(ROWS)[parallel.dp_rank])
    value.backward()
    return value.item(), [leaf.grad for leaf in own]


def captions_batch(copies: int):
    images, texts = features(3 * copies)
    return [images[: copies * ROWS], texts], torch.arange(copies * ROWS) % 5


def test_captions_and_ids_are_shared_out_with_their_images():
    size, copies = 2, 2
    leaves, ids = captions_batch(copies)
    whole_ones = [side.clone().requires_grad_() for side in leaves]
    loss = captions_loss(*whole_ones, SCALE, captions=2, image_ids=ids, duplicates="positive")
    loss.backward()
    leaders = run_ranks(captions_of, size * copies, size)[::size]
    assert sum(value for value, _ in leaders) / copies == pytest.approx(loss.item(), rel=1e-12)
    for index, expected in enumerate(whole_ones):
        got = torch.cat([gradients[index] for _, gradients in leaders]) / copies
        assert torch.allclose(got, expected.grad, rtol=1e-10, atol=1e-14)


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
        ([(2, 2), (1, 1)], "the same number of images on every rank; ranks 0.. have [2, 2, 1, 1]"),
        ([(3, 3), (3, 3)], "3 images do not divide among 2 tensor-parallel ranks"),
        ([(4, 2), (4, 2)], "needs two sets of features of one shape"),
    ],
)
def test_rows_that_cannot_be_shared_out_are_rejected_on_all_ranks_also_where_one_group_has_them(rows, message):
    """A rank that rejected them alone would leave the others in the ring. Then the ranks can continue."""
    for wrong, right, wrong_of_a_fixed_shape, then_right in run_ranks(rejections, 4, [rows, [(4, 4)] * 2]):
        assert message in wrong and message in wrong_of_a_fixed_shape and right is then_right is None
