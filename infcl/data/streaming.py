"""The streaming reader: webdataset's own pipeline, for storage that cannot seek (`pipe:`, http) and for evaluation.

For training, (seed, epoch) determines the order of the shards. They are split over ranks x workers, streamed, and
shuffled in a seeded buffer. A remote shard is spooled to local disk before its first sample is used. A transfer that
breaks off, stalls or has the wrong length is therefore repeated, and no sample of it is used.

Unlike the indexed reader, this one does not have:
- an exact resume inside an epoch: it starts at about the shard of that step and yields the remaining number of steps;
- each sample exactly once per epoch: a rank that finishes its shards early reads them again, so that all ranks make
  the same number of steps;
- independence of the number of workers.

webdataset's decoders are never used, because they unpickle; see samples.py.
"""

import hashlib
import json
import os
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from infcl.config import counted
from infcl.data.config import DataConfig
from infcl.data.index import MAX_IMAGE_BYTES, SIDECAR, SampleKeys, scan_shard, split_name
from infcl.data.plan import Share, random_order
from infcl.data.records import BadSample, Record
from infcl.data.remote import local_copy
from infcl.data.samples import ReadLog, SampleDecoder
from infcl.data.shards import find_shards
from infcl.data.storage import DEFAULT_STORAGE, ShardFault, StorageOptions, is_remote, open_regular
from infcl.data.workers import NoBatch, WorkerBoard, make_dataloader

_MAX_NAME = 4096  # characters of a member's name; webdataset's grouping is slow on longer ones
_META = re.compile(r"__[^/]*__($|/)")  # metadata members of webdataset
_MAX_EXTENDED_HEADER = 1 << 20  # bytes of a PAX header or of a GNU long name, which tarfile reads into memory
_MAX_EXPANSION, _SMALLEST_LIMIT = 100, 1 << 30  # limits when a shard is decompressed: ratio, bytes
_MAX_COUNTS = 64 << 20  # bytes read of a file with sample counts
_SHUFFLE_BUFFER = 2048  # undecoded samples
_BAD_PER_MICRO_BATCH = 8  # times its size: more bad samples than that stop the run


def stream_records(
    urls: Sequence[str],
    keys: SampleKeys,
    failed: Callable[[str, str, Exception], None],
    *,
    storage: StorageOptions = DEFAULT_STORAGE,
    on_part: Callable[[int], None] = lambda part: None,
) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of every sample, in order.

    Args:
        urls: the shards.
        keys: which members of a shard form a sample.
        failed: called with (cause, url, error) for each shard that cannot be opened or is damaged.
        storage: time-outs, attempts and the spool.
        on_part: called with the number of each shard before it is read.
    """
    from webdataset.tariterators import group_by_keys

    images, texts = keys.image.lower().split(";"), keys.text.lower().split(";")
    wanted = {*images, *texts, "json"}
    current, damaged = "", set()

    def select(name: str) -> bool:
        return len(name) <= _MAX_NAME and split_name(name)[1] in wanted and not _META.match(name)

    def handler(error: Exception) -> bool:
        if current not in damaged:  # damaged shards are already reported, with a clearer message
            failed("damaged_shard", current, error)
        return True

    def opened() -> Iterator[BinaryIO]:
        nonlocal current
        for number, current in enumerate(urls):
            on_part(number)
            try:
                path = local_copy(current, storage)
                if damage := _damage(path, keys):  # tarfile stops silently at damage
                    damaged.add(current)
                    failed("damaged_shard", current, ValueError(f"{current}: {damage}"))
                with open(path, "rb", opener=open_regular) as stream:
                    yield stream
            except ShardFault as fault:
                failed(fault.cause, current, fault)
            except OSError as error:
                failed("shard_unreadable", current, error)

    def members() -> Iterator[dict[str, Any]]:
        for stream in opened():
            try:
                tar = tarfile.open(fileobj=stream, mode="r|*", tarinfo=_BoundedHeader)
                most = max(_SMALLEST_LIMIT, _MAX_EXPANSION * os.fstat(stream.fileno()).st_size)
                for info in tar:
                    if info.offset_data + info.size > most:  # before tarfile skips it
                        raise tarfile.ReadError(f"{current}: more than {most / 1e9:.3g} GB, unpacked")
                    if info.isreg() and select(info.name):
                        if info.size > MAX_IMAGE_BYTES:
                            what = f"{current}: {ascii(info.name)} has {info.size} bytes, {MAX_IMAGE_BYTES} allowed"
                            failed("image_file_too_large", current, ValueError(what))
                        elif file := tar.extractfile(info):
                            yield {"fname": info.name, "data": file.read(), "__url__": current}
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all in memory
            except Exception as error:  # tarfile raises many types on damage
                handler(error)
            yield {}  # ends the last sample: the next shard may begin with the same key

    for sample in group_by_keys(members(), handler=handler):
        image = next((sample[e] for e in images if e in sample), None)
        text = next((sample[e] for e in texts if e in sample), None)
        key = sample["__key__"].encode("utf-8", "backslashreplace").decode()  # a name may be any bytes
        url = sample["__url__"]
        yield key, Record(image, text, sample.get("json"), f"{url} {key}", url)


class _BoundedHeader(tarfile.TarInfo):
    """A tar header of bounded size: an extended header above the limit marks the shard as damaged."""

    _EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in self._EXTENDED and self.size > _MAX_EXTENDED_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes, {_MAX_EXTENDED_HEADER} allowed")
        return super()._proc_member(archive)  # type: ignore[misc]


def _damage(path: str, keys: SampleKeys) -> str | None:
    """Return the damage of a tar, or None if it is intact or compressed."""
    try:
        return scan_shard(path, keys).damage
    except ValueError:  # compressed: damage shows only when it is read
        return None


class StreamingDataset(torch.utils.data.IterableDataset):
    """Endless stream of one worker's micro-batches in `epoch`. The source takes as many as the rank needs."""

    def __init__(
        self, shards: list[str], decoder: SampleDecoder, share: Share, storage: StorageOptions, board: WorkerBoard
    ):
        self.shards, self.decoder, self.share, self.storage, self.board = shards, decoder, share, storage, board
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
                yield batch, {kind: entries[:] for kind, entries in log.items()}
                samples, ids = [], []
                for entries in log.values():
                    entries.clear()

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
            stream = stream_records(mine, self.decoder.keys, failed, storage=self.storage, on_part=on_part)
            for _, record in shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER, rng=rng)(stream):
                yield record
            if record is None:
                raise NoBatch(
                    f"no sample in any of the {counted(len(mine), 'shard')} of a worker; the last ones: "
                    + "; ".join(f"{url}: {why.removeprefix(f'{url}: ')}" for _, url, why in log["skipped"][-3:])
                )


class StreamingSource:
    """Source on a DataLoader over a StreamingDataset. Workers restart each epoch with a copy of the current dataset."""

    repeats = False

    def __init__(
        self,
        data: DataConfig,
        decoder: SampleDecoder,
        share: Share,
    ):
        num_samples, storage = data.num_samples, data.storage
        sources, missing = find_shards(data.urls, allow_pipe=storage.allow_pipe, max_missing=data.max_missing_shards)
        shards = list(chain.from_iterable(sources))
        readers = share.readers * max(1, data.workers)
        if num_samples is None:
            num_samples = known_samples(shards)
        if num_samples is None:
            raise ValueError(
                "the streaming reader cannot count samples: say how many make an epoch (num_samples, "
                "--train-num-samples), or put sizes.json or img2dataset's _stats.json next to the shards"
            )
        if len(shards) < readers:
            raise ValueError(
                f"{counted(len(shards), 'shard')} cannot feed {counted(share.readers, 'rank')} x "
                f"{counted(max(1, data.workers), 'worker')}: the streaming reader needs {readers}; use fewer "
                "workers, or the indexed reader"
            )
        self.num_samples, self.found = num_samples, {"index/missing_shards": len(missing)} if missing else {}
        self.steps_per_epoch = share.steps_per_epoch(num_samples, f"an epoch has {num_samples} samples")
        self.sha256, self.about = hashlib.sha256("\n".join(shards).encode()).hexdigest(), counted(len(shards), "shard")
        self.board = WorkerBoard(data.workers, data.timeout, shards.__getitem__)
        self._dataset, self._share = StreamingDataset(shards, decoder, share, storage, self.board), share
        self._loader = make_dataloader(
            self._dataset,
            num_workers=data.workers,
            prefetch_factor=data.prefetch_factor,
            item_bytes=decoder.batch_bytes(share.rows),
            timeout=data.timeout if data.workers else 0,
        )

    def micro_batches(
        self, epoch: int, step: int, again: range = range(0)
    ) -> Iterator[tuple[dict[str, torch.Tensor], ReadLog]]:
        assert not again, "a stream is read once"
        self._dataset.epoch, self._dataset.done = epoch, step / self.steps_per_epoch
        return islice(self.board.watch(self._loader), (self.steps_per_epoch - step) * self._share.num_micro_batches)

    def exactly(self, epoch: int, first: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        raise AssertionError("a stream is read once")


def known_samples(shards: Sequence[str]) -> int | None:
    """Return the number of samples in all shards from the files next to them, or None if a count is unknown.

    The count of a local shard comes from the first of: its index (`SHARD.tar.infcl.idx`), `sizes.json` in its folder
    ({file: number}), img2dataset's `SHARD_stats.json` ("successes"). If a count is missing and the shards are all tars
    of one folder, the total comes from the file `__len__` in that folder.
    """
    if any(is_remote(shard) for shard in shards):
        return None
    paths = [Path(shard) for shard in shards]
    sizes = {folder: _read_json(folder / "sizes.json") for folder in {path.parent for path in paths}}
    counts = [_known_of_shard(path, sizes[path.parent]) for path in paths]
    if None not in counts:
        return sum(cast(list[int], counts))
    folder = paths[0].parent
    if {path.parent for path in paths} == {folder} and len(set(paths)) == len(list(folder.glob("*.tar"))):
        return _as_count(_read(folder / "__len__").strip())
    return None


def _known_of_shard(path: Path, sizes: dict) -> int | None:
    found = (
        _read_json(Path(f"{path}{SIDECAR}"), first_line=True).get("samples"),
        sizes.get(path.name),
        _read_json(Path(f"{str(path).removesuffix('.tar')}_stats.json")).get("successes"),
    )
    return next((count for value in found if (count := _as_count(value)) is not None), None)


def _as_count(value: Any) -> int | None:
    if isinstance(value, (str, bytes)):
        return int(value) if value.isdigit() else None
    return int(value) if isinstance(value, (int, float)) else None


def _read_json(path: Path, *, first_line: bool = False) -> dict:
    data = _read(path)
    try:
        value = json.loads(data.partition(b"\n")[0] if first_line else data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> bytes:
    """Return the first 64 MiB of a file, or b"" if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(_MAX_COUNTS)
    except (OSError, ShardFault):
        return b""
