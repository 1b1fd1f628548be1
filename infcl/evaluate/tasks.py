"""Evaluations that a trainer or a command line can run: shards and a tokenizer in, metrics out, on all ranks.

A task is built before training starts, so that a missing file is refused then, and run as often as wanted.
"""

from pathlib import Path

import torch

from infcl.data.evaluation import EvalSample, EvalShards
from infcl.data.shards import expand_shards
from infcl.data.tokenizer import Tokenizer
from infcl.evaluate.features import batches_of
from infcl.evaluate.retrieval import evaluate_retrieval
from infcl.evaluate.zero_shot import build_classifier, evaluate_zero_shot
from infcl.parallel import Parallel


class RetrievalTask:
    """Image<->text retrieval over the pairs of `urls`; a pair without a caption is left out."""

    def __init__(self, urls: str, *, tokenizer: Tokenizer, image_size: int, batch_size: int):
        self.urls, self.tokenizer, self.image_size, self.batch_size = urls, tokenizer, image_size, batch_size
        expand_shards(urls)

    def run(self, encode, parallel: Parallel) -> dict[str, float]:
        """encode(images, texts) -> features dict, through the engine. Collective."""
        shards = EvalShards(self.urls, image_size=self.image_size, rank=parallel.dp_rank, world_size=parallel.dp_size)
        blank = EvalSample(torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8), "", {}, "")
        batches = batches_of((sample for sample in shards if sample.caption), self.batch_size, self._collate)
        return evaluate_retrieval(
            encode, batches, self._collate([blank]), group=parallel.dp_group, device=parallel.device
        )

    def _collate(self, samples: list[EvalSample]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([sample.image for sample in samples]), self.tokenizer([s.caption for s in samples])


class ZeroShotTask:
    """Zero-shot classification of the images of `urls`, whose json member holds {"label": index into classnames}.

    classnames, templates: text files, one a line; by default classnames.txt and templates.txt beside the shards.
    """

    def __init__(
        self,
        urls: str,
        *,
        tokenizer: Tokenizer,
        image_size: int,
        batch_size: int,
        classnames: str | None = None,
        templates: str | None = None,
    ):
        self.urls, self.tokenizer, self.image_size, self.batch_size = urls, tokenizer, image_size, batch_size
        beside = Path(expand_shards(urls)[0]).parent
        self.classnames = _read_lines(classnames or beside / "classnames.txt", "--zeroshot-classnames")
        self.templates = _read_lines(templates or beside / "templates.txt", "--zeroshot-templates")
        for template in self.templates:
            if "{}" not in template:
                raise ValueError(f"--zeroshot-templates: {template!r} has no {{}} for the class name")

    def run(self, encode, parallel: Parallel) -> dict[str, float]:
        """encode(images or None, texts or None) -> features dict, through the engine. Collective."""
        where = {"group": parallel.dp_group, "device": parallel.device}
        classifier = build_classifier(
            lambda texts: encode(None, texts)["text_features"],
            self.tokenizer,
            self.classnames,
            self.templates,
            batch_size=self.batch_size,
            **where,
        )
        shards = EvalShards(self.urls, image_size=self.image_size, rank=parallel.dp_rank, world_size=parallel.dp_size)
        blank = EvalSample(torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8), "", {"label": 0}, "")
        return evaluate_zero_shot(
            lambda images: encode(images, None)["image_features"],
            batches_of(shards, self.batch_size, self._collate),
            self._collate([blank]),
            classifier,
            **where,
        )

    def _collate(self, samples: list[EvalSample]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = [sample.metadata.get("label") for sample in samples]
        for sample, label in zip(samples, labels):
            if not isinstance(label, int) or not 0 <= label < len(self.classnames):
                raise ValueError(
                    f"{self.urls}: sample {sample.key} has label {label!r}; an index below {len(self.classnames)} "
                    "(the number of class names) is needed"
                )
        return torch.stack([sample.image for sample in samples]), torch.tensor(labels)


def _read_lines(path: str | Path, flag: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{flag} {path}: the file is empty")
    return lines
