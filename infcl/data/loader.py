"""Loaders: what the training loop iterates over. Their whole state is {epoch, step}.

    loader = TrainLoader(
        urls, tokenizer, image_size=224, micro_batch_size=256, num_micro_batches=4, rank=r, world_size=w, seed=0
    )
    loader.set_position(*divmod(global_step, loader.steps_per_epoch))
    for micro_batches in loader:      # a list of M dicts per step, to the end of the epoch
        ...

A micro-batch is {"images": uint8 [m, 3, S, S], "texts": int64 [m, L], "ids": int64 [m]}, in pinned memory where there
is a GPU. `ids` are global sample numbers. The steps of an epoch are num_samples // global_batch_size; the samples that
are left over (fewer than one global batch, different ones each epoch) are not read in that epoch.

With the default reader, what a rank gets at (epoch, step) is a pure function of the seed, the shards and the batch
sizes: not of workers, not of where the run was resumed; and the global batch does not depend on the number of ranks.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from infcl.data.index import SampleKeys
from infcl.data.indexed import IndexedSource
from infcl.data.plan import Share, draw
from infcl.data.samples import ImageLimits, ReadLog, SampleDecoder, TrainTransform
from infcl.data.streaming import StreamingSource
from infcl.data.tokenizer import EOS_ID, PAD_ID, Tokenizer

_log = logging.getLogger(__name__)

MicroBatch = dict[str, torch.Tensor]
_WINDOW = 10_000  # samples over which the fraction of bad ones is judged


class Source(Protocol):
    """What a loader reads from. `found` counts what was wrong before the first read; `sha256` names the data."""

    num_samples: int
    steps_per_epoch: int
    sha256: str
    found: dict[str, int]

    def micro_batches(self, epoch: int, step: int) -> Iterator[tuple[MicroBatch, ReadLog]]:
        """This rank's micro-batches from a step to the end of an epoch, in order, each with what was skipped for it."""


class StepLoader:
    """Position, state and report, whatever the source; TrainLoader and SyntheticLoader say what the source is.

    Attributes: steps_per_epoch, num_samples (of the data set, over all ranks).
    """

    def __init__(self, source: Source, share: Share, *, seed: int, max_bad_fraction: float = 1.0):
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        self.steps_per_epoch, self.num_samples = source.steps_per_epoch, source.num_samples
        self._source, self._share, self._max_bad_fraction = source, share, max_bad_fraction
        self._fingerprint = {
            "seed": seed,
            "global_batch_size": share.global_batch_size,
            "manifest_sha256": source.sha256,
        }
        self._counts = Counter({"samples": 0, **source.found})
        self._examples: dict[str, str] = {}
        self._window = min(_WINDOW, self.steps_per_epoch * share.local_batch_size)
        self._window_good, self._window_bad = 0, 0
        self._epoch, self._step = 0, 0

    def __len__(self) -> int:
        """Steps that are left in the current epoch."""
        return self.steps_per_epoch - self._step

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """The remaining steps of the current epoch. Inside the loop, the position is already that of the next step."""
        source = self._source.micro_batches(self._epoch, self._step)
        for _ in range(len(self)):
            micro_batches = []
            for _ in range(self._share.num_micro_batches):
                batch, log = next(source)
                self._account(batch, log)
                micro_batches.append(batch)
            self._epoch, self._step = divmod(self._epoch * self.steps_per_epoch + self._step + 1, self.steps_per_epoch)
            yield micro_batches

    def set_position(self, epoch: int, step: int) -> None:
        """The next step to be yielded. Raises ValueError outside 0 <= step < steps_per_epoch."""
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(
                f"no step {step} in epoch {epoch}: an epoch has {self.steps_per_epoch} steps, counted from 0; "
                f"use divmod(global_step, steps_per_epoch)"
            )
        self._epoch, self._step = epoch, step

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "step": self._step, **self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError when seed, global batch or data are not the same."""
        different = [
            f"{name} is {value!r} now and was {state.get(name)!r}"
            for name, value in self._fingerprint.items()
            if state.get(name) != value
        ]
        if different:
            raise ValueError("cannot continue inside an epoch of other data: " + "; ".join(different))
        self.set_position(state["epoch"], state["step"])

    def report(self) -> dict[str, int]:
        """Counters of this rank since the start.

        "samples": used. "skipped/<cause>": bad ones, replaced. "noted/<cause>": used although something was off.
        "index/<cause>": left out when the shards were indexed (the same on every rank), with "index/damaged_shards".
        """
        return dict(self._counts)

    def table(self) -> str:
        """The report as lines of text, with one example per cause."""
        lines = [f"{count:>10}  {name:<36} {self._examples.get(name, '')}" for name, count in self._counts.items()]
        return "\n".join(line.rstrip() for line in lines)

    def _account(self, batch: MicroBatch, log: ReadLog) -> None:
        size, bad = len(batch["ids"]), len(log["skipped"])
        self._counts["samples"] += size
        for cause, message in log["skipped"]:
            self._counts[f"skipped/{cause}"] += 1
            if f"skipped/{cause}" not in self._examples:
                self._examples[f"skipped/{cause}"] = message
                _log.warning("skipped a sample (%s): %s; further ones of this kind are only counted", cause, message)
        for cause in log["noted"]:
            self._counts[f"noted/{cause}"] += 1
        self._window_good, self._window_bad = self._window_good + size, self._window_bad + bad
        seen = self._window_good + self._window_bad
        judged = max(seen, self._window)  # so that a run ends as soon as the window cannot end well
        if self._window_bad > self._max_bad_fraction * judged:
            raise RuntimeError(
                f"{self._window_bad} of the last {seen} samples of this rank were bad, more than max_bad_fraction "
                f"{self._max_bad_fraction:g} of {judged} allows:\n{self.table()}"
            )
        if seen >= self._window:
            self._window_good = self._window_bad = 0


class TrainLoader(StepLoader):
    """Image-text pairs from webdataset shards; `rank` of `world_size` reads m * M samples per step.

    urls: see `expand_shards`. reader: "indexed" (exact, needs files that can seek) or "streaming" (streaming.py says
    what it gives up; needs `num_samples`). num_samples: samples per epoch; default all; fewer means a different random
    subset each epoch. Raises ValueError, with the numbers, when shards are missing, when there are too few samples for
    one global batch, or (streaming) too few shards for ranks x workers.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        image_size: int,
        micro_batch_size: int,
        num_micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        num_workers: int = 4,
        aug_scale: tuple[float, float] = (0.9, 1.0),
        aug_ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip_probability: float = 0.0,
        max_bad_fraction: float = 0.01,
        max_image_pixels: int = ImageLimits.max_pixels,
        image_key: str = SampleKeys.image,
        text_key: str = SampleKeys.text,
        json_text_key: str | None = None,
        reader: str = "indexed",
        num_samples: int | None = None,
        index_cache: str | None = None,
        prefetch_factor: int = 4,
    ):
        keys = SampleKeys(image_key, text_key, json_text_key)
        transform = TrainTransform(image_size, scale=aug_scale, ratio=aug_ratio, flip_probability=flip_probability)
        limits = ImageLimits(max_pixels=max_image_pixels)
        decoder = SampleDecoder(tokenizer, transform, seed=seed, keys=keys, limits=limits)
        share = Share(micro_batch_size, num_micro_batches, rank, world_size)
        workers = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        if reader == "indexed":
            source = IndexedSource(urls, decoder, share, num_samples=num_samples, index_cache=index_cache, **workers)
        elif reader == "streaming":
            source = StreamingSource(urls, decoder, share, num_samples=num_samples, **workers)
        else:
            raise ValueError(f"reader is 'indexed' or 'streaming', not {reader!r}")
        super().__init__(source, share, seed=seed, max_bad_fraction=max_bad_fraction)


class SyntheticLoader(StepLoader):
    """Random images and token rows with TrainLoader's interface, for measuring without data (--dataset-type synthetic).

    A rank draws `pool` micro-batches once, from (seed, rank), and each (epoch, step, micro-batch) picks one of them.
    A row of tokens is ids in [2, vocab_size), eos (1) at a random place, padding (0).
    """

    def __init__(
        self,
        *,
        image_size: int,
        context_length: int,
        vocab_size: int,
        micro_batch_size: int,
        num_micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        num_samples: int,
        pool: int = 8,
    ):
        share = Share(micro_batch_size, num_micro_batches, rank, world_size)
        shapes = (image_size, context_length, vocab_size)
        super().__init__(_SyntheticSource(share, *shapes, seed, num_samples, pool), share, seed=seed)


class _SyntheticSource:
    def __init__(
        self,
        share: Share,
        image_size: int,
        context_length: int,
        vocab_size: int,
        seed: int,
        num_samples: int,
        pool: int,
    ):
        self.share, self.seed, self.num_samples, self.pool_size = share, seed, num_samples, pool
        self.image_size, self.context_length, self.vocab_size = image_size, context_length, vocab_size
        self.steps_per_epoch = share.steps_per_epoch(num_samples, f"an epoch has {num_samples} synthetic samples")
        self.sha256, self.found = f"synthetic {image_size} {context_length} {vocab_size} {num_samples}", {}

    @cached_property
    def pool(self) -> list[MicroBatch]:
        first = int(draw(self.seed, 0, self.share.rank, stream=0, count=1)[0] >> 1)
        generator = torch.Generator().manual_seed(first)
        m, length, place = self.share.micro_batch_size, self.context_length, torch.arange(self.context_length)
        pool = []
        for _ in range(self.pool_size):
            shape = (m, 3, self.image_size, self.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            texts = torch.randint(2, self.vocab_size, (m, length), generator=generator)
            eos = torch.randint(1, length, (m, 1), generator=generator)
            texts = texts.masked_fill(place == eos, EOS_ID).masked_fill(place > eos, PAD_ID)
            batch = {"images": images, "texts": texts}
            pool.append({k: v.pin_memory() if torch.cuda.is_available() else v for k, v in batch.items()})
        return pool

    def micro_batches(self, epoch: int, step: int) -> Iterator[tuple[MicroBatch, ReadLog]]:
        for start in self.share.positions(step, self.steps_per_epoch):
            pick = int(draw(self.seed, epoch, start, stream=0, count=1)[0] % self.pool_size)
            ids = torch.arange(start, start + self.share.micro_batch_size)
            yield {**self.pool[pick], "ids": ids}, {"skipped": [], "noted": []}
