"""The streaming reader: shards front to back, for storage without random access (`pipe:`, http) and for evaluation.

For training it is a pipeline of webdataset: (seed, epoch, pass) determines the order of the shards, which are split
over ranks and workers, read, and shuffled in a seeded buffer. A remote shard is copied to a temporary file before its
first sample is used. A transfer that breaks off, stalls or has the wrong length is therefore repeated, and no sample of
it is used. The members of a shard are found as in the indexed reader (index.find_samples), so damage costs the same
samples.

An epoch is a number of steps, the same on all ranks. It begins with a new pass over the shards. A rank whose shards end
early begins another pass when all its workers have ended theirs; its samples are then counted as noted/repeated. What a
rank has not read at the end of the epoch is left out of it.

Unlike the indexed reader, this one has no exact resume inside an epoch: it starts at about the shard of that step and
yields the remaining number of steps. The order depends on the number of workers.
"""

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

import torch

from infcl.config import counted
from infcl.data.config import DataConfig
from infcl.data.index import MAX_IMAGE_BYTES, MAX_TEXT_BYTES, SampleKeys, find_samples
from infcl.data.plan import Share, random_order
from infcl.data.records import BadSample, Record, read_members
from infcl.data.samples import DecodedSample, SampleDecoder
from infcl.data.shards import expand_shards
from infcl.data.storage import ShardFault, ShardFile, open_copy
from infcl.data.workers import NoBatch, ReadLog, Source, WorkerBoard, make_dataloader

_log = logging.getLogger(__name__)
_SHUFFLE_BUFFER = 2048  # undecoded samples
_BAD_IN_A_ROW = 10_000  # stop the run


def stream_records(
    urls: Sequence[str],
    keys: SampleKeys,
    failed: Callable[[str, str, Exception], None],
    *,
    on_part: Callable[[int], None] = lambda part: None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of every sample, in order; with `world_size` > 1, of samples rank, rank + world_size, ...

    Args:
        urls: the shards.
        keys: which members of a shard form a sample.
        failed: called with (cause, url, error) for each shard that cannot be opened or is damaged.
        on_part: called with the number of each shard before it is read.
        rank, world_size: of the members of other samples only the headers are read.
    """
    first = rank  # row of the next sample in its shard
    for number, url in enumerate(urls):
        on_part(number)
        try:
            with contextlib.closing(open_copy(url)) as file:
                rows, _, damage = find_samples(file.pread, file.file_bytes, url, keys)
                if damage:
                    failed("damaged_shard", url, ValueError(f"{url}: {damage}"))
                own = islice(rows.items(), first, None, world_size)
                first = (first - len(rows)) % world_size
                for key, row in own:
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
    """One pass over this worker's shards, as micro-batches; the last one may have fewer samples, or be None."""

    def __init__(self, shards: list[str], decoder: SampleDecoder, share: Share, board: WorkerBoard):
        self.shards, self.decoder, self.share, self.board = shards, decoder, share, board
        self.epoch, self.passes, self.done = 0, 0, 0.0  # the epoch, its passes so far, and the part of this one to skip

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor] | None, ReadLog] | NoBatch]:
        try:
            yield from self._micro_batches()
        except NoBatch as failure:  # if raised, the rank would get a traceback as the message
            yield failure

    def _micro_batches(self) -> Iterator[tuple[dict[str, torch.Tensor] | None, ReadLog]]:
        log: ReadLog = {"skipped": [], "noted": []}
        samples, ids, in_a_row = [], [], 0
        for _, record in self._records(log):
            number = int.from_bytes(hashlib.blake2b(record.where.encode(), digest_size=8).digest(), "big") >> 1
            try:
                samples.append(self.decoder.decode(record, self.epoch + (self.passes << 32), number, log))
                ids.append(number)
                in_a_row = 0
            except BadSample as bad:
                log["skipped"].append((bad.cause, record.shard, f"{record.where}: {bad}"))
                in_a_row += 1
                if in_a_row == _BAD_IN_A_ROW:
                    last = f"{bad.cause}: {record.where}: {bad}"
                    raise NoBatch.after(in_a_row, last, storage_fails=record.fault is not None) from bad
            if len(samples) == self.share.rows:
                yield self._batch(samples, ids, log)
                samples, ids, log["skipped"], log["noted"] = [], [], [], []
        yield self._batch(samples, ids, log)

    def _batch(
        self, samples: list[DecodedSample], ids: list[int], log: ReadLog
    ) -> tuple[dict[str, torch.Tensor] | None, ReadLog]:
        batch = self.decoder.batch(samples, ids, log) if samples else None
        self.board.rests()
        return batch, dict(log)

    def _records(self, log: ReadLog) -> Iterable[tuple[str, Record]]:
        import webdataset

        order = random_order(len(self.shards), self.decoder.seed, self.epoch).tolist()
        rng = random.Random(f"{self.decoder.seed} {self.epoch} {self.passes}")

        def failed(cause: str, url: str, error: Exception) -> None:
            log["skipped"].append((cause, url, str(error)))

        def records(numbers: Iterable[dict[str, str]]) -> Iterator[tuple[str, Record]]:
            mine = [int(each["url"]) for each in numbers]
            mine = rng.sample(mine, len(mine)) if self.passes else mine[int(len(mine) * self.done) :]
            urls = [self.shards[number] for number in mine]
            return stream_records(urls, self.decoder.keys, failed, on_part=lambda at: self.board.reads(mine[at]))

        return webdataset.DataPipeline(
            webdataset.SimpleShardList([str(number) for number in order]),  # the same for all passes of an epoch
            webdataset.slice(self.share.reader, None, self.share.readers),
            webdataset.split_by_worker,
            records,
            webdataset.shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER, rng=rng),
        )


class StreamingSource(Source):
    """Source on a DataLoader over a StreamingDataset. Workers restart each epoch with a copy of the current dataset."""

    board: WorkerBoard

    def __init__(self, data: DataConfig, decoder: SampleDecoder, share: Share):
        assert data.num_samples is not None, "checked with the flags"
        shards = expand_shards(data.urls, allow_pipe=data.allow_pipe)
        readers = share.readers * max(1, data.workers)
        if len(shards) < readers:
            raise ValueError(
                f"{counted(len(shards), 'shard')} cannot feed {counted(share.readers, 'rank')} x "
                f"{counted(max(1, data.workers), 'worker')}: the streaming reader needs {readers}; use fewer "
                "workers, or the indexed reader"
            )
        self.num_samples, self.found = data.num_samples, {}
        self.steps_per_epoch = share.steps_per_epoch(self.num_samples, f"an epoch has {self.num_samples} samples")
        self.sha256, self.about = hashlib.sha256("\n".join(shards).encode()).hexdigest(), counted(len(shards), "shard")
        self.board = WorkerBoard(data.workers, shards.__getitem__)
        self._dataset, self._share = StreamingDataset(shards, decoder, share, self.board), share
        self._loader = make_dataloader(
            self._dataset,
            num_workers=data.workers,
            item_bytes=decoder.batch_bytes(share.rows),
            node_readers=share.node_readers,
            timeout=data.timeout,
        )

    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        assert not again, "a stream is read once"
        while True:
            left = (self.steps_per_epoch - step) * self._share.batch.num_micro_batches
            yield from islice(self._passes(epoch, step / self.steps_per_epoch), left)
            epoch, step = epoch + 1, 0

    def _passes(self, epoch: int, done: float) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        """Yield micro-batches of `epoch`. All workers end their pass over the shards before the next one begins."""
        parts: list[dict[str, torch.Tensor]] = []  # the last, smaller micro-batches of workers
        pending: ReadLog = {"skipped": [], "noted": []}
        for passes in count():
            self._dataset.epoch, self._dataset.passes, self._dataset.done = epoch, passes, 0.0 if passes else done
            first, samples = passes > 0, 0
            for batch, log in self.board.watch(self._loader):
                pending = {name: pending[name] + log[name] for name in pending}
                if batch is None:
                    continue
                samples += len(batch["ids"])
                batch["again"] = torch.full_like(batch["ids"], passes > 0)
                if (
                    len(batch["ids"]) < self._share.rows or first
                ):  # the first one of a pass takes what the last one left
                    batch, parts = _merged([*parts, batch], self._share.rows)
                if batch is not None:
                    first, repeated = False, int(batch.pop("again").sum())
                    pending["noted"] += ["repeated"] * repeated
                    yield batch, pending
                    pending = {"skipped": [], "noted": []}
            if not samples and (passes or not done):
                bad = pending["skipped"] or [("no_sample", "the shards", "they are empty")]
                last = "; ".join(f"{cause}: {url}: {why.removeprefix(f'{url}: ')}" for cause, url, why in bad[-3:])
                storage_fails = any(cause.startswith("shard_") for cause, _, _ in bad)
                raise NoBatch.after(len(bad), last, storage_fails=storage_fails)
            if passes == 0:
                _log.warning("the shards of a rank ended before epoch %d and are repeated (noted/repeated)", epoch)


def _merged(
    parts: list[dict[str, torch.Tensor]], rows: int
) -> tuple[dict[str, torch.Tensor] | None, list[dict[str, torch.Tensor]]]:
    """Return a micro-batch of `rows` samples, or None if the parts have fewer; and the parts that are left."""
    if sum(len(part["ids"]) for part in parts) < rows:
        return None, parts
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    size = len(whole["ids"])
    cut = {name: rows * (len(value) // size) for name, value in whole.items()}
    left = {name: value[cut[name] :] for name, value in whole.items()}
    return {name: value[: cut[name]] for name, value in whole.items()}, [left] if size > rows else []
