"""The streaming reader: webdataset's pipeline behind the loader, for storage that cannot seek."""

from collections import Counter
from shlex import quote

import pytest

from infcl.config import parse_args
from tests.lib.shard_files import write_shards
from tests.lib.small_loader import sample_numbers, step_loader


def streaming(urls: str, tokenizer, num_samples: int, **options):
    return step_loader(urls, tokenizer, dataset_type="streaming", train_num_samples=num_samples, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_splits_shards_over_ranks_and_repeats_from_its_seed(shards, tokenizer, workers):
    def run(rank: int) -> list[list[int]]:
        urls, options = shards + "/{00000,00001,00003,00004}.tar", {"rank": rank, "workers": workers}
        return sample_numbers(streaming(urls, tokenizer, 48, num_micro_batches=1, world_size=2, **options))

    ranks = [run(0), run(1)]
    assert ranks == [run(0), run(1)]
    assert [len(steps) for steps in ranks] == [8, 8]
    assert not set(sum(ranks[0], [])) & set(sum(ranks[1], []))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_over_unequal_shards_ends_before_the_next_and_repeats_are_counted(tmp_path, tokenizer, workers):
    write_shards(tmp_path, [7, 1, 53, 19])
    everyone = []
    for rank in range(2):
        options = {"micro_batch_size": 4, "num_micro_batches": 1, "world_size": 2, "rank": rank, "workers": workers}
        loader = streaming(str(tmp_path), tokenizer, 80, **options)
        seen = sum(sample_numbers(loader), [])
        everyone += seen
        times = Counter(seen)
        repeated = len(seen) - len(times)
        assert max(times.values()) - min(times.values()) <= 1, "a sample repeats while others of its rank are unread"
        assert len(seen) == 40 and loader.report().get("noted/repeated", 0) == repeated
    assert len(set(everyone)) == 66 and max(Counter(everyone).values()) == 2


def test_it_reads_pipes_and_starts_each_epoch_in_another_order(shards, tokenizer):
    pipe = f"pipe:cat {quote(shards)}/" + "{00001,00004}.tar"
    loader = streaming(pipe, tokenizer, 42, allow_pipe_urls=True)
    first, second = sum(sample_numbers(loader), []), sum(sample_numbers(loader), [])
    assert len(set(first)) == len(first) and set(first) == set(second) and first != second
    loader.set_position(2, 5)
    assert len(sample_numbers(loader)) == 2


def test_it_resumes_with_the_shard_that_the_step_had_reached(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("infcl.data.streaming._SHUFFLE_BUFFER", 1)
    loader = streaming(write_shards(tmp_path, [6] * 4), tokenizer, 24)
    whole = sample_numbers(loader)
    loader.set_position(0, 3)  # of 4 steps of 6 samples: three of four shards lie behind
    assert sample_numbers(loader) == whole[3:]


def test_it_says_what_it_needs(shards, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--dataset-type streaming needs --train-num-samples"):
        parse_args(["--train-data", "pipe:cat x", "--tokenizer", "open_clip:x", "--dataset-type", "streaming"])
    with pytest.raises(ValueError, match="5 shards cannot feed 2 ranks x 3 workers"):
        streaming(shards, tokenizer, 50, world_size=2, workers=3)
    with pytest.raises(ValueError, match="1 shard cannot feed 1 rank x 2 workers"):
        streaming(write_shards(tmp_path, [5]), tokenizer, 5, workers=2)
    with pytest.raises(ValueError, match="cannot read micro-batches a second time"):
        next(streaming(shards, tokenizer, 24).steps(range(1)))
