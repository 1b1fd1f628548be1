"""Samples per step and steps per run: the only module that multiplies batch sizes.

global_batch_size = dp_size * num_micro_batches * micro_batch_size
"""

from collections.abc import Iterator
from dataclasses import dataclass

from infcl.config.settings import TrainConfig
from infcl.config.words import counted


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of a step.

    Attributes:
        dp_size: data-parallel ranks.
        num_micro_batches: micro-batches per rank and step.
        micro_batch_size: samples per micro-batch.
    """

    dp_size: int
    num_micro_batches: int
    micro_batch_size: int

    @classmethod
    def of(cls, config: TrainConfig, dp_size: int) -> "BatchPlan":
        """Return the plan of a run on `dp_size` data-parallel ranks.

        With --global-batch-size, micro-batches have the largest size up to --batch-size that divides a rank's share.

        Raises:
            ValueError: the global batch cannot be divided evenly among the ranks.
        """
        if config.global_batch_size is None:
            return cls(dp_size, config.accum_freq, config.batch_size)
        share, rest = divmod(config.global_batch_size, dp_size)
        if rest or not share or share % config.tensor_parallel_size:
            ranks = dp_size * config.tensor_parallel_size
            raise ValueError(
                f"--global-batch-size {config.global_batch_size} cannot be shared by {ranks} ranks: use a multiple "
                f"of {ranks}, or ranks that divide it"
            )
        micro = next(cls(dp_size, 1, share).divisors(config.batch_size, config.tensor_parallel_size))
        return cls(dp_size, share // micro, micro)

    def divisors(self, largest: int, parts: int = 1) -> Iterator[int]:
        """Yield, in descending order, sizes <= `largest` that divide a rank's share and are multiples of `parts`."""
        share = self.rank_batch_size
        return (n for n in range(min(largest, share), 0, -1) if share % n == 0 and n % parts == 0)

    def smaller_than_asked(self, config: TrainConfig) -> str | None:
        """Return a line for the user if micro-batches are smaller than --batch-size, else None."""
        parts = config.tensor_parallel_size
        wanted = min(config.batch_size, self.rank_batch_size) // parts * parts
        if self.micro_batch_size >= wanted:
            return None
        return (
            f"micro-batches of {self.micro_batch_size}, not --batch-size {config.batch_size}: the largest that divides "
            f"the {self.rank_batch_size} samples of {counted(parts, 'rank')}. A --global-batch-size that is a multiple "
            f"of {self.dp_size * wanted} makes them {wanted}"
        )

    @property
    def rank_batch_size(self) -> int:
        return self.num_micro_batches * self.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.dp_size * self.rank_batch_size

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size:,} samples per step = {counted(self.dp_size, 'data-parallel rank')} x "
            f"{counted(self.num_micro_batches, 'micro-batch', 'micro-batches')} (--accum-freq) x "
            f"{self.micro_batch_size} (--batch-size)"
        )


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of the full run."""
    return config.steps if config.steps is not None else config.epochs * steps_per_epoch
