"""Evaluation tasks of the trainer and of the command line: data and a tokenizer in, metrics out, on all ranks.

A task is built and checked before training starts, so that missing files and unusable data are reported early.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infcl.data.evaluation import EVAL_LIMITS, EvalSample, EvalSamples, class_names, eval_source
from infcl.data.images import ImageLimits
from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.shards import expand_shards
from infcl.data.table import DEFAULT_COLUMNS, TableColumns
from infcl.evaluate.classes import read_classes, read_templates
from infcl.evaluate.features import batches_of
from infcl.evaluate.retrieval import encode_pairs, retrieval_metrics
from infcl.evaluate.validation import ValidationLoss, validation_loss
from infcl.evaluate.zero_shot import build_classifier, evaluate_zero_shot
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess
from infcl.parallel import Parallel, from_first_rank

log = logging.getLogger(__name__)

TRIED = 1000  # most samples that `check` reads
Tokenize = Callable[[list[str]], torch.Tensor]  # n texts -> int64 [n, L]
Scalars = dict[str, torch.Tensor]


class RetrievalTask:
    """Image<->text retrieval over the samples of `data`. Samples without a caption are skipped.

    An image's captions are the list "captions" of its json record or, without that list, its caption.

    Args:
        captions: "lines" splits a caption into one caption per line (CLIP-benchmark's shards of COCO and Flickr).
        keys: shard members that make a sample. Without a caption there, those of the format are read.
        columns: table columns that make a sample.
        loss: also report val_loss, computed from the same features.
    """

    def __init__(
        self,
        data: str,
        *,
        tokenizer: Tokenize,
        image_size: int,
        batch_size: int,
        captions: str = "one",
        keys: SampleKeys = DEFAULT_KEYS,
        columns: TableColumns = DEFAULT_COLUMNS,
        limits: ImageLimits = EVAL_LIMITS,
        resize: str = "torch",
        preprocess: Preprocess = CLIP_PREPROCESS,
        loss: ValidationLoss | None = None,
    ):
        self.data, self.tokenizer, self.image_size, self.batch_size = data, tokenizer, image_size, batch_size
        source = eval_source(data, columns)
        images: dict[str, Any] = {"image_size": image_size, "resize": resize, "preprocess": preprocess}
        self.source = partial(source, keys=keys, limits=limits, **images)
        self.captions, self.loss = captions, loss

    def check(self) -> None:
        """Check that the first TRIED samples have an image with a caption. Collective: rank 0 reads.

        Raises:
            ValueError: none of them does.
        """

        def try_data() -> None:
            samples = self.source(limit=TRIED)
            if not any(self._captions(sample) for sample in samples):
                raise ValueError(
                    f"{self.data}: no image with a caption{_told(samples)}; docs/howto/evaluate.md has the format"
                )

        from_first_rank(try_data)

    def run(
        self, encode, parallel: Parallel, scalar_values: Callable[[Scalars], Scalars] = lambda returned: returned
    ) -> dict[str, float]:
        """Return the metrics of all ranks. Collective.

        Args:
            encode: (images on the device, texts on the host) -> features dict, through the engine.
            scalar_values: maps the scalars that `encode` returned to the engine's exact ones.
        """
        where: dict[str, Any] = {"group": parallel.dp_group, "device": parallel.device}
        samples = self.source(rank=parallel.dp_rank, world_size=parallel.dp_size)
        blank = EvalSample(_blank(self.image_size), "-", {}, "")
        batches = batches_of(self._with_captions(samples), self.batch_size, self._collate)
        features = encode_pairs(encode, batches, self._collate([blank]), **where)
        metrics = retrieval_metrics(features, group=parallel.dp_group) | _skipped(samples, parallel)
        if self.loss is not None:
            scalars = scalar_values(features.scalars)
            metrics |= validation_loss(features, self.loss, parallel.dp_group, scalars)
        return metrics

    def _with_captions(self, samples: EvalSamples) -> Iterator[EvalSample]:
        """Yield the samples that have captions and count the others as skipped."""
        for sample in samples:
            if self._captions(sample):
                yield sample
            else:
                samples.skipped["no_caption"] += 1

    def _captions(self, sample: EvalSample) -> list[str]:
        listed = sample.metadata.get("captions")
        if not isinstance(listed, list):
            listed = sample.caption.splitlines() if self.captions == "lines" else [sample.caption]
        return [caption for caption in listed if isinstance(caption, str) and caption.strip()]

    def _collate(self, samples: list[EvalSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return images [m, 3, S, S], tokens [sum of captions, L] and captions per image [m]."""
        captions = [self._captions(sample) for sample in samples]
        tokens = self.tokenizer([caption for listed in captions for caption in listed])
        return torch.stack([sample.image for sample in samples]), tokens, torch.tensor([len(c) for c in captions])


class ZeroShotTask:
    """Zero-shot classification of `data`: class-named folders, or shards with a `cls` or json {"label": ...} member.

    Args:
        classnames, templates: text files or "imagenet"; by default classnames.txt and templates.txt in the data's
            folder. Without these files, class folders use their names and "a photo of a {}".
        classes: file of the competing classes, for sets that have only some (see infcl.evaluate.classes).
    """

    def __init__(
        self,
        data: str,
        *,
        tokenizer: Tokenize,
        image_size: int,
        batch_size: int,
        classnames: str | None = None,
        templates: str | None = None,
        classes: str | None = None,
        limits: ImageLimits = EVAL_LIMITS,
        resize: str = "torch",
        preprocess: Preprocess = CLIP_PREPROCESS,
    ):
        self.data, self.tokenizer, self.image_size, self.batch_size = data, tokenizer, image_size, batch_size
        keys = SampleKeys(text="cls")
        images: dict[str, Any] = {"image_size": image_size, "resize": resize, "preprocess": preprocess}
        self.source = partial(eval_source(data), keys=keys, limits=limits, **images)
        path = Path(data)
        is_folder = path.is_dir() and not any(path.glob("*.tar"))
        folder = path if is_folder else Path(expand_shards(data)[0]).parent
        folders = set(class_names(path)) if is_folder else None

        def default(name: str) -> Path | None:
            if (folder / name).is_file() or is_folder:
                return folder / name if (folder / name).is_file() else None
            flag = f"--zeroshot-{name.removesuffix('.txt')}"
            raise ValueError(f"{data}: no {name} next to the shards; write one, or give {flag} FILE or imagenet")

        self.classes = read_classes(classnames or default("classnames.txt"), classes, folders=folders)
        self.templates = read_templates(templates or default("templates.txt"))
        self.leaves_out = classes is not None
        if folders and not folders & self.classes.rows.keys():
            raise ValueError(f"{data}: none of its {len(folders)} folders is a class of {classes}")

    def check(self) -> None:
        """Check that the first TRIED samples have an image and a class. Collective: rank 0 reads.

        With a classes file, the first TRIED samples may all be of other classes: then only a shorter set is rejected.

        Raises:
            ValueError: none of them does, or a label is invalid.
        """

        def try_data() -> None:
            samples = self.source(limit=TRIED)
            if any(self._row(sample) is not None for sample in samples):
                return
            problem = f"{self.data}: no image of a class{_told(samples)}"
            if not (self.leaves_out and samples.is_cut):
                raise ValueError(f"{problem}; docs/howto/evaluate.md has the format")
            log.warning("%s; the others are read during the evaluation", problem)

        from_first_rank(try_data)

    def run(self, encode, parallel: Parallel, scalar_values: object = None) -> dict[str, float]:
        """Return the metrics of all ranks. Collective.

        Args:
            encode: (images on the device or None, texts on the host or None) -> features dict.
        """
        where: dict[str, Any] = {"group": parallel.dp_group, "device": parallel.device}
        classifier = build_classifier(
            lambda texts: encode(None, texts)["text_features"],
            self.tokenizer,
            self.classes.names,
            self.templates,
            batch_size=self.batch_size,
            **where,
        )
        samples = self.source(rank=parallel.dp_rank, world_size=parallel.dp_size)
        rows = ((sample.image, self._row(sample)) for sample in samples)
        labelled = ((image, row) for image, row in rows if row is not None)
        metrics = evaluate_zero_shot(
            lambda images: encode(images, None)["image_features"],
            batches_of(labelled, self.batch_size, _collate_labelled),
            _collate_labelled([(_blank(self.image_size), 0)]),
            classifier,
            right=self.classes.right,
            **where,
        )
        return metrics | _skipped(samples, parallel)

    def _row(self, sample: EvalSample) -> int | None:
        """Return the sample's row of ClassSet.right, or None if a classes file excludes its label.

        Raises:
            ValueError: the label is invalid.
        """
        label = sample.metadata.get("label", sample.caption.strip() or None)
        row = self.classes.rows.get(str(label))
        if row is None and not self.leaves_out:
            raise ValueError(
                f"{self.data}: sample {sample.key} has label {label!r}; an index below {len(self.classes.names)} "
                "(the number of class names), or a label of the classnames file, is needed"
            )
        return row


def _skipped(samples: EvalSamples, parallel: Parallel) -> dict[str, float]:
    """Return num_skipped: samples of all ranks without a usable image or caption, or lost in damaged shards."""
    total = torch.tensor([samples.skipped.total()], device=parallel.device)
    dist.all_reduce(total, group=parallel.dp_group)
    return {"num_skipped": int(total)}


def _told(samples: EvalSamples) -> str:
    """Describe for a message how much was read and what was skipped."""
    counts = ", ".join(f"{cause}: {count}" for cause, count in samples.skipped.items())
    among = f" among its first {samples.limit:,} samples" if samples.is_cut else ""
    return f"{among} ({counts})" if counts else among


def _blank(image_size: int) -> torch.Tensor:
    return torch.zeros(3, image_size, image_size, dtype=torch.uint8)


def _collate_labelled(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([image for image, _ in samples]), torch.tensor([row for _, row in samples])
