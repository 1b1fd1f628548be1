"""Users' data: several sources with factors, captions in json."""

import json
from collections import Counter

import numpy as np
import pytest

from infcl.config import parse_factors
from infcl.data.captions import decode_captions
from infcl.data.index import SampleKeys
from infcl.data.plan import EpochPlan, epoch_size
from infcl.data.records import Record
from tests.lib.shard_files import encode, picture, write_shards, write_tar
from tests.lib.small_loader import small_loader

# ---- upsampling ----


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("factors", [(1, 2), (0.5, 1), (2.25, 0.1), (1, 1), (3, 3)])
def test_an_epoch_repeats_each_source_by_its_factor(chunk, factors):
    counts, per_shard = np.array([20, 0, 17, 40]), np.array([factors[0]] * 3 + [factors[1]], dtype=float)
    seen = []
    for epoch in (0, 1):
        plan = EpochPlan(counts, chunk=chunk, seed=3, epoch=epoch, factors=per_shard)
        assert plan.num_samples == epoch_size(counts, per_shard)
        times = Counter(plan.samples(0, plan.num_samples).tolist())
        for source, factor in ((range(37), factors[0]), (range(37, 77), factors[1])):
            repeats = [times[i] for i in source]
            assert int(factor) <= min(repeats) <= max(repeats) <= -(-factor // 1)
            if factors[0] != factors[1]:
                assert sum(repeats) == int(factor) * len(source) + round(factor % 1 * len(source))
        seen.append(frozenset(i for i in range(77) if times[i] > int(factors[i >= 37])))
    if chunk < 100 and any(factor % 1 for factor in factors):
        assert seen[0] != seen[1]  # another part is drawn in every epoch


def test_upsampled_sources_resume_and_do_not_depend_on_workers(tmp_path, tokenizer):
    urls = f"{write_shards(tmp_path / 'a', [4, 3])}::{write_shards(tmp_path / 'b', [5])}"
    options = {"train_data_upsampling_factors": "1::2.4", "micro_batch_size": 2}
    loader = small_loader(urls, tokenizer, **options)
    assert loader.num_samples == 7 + 10 + 2
    epochs = [[batch["ids"].tolist() for (batch,) in loader] for _ in range(2)]
    again = small_loader(urls, tokenizer, workers=1, **options)
    again.load_state_dict(loader.state_dict() | {"epoch": 1, "step": 3})
    assert [batch["ids"].tolist() for (batch,) in again] == epochs[1][3:] and epochs[0] != epochs[1]
    with pytest.raises(ValueError, match="manifest_sha256"):
        small_loader(urls, tokenizer, **options | {"train_data_upsampling_factors": "1::2.2"}).load_state_dict(
            loader.state_dict()
        )
    for wrong in ("1", "1::2::3"):
        with pytest.raises(ValueError, match="2 sources need as many upsampling factors"):
            small_loader(urls, tokenizer, train_data_upsampling_factors=wrong)


# ---- captions in json ----


def json_record(**values) -> Record:
    return Record(b"", b"never read", json.dumps(values).encode(), "here")


def test_json_keys_are_drawn_by_their_weights_and_zero_comes_last():
    keys = SampleKeys(json_text="a;b;c", json_probs=(0.7, 0.3))
    rng = np.random.default_rng(0)
    times = Counter(decode_captions(json_record(a="1", b="2", c="3"), keys, rng.random(3))[0][0] for _ in range(2000))
    assert 1300 < times["1"] < 1500 and times["1"] + times["2"] == 2000
    assert decode_captions(json_record(c="3"), keys, rng.random(3))[0][0] == "3"
    for wrong in ((0.5, 0.3, 0.1, 0.1), (-1.0,)):
        with pytest.raises(ValueError, match="--json-text-key-probs"):
            SampleKeys(json_text="a;b;c", json_probs=wrong)
    with pytest.raises(ValueError, match="--json-text-key-probs"):
        SampleKeys(json_probs=(1.0,))


def test_drawn_captions_belong_to_the_position(tmp_path, tokenizer):
    members = []
    for i in range(12):
        members += [(f"{i}.png", encode(picture(i))), (f"{i}.json", b'{"a": "picture", "b": "number"}')]
    write_tar(tmp_path / "0.tar", members)
    options = {"keys": SampleKeys(json_text="a;b", json_probs=(0.5, 0.5))}

    def texts(loader):
        return [batch["texts"].tolist() for (batch,) in loader]

    loader = small_loader(str(tmp_path), tokenizer, **options)
    first, second = texts(loader), texts(loader)
    assert texts(small_loader(str(tmp_path), tokenizer, workers=1, **options)) == first != second
    assert len({str(row) for row in first}) == 2


def test_factors_are_numbers_above_zero():
    assert parse_factors("1::0.5") == [1.0, 0.5]
    for wrong in ("1::0", "one", "1:2", "nan"):
        with pytest.raises(ValueError, match="--train-data-upsampling-factors"):
            parse_factors(wrong)
