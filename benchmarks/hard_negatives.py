"""What hard negatives teach: `python -m benchmarks.hard_negatives --out docs/results`, a small text retriever on a CPU.

A query and its document name the same scene, each in one of four ways ("a red circle left of a blue square on black",
"black with a blue square right of a red circle"). The hard negative is the scene with its objects exchanged, in the
document's words. Both are trained with info_nce_loss over the documents of the whole batch, with and without the hard
negatives among them. A row per training; on scenes whose pair of objects was never trained on:

    relation      share of queries whose document is nearer than its hard negative (chance 0.5)
    recall_at_1   among all their documents and hard negatives
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.clock import hardware
from benchmarks.rows import append
from infcl import info_nce_loss
from infcl.data.render import BACKGROUNDS, COLOURS, SHAPES
from infcl.models.config import TextConfig
from infcl.models.text import TextTower

RELATIONS = {"left": "right", "above": "below"}
WORDS = ["", *COLOURS, *SHAPES, *BACKGROUNDS, *RELATIONS, *RELATIONS.values(), "with"]
SCALE, HELD_OUT = 20.0, 40  # 1 / temperature; pairs of objects

Scene = tuple[tuple[str, str], tuple[str, str], str, str]  # first, second object (colour, shape), relation, background


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of hard_negatives.csv; rows are appended")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="queries of a step")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    for seed, hard in itertools.product(range(options.seeds), (0, 1)):
        row = {"hard_negatives": hard, "seed": seed, "steps": options.steps, "batch": options.batch}
        row |= train(seed, bool(hard), steps=options.steps, batch=options.batch)
        append(options.out / "hard_negatives.csv", [row | hardware(options.commit)])
        print(row, flush=True)


def train(seed: int, hard: bool, *, steps: int, batch: int) -> dict[str, float]:
    """Train a retriever from `seed`; how it does on held-out scenes."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    training, held_out = scenes(seed)
    config = TextConfig(
        context_length=8, vocab_size=len(WORDS), width=64, heads=4, layers=2, pool_type="last", no_causal_mask=True
    )
    tower = TextTower(config, 32)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)

    def encode(texts: list[list[str]]) -> torch.Tensor:
        tokens = torch.tensor([[WORDS.index(word) for word in text] for text in texts])
        return F.normalize(tower.encode_text(tokens), dim=1)

    for _ in range(steps):
        own = [training[i] for i in random.choice(len(training), batch, replace=False)]
        queries, documents, negatives = texts_of(own, random)
        documents += negatives if hard else []
        loss = info_nce_loss(encode(queries), encode(documents), torch.arange(batch), SCALE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        queries, positives, negatives = map(encode, texts_of(held_out, np.random.default_rng(seed)))
        best = (queries @ torch.cat([positives, negatives]).T).argmax(dim=1)
        nearer = (queries * positives).sum(1) > (queries * negatives).sum(1)
    return {
        "relation": nearer.double().mean().item(),
        "recall_at_1": (best == torch.arange(len(held_out))).double().mean().item(),
        "documents": 2 * len(held_out),
    }


def scenes(seed: int) -> tuple[list[Scene], list[Scene]]:
    """(training, held out): no pair of objects is in both."""
    objects = list(itertools.product(COLOURS, SHAPES))
    pairs = list(itertools.combinations(objects, 2))
    order = np.random.default_rng(seed).permutation(len(pairs))

    def of(numbers) -> list[Scene]:
        return [
            (*ordered, relation, background)
            for number in numbers
            for ordered in itertools.permutations(pairs[number])
            for relation in RELATIONS
            for background in BACKGROUNDS
        ]

    return of(order[HELD_OUT:]), of(order[:HELD_OUT])


def texts_of(own: list[Scene], random: np.random.Generator) -> tuple[list, list, list]:
    """(queries, documents, hard negatives), each a text per scene."""
    ways = random.integers(4, size=(2, len(own)))
    queries = [text_of(scene, way) for scene, way in zip(own, ways[0])]
    documents = [text_of(scene, way) for scene, way in zip(own, ways[1])]
    negatives = [text_of((scene[1], scene[0], *scene[2:]), way) for scene, way in zip(own, ways[1])]
    return queries, documents, negatives


def text_of(scene: Scene, way: int) -> list[str]:
    """In one of four ways: from either object, the background first or last."""
    first, second, relation, background = scene
    if way % 2:
        first, second, relation = second, first, RELATIONS[relation]
    words = [*first, relation, *second]
    return [background, "with", *words, ""] if way // 2 else [*words, background, "", ""]


if __name__ == "__main__":
    main()
