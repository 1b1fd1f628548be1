"""The indexed reader: turn the plan into micro-batches by random access to the samples.

One item of the sampler is one micro-batch: (epoch, first position, sample numbers). Items do not depend on worker
state, and torch's DataLoader returns them in order. The result is therefore independent of the number of workers.
A bad sample is replaced by one that (seed, epoch, position, attempt) selects from the full data set, so every
micro-batch has its full shape on every rank. The log of skipped samples is returned with the batch.
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from infcl.config import TrainConfig
from infcl.data.plan import EpochPlan, Share, chunk_size, draw, epoch_size
from infcl.data.records import BadSample, Record, ShardReader
from infcl.data.samples import BatchBuilder, DecodedSample, SampleDecoder
from infcl.data.table import TableReader
from infcl.data.workers import MicroBatch, NoBatch, ReadLog, Source, make_dataloader, new_log, watch

_log = logging.getLogger(__name__)
Collection = ShardReader | TableReader


class IndexedDataset:
    """Map-style dataset for torch's DataLoader. Its keys are (epoch, first position, sample numbers)."""

    def __init__(self, collection: Collection, decoder: SampleDecoder):
        self.collection, self.decoder, self.builder = collection, decoder, BatchBuilder(decoder)
        self.num_samples = int(collection.counts.sum())

    def __getitem__(self, item: tuple[int, int, np.ndarray]) -> tuple[MicroBatch | None, ReadLog] | NoBatch:
        epoch, first, ids = item
        try:
            records = enumerate(self.collection.read(ids))
            return self.builder.batch(
                [self._decode_or_replace(record, epoch, first + i, int(ids[i])) for i, record in records]
            )
        except NoBatch as failure:  # if raised, the rank would get a traceback as the message
            return failure

    def exactly(self, epoch: int, first: int, ids: torch.Tensor) -> MicroBatch:
        """Return the micro-batch at position `first` of the samples `ids`. Raises BadSample, replaces nothing."""
        log, records = new_log(), self.collection.read(ids.numpy())
        samples = [self.decoder.decode(record, epoch, first + i, log) for i, record in enumerate(records)]
        return self.decoder.batch(samples, ids.tolist(), log)

    def _decode_or_replace(self, record: Record, epoch: int, position: int, number: int) -> tuple[DecodedSample, int]:
        """Return (decoded sample, its number) of `record`, or of its first usable replacement."""
        attempt = 0
        while (decoded := self.builder.decode(record, epoch, position, number)) is None:
            attempt += 1
            raw = draw(self.decoder.seed, epoch, position, stream=attempt, count=1)[0]
            number = int(raw) % self.num_samples
            record = self.collection.read(np.array([number]))[0]
        return decoded


class PlanSampler:
    """Sampler of a DataLoader: the items of the dataset from a step on, without an end.

    It is not the source itself: a source and a loader that refer to each other are left to the garbage collector,
    which closes the queues before torch can tell the workers to stop. Each worker then costs 10 s.
    """

    def __init__(self, collection: Collection, share: Share, steps_per_epoch: int, seed: int):
        self.counts, self.factors = collection.counts, collection.factors
        self.share, self.steps_per_epoch, self.seed = share, steps_per_epoch, seed
        self.epoch, self.step, self.again = 0, 0, range(0)  # what the next iteration yields

    def positions(self) -> Iterator[tuple[int, int]]:
        """Yield the epoch of each micro-batch, and the position of its first sample in it."""
        return self.share.positions(self.epoch, self.step, self.steps_per_epoch, self.again)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        chunk = chunk_size(self.share.batch.global_batch_size)
        for epoch, micro_batches in groupby(self.positions(), key=itemgetter(0)):
            plan = EpochPlan(self.counts, chunk=chunk, seed=self.seed, epoch=epoch, factors=self.factors)
            for _, first in micro_batches:
                yield epoch, first, plan.samples(first, first + self.share.rows)


class IndexedSource(Source):
    """Source on a DataLoader over the plan. Workers persist over resumes, and read ahead over the end of an epoch."""

    repeats = True

    def __init__(self, collection: Collection, flags: TrainConfig, decoder: SampleDecoder, share: Share):
        self.found, self.about = collection.found, str(collection)
        problems = ", ".join(f"{name}: {count}" for name, count in self.found.items())
        where = f"{self.about} ({problems})" if problems else self.about
        total = epoch_size(collection.counts, collection.factors)
        if not collection.counts.any():
            raise ValueError(f"{where}: {collection.if_empty}")
        if total != collection.counts.sum():
            where += f", of which an epoch uses {total} (--train-data-upsampling-factors)"
        self.num_samples = total if flags.train_num_samples is None else flags.train_num_samples
        if self.num_samples > total:
            raise ValueError(f"{self.num_samples} samples per epoch were requested (--train-num-samples), but {where}")
        self.steps_per_epoch = share.steps_per_epoch(self.num_samples, where)
        self.sha256, self._micro_batches_per_step = collection.sha256, share.batch.num_micro_batches
        self._sampler = PlanSampler(collection, share, self.steps_per_epoch, decoder.seed)
        self._dataset = IndexedDataset(collection, decoder)
        self._loader = make_dataloader(
            self._dataset, flags, decoder, share, sampler=self._sampler, persistent_workers=flags.workers > 0
        )
        if share.reader == 0:
            for line in collection.warnings:
                _log.warning("%s", line)

    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[MicroBatch, ReadLog]]:
        self._sampler.epoch, self._sampler.step, self._sampler.again = epoch, step, again
        used: dict[tuple[int, int], torch.Tensor] = {}  # position of each micro-batch of a step -> its sample numbers
        for position, (batch, log) in zip(self._sampler.positions(), watch(self._loader)):
            if position not in used and len(used) == self._micro_batches_per_step:
                used.clear()
            ids = used.setdefault(position, batch["ids"].clone())
            yield (batch if torch.equal(batch["ids"], ids) else self._as_before(batch, *position, ids)), log

    def _as_before(self, batch: MicroBatch, epoch: int, first: int, ids: torch.Tensor) -> MicroBatch:
        """Return the micro-batch of the samples `ids`, or `batch` (other samples) if they cannot be read."""
        _log.warning("the second read of a micro-batch gave other samples; reading those of the first")
        try:
            return self._dataset.exactly(epoch, first, ids)
        except BadSample as bad:
            _log.warning("a sample of the first read cannot be read again: %s: %s", bad.cause, bad)
            return batch
