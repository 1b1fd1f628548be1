"""SyntheticSource: random images and tokens, for benchmarks without a data set (--dataset-type synthetic)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from infcl.data.plan import Share, draw
from infcl.data.tokenizer import EOS_ID, PAD_ID
from infcl.data.workers import MicroBatch, ReadLog, Source, new_log


def random_captions(
    count: int, context_length: int, vocab_size: int, end_id: int, pad_id: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random token rows, int64 [count, context_length], see `SyntheticSource`."""
    position = torch.arange(context_length)
    ids = torch.randint(2, vocab_size, (count, context_length), generator=generator)
    ids[ids == end_id] = 2 - (end_id == 2)
    end = torch.randint(1, max(2, context_length // 2), (count, 1), generator=generator)
    return ids.masked_fill(position == end, end_id).masked_fill(position > end, pad_id)


@dataclass
class SyntheticSource(Source):
    """Source of random images and tokens for a StepLoader.

    A rank draws `pool_size` micro-batches once from (seed, rank). Each (epoch, step, micro-batch) uses one of them.
    Captions have 2 to context_length / 2 tokens, uniformly distributed: for a context length of 77, 20 on average.
    Token ids are in [2, vocab_size) except `end_id`. Then come `end_id` and padding (`pad_id`).

    Args:
        image_size: side S of the square images, in pixels.
        seed: of the images, the tokens and the choice of micro-batches.
        num_samples: samples per epoch, over all ranks.
        end_id, pad_id: token ids of the end and of the padding.
        pool_size: number of different micro-batches.
    """

    share: Share
    image_size: int
    context_length: int
    vocab_size: int
    seed: int
    num_samples: int
    end_id: int = EOS_ID
    pad_id: int = PAD_ID
    pool_size: int = 8
    repeats = True

    def __post_init__(self):
        count = self.num_samples
        self.steps_per_epoch = self.share.steps_per_epoch(count, f"an epoch has {count} synthetic samples")
        self.about, self.found = f"{count} synthetic samples", {}
        sizes = (self.image_size, self.context_length, self.vocab_size, self.end_id, self.pad_id, count)
        self.sha256 = " ".join(map(str, ("synthetic", *sizes)))

    @cached_property
    def pool(self) -> list[MicroBatch]:
        first = int(draw(self.seed, 0, self.share.rank, stream=0, count=1)[0] >> 1)
        generator = torch.Generator().manual_seed(first)
        m, pool = self.share.batch.micro_batch_size, []
        for _ in range(self.pool_size):
            shape = (m, 3, self.image_size, self.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            texts = random_captions(m, self.context_length, self.vocab_size, self.end_id, self.pad_id, generator)
            own = slice(self.share.part * self.share.rows, (self.share.part + 1) * self.share.rows)
            batch = {"images": images[own].clone(), "texts": texts[own].clone()}
            pool.append({k: v.pin_memory() if torch.cuda.is_available() else v for k, v in batch.items()})
        return pool

    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[MicroBatch, ReadLog]]:
        for at_epoch, start in self.share.positions(epoch, step, self.steps_per_epoch, again):
            first = start - self.share.part * self.share.rows  # of the full micro-batch
            pick = int(draw(self.seed, at_epoch, first, stream=0, count=1)[0] % self.pool_size)
            ids = torch.arange(start, start + self.share.rows)
            yield {**self.pool[pick], "ids": ids}, new_log()
