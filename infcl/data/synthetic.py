"""Random images and token rows in the shape of data, for measuring without any (--dataset-type synthetic)."""

from collections.abc import Iterator
from functools import cached_property

import torch

from infcl.data.loader import MicroBatch, StepLoader
from infcl.data.plan import Share, draw
from infcl.data.samples import ReadLog
from infcl.data.tokenizer import EOS_ID, PAD_ID
from infcl.data.workers import WorkerBoard


class SyntheticLoader(StepLoader):
    """Random images and token rows with TrainLoader's interface, for measuring without data (--dataset-type synthetic).

    A rank draws `pool` micro-batches once, from (seed, rank), and each (epoch, step, micro-batch) picks one of them.
    A row of tokens is ids in [2, vocab_size), eos (1) at a random place, padding (0). A model that pools at the largest
    id finds it anywhere before the eos: of 77 places 20 in the mean.
    """

    def __init__(
        self,
        *,
        image_size: int,
        context_length: int,
        vocab_size: int,
        micro_batch_size: int,
        num_micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        num_samples: int,
        part: int = 0,
        parts: int = 1,
        pool: int = 8,
    ):
        share = Share(micro_batch_size, num_micro_batches, rank, world_size, part, parts)
        shapes = (image_size, context_length, vocab_size)
        super().__init__(_SyntheticSource(share, *shapes, seed, num_samples, pool), share, seed=seed)


class _SyntheticSource:
    repeats = True

    def __init__(
        self,
        share: Share,
        image_size: int,
        context_length: int,
        vocab_size: int,
        seed: int,
        num_samples: int,
        pool: int,
    ):
        self.share, self.seed, self.num_samples, self.pool_size = share, seed, num_samples, pool
        self.image_size, self.context_length, self.vocab_size = image_size, context_length, vocab_size
        self.steps_per_epoch = share.steps_per_epoch(num_samples, f"an epoch has {num_samples} synthetic samples")
        self.board = WorkerBoard(0, 0.0, str)
        self.sha256 = f"synthetic {image_size} {context_length} {vocab_size} {num_samples}"
        self.about = f"{num_samples} synthetic samples"
        self.found: dict[str, int] = {}

    @cached_property
    def pool(self) -> list[MicroBatch]:
        first = int(draw(self.seed, 0, self.share.rank, stream=0, count=1)[0] >> 1)
        generator = torch.Generator().manual_seed(first)
        m, length, place = self.share.micro_batch_size, self.context_length, torch.arange(self.context_length)
        pool = []
        for _ in range(self.pool_size):
            shape = (m, 3, self.image_size, self.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            texts = torch.randint(2, self.vocab_size, (m, length), generator=generator)
            eos = torch.randint(1, length, (m, 1), generator=generator)
            texts = texts.masked_fill(place == eos, EOS_ID).masked_fill(place > eos, PAD_ID)
            own = slice(self.share.part * self.share.rows, (self.share.part + 1) * self.share.rows)
            batch = {"images": images[own].clone(), "texts": texts[own].clone()}
            pool.append({k: v.pin_memory() if torch.cuda.is_available() else v for k, v in batch.items()})
        return pool

    def micro_batches(self, epoch: int, step: int, again: range = range(0)) -> Iterator[tuple[MicroBatch, ReadLog]]:
        for start in self.share.positions(step, self.steps_per_epoch, again):
            first = start - self.share.part * self.share.rows  # of the whole micro-batch
            pick = int(draw(self.seed, epoch, first, stream=0, count=1)[0] % self.pool_size)
            ids = torch.arange(start, start + self.share.rows)
            yield {**self.pool[pick], "ids": ids}, {"skipped": [], "noted": []}

    def exactly(self, epoch: int, first: int, ids: torch.Tensor) -> MicroBatch:
        raise AssertionError("what is drawn is the same each time")
