"""The streaming reader: shards front to back, for storage without random access (`pipe:`, http) and for evaluation.

For training, (seed, epoch) determines the order of the shards. They are split over ranks x workers, streamed, and
shuffled in a seeded buffer. A remote shard is copied to a temporary file before its first sample is used. A transfer
that breaks off, stalls or has the wrong length is therefore repeated, and no sample of it is used. The members of a
shard are found as in the indexed reader (index.find_samples), so damage costs the same samples.

Unlike the indexed reader, this one does not have:
- an exact resume inside an epoch: it starts at about the shard of that step and yields the remaining number of steps;
- each sample exactly once per epoch: a rank that finishes its shards early reads them again, so that all ranks make
  the same number of steps;
- independence of the number of workers.
"""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import torch

from infcl.config import counted
from infcl.data.config import DataConfig
from infcl.data.index import MAX_IMAGE_BYTES, MAX_TEXT_BYTES, SampleKeys, find_samples
from infcl.data.plan import Share, random_order
from infcl.data.records import BadSample, Record, read_members
from infcl.data.samples import SampleDecoder
from infcl.data.shards import find_shards
from infcl.data.storage import ShardFault, ShardFile, open_copy
from infcl.data.workers import NoBatch, ReadLog, Source, WorkerBoard, make_dataloader

_SHUFFLE_BUFFER = 2048  # undecoded samples
_BAD_PER_MICRO_BATCH = 8  # times its size: more bad samples than that stop the run


def stream_records(
    urls: Sequence[str],
    keys: SampleKeys,
    failed: Callable[[str, str, Exception], None],
    *,
    on_part: Callable[[int], None] = lambda part: None,
) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of every sample, in order.

    Args:
        urls: the shards.
        keys: which members of a shard form a sample.
        failed: called with (cause, url, error) for each shard that cannot be opened or is damaged.
        on_part: called with the number of each shard before it is read.
    """
    for number, url in enumerate(urls):
        on_part(number)
        try:
            with contextlib.closing(open_copy(url)) as file:
                rows, _, damage = find_samples(file.pread, file.file_bytes, url, keys)
                if damage:
                    failed("damaged_shard", url, ValueError(f"{url}: {damage}"))
                for key, row in rows.items():
                    name = key.encode("utf-8", "backslashreplace").decode()  # a name may be any bytes
                    yield name, _read_record(file, row, f"{url} {name}", url)
        except ShardFault as fault:
            failed(fault.cause, url, fault)
        except (OSError, ValueError) as error:  # ValueError: it is compressed
            failed("damaged_shard" if isinstance(error, ValueError) else "shard_unreadable", url, error)


def _read_record(file: ShardFile, row: list[int], where: str, url: str) -> Record:
    if row[1] > MAX_IMAGE_BYTES:
        fault = ShardFault("image_file_too_large", f"{row[1]} bytes, {MAX_IMAGE_BYTES} allowed")
        return Record(None, None, None, where, url, fault)
    text_bytes = min(row[3], MAX_TEXT_BYTES + 1)
    image, text, json = read_members(file, [(row[0], row[1]), (row[2], text_bytes), (row[4], row[5])], url)
    return Record(image, text, json, where, url)


class StreamingDataset(torch.utils.data.IterableDataset):
    """Endless stream of one worker's micro-batches in `epoch`. The source takes as many as the rank needs."""

    def __init__(self, shards: list[str], decoder: SampleDecoder, share: Share, board: WorkerBoard):
        self.shards, self.decoder, self.share, self.board = shards, decoder, share, board
        self.epoch, self.done = 0, 0.0  # current epoch, and the fraction of it before the first step

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog] | NoBatch]:
        try:
            yield from self._micro_batches()
        except NoBatch as failure:  # if raised, the rank would get a traceback as the message
            yield failure

    def _micro_batches(self) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        log: ReadLog = {"skipped": [], "noted": []}
        samples, ids = [], []
        for record in self._records(log):
            number = int.from_bytes(hashlib.blake2b(record.where.encode(), digest_size=8).digest(), "big") >> 1
            try:
                samples.append(self.decoder.decode(record, self.epoch, number, log))
                ids.append(number)
            except BadSample as bad:
                log["skipped"].append((bad.cause, record.shard, f"{record.where}: {bad}"))
                if len(log["skipped"]) > _BAD_PER_MICRO_BATCH * self.share.rows:
                    raise NoBatch(
                        f"{len(log['skipped'])} bad samples for {len(samples)} good ones (the last: {bad.cause}: "
                        f"{record.where}: {bad}); is this a data set of images?",
                        2,
                    ) from bad
            if len(samples) == self.share.rows:
                batch = self.decoder.batch(samples, ids, log)
                self.board.rests()
                yield batch, dict(log)
                samples, ids = [], []
                log.update(skipped=[], noted=[])

    def _records(self, log: ReadLog) -> Iterator[Record]:
        """Yield the records of this worker's shards, in repeated passes."""
        from webdataset.filters import shuffle

        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        part = worker * self.share.readers + self.share.reader
        order = random_order(len(self.shards), self.decoder.seed, self.epoch).tolist()
        numbers = order[part :: self.share.readers * workers]
        begin = int(len(numbers) * self.done)
        numbers = numbers[begin:] + numbers[:begin]
        mine = [self.shards[i] for i in numbers]
        rng = random.Random(f"{self.decoder.seed} {self.epoch} {part}")

        def failed(cause: str, url: str, error: Exception) -> None:
            log["skipped"].append((cause, url, str(error)))

        def on_part(number: int) -> None:
            self.board.reads(numbers[number])

        while True:
            record = None
            stream = stream_records(mine, self.decoder.keys, failed, on_part=on_part)
            for _, record in shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER, rng=rng)(stream):
                yield record
            if record is None:
                raise NoBatch(
                    f"no sample in any of the {counted(len(mine), 'shard')} of a worker; the last ones: "
                    + "; ".join(f"{url}: {why.removeprefix(f'{url}: ')}" for _, url, why in log["skipped"][-3:])
                )


class StreamingSource(Source):
    """Source on a DataLoader over a StreamingDataset. Workers restart each epoch with a copy of the current dataset."""

    board: WorkerBoard

    def __init__(self, data: DataConfig, decoder: SampleDecoder, share: Share):
        assert data.num_samples is not None, "checked with the flags"
        sources, missing = find_shards(data.urls, allow_pipe=data.allow_pipe, max_missing=data.max_missing_shards)
        shards = list(chain.from_iterable(sources))
        readers = share.readers * max(1, data.workers)
        if len(shards) < readers:
            raise ValueError(
                f"{counted(len(shards), 'shard')} cannot feed {counted(share.readers, 'rank')} x "
                f"{counted(max(1, data.workers), 'worker')}: the streaming reader needs {readers}; use fewer "
                "workers, or the indexed reader"
            )
        self.num_samples, self.found = data.num_samples, {"index/missing_shards": len(missing)} if missing else {}
        self.steps_per_epoch = share.steps_per_epoch(self.num_samples, f"an epoch has {self.num_samples} samples")
        self.sha256, self.about = hashlib.sha256("\n".join(shards).encode()).hexdigest(), counted(len(shards), "shard")
        self.board = WorkerBoard(data.workers, shards.__getitem__)
        self._dataset, self._share = StreamingDataset(shards, decoder, share, self.board), share
        self._loader = make_dataloader(
            self._dataset,
            num_workers=data.workers,
            item_bytes=decoder.batch_bytes(share.rows),
            timeout=data.timeout,
        )

    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        assert not again, "a stream is read once"
        while True:
            self._dataset.epoch, self._dataset.done = epoch, step / self.steps_per_epoch
            count = (self.steps_per_epoch - step) * self._share.num_micro_batches
            yield from islice(self.board.watch(self._loader), count)
            epoch, step = epoch + 1, 0
