"""Evaluation tasks of the trainer and of the command line: data and a tokenizer in, metrics out, on all ranks.

A task is built and checked before training starts, so that missing files and unusable data are reported early.
"""

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from infcl.config.words import printable
from infcl.data.evaluation import EvalConfig, EvalSample, EvalSamples, class_names, eval_source
from infcl.data.index import SampleKeys
from infcl.data.shards import expand_shards
from infcl.evaluate.features import at_width
from infcl.evaluate.load import Tokenize
from infcl.evaluate.retrieval import encode_pairs, retrieval_metrics
from infcl.evaluate.validation import ValidationLoss, validation_loss
from infcl.evaluate.zero_shot import build_classifiers, evaluate_zero_shot, read_classes, read_templates
from infcl.parallel import Parallel, from_first_rank, gather_objects

log = logging.getLogger(__name__)

TRIED = 1000  # most samples that `check` reads
Encode = Callable[[torch.Tensor | None, torch.Tensor | None], dict[str, torch.Tensor]]
ScalarValues = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Task(ABC):
    """An evaluation of the samples of a set.

    Args:
        tokenizer: n texts -> int64 [n, L].
        batch_size: images per rank and forward.
        widths: also report the metrics of embeddings of these widths: a prefix of the features, normalised.
    """

    missing = ""  # what no sample has where `check` fails
    leaves_out = False  # whether the first TRIED samples may all be unusable
    skipped_as = ""  # the counter of samples without a target
    about: Mapping[str, str | int] = {}  # what the metrics depend on, to print and store with them

    def __init__(self, config: EvalConfig, *, tokenizer: Tokenize, batch_size: int, widths: Sequence[int] = ()):
        self.data, self.tokenizer, self.batch_size, self.widths = config.data, tokenizer, batch_size, widths
        self.blank = torch.zeros(3, config.image_size, config.image_size, dtype=torch.uint8)
        self.source = eval_source(config)

    @abstractmethod
    def target(self, sample: EvalSample) -> Any | None:
        """Return what the image is compared with, or None to skip it."""

    @abstractmethod
    def collate(self, samples: list[tuple[torch.Tensor, Any]]) -> tuple[torch.Tensor, ...]:
        """Return a batch of (image, target): images [m, 3, S, S], and tensors of the targets."""

    @abstractmethod
    def metrics(self, encode: Encode, batches: Iterator, scalar_values: ScalarValues, **where: Any) -> dict[str, float]:
        """Return the metrics of all ranks' batches. Collective over `where`, the group and this rank's device."""

    def check(self) -> None:
        """Check that one of the first TRIED samples is usable. Collective: rank 0 reads.

        Raises:
            ValueError: none of them is.
        """

        def try_data() -> None:
            samples, first = self.source(limit=TRIED), ""
            for sample in samples:
                if self.target(sample) is not None:
                    return
                samples.skipped[self.skipped_as] += 1
                first = first or f"; the first: {printable(f'{sample.key} {sample.metadata}'[:200])}"
            counts = ", ".join(f"{cause}: {count}" for cause, count in samples.skipped.items())
            among = f" among its first {TRIED:,} samples" if samples.is_cut else ""
            problem = f"{self.data}: no image {self.missing}{among}{f' ({counts}{first})' if counts else ''}"
            if not (self.leaves_out and samples.is_cut):
                raise ValueError(f"{problem}; docs/howto/evaluate.md has the format")
            log.warning("%s; the others are read during the evaluation", problem)

        from_first_rank(try_data)

    def run(
        self, encode: Encode, parallel: Parallel, scalar_values: ScalarValues = lambda returned: returned
    ) -> dict[str, float]:
        """Return the metrics of all ranks, and num_skipped, in all and by cause. Collective.

        Args:
            encode: (images on the device or None, texts on the host or None) -> features dict, through the engine.
            scalar_values: maps the scalars that `encode` returned to the engine's exact ones.
        """
        samples = self.source(rank=parallel.dp_rank, world_size=parallel.dp_size)
        where: dict[str, Any] = {"group": parallel.dp_group, "device": parallel.device}
        usable = self._usable(samples)
        batches = map(self.collate, iter(lambda: list(islice(usable, self.batch_size)), []))
        metrics = self.metrics(encode, batches, scalar_values, **where)
        skipped = sum(gather_objects(samples.skipped, parallel.dp_group), Counter[str]())
        causes = {f"num_skipped_{cause}": count for cause, count in sorted(skipped.items()) if count}
        return metrics | {"num_skipped": skipped.total()} | causes

    def _usable(self, samples: EvalSamples) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield the images that have a target, and count the others as skipped."""
        for sample in samples:
            if (target := self.target(sample)) is None:
                samples.skipped[self.skipped_as] += 1
            else:
                yield sample.image, target


class RetrievalTask(Task):
    """Image-text retrieval over the samples of a set. Samples without a caption are skipped.

    An image's captions are those of --json-text-key, else the list "captions" of its json, else its caption.

    Args:
        loss: also report val_loss, computed from the same features.
    """

    missing, skipped_as = "with a caption", "no_caption"

    def __init__(self, config: EvalConfig, *, loss: ValidationLoss | None = None, **common: Any):
        super().__init__(config, **common)
        self.loss = loss

    def target(self, sample: EvalSample) -> list[str] | None:
        return [caption for caption in sample.captions if caption.strip()] or None

    def collate(self, samples: list[tuple[torch.Tensor, list[str]]]) -> tuple[torch.Tensor, ...]:
        """Return images [m, 3, S, S], tokens [sum of captions, L] and captions per image [m]."""
        images, captions = zip(*samples)
        tokens = self.tokenizer([caption for listed in captions for caption in listed])
        return torch.stack(images), tokens, torch.tensor([len(listed) for listed in captions])

    def metrics(self, encode: Encode, batches: Iterator, scalar_values: ScalarValues, **where: Any) -> dict[str, float]:
        features = encode_pairs(encode, batches, self.collate([(self.blank, ["-"])]), **where)
        metrics = retrieval_metrics(features, group=where["group"])
        for width in self.widths:
            metrics |= at_width(width, retrieval_metrics(features.prefix(width), group=where["group"]))
        if self.loss is not None:
            metrics |= validation_loss(features, self.loss, where["group"], scalar_values(features.scalars))
        return metrics


class ZeroShotTask(Task):
    """Zero-shot classification: class-named folders, or shards with a `cls` or json {"label": ...} member.

    Args:
        classnames, templates: text files or "imagenet"; by default classnames.txt and templates.txt in the data's
            folder. Without these files, class folders use their names and "a photo of a {}".
        classes: file of the competing classes, for sets that have only some (see infcl.evaluate.zero_shot).
    """

    missing, skipped_as = "of a class", "other_class"

    def __init__(
        self,
        config: EvalConfig,
        *,
        classnames: str | None = None,
        templates: str | None = None,
        classes: str | None = None,
        **common: Any,
    ):
        super().__init__(dataclasses.replace(config, keys=SampleKeys(config.keys.image, "cls")), **common)
        data, path = config.data, Path(config.data)
        is_folder = path.is_dir() and not any(path.glob("*.tar"))
        folder = path if is_folder else Path(expand_shards(data)[0]).parent
        folders = set(class_names(path)) if is_folder else None

        def default(name: str) -> Path | None:
            if (folder / name).is_file():
                return folder / name
            if is_folder:
                return None
            flag = f"--zeroshot-{name.removesuffix('.txt')}"
            raise ValueError(f"{data}: no {name} next to the shards; write one, or give {flag} FILE or imagenet")

        self.classes = read_classes(classnames or default("classnames.txt"), classes, folders=folders)
        source = templates or default("templates.txt")
        self.templates = read_templates(source)
        self.about = {
            "classes": len(self.classes.names),
            "prompts": len(self.templates),
            "prompt": self.templates[0],
            "prompt_source": str(source or "default: no templates.txt"),
        }
        self.leaves_out = classes is not None
        if folders and not folders & self.classes.rows.keys():
            raise ValueError(f"{data}: none of its {len(folders)} folders is a class of {classes}")

    def target(self, sample: EvalSample) -> int | None:
        """Return the sample's row of ClassSet.right, or None if its label is of no class that competes."""
        return self.classes.rows.get(str(sample.metadata.get("label", sample.caption.strip() or None)))

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, ...]:
        images, rows = zip(*samples)
        return torch.stack(images), torch.tensor(rows)

    def metrics(self, encode: Encode, batches: Iterator, scalar_values: ScalarValues, **where: Any) -> dict[str, float]:
        names, size = self.classes.names, self.batch_size
        classifiers = build_classifiers(
            encode, self.tokenizer, names, self.templates, batch_size=size, widths=self.widths, **where
        )
        filler = self.collate([(self.blank, 0)])
        return evaluate_zero_shot(encode, batches, filler, classifiers, self.classes.right, **where)
