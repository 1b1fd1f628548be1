"""SyntheticLoader: random images and tokens, for benchmarks without a data set (--dataset-type synthetic)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from infcl.data.loader import MicroBatch, StepLoader
from infcl.data.plan import Share, draw
from infcl.data.samples import ReadLog
from infcl.data.tokenizer import EOS_ID, PAD_ID
from infcl.data.workers import WorkerBoard


class SyntheticLoader(StepLoader):
    """Loader of random images and tokens, with the interface of TrainLoader (--dataset-type synthetic).

    A rank draws `pool` micro-batches once from (seed, rank). Each (epoch, step, micro-batch) uses one of them.
    Captions have 2 to context_length / 2 tokens, uniformly distributed: for a context length of 77, 20 on average.
    Token ids are in [2, vocab_size) except `end_id`. Then come `end_id` and padding (`pad_id`).

    Args:
        share: the samples of each step that this process reads.
        image_size: side S of the square images, in pixels.
        context_length: token positions per caption.
        vocab_size: number of token ids.
        seed: of the images, the tokens and the choice of micro-batches.
        num_samples: samples per epoch, over all ranks.
        end_id, pad_id: token ids of the end and of the padding.
        pool: number of different micro-batches.
    """

    def __init__(
        self,
        share: Share,
        *,
        image_size: int,
        context_length: int,
        vocab_size: int,
        seed: int,
        num_samples: int,
        end_id: int = EOS_ID,
        pad_id: int = PAD_ID,
        pool: int = 8,
    ):
        captions = Captions(context_length, vocab_size, end_id, pad_id)
        super().__init__(_SyntheticSource(share, captions, image_size, seed, num_samples, pool), share, seed=seed)


class Captions(NamedTuple):
    """Generator of random token rows."""

    context_length: int
    vocab_size: int
    end_id: int
    pad_id: int

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return int64 [count, context_length]."""
        place = torch.arange(self.context_length)
        ids = torch.randint(2, self.vocab_size, (count, self.context_length), generator=generator)
        ids[ids == self.end_id] = 2 - (self.end_id == 2)
        end = torch.randint(1, max(2, self.context_length // 2), (count, 1), generator=generator)
        return ids.masked_fill(place == end, self.end_id).masked_fill(place > end, self.pad_id)


@dataclass
class _SyntheticSource:
    share: Share
    captions: Captions
    image_size: int
    seed: int
    num_samples: int
    pool_size: int
    repeats = True

    def __post_init__(self):
        number = self.num_samples
        self.steps_per_epoch = self.share.steps_per_epoch(number, f"an epoch has {number} synthetic samples")
        self.board = WorkerBoard(0, 0.0, str)
        self.sha256 = " ".join(map(str, ("synthetic", self.image_size, *self.captions, number)))
        self.about = f"{number} synthetic samples"
        self.found: dict[str, int] = {}

    @cached_property
    def pool(self) -> list[MicroBatch]:
        first = int(draw(self.seed, 0, self.share.rank, stream=0, count=1)[0] >> 1)
        generator = torch.Generator().manual_seed(first)
        m, pool = self.share.micro_batch_size, []
        for _ in range(self.pool_size):
            shape = (m, 3, self.image_size, self.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            texts = self.captions.draw(m, generator)
            own = slice(self.share.part * self.share.rows, (self.share.part + 1) * self.share.rows)
            batch = {"images": images[own].clone(), "texts": texts[own].clone()}
            pool.append({k: v.pin_memory() if torch.cuda.is_available() else v for k, v in batch.items()})
        return pool

    def micro_batches(self, epoch: int, step: int, again: range = range(0)) -> Iterator[tuple[MicroBatch, ReadLog]]:
        for start in self.share.positions(step, self.steps_per_epoch, again):
            first = start - self.share.part * self.share.rows  # of the full micro-batch
            pick = int(draw(self.seed, epoch, first, stream=0, count=1)[0] % self.pool_size)
            ids = torch.arange(start, start + self.share.rows)
            yield {**self.pool[pick], "ids": ids}, {"skipped": [], "noted": []}

    def exactly(self, epoch: int, first: int, ids: torch.Tensor) -> MicroBatch:
        raise AssertionError("what is drawn is the same each time")
