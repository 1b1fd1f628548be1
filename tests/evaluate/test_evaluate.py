"""Retrieval and zero-shot over several ranks equal a plain single-process computation, whatever the shares are."""

import statistics

import pytest
import torch
import torch.nn.functional as F

from infcl.evaluate.features import in_step
from infcl.evaluate.retrieval import Features, encode_pairs, retrieval_counts, retrieval_metrics
from infcl.evaluate.validation import ValidationLoss, validation_loss
from infcl.evaluate.zero_shot import build_classifiers, evaluate_zero_shot
from tests.lib.ranks import rejected, run_ranks

SAMPLES, WIDTH, CLASSES = 23, 6, 4


def batches_with_a_mistake(rank, world_size, place, others):
    """What each rank hears of an error in rank 1's data after `place` batches, where others have `others`."""

    def own():
        yield from range(place if rank == 1 else others)
        if rank == 1:
            raise ValueError("sample 7: its label is 9 of 4 classes")

    seen = []

    def go():
        for batch, real in in_step(own(), "filler", torch.distributed.group.WORLD, torch.device("cpu")):
            seen.append(batch if real else None)

    return rejected(go), seen


@pytest.mark.parametrize(("place", "others"), [(0, 3), (2, 2), (3, 1)])
def test_a_mistake_in_one_ranks_data_is_raised_on_all_at_the_same_batch(place, others):
    for rank, (message, seen) in enumerate(run_ranks(batches_with_a_mistake, 3, place, others)):
        assert message == "sample 7: its label is 9 of 4 classes"
        assert seen == [batch if rank == 1 or batch < others else None for batch in range(place)]


IMAGES = 150
CAPTIONS = torch.tensor([1, 5, 2, 3, 1, 4, 5] * 22)[:IMAGES]  # per image


def captioned():
    """images [N, D], texts [C, D], owner [C]; with duplicates, so that ties are met."""
    generator = torch.Generator().manual_seed(4)
    images = F.normalize(torch.randn(IMAGES, WIDTH, generator=generator), dim=-1)
    owner = torch.repeat_interleave(torch.arange(IMAGES), CAPTIONS)
    texts = F.normalize(images[owner] + 0.6 * torch.randn(len(owner), WIDTH, generator=generator), dim=-1)
    texts[7], images[3] = texts[30], images[12]
    return images, texts, owner


def retrieve(rank, world_size, tile, count=IMAGES):
    images, texts, owner = captioned()
    mine = torch.arange(count)[rank::world_size]
    filler, batches = (images[:1], texts[:1], CAPTIONS[:1]), []
    for chunk in mine.split(20) if len(mine) else ():
        rows = torch.cat([(owner == i).nonzero()[:, 0] for i in chunk])
        batches.append((images[chunk], texts[rows], CAPTIONS[chunk]))
    forwards = []

    def encode(image, text):
        forwards.append(len(image))
        return {"image_features": image, "text_features": text}

    group = torch.distributed.group.WORLD
    features = encode_pairs(encode, batches, filler, group=group, device=torch.device("cpu"))
    return retrieval_metrics(features, group=group, tile=tile), len(forwards)


def plain_counts(images, texts, owner):
    """(higher, ties) [n, 2] and [t, 2] from the full float64 matrix, one query at a time."""
    scores = images.double() @ texts.double().T
    own = torch.arange(len(images))[:, None] == owner

    def count(right, wrong):
        return [(wrong > right).sum().item(), (wrong == right).sum().item()]

    of_images = [count(scores[i][own[i]].max(), scores[i][~own[i]]) for i in range(len(images))]
    of_texts = [count(scores[owner[c], c], scores[~own[:, c], c]) for c in range(len(texts))]
    return torch.tensor(of_images).double(), torch.tensor(of_texts).double()


def expected_hits(counts, k):
    """The share of orders of the ties that has the right candidate among the first k, enumerated."""
    return sum(
        sum(higher + place < k for place in range(int(ties) + 1)) / (ties + 1) for higher, ties in counts.tolist()
    ) / len(counts)


def mean_ranks(counts):
    return 1 + counts[:, 0] + counts[:, 1] / 2


@pytest.mark.parametrize(
    ("world_size", "tile", "count"),
    [(ranks, tile, IMAGES) for ranks in (1, 2, 3, 4) for tile in (64, 4096)] + [(4, 64, few) for few in (1, 2, 5)],
)
def test_retrieval_with_several_captions_equals_the_full_matrix(world_size, tile, count):
    """Also of fewer images than there are ranks."""
    results = run_ranks(retrieve, world_size, tile, count)
    images, texts, owner = captioned()
    of_count = plain_counts(images[:count], texts[owner < count], owner[owner < count])
    expected = dict(zip(("image_to_text", "text_to_image"), of_count))
    for metrics, forwards in results:
        assert (metrics["num_samples"], metrics["num_captions"]) == (count, int(CAPTIONS[:count].sum()))
        for name, counts in expected.items():
            for k in (1, 5, 10):
                assert metrics[f"{name}_r{k}"] == pytest.approx(expected_hits(counts, k))
            assert metrics[f"{name}_median_rank"] == statistics.median(mean_ranks(counts).tolist())
        assert forwards == results[0][1], "every rank must make the same number of forwards"


@pytest.mark.parametrize("tile", [64, 4096])
def test_a_collapsed_model_gets_chance(tile):
    same = F.normalize(torch.rand(1, 24), dim=-1).expand(99, 24)
    for counts in retrieval_counts(same, same, torch.arange(99), tile=tile):
        assert mean_ranks(counts).tolist() == [50.0] * 99
    metrics = retrieval_metrics(Features(same, same, torch.arange(99), {}), group=None, tile=tile)
    for k in (1, 5, 10):
        assert metrics[f"image_to_text_r{k}"] == metrics[f"text_to_image_r{k}"] == pytest.approx(k / 99)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [64, 4096])
def test_on_a_gpu_counts_equal_the_oracle_ties_included(tile):
    arguments = captioned()
    counts = retrieval_counts(*(tensor.cuda() for tensor in arguments), tile=tile)
    for ours, expected in zip(counts, plain_counts(*arguments)):
        assert ours.cpu().tolist() == expected.tolist()
    same = F.normalize(torch.rand(1, 768), dim=-1).expand(9999, 768).cuda()
    for counts in retrieval_counts(same, same, torch.arange(9999).cuda(), tile=tile):
        assert mean_ranks(counts).unique().tolist() == [5000.0]


def test_retrieval_holds_nothing_larger_than_a_tile():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            result = function(*arguments, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    features = F.normalize(torch.randn(1000, WIDTH), dim=-1)
    with Largest() as largest:
        retrieval_counts(features, features, torch.arange(1000), tile=64)
    assert largest.elements <= 1024 * WIDTH


def held_out_loss(rank, world_size, rank_batch_size, count):
    images, texts, owner = captioned()
    mine = torch.arange(count)[rank::world_size]
    rows = torch.cat([(owner == i).nonzero()[:, 0] for i in mine] or [mine])
    local = torch.repeat_interleave(torch.arange(len(mine)), CAPTIONS[mine])
    scalars = {"logit_scale": torch.tensor([2.0])}
    features = Features(images[mine], texts[rows], local, scalars)
    return validation_loss(
        features, ValidationLoss("inf_cl", "torch", rank_batch_size), torch.distributed.group.WORLD, scalars
    )


@pytest.mark.parametrize(
    ("world_size", "rank_batch_size", "count"),
    [(1, 48, IMAGES), (2, 24, IMAGES), (4, 12, IMAGES), (2, 100, IMAGES)]
    + [(ranks, 64, few) for ranks, few in ((1, 21), (2, 21), (3, 1), (3, 2))],
)
def test_validation_loss_is_that_of_global_batches_whatever_the_ranks(world_size, rank_batch_size, count):
    """A set that is smaller than a global batch is one of all its samples."""
    images, texts, owner = captioned()
    first = torch.tensor([(owner == i).nonzero()[0, 0] for i in range(count)])
    batch = world_size * rank_batch_size if count // world_size >= rank_batch_size else count
    losses = []
    for start in range(0, count - batch + 1, batch):
        rows = slice(start, start + batch)
        logits = torch.tensor(2.0).exp() * (images[rows].double() @ texts[first][rows].double().T)
        target = torch.arange(batch)
        losses.append((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2)
    for metrics in run_ranks(held_out_loss, world_size, rank_batch_size, count):
        assert metrics["val_loss_batch"] == batch
        assert metrics["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5, abs=1e-6)


def tied(rank, world_size, size):
    """Retrieval of 20 images, four of each, whose captions are alike too; features depend on the batch's size."""
    inputs = torch.arange(5).repeat(4)[rank::world_size][:, None].float()
    directions = F.normalize(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)), dim=-1)

    def encode(image, text):
        noise = 1e-7 * torch.arange(1, WIDTH + 1) * (len(image) + rank)
        features = directions[image[:, 0].long()] + noise
        return {"image_features": features, "text_features": directions[text[:, 0].long()] + noise.flip(0)}

    batches = [(rows, rows, torch.ones(len(rows), dtype=torch.int64)) for rows in inputs.split(size)]
    where = {"group": torch.distributed.group.WORLD, "device": torch.device("cpu")}
    features = encode_pairs(encode, batches, batches[0], **where)
    return retrieval_metrics(features, group=where["group"])


@pytest.mark.parametrize(("world_size", "size"), [(1, 20), (1, 7), (2, 3), (3, 4)])
def test_equal_images_and_captions_tie_whatever_batch_they_are_encoded_in(world_size, size):
    for metrics in run_ranks(tied, world_size, size):
        for name in ("image_to_text", "text_to_image"):
            assert (metrics[f"{name}_r1"], metrics[f"{name}_median_rank"]) == (pytest.approx(0.25), 2.5)


def classify(rank, world_size):
    generator = torch.Generator().manual_seed(5)
    prototypes = F.normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    images = F.normalize(prototypes[labels] + 0.5 * torch.randn(SAMPLES, WIDTH, generator=generator), dim=-1)
    names, templates = [str(k) for k in range(CLASSES)], ["{} a", "{} b", "{} c"]

    def tokenize(texts):
        return torch.tensor([[int(text.split()[0]), ord(text.split()[1])] for text in texts])

    def encode_text(_, tokens):
        noise = torch.stack([torch.sin(tokens[:, 1].float() * (d + 1)) for d in range(WIDTH)], dim=1)
        return {"text_features": F.normalize(prototypes[tokens[:, 0]] + 0.2 * noise, dim=-1)}

    where = {"group": torch.distributed.group.WORLD, "device": torch.device("cpu")}
    classifiers = build_classifiers(encode_text, tokenize, names, templates, batch_size=5, widths=(3,), **where)
    batches = list(zip(*(column[rank::world_size].split(4) for column in (images, labels))))
    right = torch.eye(CLASSES).bool()
    metrics = evaluate_zero_shot(
        lambda x, _: {"image_features": x}, batches, (images[:1], labels[:1]), classifiers, right, **where
    )
    expected, errors = [], []
    for classifier, width in zip(classifiers, (WIDTH, 3)):
        prompts = [encode_text(None, tokenize([t.format(n) for t in templates]))["text_features"] for n in names]
        exact = F.normalize(torch.stack([F.normalize(of_class[:, :width]).sum(0) for of_class in prompts]))
        expected.append(float(((images[:, :width] @ exact.T).argmax(1) == labels).float().mean()))
        errors.append(float((classifier - exact).abs().max()))
    return metrics, expected, max(errors)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_zero_shot_equals_the_single_process_computation(world_size):
    """Of the full features, and of their first 3 dimensions."""
    for metrics, (top1, narrow), classifier_error in run_ranks(classify, world_size):
        of_width = {"width_3_top1": pytest.approx(narrow), "width_3_top5": metrics["width_3_top5"]}
        assert metrics == {"top1": pytest.approx(top1), "top5": 1.0, "num_samples": SAMPLES} | of_width
        assert narrow < top1 and metrics["width_3_top5"] >= narrow
        assert classifier_error < 1e-6
