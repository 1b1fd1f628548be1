"""The memory of data workers does not grow over many epochs of small shards."""

from pathlib import Path

import pytest

from benchmarks.data import JITTER, write_images
from infcl.config import BatchPlan
from infcl.data.config import DataConfig
from infcl.data.loader import TrainLoader
from infcl.data.plan import Share
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer

EPOCHS, SETTLED = 20, 4  # growth counts from the epoch by whose end Python and torch have allocated what they need


@pytest.mark.slow
def test_workers_do_not_grow_over_twenty_epochs(tmp_path: Path):
    captions = write_images(tmp_path / "shards", 256, 96)
    train_tokenizer(captions, tmp_path / "x.model", 160)
    loader = TrainLoader(
        DataConfig(f"{tmp_path}/shards", workers=2, aug=JITTER),
        Tokenizer(tmp_path / "x.model", 64),
        Share(BatchPlan(1, 1, 32), rank=0),
        image_size=96,
        seed=0,
    )
    memory = []  # [epochs][workers], in MB
    for _ in range(EPOCHS):
        for _ in loader:
            pass
        memory.append(loader.worker_memory_mb())
    growth = [last / first - 1 for first, last in zip(memory[SETTLED - 1], memory[-1])]
    assert max(growth) < 0.05
