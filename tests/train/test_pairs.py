"""Duplicates, several captions of an image and hard negatives: the trainer's curve does not depend on the split."""

import json

import pytest

from infcl.config import TrainConfig
from infcl.report.records import read_metrics
from tests.lib.ranks import run_ranks
from tests.lib.shard_files import encode, picture, write_tar
from tests.lib.small_loader import caption_tokenizer
from tests.lib.training import demo_config, new_trainer

CASES = {
    "negatives by caption": {"duplicates": "mask:caption", "negatives_key": "hard"},
    "mask by key": {"duplicates": "mask:key:group"},
    "siglip": {"duplicates": "mask", "loss": "siglip"},
    "all": {"captions_per_image": 3, "negatives_key": "hard", "duplicates": "positive", "pack_captions": "on"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """48 samples of 20 pictures with one to three captions."""
    folder = tmp_path_factory.mktemp("pairs")
    members = []
    for i in range(48):
        captions = [f"picture number {i} {word}" for word in ("from", "json", "picture")[: 1 + i % 3]]
        values = {
            "caption": captions,
            "hard": [captions[0], f"picture number {i ^ 1} from", f"json {i}"],
            "group": i // 3,
        }
        members += [(f"{i:02d}.png", encode(picture(i % 20))), (f"{i:02d}.json", json.dumps(values).encode())]
    write_tar(folder / "shards" / "0.tar", members)
    caption_tokenizer(folder)
    return folder


def fit(rank, world_size, config: TrainConfig):
    trainer = new_trainer(config)
    trainer.fit()
    return None if rank else read_metrics(trainer.run.metrics, "train")


@pytest.mark.first(1)
@pytest.mark.parametrize("case", CASES)
def test_the_curve_does_not_depend_on_how_the_batch_is_split(data, tmp_path, case):
    curves = []
    splits = ((1, 24, 1, "1"), (1, 8, 3, "2"), (2, 6, 2, "1"))  # ranks, micro-batch, micro-batches, cached graphs
    for number, (ranks, size, count, resident) in enumerate(splits):
        config = demo_config(
            data, tmp_path, name=str(number), train_data=str(data / "shards"), tokenizer=str(data / "x.model"),
            model="demo", batch_size=size, accum_freq=count, resident_micro_batches=resident, pixel_cache_gb="0",
            steps=3, warmup=1, **CASES[case],
        )  # fmt: skip
        records = run_ranks(fit, ranks, config)[0]
        names = ["loss", "grad_norm", "duplicate_share", "duplicate_negatives"]
        curves.append([record[name] for record in records for name in names if name in record])
        if case == "negatives by caption":
            assert 0 < records[0]["duplicate_negatives"] < 1
        assert ("duplicate_share" in records[0]) == (config.duplicates != "negative")
    assert len(curves[0]) >= 8 and all(curve == pytest.approx(curves[0], rel=1e-3) for curve in curves[1:])
