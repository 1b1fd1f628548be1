"""A training loader for a few small samples: one per step, read in this process by one rank."""

from pathlib import Path

import torch

from infcl.config import BatchPlan, TrainConfig
from infcl.data.evaluation import EvalConfig, eval_source
from infcl.data.images import DEFAULT_LIMITS
from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.loader import TrainLoader
from infcl.data.plan import Share
from infcl.data.records import Record
from infcl.data.samples import DecodedSample, SampleDecoder, SampleTexts
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer
from infcl.data.transforms import TrainTransform
from infcl.data.workers import new_log


def small_loader(urls: str, tokenizer: Tokenizer, *, image_size: int = 16, seed: int = 0, **options) -> TrainLoader:
    """Make a loader; options are flags, `keys`, `texts`, and fields of BatchPlan and Share."""
    sizes = [options.pop(name, 1) for name in ("world_size", "num_micro_batches", "micro_batch_size")]
    where = {name: options.pop(name) for name in ("part", "parts", "node_readers") if name in options}
    share = Share(BatchPlan(*sizes), options.pop("rank", 0), **where)
    options |= _flags_of(options.pop("keys", DEFAULT_KEYS), options.pop("texts", SampleTexts()))
    flags = TrainConfig(train_data=urls, **{"workers": 0, "seed": seed, **options})
    return TrainLoader(flags, tokenizer, share, image_size=image_size)


def _flags_of(keys: SampleKeys, texts: SampleTexts) -> dict:
    return {
        "image_key": keys.image, "text_key": keys.text, "json_text_key": keys.json_text,
        "json_text_key_probs": list(keys.json_probs),
        "teacher_key": f"{keys.teacher.removesuffix('.npy')}:{keys.teacher_width}" if keys.teacher else None,
        "captions_per_image": texts.captions, "captions": "lines" if texts.lines else "one",
        "negatives_key": texts.negatives, "duplicates": f"mask:{texts.same}" if texts.same else "negative",
    }  # fmt: skip


def eval_samples(data: str, *, image_size: int, rank: int = 0, world_size: int = 1, threads: int = 4, **options):
    """Return the samples of an evaluation set; options are fields of EvalConfig."""
    source = eval_source(EvalConfig(data=data, image_size=image_size, **options))
    return source(rank=rank, world_size=world_size, threads=threads)


def step_loader(urls: str, tokenizer: Tokenizer, **options) -> TrainLoader:
    """Make a loader with steps of two micro-batches of three samples."""
    defaults = {"micro_batch_size": 3, "num_micro_batches": 2, "seed": 5, "max_bad_fraction": 0.9}
    return small_loader(urls, tokenizer, **(defaults | options))


def decode_record(record: Record) -> DecodedSample:
    """Decode a record as training does, with the default settings."""
    decoder = SampleDecoder(None, TrainTransform(8), seed=0, keys=DEFAULT_KEYS, limits=DEFAULT_LIMITS)
    return decoder.decode(record, 0, 0, new_log())


def sample_numbers(loader: TrainLoader) -> list[list[int]]:
    """Return the sample numbers of each remaining step."""
    return [torch.cat([batch["ids"] for batch in step]).tolist() for step in loader]


def caption_tokenizer(folder: Path) -> Tokenizer:
    """Train a sentencepiece tokenizer for the captions of shard_files, 12 tokens each, and write it to `folder`."""
    path = folder / "x.model"
    train_tokenizer([f"picture number {i} from json" for i in range(100)], path, 40)
    return Tokenizer(path, context_length=12)
