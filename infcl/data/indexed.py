"""The indexed reader: plan -> micro-batches, by random access into the shards.

One item of the sampler is one micro-batch: (epoch, first position, sample numbers). Workers hold no state that an item
depends on, and torch's DataLoader returns items in order, so the result does not depend on how many workers there are.
A sample that cannot be decoded is replaced by another one, chosen by (seed, epoch, position, attempt) from the whole
data set, so every micro-batch has its full shape on every rank; what was skipped travels with the batch.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from infcl.data.plan import EpochPlan, Share, chunk_size, draw
from infcl.data.samples import BadSample, ReadLog, SampleDecoder
from infcl.data.shards import Manifest, Record, ShardReader, load_manifest
from infcl.data.workers import make_dataloader

_log = logging.getLogger(__name__)
_ATTEMPTS = 8  # samples tried for one place before the data is declared unusable


class IndexedDataset:
    """Map-style dataset of torch's DataLoader; its keys are the items of `PlanSampler`."""

    def __init__(self, manifest: Manifest, decoder: SampleDecoder):
        self.manifest, self.decoder = manifest, decoder
        self.reader = ShardReader(manifest, decoder.keys)

    def __getitem__(self, item: tuple[int, int, np.ndarray]) -> tuple[dict[str, torch.Tensor], ReadLog]:
        epoch, first, ids = item
        log: ReadLog = {"skipped": [], "noted": []}
        samples, used = [], []
        for i, record in enumerate(self.reader.read(ids)):
            sample, number = self._decode_or_replace(record, epoch, first + i, int(ids[i]), log)
            samples.append(sample)
            used.append(number)
        return self.decoder.batch(samples, used, log), log

    def _decode_or_replace(self, record: Record, epoch: int, position: int, number: int, log: ReadLog):
        """((pixels, caption), sample number): of `record`, or of the first usable one of its replacements."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self.decoder.decode(record, epoch, position, log), number
            except BadSample as bad:
                log["skipped"].append((bad.cause, f"{record.where}: {bad}"))
            raw = draw(self.decoder.seed, epoch, position, stream=attempt, count=1)[0]
            number = int(raw) % self.manifest.num_samples
            record = self.reader.read(np.array([number]))[0]
        failures = "\n  ".join(f"{cause}: {message}" for cause, message in log["skipped"][-_ATTEMPTS:])
        raise RuntimeError(
            f"{_ATTEMPTS} samples in a row could not be used; is this a data set of images?\n  {failures}"
        )


class PlanSampler:
    """Yields one rank's items from `start` = (epoch, step) to the end of that epoch."""

    def __init__(self, manifest: Manifest, share: Share, *, seed: int, steps_per_epoch: int):
        self.counts = np.array([shard.samples for shard in manifest.shards])
        self.share, self.seed, self.steps_per_epoch = share, seed, steps_per_epoch
        self.start = (0, 0)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        return self._items(*self.start)

    def _items(self, epoch: int, first_step: int) -> Iterator[tuple[int, int, np.ndarray]]:
        chunk = chunk_size(self.share.global_batch_size)
        plan = EpochPlan(self.counts, chunk=chunk, seed=self.seed, epoch=epoch)
        for start in self.share.positions(first_step, self.steps_per_epoch):
            yield epoch, start, plan.samples(start, start + self.share.micro_batch_size)


class IndexedSource:
    """A DataLoader over the plan. Workers live as long as the source; an epoch or a resume only resets the sampler."""

    def __init__(
        self,
        urls: str | Sequence[str],
        decoder: SampleDecoder,
        share: Share,
        *,
        num_samples: int | None,
        index_cache: str | None,
        num_workers: int,
        prefetch_factor: int,
    ):
        manifest = load_manifest(
            urls, keys=decoder.keys, index_cache=index_cache, rank=share.rank, world_size=share.world_size
        )
        where = f"{len(manifest.shards)} shards hold {manifest.num_samples} usable samples"
        self.found = {f"index/{cause}": count for cause, count in manifest.rejected.items()}
        if manifest.damaged:
            self.found["index/damaged_shards"] = len(manifest.damaged)
        if self.found:
            where += f" ({', '.join(f'{name}: {count}' for name, count in self.found.items())})"
        if num_samples is not None and num_samples > manifest.num_samples:
            raise ValueError(f"{num_samples} samples per epoch were asked for, but {where}")
        self.num_samples = manifest.num_samples if num_samples is None else num_samples
        self.steps_per_epoch = share.steps_per_epoch(self.num_samples, where)
        self.sha256 = manifest.sha256
        self._sampler = PlanSampler(manifest, share, seed=decoder.seed, steps_per_epoch=self.steps_per_epoch)
        self._loader = make_dataloader(
            IndexedDataset(manifest, decoder),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            item_bytes=decoder.batch_bytes(share.micro_batch_size),
            sampler=self._sampler,
            persistent_workers=num_workers > 0,
        )
        if share.rank == 0:
            for path, damage in manifest.damaged.items():
                _log.warning("damaged shard, only the samples before it are used: %s: %s", path, damage)

    def micro_batches(self, epoch: int, step: int) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        self._sampler.start = (epoch, step)
        return iter(self._loader)
