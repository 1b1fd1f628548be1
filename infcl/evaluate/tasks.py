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
from infcl.evaluate.features import batches_of
from infcl.evaluate.load import Tokenize
from infcl.evaluate.retrieval import encode_pairs, retrieval_metrics
from infcl.evaluate.validation import ValidationLoss, validation_loss
from infcl.evaluate.zero_shot import build_classifier, evaluate_zero_shot, read_classes, read_templates
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess
from infcl.parallel import Parallel, from_first_rank

log = logging.getLogger(__name__)

TRIED = 1000  # most samples that `check` reads
Scalars = dict[str, torch.Tensor]


class Task:
    """An evaluation of the samples of `data`: shards, a folder of class folders, or a table.

    Args:
        data: path of the data.
        tokenizer: n texts -> int64 [n, L].
        image_size: side of the square images, in pixels.
        batch_size: images per rank and forward.
        keys: shard members that make a sample.
        columns: table columns that make a sample.
        limits, resize, preprocess: see EvalSamples.
    """

    missing = ""  # what no sample has where `check` fails
    leaves_out = False  # whether the first TRIED samples may all be unusable

    def __init__(
        self,
        data: str,
        *,
        tokenizer: Tokenize,
        image_size: int,
        batch_size: int,
        keys: SampleKeys = DEFAULT_KEYS,
        columns: TableColumns = DEFAULT_COLUMNS,
        limits: ImageLimits = EVAL_LIMITS,
        resize: str = "torch",
        preprocess: Preprocess = CLIP_PREPROCESS,
    ):
        self.data, self.tokenizer, self.batch_size = data, tokenizer, batch_size
        self.blank = torch.zeros(3, image_size, image_size, dtype=torch.uint8)
        images: dict[str, Any] = {"image_size": image_size, "resize": resize, "preprocess": preprocess}
        self.source = partial(eval_source(data, columns), keys=keys, limits=limits, **images)

    def usable(self, sample: EvalSample) -> bool:
        """Return whether the sample takes part in the evaluation. Raises ValueError if its label is invalid."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that one of the first TRIED samples is usable. Collective: rank 0 reads.

        Raises:
            ValueError: none of them is, or a label is invalid.
        """

        def try_data() -> None:
            samples = self.source(limit=TRIED)
            if any(self.usable(sample) for sample in samples):
                return
            counts = ", ".join(f"{cause}: {count}" for cause, count in samples.skipped.items())
            among = f" among its first {TRIED:,} samples" if samples.is_cut else ""
            problem = f"{self.data}: no image {self.missing}{among}{f' ({counts})' if counts else ''}"
            if not (self.leaves_out and samples.is_cut):
                raise ValueError(f"{problem}; docs/howto/evaluate.md has the format")
            log.warning("%s; the others are read during the evaluation", problem)

        from_first_rank(try_data)


class RetrievalTask(Task):
    """Image-text retrieval over the samples of `data`. Samples without a caption are skipped.

    An image's captions are the list "captions" of its json record or, without that list, its caption.

    Args:
        captions: "lines" splits a caption into one caption per line (CLIP-benchmark's shards of COCO and Flickr).
        loss: also report val_loss, computed from the same features.
        common: arguments of Task.
    """

    missing = "with a caption"

    def __init__(self, data: str, *, captions: str = "one", loss: ValidationLoss | None = None, **common: Any):
        super().__init__(data, **common)
        self.captions, self.loss = captions, loss

    def run(
        self, encode, parallel: Parallel, scalar_values: Callable[[Scalars], Scalars] = lambda returned: returned
    ) -> dict[str, float]:
        """Return the metrics of all ranks. Collective.

        Args:
            encode: (images on the device, texts on the host) -> features dict, through the engine.
            parallel: the ranks.
            scalar_values: maps the scalars that `encode` returned to the engine's exact ones.
        """
        where: dict[str, Any] = {"group": parallel.dp_group, "device": parallel.device}
        samples = self.source(rank=parallel.dp_rank, world_size=parallel.dp_size)
        filler = self._collate([EvalSample(self.blank, "-", {}, "")])
        batches = batches_of(self._with_captions(samples), self.batch_size, self._collate)
        features = encode_pairs(encode, batches, filler, **where)
        metrics = retrieval_metrics(features, group=parallel.dp_group) | _skipped(samples, parallel)
        if self.loss is not None:
            metrics |= validation_loss(features, self.loss, parallel.dp_group, scalar_values(features.scalars))
        return metrics

    def usable(self, sample: EvalSample) -> bool:
        return bool(self._captions(sample))

    def _with_captions(self, samples: EvalSamples) -> Iterator[EvalSample]:
        """Yield the samples that have captions and count the others as skipped."""
        for sample in samples:
            if self.usable(sample):
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


class ZeroShotTask(Task):
    """Zero-shot classification of `data`: class-named folders, or shards with a `cls` or json {"label": ...} member.

    Args:
        classnames, templates: text files or "imagenet"; by default classnames.txt and templates.txt in the data's
            folder. Without these files, class folders use their names and "a photo of a {}".
        classes: file of the competing classes, for sets that have only some (see infcl.evaluate.zero_shot).
        common: arguments of Task.
    """

    missing = "of a class"

    def __init__(
        self,
        data: str,
        *,
        classnames: str | None = None,
        templates: str | None = None,
        classes: str | None = None,
        **common: Any,
    ):
        super().__init__(data, keys=SampleKeys(text="cls"), **common)
        path = Path(data)
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
        self.templates = read_templates(templates or default("templates.txt"))
        self.leaves_out = classes is not None
        if folders and not folders & self.classes.rows.keys():
            raise ValueError(f"{data}: none of its {len(folders)} folders is a class of {classes}")

    def run(self, encode, parallel: Parallel, scalar_values: object = None) -> dict[str, float]:
        """Return the metrics of all ranks. Collective.

        Args:
            encode: (images on the device or None, texts on the host or None) -> features dict.
            parallel: the ranks.
            scalar_values: unused.
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
            _collate_labelled([(self.blank, 0)]),
            classifier,
            self.classes.right,
            **where,
        )
        return metrics | _skipped(samples, parallel)

    def usable(self, sample: EvalSample) -> bool:
        return self._row(sample) is not None

    def _row(self, sample: EvalSample) -> int | None:
        """Return the sample's row of ClassSet.right, or None if a classes file excludes its label."""
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


def _collate_labelled(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([image for image, _ in samples]), torch.tensor([row for _, row in samples])
