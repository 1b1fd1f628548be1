"""A training loader over a test's few small samples: one of them a step, read in this process by one rank."""

from pathlib import Path

from infcl.data.loader import TrainLoader
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer

SMALL = {"image_size": 16, "micro_batch_size": 1, "num_micro_batches": 1, "num_workers": 0}


def small_loader(urls: str, tokenizer: Tokenizer, **options) -> TrainLoader:
    return TrainLoader(urls, tokenizer, **{**SMALL, "rank": 0, "world_size": 1, "seed": 0, **options})


def caption_tokenizer(folder: Path) -> Tokenizer:
    """Sentencepiece for the captions of shard_files, 12 tokens each; its model is written to `folder`."""
    path = folder / "x.model"
    train_tokenizer([f"picture number {i} from json" for i in range(100)], path, 40)
    return Tokenizer(path, context_length=12)
