"""The plan of an epoch: in which order the samples of all shards are read, as a pure function of integers.

In:  samples per shard, seed, epoch, chunk size; upsampling factors.
Out: the global sample numbers of any range of positions; sample numbers count through the shards in their given order.
How: each shard is cut into chunks of consecutive samples, the chunks of all shards are permuted by (seed, epoch), and
     prefix sums of their lengths turn a position into a sample. Step s of rank r, out of global batches of GB samples
     and LB samples per rank, is the range of positions [s*GB + r*LB, s*GB + (r+1)*LB): exactly once per epoch, equal
     counts on all ranks, the same global batches at every world size, and a resume is arithmetic.

Only raw output of the Philox counter generator is used (numpy guarantees that it never changes), not numpy's
distributions (which may change between releases).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_SUBSET_STREAM = 1 << 32  # of `draw`: which part of a source an epoch sees once more


@dataclass(frozen=True)
class Share:
    """One data-parallel rank's part of every step: M micro-batches of m samples.

    Where several processes hold such a rank together (tensor parallelism), each reads m / parts samples of every
    micro-batch: the part-th ones.
    """

    micro_batch_size: int
    num_micro_batches: int
    rank: int
    world_size: int
    part: int = 0
    parts: int = 1

    def __post_init__(self):
        if (
            min(self.micro_batch_size, self.num_micro_batches, self.world_size) < 1
            or not 0 <= self.rank < self.world_size
        ):
            raise ValueError(f"sizes must be at least 1 and 0 <= rank < world_size: {self}")
        if not 0 <= self.part < self.parts or self.micro_batch_size % self.parts:
            raise ValueError(f"{self.parts} parts must divide a micro-batch of {self.micro_batch_size}: {self}")

    @property
    def rows(self) -> int:
        """Samples of a micro-batch that this process reads."""
        return self.micro_batch_size // self.parts

    @property
    def reader(self) -> int:
        """This process among all `readers`."""
        return self.rank * self.parts + self.part

    @property
    def readers(self) -> int:
        return self.world_size * self.parts

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.num_micro_batches * self.micro_batch_size

    def steps_per_epoch(self, num_samples: int, where: str) -> int:
        """Whole global batches in an epoch. Raises ValueError if there is none; `where` says what was counted."""
        if num_samples < self.global_batch_size:
            sizes = f"{self.world_size} x {self.num_micro_batches} x {self.micro_batch_size}"
            raise ValueError(
                f"{where}, fewer than one global batch of {self.global_batch_size} (data-parallel ranks x "
                f"micro-batches x samples: {sizes}): use a smaller batch or more data"
            )
        return num_samples // self.global_batch_size

    def positions(self, first_step: int, last_step: int, again: range = range(0)) -> Iterator[int]:
        """The first position of what this process reads of each micro-batch in the steps [first_step, last_step).

        Those of the micro-batches `again` come a second time behind each step's.
        """
        for step in range(first_step, last_step):
            first = (step * self.world_size + self.rank) * self.num_micro_batches  # counted in micro-batches
            for index in (*range(self.num_micro_batches), *again):
                yield (first + index) * self.micro_batch_size + self.part * self.rows


def chunk_size(global_batch_size: int) -> int:
    """Consecutive samples read together: as long as a batch still mixes at least 512 independent chunks, at most 256.

    The contrastive loss does not depend on the order inside a global batch, so chunks cost no randomness beyond which
    samples share a batch; longer reads are kinder to disks and object stores.
    """
    return max(1, min(256, global_batch_size // 512))


def epoch_size(counts: np.ndarray, factors: np.ndarray | None = None) -> int:
    """Return samples in an epoch: of each source, floor(factor) times all of them and the rounded rest."""
    if factors is None:
        return int(np.sum(counts))
    totals = {factor: int(np.sum(counts[factors == factor])) for factor in np.unique(factors).tolist()}
    return sum(int(f) * total + round((f - int(f)) * total) for f, total in totals.items())


class EpochPlan:
    """The permutation of one epoch. Memory: 20 bytes per chunk; 2 billion samples in chunks of 64 plan in seconds.

    `factors` (float [shards], default all 1) say how often an epoch sees a sample of each shard: 2.5 is twice every
    sample and once more a half of them, another half in every epoch. An epoch has `epoch_size` samples.
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
        """Global sample numbers, int64 [stop - start], of the positions [start, stop)."""
        assert 0 <= start <= stop <= self.num_samples, (start, stop, self.num_samples)
        position = np.arange(start, stop)
        chunk = np.searchsorted(self._start, position, side="right") - 1
        return self._first[chunk] + position - self._start[chunk]


def _upsampled(length: np.ndarray, factor: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(which chunks, how many samples of each) for chunks of `length` and `factor` [chunks]."""
    copies, lengths = [], []
    for group, value in enumerate(np.unique(factor).tolist()):
        chunks = np.flatnonzero(factor == value)
        copies += [chunks] * int(value)
        lengths += [length[chunks]] * int(value)
        wanted = round((value - int(value)) * int(length[chunks].sum()))
        raw = draw(seed, epoch, group, stream=_SUBSET_STREAM, count=len(chunks))
        some = chunks[np.argsort(raw, kind="stable")]
        before = np.cumsum(length[some]) - length[some]
        some = some[before < wanted]
        copies.append(some)
        lengths.append(np.minimum(length[some], wanted - before[: len(some)]))
    return np.concatenate(copies), np.concatenate(lengths)


def random_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(count), int64 [count], determined by (seed, epoch)."""
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def draw(seed: int, epoch: int, position: int, *, stream: int, count: int) -> np.ndarray:
    """`count` independent uint64 numbers that belong to one position of one epoch; `stream` separates their uses."""
    counter = np.array([0, position, stream, 1], dtype=np.uint64)  # the plan's own draws have 0 in the last word
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter).random_raw(count)


def uniforms(raw: np.ndarray) -> np.ndarray:
    """uint64 -> float64 in [0, 1)."""
    return (raw >> np.uint64(11)) * 2.0**-53
