"""What the flags say of a sample: its members, texts and image limits. The model and the ranks change none of it."""

import dataclasses

from infcl.config import TrainConfig
from infcl.data.images import ImageLimits
from infcl.data.index import SampleKeys
from infcl.data.samples import SampleTexts
from infcl.data.shards import split_sources
from infcl.data.table import is_json_lines


def keys_of(flags: TrainConfig) -> SampleKeys:
    """Return the members of a training sample."""
    probs = tuple(flags.json_text_key_probs)
    return SampleKeys(flags.image_key, flags.text_key, flags.json_text_key, probs, *flags.teacher_member)


def texts_of(flags: TrainConfig) -> SampleTexts:
    """Return the texts of a training sample. Raises ValueError if they are in json, which a csv table has not."""
    treatment, by = flags.duplicates_and_by
    same = by if treatment != "negative" else None
    texts = SampleTexts(flags.captions_per_image, flags.captions == "lines", flags.negatives_key, same)
    is_csv = flags.dataset_type == "csv" and not all(map(is_json_lines, split_sources(flags.train_data or "")))
    if texts.needs_json and is_csv:
        raise ValueError("csv tables have no json: --negatives-key and --duplicates mask:key:NAME need shards or jsonl")
    return texts


def limits_of(flags: TrainConfig, limits: ImageLimits) -> ImageLimits:
    """Return `limits` updated with the image limits of the flags."""
    upright = not flags.ignore_exif_orientation
    return dataclasses.replace(limits, max_pixels=flags.max_image_pixels, upright=upright)
