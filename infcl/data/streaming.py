"""The streaming reader: shards front to back, for storage without random access (`pipe:`, http).

A pipeline of webdataset. Its opener and expander of shards is `records.stream_records`, which repeats transfers that
break off and loses only damaged samples. docs/howto/data.md describes epochs, passes over the shards, and repeats.
"""

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from itertools import count, islice

import torch

from infcl.config import TrainConfig, counted
from infcl.data.plan import Share, random_order
from infcl.data.records import Record, stream_records
from infcl.data.samples import BatchBuilder, DecodedSample, SampleDecoder, hash_63, join_batches
from infcl.data.shards import expand_shards
from infcl.data.workers import MicroBatch, NoBatch, ReadLog, Source, make_dataloader, new_log, watch

_log = logging.getLogger(__name__)
_SHUFFLE_BUFFER = 2048  # undecoded samples


class StreamingDataset(torch.utils.data.IterableDataset):
    """One pass over this worker's shards, as micro-batches; the last one may have fewer samples, or be None."""

    def __init__(self, shards: list[str], decoder: SampleDecoder, share: Share):
        self.shards, self.decoder, self.share = shards, decoder, share
        self.epoch, self.passes, self.done = 0, 0, 0.0  # the epoch, its passes so far, and the part of this one to skip

    def __iter__(self) -> Iterator[tuple[MicroBatch | None, ReadLog] | NoBatch]:
        import webdataset

        builder = BatchBuilder(self.decoder)
        order = random_order(len(self.shards), self.decoder.seed, self.epoch).tolist()  # the same for all passes
        rng = random.Random(f"{self.decoder.seed} {self.epoch} {self.passes}")

        def records(parts: Iterable[dict[str, str]]) -> Iterator[Record]:
            own = [self.shards[int(part["url"])] for part in parts]
            reads = stream_records(own[int(len(own) * self.done) :], self.decoder.keys, builder.skip)
            return (record for _, record in reads)

        def decode(record: Record) -> tuple[DecodedSample, int] | None:
            number = hash_63(record.where.encode())
            return builder.decode(record, self.epoch + (self.passes << 32), number, number)

        try:
            yield from webdataset.DataPipeline(
                webdataset.SimpleShardList([str(number) for number in order]),
                webdataset.slice(self.share.reader, None, self.share.readers),
                webdataset.split_by_worker,
                records,
                webdataset.shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER, rng=rng),
                webdataset.map(decode),
                webdataset.batched(self.share.rows, collation_fn=builder.batch),
            )
            yield builder.batch([])  # what was skipped after the last sample
        except NoBatch as failure:  # if raised, the rank would get a traceback as the message
            yield failure


class StreamingSource(Source):
    """Source on a DataLoader over a StreamingDataset. Workers restart each pass with a copy of the current dataset."""

    def __init__(self, flags: TrainConfig, decoder: SampleDecoder, share: Share):
        assert flags.train_data is not None and flags.train_num_samples is not None, "checked with the flags"
        shards = expand_shards(flags.train_data, allow_pipe=flags.allow_pipe_urls)
        workers = max(1, flags.workers)
        if len(shards) < (needed := share.readers * workers):
            readers = f"{counted(share.readers, 'rank')} x {counted(workers, 'worker')}"
            raise ValueError(
                f"{counted(len(shards), 'shard')} cannot feed {readers}: the streaming reader needs {needed}; "
                "use fewer workers, or the indexed reader"
            )
        self.num_samples, self.found = flags.train_num_samples, {}
        self.steps_per_epoch = share.steps_per_epoch(self.num_samples, f"an epoch has {self.num_samples} samples")
        self.sha256, self.about = hashlib.sha256("\n".join(shards).encode()).hexdigest(), counted(len(shards), "shard")
        self._dataset, self._share = StreamingDataset(shards, decoder, share), share
        self._loader = make_dataloader(self._dataset, flags, decoder, share)

    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[MicroBatch, ReadLog]]:
        assert not again, "a stream is read once"
        while True:
            left = (self.steps_per_epoch - step) * self._share.batch.num_micro_batches
            yield from islice(self._passes(epoch, step / self.steps_per_epoch), left)
            epoch, step = epoch + 1, 0

    def _passes(self, epoch: int, done: float) -> Iterator[tuple[MicroBatch, ReadLog]]:
        """Yield micro-batches of `epoch`. All workers end their pass over the shards before the next one begins."""
        parts: list[MicroBatch] = []  # the last, smaller micro-batches of workers
        pending = new_log()
        for passes in count():
            self._dataset.epoch, self._dataset.passes, self._dataset.done = epoch, passes, 0.0 if passes else done
            first, samples = passes > 0, 0  # the first one of a pass takes what the last one left
            for batch, log in watch(self._loader):
                pending = {name: pending[name] + log[name] for name in pending}
                if batch is None:
                    continue
                samples += len(batch["ids"])
                batch["again"] = torch.full_like(batch["ids"], passes > 0)
                if first or len(batch["ids"]) < self._share.rows:
                    batch, parts = join_batches([*parts, batch], self._share.rows)
                if batch is not None:
                    first = False
                    pending["noted"] += ["repeated"] * int(batch.pop("again").sum())
                    yield batch, pending
                    pending = new_log()
            if not samples and (passes or not done):
                bad = pending["skipped"] or [("no_sample", "", "the shards are empty")]
                raise NoBatch.after(len(bad), bad[-1], storage_fails=any(each[0].startswith("shard_") for each in bad))
            if passes == 0:
                _log.warning("the shards of a rank ended before epoch %d and are repeated (noted/repeated)", epoch)
