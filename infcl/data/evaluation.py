"""Evaluation data: every sample of some shards once, in order, split over ranks.

In:  shards (anything that webdataset opens), image size.
Out: `EvalSample`s: the image after the evaluation transform, caption, the json member (class labels), key.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.samples import BadSample, EvalTransform, ImageLimits, decode_caption, decode_image, parse_json
from infcl.data.shards import expand_shards
from infcl.data.streaming import stream_records

EVAL_LIMITS = ImageLimits(min_side=1)


class EvalSample(NamedTuple):
    image: torch.Tensor  # uint8 [3, S, S]
    caption: str  # "" where the sample has none
    metadata: dict[str, Any]  # the json member, {} where there is none
    key: str


class EvalShards:
    """Iterate over the samples of evaluation shards; sample i goes to rank i % world_size, whatever the shards.

    Every rank streams every shard and decodes its own part. Samples without a usable image are left out and counted by
    cause in `skipped`; a missing caption is not an error here (classification needs none).
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        image_size: int,
        rank: int = 0,
        world_size: int = 1,
        keys: SampleKeys = DEFAULT_KEYS,
        limits: ImageLimits = EVAL_LIMITS,
    ):
        self.shards = expand_shards(urls)
        self.transform, self.rank, self.world_size = EvalTransform(image_size), rank, world_size
        self.keys, self.limits = keys, limits
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EvalSample]:
        def shard_failed(error: Exception) -> None:
            self.skipped["damaged_shard"] += 1

        for i, (key, record) in enumerate(stream_records(self.shards, self.keys, shard_failed)):
            if i % self.world_size != self.rank:
                continue
            try:
                image = self.transform(decode_image(record.image or b"", self.limits))
                metadata = parse_json(record.json) if record.json is not None else {}
            except BadSample as bad:
                self.skipped[bad.cause] += 1
                continue
            try:
                caption, _ = decode_caption(record, self.keys)
            except BadSample:
                caption = ""
            yield EvalSample(image, caption, metadata, key)
