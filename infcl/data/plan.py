"""The plan of an epoch: the order in which the samples of all shards are read, as a pure function of integers.

In:  samples per shard, seed, epoch, chunk size; upsampling factors.
Out: the global sample numbers of any range of positions. Sample numbers continue from shard to shard, in their order.
How: each shard is cut into chunks of consecutive samples, and (seed, epoch) permutes the chunks of all shards. Prefix
     sums of the chunk lengths turn a position into a sample number. With GB samples per global batch and LB samples per
     rank, step s of rank r is the range of positions [s*GB + r*LB, s*GB + (r+1)*LB). So each sample occurs exactly once
     per epoch (without upsampling), all ranks have equal counts, and the world size does not change the global batches.
     A resume is arithmetic.

Only raw output of the Philox counter generator is used, which numpy guarantees never to change. numpy's distributions
may change between releases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from infcl.config import BatchPlan

_SUBSET_STREAM = 1 << 32  # of `draw`: selects the fraction of a source that is repeated in an epoch


@dataclass(frozen=True)
class Share:
    """One data-parallel rank's share of every step: M micro-batches of m samples.

    With tensor parallelism, `parts` processes form one such rank. Each reads m / parts samples of every micro-batch.

    Args:
        part, parts: index of this process in its rank, and the number of processes per rank.
        node_readers: processes on this node, which share its memory.
    """

    batch: BatchPlan
    rank: int
    part: int = 0
    parts: int = 1
    node_readers: int = 1

    def __post_init__(self):
        assert self.batch.rank_batch_size > 0 and self.batch.micro_batch_size % self.parts == 0, self
        assert 0 <= self.rank < self.batch.dp_size and 0 <= self.part < self.parts, self

    @property
    def rows(self) -> int:
        """Number of samples that this process reads per micro-batch."""
        return self.batch.micro_batch_size // self.parts

    @property
    def reader(self) -> int:
        """Index of this process among all `readers`."""
        return self.rank * self.parts + self.part

    @property
    def readers(self) -> int:
        """Number of processes that read, over all ranks."""
        return self.batch.dp_size * self.parts

    def steps_per_epoch(self, num_samples: int, where: str) -> int:
        """Return the number of full global batches per epoch. Raises ValueError (with `where`) if it is 0."""
        batch, size = self.batch, self.batch.global_batch_size
        if num_samples < size:
            sizes = f"{batch.dp_size} x {batch.num_micro_batches} x {batch.micro_batch_size}"
            raise ValueError(
                f"{where}, fewer than one global batch of {size} (data-parallel ranks x "
                f"micro-batches x samples: {sizes}): use a smaller batch or more data"
            )
        return num_samples // size

    def positions(
        self, epoch: int, step: int, steps_per_epoch: int, again: range = range(0)
    ) -> Iterator[tuple[int, int]]:
        """Yield (epoch, first position that this process reads) of each micro-batch from `step` on, without an end.

        At the end of each step, the positions of its micro-batches `again` are repeated.
        """
        for number in count(epoch * steps_per_epoch + step):
            epoch, step = divmod(number, steps_per_epoch)
            first = step * self.batch.global_batch_size + self.rank * self.batch.rank_batch_size
            for index in (*range(self.batch.num_micro_batches), *again):
                yield epoch, first + index * self.batch.micro_batch_size + self.part * self.rows


def chunk_size(global_batch_size: int) -> int:
    """Return the samples per chunk: at most 256, and small enough that a global batch mixes at least 512 chunks.

    Chunks are read with one call, which suits disks and object stores. The contrastive loss does not depend on the
    order inside a global batch, so chunks only affect which samples share a batch.
    """
    return max(1, min(256, global_batch_size // 512))


def epoch_size(counts: np.ndarray, factors: np.ndarray) -> int:
    """Return the samples per epoch: for each factor, floor(factor) x its samples plus the rounded rest."""
    totals = {factor: int(np.sum(counts[factors == factor])) for factor in np.unique(factors).tolist()}
    return sum(int(f) * total + round((f - int(f)) * total) for f, total in totals.items())


class EpochPlan:
    """The permutation of one epoch. It takes 20 bytes per chunk, and seconds for 2 billion samples in chunks of 64.

    Args:
        counts: samples per shard, [shards].
        chunk: consecutive samples that stay together.
        seed, epoch: determine the order.
        factors: float [shards], default 1: how often the epoch contains each sample of a shard. With 2.5, it contains
            every sample twice and half of them a third time; the half differs between epochs.

    Attributes: num_samples (`epoch_size`).
    """

    def __init__(
        self,
        counts: Sequence[int] | np.ndarray,
        *,
        chunk: int,
        seed: int,
        epoch: int,
        factors: np.ndarray | None = None,
    ):
        counts = np.asarray(counts, dtype=np.int64)  # [shards]
        chunks_per_shard = -(-counts // chunk)
        shard = np.repeat(np.arange(len(counts)), chunks_per_shard)  # [chunks]
        first_chunk = np.cumsum(chunks_per_shard) - chunks_per_shard
        row = (np.arange(len(shard)) - first_chunk[shard]) * chunk
        length = np.minimum(chunk, counts[shard] - row)
        if factors is not None and (np.asarray(factors) != 1).any():
            copies, length = _upsampled(length, np.asarray(factors)[shard], seed, epoch)
            shard, row = shard[copies], row[copies]
        order = random_order(len(shard), seed, epoch)
        first_sample = np.cumsum(counts) - counts
        self._first = (first_sample[shard] + row)[order]  # global number of each chunk's first sample
        self._start = np.concatenate([[0], np.cumsum(length[order])])
        self.num_samples = int(self._start[-1])

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the global sample numbers, int64 [stop - start], of the positions [start, stop)."""
        assert 0 <= start <= stop <= self.num_samples, (start, stop, self.num_samples)
        position = np.arange(start, stop)
        chunk = np.searchsorted(self._start, position, side="right") - 1
        return self._first[chunk] + position - self._start[chunk]


def _upsampled(length: np.ndarray, factor: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (chunk indices with repeats, samples to read of each) for chunks of `length` and `factor` [chunks]."""
    copies, lengths = [], []
    for group, value in enumerate(np.unique(factor).tolist()):
        chunks = np.flatnonzero(factor == value)
        wanted = round((value - int(value)) * int(length[chunks].sum()))
        raw = draw(seed, epoch, group, stream=_SUBSET_STREAM, count=len(chunks))
        some = chunks[np.argsort(raw, kind="stable")]
        before = np.cumsum(length[some]) - length[some]
        some = some[before < wanted]
        copies += [chunks] * int(value) + [some]
        lengths += [length[chunks]] * int(value) + [np.minimum(length[some], wanted - before[: len(some)])]
    return np.concatenate(copies), np.concatenate(lengths)


def random_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of range(count), int64 [count], that (seed, epoch) determines."""
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def draw(seed: int, epoch: int, position: int, *, stream: int, count: int) -> np.ndarray:
    """Return `count` independent random uint64 for one position of one epoch. Each use has its own `stream`."""
    # the last word separates these draws from random_order, which has 0
    counter = np.array([0, position, stream, 1], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter).random_raw(count)


def uniforms(raw: np.ndarray) -> np.ndarray:
    """Map random uint64 to float64 in [0, 1)."""
    return (raw >> np.uint64(11)) * 2.0**-53
