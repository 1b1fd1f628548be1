"""Retrieval and zero-shot over several ranks equal a plain single-process computation, whatever the shares are."""

import pytest
import torch
import torch.nn.functional as F

from infcl.evaluate.retrieval import retrieval_ranks
from tests.ranks import run_ranks

SAMPLES, WIDTH, CLASSES = 23, 6, 4


def pairs():
    generator = torch.Generator().manual_seed(3)
    images = F.normalize(torch.randn(SAMPLES, WIDTH, generator=generator), dim=-1)
    texts = F.normalize(images + 0.4 * torch.randn(SAMPLES, WIDTH, generator=generator), dim=-1)
    return images, texts


def own_batches(columns, rank, world_size, size):
    return list(zip(*(column[rank::world_size].split(size) for column in columns)))


def retrieve(rank, world_size):
    from infcl.evaluate.retrieval import evaluate_retrieval

    images, texts = pairs()
    forwards = []

    def encode(image, text):
        forwards.append(len(image))
        return {"image_features": image, "text_features": text}

    metrics = evaluate_retrieval(
        encode,
        own_batches((images, texts), rank, world_size, 5),
        (images[:1], texts[:1]),
        group=torch.distributed.group.WORLD,
        device=torch.device("cpu"),
        chunk=4,
    )
    return metrics, len(forwards)


def plain_recall(scores, k):
    own = scores.diagonal()[:, None]
    return float(((scores > own).sum(1) < k).float().mean())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_retrieval_equals_the_full_matrix(world_size):
    results = run_ranks(retrieve, world_size)
    images, texts = pairs()
    scores = images @ texts.T
    for metrics, forwards in results:
        assert metrics["num_samples"] == SAMPLES
        for k in (1, 5, 10):
            assert metrics[f"image_to_text_r{k}"] == pytest.approx(plain_recall(scores, k))
            assert metrics[f"text_to_image_r{k}"] == pytest.approx(plain_recall(scores.T, k))
        assert forwards == results[0][1], "every rank must make the same number of forwards"


def test_a_collapsed_model_gets_chance():
    same = F.normalize(torch.ones(9, 4), dim=-1)
    assert retrieval_ranks(same, same, torch.arange(9)).tolist() == [5.0] * 9


def classify(rank, world_size):
    from infcl.evaluate.zero_shot import build_classifier, evaluate_zero_shot

    generator = torch.Generator().manual_seed(5)
    prototypes = F.normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    images = F.normalize(prototypes[labels] + 0.5 * torch.randn(SAMPLES, WIDTH, generator=generator), dim=-1)
    names, templates = [str(k) for k in range(CLASSES)], ["{} a", "{} b", "{} c"]

    def tokenize(texts):
        return torch.tensor([[int(text.split()[0]), ord(text.split()[1])] for text in texts])

    def encode_text(tokens):
        noise = torch.stack([torch.sin(tokens[:, 1].float() * (d + 1)) for d in range(WIDTH)], dim=1)
        return F.normalize(prototypes[tokens[:, 0]] + 0.2 * noise, dim=-1)

    where = {"group": torch.distributed.group.WORLD, "device": torch.device("cpu")}
    classifier = build_classifier(encode_text, tokenize, names, templates, batch_size=5, **where)
    metrics = evaluate_zero_shot(
        lambda x: x, own_batches((images, labels), rank, world_size, 4), (images[:1], labels[:1]), classifier, **where
    )
    expected_classifier = F.normalize(
        torch.stack([encode_text(tokenize([t.format(n) for t in templates])).sum(0) for n in names]), dim=-1
    )
    top1 = float(((images @ expected_classifier.T).argmax(1) == labels).float().mean())
    return metrics, top1, float((classifier - expected_classifier).abs().max())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_zero_shot_equals_the_single_process_computation(world_size):
    for metrics, top1, classifier_error in run_ranks(classify, world_size):
        assert metrics == {"top1": pytest.approx(top1), "top5": 1.0, "num_samples": SAMPLES}
        assert classifier_error < 1e-6
