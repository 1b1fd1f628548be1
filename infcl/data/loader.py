"""Loaders: the training loop iterates over them. Their state is {epoch, step}.

    loader = TrainLoader(flags, tokenizer, share, image_size=224)
    loader.set_position(*divmod(global_step, loader.steps_per_epoch))
    for micro_batches in loader:      # a list of M dicts per step, until the epoch ends

A micro-batch is a dict of tensors (samples.SampleDecoder), in pinned memory if there is a GPU. An epoch has
num_samples // global_batch_size steps; the remainder is a different one in every epoch.

With the default reader, the samples of a rank at (epoch, step) are a pure function of the seed, the shards and the
batch sizes, and the global batch does not depend on the number of ranks.
"""

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from infcl.config import TrainConfig, parse_factors
from infcl.data.config import keys_of, limits_of, texts_of
from infcl.data.images import DEFAULT_LIMITS
from infcl.data.indexed import IndexedSource
from infcl.data.plan import Share
from infcl.data.records import ShardReader
from infcl.data.samples import SampleDecoder
from infcl.data.shards import Shard, load_manifest
from infcl.data.streaming import StreamingSource
from infcl.data.table import TableReader, columns_of
from infcl.data.tokenizer.open_clip import AnyTokenizer
from infcl.data.transforms import TrainTransform
from infcl.data.workers import MicroBatch, ReadLog, Source

_log = logging.getLogger(__name__)

_WINDOW = 10_000  # samples over which the fraction of bad samples is computed
_BAD_ALLOWED = 10  # bad samples per window that never stop a run: 1% of a small data set may be less than one sample
_WORST_SHARDS = 5  # listed by StepLoader.table
_SECONDS_BETWEEN_WARNINGS = 60.0  # about the same cause


class TooManyBadSamples(RuntimeError):
    """More than --max-bad-fraction of a window, and more than `_BAD_ALLOWED`, samples are bad.

    The message is one line, then a table of causes.
    """


class StepLoader:
    """Position, state and report of a loader. TrainLoader makes its source from the flags.

    Attributes: steps_per_epoch, num_samples (of the data set, over all ranks), about (describes the size of the data),
    repeats (whether `steps(again)` works).
    """

    def __init__(
        self, source: Source, share: Share, *, seed: int, max_bad_fraction: float = 1.0, tokenizer_sha256: str = ""
    ):
        self.steps_per_epoch, self.num_samples = source.steps_per_epoch, source.num_samples
        self.repeats, self.about = source.repeats, source.about
        self._source, self._share, self._max_bad_fraction = source, share, max_bad_fraction
        self._fingerprint = {
            "seed": seed,
            "global_batch_size": share.batch.global_batch_size,
            "manifest_sha256": source.sha256,
            "tokenizer_sha256": tokenizer_sha256,
        }
        self._counts = Counter({"samples": 0, **source.found})
        self._examples: dict[str, str] = {}
        self._by_shard: Counter[tuple[str, str]] = Counter()  # (shard, cause)
        self._next_warning: dict[str, float] = {}
        self._memory_mb: dict[int, float] = {}
        self._window = min(_WINDOW, self.steps_per_epoch * share.batch.num_micro_batches * share.rows)
        self._window_good, self._window_bad = 0, 0
        self.too_many_bad: TooManyBadSamples | None = None  # raised after all micro-batches of the step are consumed
        self._epoch, self._step = 0, 0
        # where an epoch ended (epoch, step, again), and the source, whose workers read the next epoch meanwhile
        self._ahead: tuple[tuple[int, int, range], Iterator[tuple[MicroBatch, ReadLog]]] | None = None

    def __len__(self) -> int:
        """Return the number of steps left in the current epoch."""
        return self.steps_per_epoch - self._step

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Yield the remaining steps of the current epoch. Inside the loop, the position is that of the next step."""
        for step in self.steps():
            yield list(step)

    def steps(self, again: range = range(0)) -> Generator[Iterator[MicroBatch], None, None]:
        """Yield the remaining steps of the current epoch, each as an iterator that reads its M micro-batches lazily.

        The caller must exhaust a step before it takes the next one.

        Args:
            again: indices of the micro-batches that come a second time at the end of the step, bit-identical. If a
                read fails in only one of the two passes, the samples of the first pass are used.

        Raises:
            ValueError: `again` is not empty, and the source cannot read micro-batches twice.
            TooManyBadSamples: after a step with too many bad samples.
        """
        if again and not self._source.repeats:
            raise ValueError("--dataset-type streaming cannot read micro-batches a second time; use webdataset")
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != (self._epoch, self._step, again):
            ahead = None  # its workers end before others start
            source = self._source.micro_batches(self._epoch, self._step, again)
        else:
            source = ahead[1]
        for _ in range(len(self)):
            position = self._epoch * self.steps_per_epoch + self._step + 1
            self._epoch, self._step = divmod(position, self.steps_per_epoch)
            yield self._one_step(source, again)
            if self.too_many_bad:
                raise self.too_many_bad
        self._ahead = (self._epoch, self._step, again), source

    def _one_step(self, source: Iterator[tuple[MicroBatch, ReadLog]], again: range) -> Iterator[MicroBatch]:
        for index in range(self._share.batch.num_micro_batches + len(again)):
            batch, log = next(source)
            if index < self._share.batch.num_micro_batches:
                self._account(batch, log)
            yield batch

    def set_position(self, epoch: int, step: int) -> None:
        """Set the step that is yielded next. Raises ValueError outside 0 <= step < steps_per_epoch."""
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"no step {step} in epoch {epoch}: an epoch has {self.steps_per_epoch} steps")
        self._epoch, self._step = epoch, step

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the fingerprint of the data, batch size, seed and tokenizer."""
        return {"epoch": self._epoch, "step": self._step, "data": self.about, **self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position at which `state` was taken.

        Raises ValueError if the seed, global batch size, data or tokenizer differs.
        """
        different = [
            f"{name} is {value!r} now and was {state.get(name)!r}"
            for name, value in self._fingerprint.items()
            if state.get(name) != value
        ]
        if different:
            if state.get("data", self.about) != self.about:
                different.append(f"now {self.about}, then {state.get('data')}")
            raise ValueError(
                f"cannot continue inside an epoch of other data: {'; '.join(different)}. Give what it was, or start "
                "from its weights under another --name: --pretrained RUN"
            )
        self.set_position(state["epoch"], state["step"])

    def report(self) -> dict[str, int]:
        """Return this rank's counters since the start.

        "samples" counts the samples used, "skipped/<cause>" bad samples that were replaced, and "noted/<cause>" samples
        used despite a minor problem. "index/<cause>" counts samples left out when the shards were indexed, and
        "index/damaged_shards" the damaged shards. The index counters are the same on every rank.
        """
        return dict(self._counts)

    def table(self) -> str:
        """Return the report as text: the counters, an example per cause, and the shards with the most bad samples."""
        lines = [f"{count:>10}  {name:<36} {self._examples.get(name, '')}" for name, count in self._counts.items()]
        worst = self._by_shard.most_common(_WORST_SHARDS)
        lines += [f"{count:>10}  skipped/{cause} in {shard}" for (shard, cause), count in worst]
        return "\n".join(line.rstrip() for line in lines)

    def worker_memory_mb(self) -> list[float]:
        """Return the resident memory (MB) of each worker process after its last batch; empty before the first."""
        return list(self._memory_mb.values())

    def _account(self, batch: MicroBatch, log: ReadLog) -> None:
        size, bad = len(batch["ids"]), len(log["skipped"])
        self._counts["samples"] += size
        self._memory_mb.update(log["memory_mb"])
        for cause, shard, message in log["skipped"]:
            name = f"skipped/{cause}"
            self._counts[name] += 1
            self._by_shard[shard, cause] += 1
            self._examples.setdefault(name, message)
            if time.monotonic() >= self._next_warning.get(cause, 0.0):
                self._next_warning[cause] = time.monotonic() + _SECONDS_BETWEEN_WARNINGS
                _log.warning("skipped a sample, %s (%d so far): %s", cause, self._counts[name], message)
        for cause in log["noted"]:
            self._counts[f"noted/{cause}"] += 1
        self._window_good, self._window_bad = self._window_good + size, self._window_bad + bad
        seen = self._window_good + self._window_bad
        judged = max(seen, self._window)  # stop as soon as the full window must exceed the limit
        if self._window_bad > max(_BAD_ALLOWED, self._max_bad_fraction * judged):
            self.too_many_bad = self.too_many_bad or TooManyBadSamples(
                f"{self._window_bad} of the last {seen} samples of this rank were bad, more than --max-bad-fraction "
                f"{self._max_bad_fraction:g} allows of {judged:,} "
                f"(a window is {self._window:,}; {_BAD_ALLOWED} may always be):\n" + self.table()
            )
        if seen >= self._window:
            self._window_good = self._window_bad = 0


class TrainLoader(StepLoader):
    """Loader of image-text pairs from webdataset shards or a table of files: m * M samples per step and rank.

    Args:
        flags: of the run; their `workers` is a number.
        image_size: side S of the square images, in pixels.
        teacher: tokenizer of a teacher, see SampleDecoder.
        indexed: the shards that other processes of this node have indexed (shards.load_manifest).

    Raises:
        ValueError: shards are missing, there are too few samples for one global batch, or (streaming) there are too few
            shards for ranks x workers.
    """

    def __init__(
        self,
        flags: TrainConfig,
        tokenizer: AnyTokenizer,
        share: Share,
        *,
        image_size: int,
        teacher: AnyTokenizer | None = None,
        indexed: Mapping[str, Shard] | None = None,
    ):
        decoder = SampleDecoder(
            tokenizer,
            TrainTransform(image_size, **flags.aug_cfg),
            seed=flags.seed,
            keys=keys_of(flags),
            limits=limits_of(flags, DEFAULT_LIMITS),
            texts=texts_of(flags),
            teacher=teacher,
        )
        source: Source
        if flags.dataset_type == "streaming":
            source = StreamingSource(flags, decoder, share)
        else:
            source = IndexedSource(open_collection(flags, indexed), flags, decoder, share)
        bad, sha256 = flags.max_bad_fraction, tokenizer.sha256
        super().__init__(source, share, seed=flags.seed, max_bad_fraction=bad, tokenizer_sha256=sha256)


def open_collection(flags: TrainConfig, indexed: Mapping[str, Shard] | None = None) -> ShardReader | TableReader:
    """Return the reader of the samples of --train-data by number. Raises ValueError if it cannot be read."""
    assert flags.train_data is not None, "checked with the flags"
    factors, keys = parse_factors(flags.train_data_upsampling_factors), keys_of(flags)
    if flags.dataset_type == "csv":
        return TableReader(flags.train_data, columns=columns_of(flags), factors=factors)
    options: dict[str, Any] = {"index_cache": flags.index_cache, "indexed": indexed}
    manifest = load_manifest(flags.train_data, factors=factors, keys=keys, **options)
    return ShardReader(manifest, keys, needs_json=texts_of(flags).needs_json)
