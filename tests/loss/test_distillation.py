"""The distillation loss equals the dense float64 formulas of the papers, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist

from infcl import RingOptions, distillation_loss
from tests.lib.loss_oracle import features, mean_kl, means_over_ranks, relative_error
from tests.lib.ranks import run_ranks

FLOAT64 = torch.float64
WORKSPACE = 4 * 7 * 4 * 4  # chunks of a few entries
CASES = [  # rows per rank, student's features and scale, teacher's features and scale, dtype
    (7, "random", 10.0, "random", 20.0, FLOAT64),
    (5, "random", 100.0, "apart", 100.0, FLOAT64),
    (6, "equal", 100.0, "near", 50.0, FLOAT64),
    (9, "opposite", 100.0, "aligned", 100.0, FLOAT64),
    (1, "random", 10.0, "random", 20.0, FLOAT64),
    (13, "apart", 50.0, "random", 100.0, torch.float32),
    (11, "near", 100.0, "equal", 100.0, FLOAT64),
    (8, "zero", 100.0, "opposite", 100.0, FLOAT64),
]


def batch(case, world_size):
    rows, kind, scale, teacher_kind, teacher_scale, dtype = case
    student, teacher = (
        features(kind, rows * world_size, 24, dtype),
        features(teacher_kind, rows * world_size, 40, dtype),
    )
    return *student, scale, *teacher, teacher_scale


def open_clip_formula(images, texts, scale, teacher_images, teacher_texts, teacher_scale):
    """DistillClipLoss: the cross entropy of the student under the teacher's probabilities."""
    logits, wanted = scale * images @ texts.T, teacher_scale * teacher_images @ teacher_texts.T
    return sum(
        -(b.softmax(1) * a.log_softmax(1)).sum(1).mean() / 2 for a, b in ((logits, wanted), (logits.T, wanted.T))
    )


def with_gradients(loss, case, rank=0, world_size=1, wide=False, **options):
    """-> loss, gradients of images, texts and scale, of a rank's share of the batch."""
    images, texts, scale, *teacher, teacher_scale = batch(case, world_size)
    own = [side.chunk(world_size)[rank] for side in (images, texts, *teacher)]
    own = [side.double() if wide else side for side in own]
    leaves = [*own[:2], torch.tensor(scale, dtype=torch.promote_types(own[0].dtype, torch.float32))]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(*leaves, *own[2:], teacher_scale, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def ours(images, texts, scale, teacher_images, teacher_texts, teacher_scale, weights=None, **options):
    return distillation_loss(
        images, texts, scale, teacher_image_features=teacher_images, teacher_text_features=teacher_texts,
        teacher_scale=teacher_scale, teacher_weights=weights, **options,
    )  # fmt: skip


def on_rank(rank, world_size, ring):
    options = {"group": dist.group.WORLD, "options": RingOptions(workspace_bytes=WORKSPACE, **ring)}
    return [with_gradients(ours, case, rank, world_size, **options) for case in CASES]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("world_size", "ring"), [(1, {}), (2, {}), (3, {}), (4, {}), (4, {"ring": "two-level", "ranks_per_node": 2})]
)
def test_it_equals_the_dense_float64_definition(world_size, ring):
    if world_size == 1:
        options = RingOptions(workspace_bytes=WORKSPACE)
        results = [with_gradients(ours, case, options=options) for case in CASES]
    else:
        results = [means_over_ranks(per_rank) for per_rank in zip(*run_ranks(on_rank, world_size, ring))]
    for case, result in zip(CASES, results):
        grown = (case[0] * world_size, *case[1:])
        for value, expected in zip(result, with_gradients(mean_kl, grown, wide=True)):
            assert relative_error(value, expected, floor=1e-2) < (1e-10 if case[-1] == FLOAT64 else 1e-4), case


@pytest.mark.parametrize("case", CASES[:2], ids=["random", "apart"])
def test_gradients_are_those_of_open_clips_formula_and_the_value_lacks_the_teachers_entropy(case):
    value, *gradients = with_gradients(ours, case)
    theirs, *expected = with_gradients(open_clip_formula, case)
    _, _, _, images, texts, scale = batch(case, 1)
    wanted = scale * images @ texts.T
    entropy = sum(-(of.softmax(1) * of.log_softmax(1)).sum(1).mean() / 2 for of in (wanted, wanted.T))
    torch.testing.assert_close(value + entropy, theirs, rtol=1e-11, atol=0)
    for gradient, true in zip(gradients, expected):
        assert relative_error(gradient, true) < 1e-9


def test_members_of_a_teacher_add_up_by_weight_and_need_no_common_width():
    images, texts, scale, first, second, teacher_scale = batch(CASES[0], 1)
    members = [(first, second, teacher_scale), (*features("apart", 7, 16, FLOAT64), 50.0)]
    lists = dict(zip(("teacher_image_features", "teacher_text_features", "teacher_scale"), map(list, zip(*members))))
    for weights, shares in ((None, (0.5, 0.5)), ((0.2, 2.0), (0.2, 2.0))):
        value = distillation_loss(images, texts, scale, teacher_weights=weights, **lists)
        expected = sum(share * mean_kl(images, texts, scale, *member) for share, member in zip(shares, members))
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(dtype):
    images, texts = features("training", 33, 40, dtype)
    value = ours(images.requires_grad_(), texts, 100.0, images.detach(), texts, 100.0)
    assert abs(value) < 1e-6 and torch.autograd.grad(value, images)[0].norm() < 1e-4


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ((torch.ones(4, 8), torch.ones(5, 8), 1.0), "4 images and 5 texts, the student 5 samples"),
        (([torch.ones(5, 8)], [torch.ones(5, 8)], [1.0, 2.0]), "1 members have 1 sets of text features, 2 scales"),
        (([], [], []), "0 members have 0 sets of text features, 0 scales and 0 weights"),
        ((torch.ones(5, 8), torch.ones(5, 9), 1.0), r"\(5, 8\), \(5, 9\)"),
        ((torch.ones(5, 8), torch.ones(5, 8), 1.0, [float("nan")]), r"teacher_weights \[nan\] must be finite"),
        ((torch.ones(5, 8), torch.ones(5, 8), 1.0, [-1.0]), r"teacher_weights \[-1.0\] must be finite"),
    ],
)
def test_a_wrong_teacher_is_rejected_with_the_numbers(teacher, message):
    with pytest.raises(ValueError, match=message):
        ours(*features("random", 5, 24), 10.0, *teacher)
