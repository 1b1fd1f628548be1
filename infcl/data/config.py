"""DataConfig: the data settings that the flags give, independent of the model and the ranks."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infcl.config import TrainConfig, parse_factors
from infcl.data.images import DEFAULT_LIMITS, ImageLimits
from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.samples import SampleTexts
from infcl.data.shards import split_sources
from infcl.data.table import DEFAULT_COLUMNS, TableColumns, columns_of, is_json_lines


@dataclass(frozen=True)
class DataConfig:
    """Settings of a `TrainLoader`.

    Args:
        urls: shards as for `shards.expand_shards`, or tables as for `table.TableReader`.
        dataset_type: "webdataset", "csv", or "streaming" (docs/howto/data.md).
        aug: options of `TrainTransform`.
        num_samples: samples per epoch; if fewer than all, each epoch has another random subset.
        upsampling_factors: one per `::` part of urls: how often an epoch contains its samples (plan.py).
        allow_pipe: allow `pipe:COMMAND`, which runs a shell command (streaming).
        index_cache: folder for indexes that cannot be stored next to their shards.
        max_bad_fraction: fraction of bad samples above which the run stops.
        workers: worker processes per rank; with 0, the rank itself reads.
        timeout: seconds without a micro-batch after which the run stops.
    """

    urls: str
    dataset_type: str = "webdataset"
    keys: SampleKeys = DEFAULT_KEYS
    columns: TableColumns = DEFAULT_COLUMNS
    limits: ImageLimits = DEFAULT_LIMITS
    texts: SampleTexts = SampleTexts()
    aug: dict[str, Any] = field(default_factory=dict)
    num_samples: int | None = None
    upsampling_factors: Sequence[float] | None = None
    allow_pipe: bool = False
    index_cache: str | None = None
    max_bad_fraction: float = 0.01
    workers: int = 4
    timeout: float = 600.0

    def __post_init__(self):
        if self.dataset_type == "streaming" and self.upsampling_factors is not None:
            raise ValueError("upsampling factors need --dataset-type webdataset, not streaming")
        if self.dataset_type == "csv" and self.keys.teacher:
            raise ValueError("tables have no members for --teacher-key: it needs shards")
        has_json = self.dataset_type != "csv" or all(map(is_json_lines, split_sources(self.urls)))
        if self.texts.needs_json and not has_json:
            raise ValueError(
                "csv tables have no json: --negatives-key and --duplicates mask:key:NAME need shards or jsonl"
            )

    @classmethod
    def of(cls, config: TrainConfig) -> "DataConfig":
        """Return the data settings of a run's flags."""
        assert config.train_data is not None, "checked with the flags"
        treatment, by = config.duplicates_and_by
        probs = tuple(config.json_text_key_probs)
        return cls(
            config.train_data,
            dataset_type=config.dataset_type,
            keys=SampleKeys(config.image_key, config.text_key, config.json_text_key, probs, *config.teacher_member),
            columns=columns_of(config),
            limits=limits_of(config, DEFAULT_LIMITS),
            texts=SampleTexts(
                config.captions_per_image,
                config.captions == "lines",
                config.negatives_key,
                by if treatment != "negative" else None,
            ),
            aug=config.aug_cfg,
            num_samples=config.train_num_samples,
            upsampling_factors=parse_factors(config.train_data_upsampling_factors),
            allow_pipe=config.allow_pipe_urls,
            index_cache=config.index_cache,
            max_bad_fraction=config.max_bad_fraction,
            workers=config.workers,
            timeout=60 * config.dist_timeout / 3,
        )


def limits_of(config: TrainConfig, limits: ImageLimits) -> ImageLimits:
    """Return `limits` updated with the image limits of the flags."""
    upright = not config.ignore_exif_orientation
    return dataclasses.replace(limits, max_pixels=config.max_image_pixels, upright=upright)
