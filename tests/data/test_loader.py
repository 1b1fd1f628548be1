import gc
import hashlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.data import JITTER, write_images
from infcl.config import BatchPlan
from infcl.data.index import SampleKeys
from infcl.data.loader import StepLoader, TooManyBadSamples
from infcl.data.plan import EpochPlan, Share
from infcl.data.records import ShardReader
from infcl.data.samples import SampleDecoder
from infcl.data.storage import ShardFault
from infcl.data.synthetic import SyntheticSource, random_captions
from infcl.data.tokenizer import EOS_ID, Tokenizer
from infcl.data.workers import NoBatch, describe_death, new_log
from tests.lib.sample_kinds import write_kinds
from tests.lib.shard_files import encode, pair_members, picture, write_tar
from tests.lib.small_loader import sample_numbers, step_loader


def digest(loader, steps: int | None = None) -> list[str]:
    """One hash per step, over all that it holds: of the rest of the epoch, or of as many steps as are asked for."""
    result = []
    while True:
        for step in loader:
            parts = b"".join(batch[name].numpy().tobytes() for batch in step for name in ("ids", "images", "texts"))
            result.append(hashlib.sha256(parts).hexdigest())
            if len(result) == steps:
                return result
        if steps is None:
            return result


def test_image_and_caption_of_a_sample_stay_together_in_batches_of_the_promised_shapes(shards, tokenizer):
    loader = step_loader(shards, tokenizer, aug_cfg={"scale": (1, 1), "ratio": (1, 1)}, image_size=20)
    steps = list(loader)
    assert len(steps) == loader.steps_per_epoch == 53 // 6 and loader.num_samples == 53
    for step in steps:
        assert len(step) == 2
        for batch in step:
            assert batch["images"].shape == (3, 3, 20, 20) and batch["images"].dtype == torch.uint8
            assert batch["ids"].shape == (3,) and batch["ids"].dtype == batch["texts"].dtype == torch.int64
            texts = tokenizer([f"picture number {i}" for i in batch["ids"].tolist()])
            assert torch.equal(batch["texts"], texts)
            for image, number in zip(batch["images"], batch["ids"].tolist()):
                expected = torch.from_numpy(picture(number)).permute(2, 0, 1)[:, :, 2:22].float()
                assert (image.float() - expected).abs().mean() < 25  # the crop is 20 of 24 columns, somewhere


def test_the_sequence_does_not_depend_on_the_number_of_workers_which_tell_their_memory(shards, tokenizer):
    expected = digest(step_loader(shards, tokenizer))
    for workers in (1, 2):
        loader = step_loader(shards, tokenizer, workers=workers)
        assert loader.worker_memory_mb() == [] and digest(loader) == expected
        loader.set_position(0, 3)  # the same workers, sent back
        assert digest(loader) == expected[3:]
        memory = loader.worker_memory_mb()
        assert len(memory) == workers and all(50 < megabytes < 5000 for megabytes in memory)


def test_workers_read_the_next_epoch_while_the_rank_evaluates(shards, tokenizer, monkeypatch):
    decoded, decode = multiprocessing.Value("i", 0), SampleDecoder.decode

    def count_and_decode(*arguments):
        with decoded.get_lock():
            decoded.value += 1
        return decode(*arguments)

    monkeypatch.setattr(SampleDecoder, "decode", count_and_decode)
    loader = step_loader(shards, tokenizer, workers=2)
    used, deadline = 6 * len(list(loader)), time.monotonic() + 60
    while decoded.value < used + 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert decoded.value >= used + 6, f"{decoded.value} samples decoded, {used} in the epoch"


@pytest.mark.first(1)
@pytest.mark.parametrize("world_size", [2, 1, 4])
def test_any_stop_with_any_workers_continues_the_uninterrupted_run_of_three_epochs(shards, tokenizer, world_size):
    """The resume proof, by ids, crops and texts of each rank; of the first rank also at the end of an epoch."""
    sizes = {"micro_batch_size": 3, "num_micro_batches": 4 // world_size, "world_size": world_size}
    rng = random.Random(world_size)
    for rank in range(world_size):
        loader = step_loader(shards, tokenizer, rank=rank, **sizes)
        whole = [entry for _ in range(3) for entry in digest(loader)]
        for stop in [rng.randrange(1, len(whole)), *[len(whole) // 3] * (rank == 0)]:
            workers = rng.sample([0, 1, 2], 2)
            first = step_loader(shards, tokenizer, rank=rank, workers=workers[0], **sizes)
            seen = digest(first, stop)
            second = step_loader(shards, tokenizer, rank=rank, workers=workers[1], **sizes)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert seen + digest(second, len(whole) - stop) == whole, (rank, stop, workers)


def test_a_change_of_world_size_regroups_the_same_samples_with_the_same_crops(shards, tokenizer):
    def steps(world_size: int) -> list[dict[int, bytes]]:
        sizes = {"micro_batch_size": 2, "num_micro_batches": 6 // world_size, "world_size": world_size}
        loaders = [step_loader(shards, tokenizer, rank=rank, **sizes) for rank in range(world_size)]
        if world_size > 1:  # as after a resume in the middle of an epoch
            state = step_loader(shards, tokenizer, micro_batch_size=2, num_micro_batches=6).state_dict()
            for loader in loaders:
                loader.load_state_dict(state | {"epoch": 1, "step": 2})
        else:
            loaders[0].set_position(1, 2)
        return [
            {int(i): image.numpy().tobytes() for step in ranks for b in step for i, image in zip(b["ids"], b["images"])}
            for ranks in zip(*loaders)
        ]

    expected = steps(1)
    assert [len(step) for step in expected] == [12, 12] and steps(2) == steps(3) == expected


def test_starting_an_epoch_leaves_the_global_random_state_alone(shards, tokenizer):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    next(iter(step_loader(shards, tokenizer)))
    assert torch.equal(torch.rand(3), expected)


def test_fewer_samples_per_epoch_are_a_different_subset_each_epoch(shards, tokenizer):
    loader = step_loader(shards, tokenizer, train_num_samples=12)
    first, second = sum(sample_numbers(loader), []), sum(sample_numbers(loader), [])
    assert len(set(first)) == len(set(second)) == 12 and set(first) != set(second)


def test_a_wrong_position_or_state_is_rejected_with_both_values(shards, tokenizer, tokenizer_model):
    loader = step_loader(shards, tokenizer)
    with pytest.raises(ValueError, match="no step 8 in epoch 0"):
        loader.set_position(0, 8)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="seed is 6 now and was 5"):
        step_loader(shards, tokenizer, seed=6).load_state_dict(state)
    with pytest.raises(ValueError, match="tokenizer_sha256 is"):
        step_loader(shards, Tokenizer(tokenizer_model, 12)).load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch_size is 3 now and was 6"):
        step_loader(shards, tokenizer, num_micro_batches=1).load_state_dict(state)
    with pytest.raises(
        ValueError, match="manifest_sha256 .*; now 2 shards hold .*, then 5 shards hold .*--pretrained RUN"
    ):
        step_loader(shards + "/{00000,00001}.tar", tokenizer).load_state_dict(state)


def test_workers_that_would_overflow_shared_memory_are_rejected(shards, tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="4 workers x 4 micro-batches of .* MiB are free: use fewer --workers"):
        step_loader(shards, tokenizer, image_size=10**6, workers=4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(ValueError, match=r"of 0\.\d+ MiB need 0\.\d+ MiB of /dev/shm .* 0.004 MiB are free"):
        step_loader(shards, tokenizer, workers=4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=20_000))  # for all ranks of the node
    step_loader(shards, tokenizer, workers=1)
    with pytest.raises(ValueError, match="8 ranks x 1 worker x 4 micro-batches .* per node"):
        step_loader(shards, tokenizer, workers=1, node_readers=8)


@pytest.mark.parametrize(
    ("dataset_type", "teacher", "image", "asked"),
    [
        ("webdataset", "", b"text", "not_an_image: .*0.tar .*is this a data set of images"),
        ("streaming", "", b"text", "not_an_image: .*0.tar .*is this a data set of images"),
        ("webdataset", "t.npy", encode(picture(1)), "no_teacher: .* is missing.*are these the shards of --teacher-key"),
    ],
)
def test_a_worker_s_failure_reaches_the_rank_in_one_line(
    tmp_path, tokenizer, dataset_type, teacher, image, asked, monkeypatch
):
    monkeypatch.setattr("infcl.data.samples._BAD_IN_A_ROW", 100)
    content = {"png": image, "txt": b"text"}
    write_tar(tmp_path / "0.tar", [(f"{i}.{name}", data) for i in range(60) for name, data in content.items()])
    options = {"keys": SampleKeys(teacher=teacher, teacher_width=8 * bool(teacher)), "train_num_samples": 60}
    message, code = "", 0
    try:  # pytest.raises would keep the workers
        list(step_loader(str(tmp_path), tokenizer, workers=1, dataset_type=dataset_type, **options))
    except NoBatch as failure:
        message, code = str(failure), failure.exit_code
    assert re.search(asked, message)
    assert code == 65 and "\n" not in message


def test_a_worker_that_has_failed_fails_again_for_the_micro_batches_that_were_requested_ahead(tmp_path, tokenizer):
    write_tar(tmp_path / "0.tar", [(f"{i}.{e}", b"text") for i in range(60) for e in ("png", "txt")])
    dataset = step_loader(str(tmp_path), tokenizer)._source._dataset
    dataset.builder._bad_in_a_row = 10_000
    assert isinstance(dataset[0, 0, np.arange(3)], NoBatch)


def test_too_little_data_is_an_error_with_the_numbers(shards, tokenizer, tmp_path):
    write_tar(tmp_path / "0.tar", [(f"{i}.txt", b"text") for i in range(9)])
    for urls, sizes, message in [
        (shards, {"micro_batch_size": 10, "num_micro_batches": 3, "world_size": 2},
         r"hold 53 .*batch of 60 \(data-parallel ranks x micro-batches x samples: 2 x 3 x 10\)"),
        (shards, {"train_num_samples": 100}, "100 samples per epoch were requested .*but 5 shards hold 53"),
        (shards, {"train_data_upsampling_factors": "0.1"}, r"hold 53 .* epoch uses 5 \(--train-data-ups"),
        (shards, {"train_data_upsampling_factors": "0.001"}, "epoch uses 0 .*, fewer than one global batch"),
        (str(tmp_path), {}, r"holds 0 usable samples \(index/no_image: 9\): are these tars .* --text-key"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            step_loader(urls, tokenizer, **sizes)


def test_bad_samples_are_replaced_alike_everywhere_and_reported_by_cause(tmp_path, tokenizer, caplog, monkeypatch):
    """What is counted as what, and that no good sample is lost: tests/data/test_data_fuzz.py."""
    monkeypatch.setattr("infcl.data.loader._SECONDS_BETWEEN_WARNINGS", 1e9)  # more than a busy machine takes
    urls, options = write_kinds(tmp_path), {"num_micro_batches": 1, "max_bad_fraction": 1.0}
    loaders = [step_loader(urls, tokenizer, workers=workers, **options) for workers in (0, 1)]
    assert digest(loaders[0]) == digest(loaders[1])
    assert caplog.text.count("not_an_image") == 2  # once for each loader
    assert re.search(r"0.tar sample \d+: starts with(.|\n)*  skipped/\w+ in .*/0.tar\n", loaders[0].table())
    monkeypatch.setattr("infcl.data.loader._BAD_ALLOWED", 0)
    with pytest.raises(TooManyBadSamples, match="more than --max-bad-fraction 0.05 allows of 33(.|\n)*skipped/"):
        list(step_loader(urls, tokenizer, num_micro_batches=1, max_bad_fraction=0.05))


@pytest.mark.parametrize("dataset_type", ["webdataset", "streaming"])
def test_the_share_of_bad_samples_decides_and_not_a_run_of_them(tmp_path, tokenizer, dataset_type):
    """11 of 12 are bad, so a position has to pass 11 on average."""
    members = [(name, data if i // 3 in (7, 8) or name[-3:] in ("txt", "son") else b"")
               for i, (name, data) in enumerate(m for i in range(24) for m in pair_members(i))]  # fmt: skip
    write_tar(tmp_path / "0.tar", members)
    options = {"dataset_type": dataset_type, "train_num_samples": 24, "micro_batch_size": 2, "num_micro_batches": 1}
    loader = step_loader(str(tmp_path), tokenizer, max_bad_fraction=1.0, **options)
    steps = sample_numbers(loader)
    assert len(steps) == 12 and len(set(sum(steps, []))) == 2
    with pytest.raises(TooManyBadSamples):
        list(step_loader(str(tmp_path), tokenizer, max_bad_fraction=0.5, **options))


def test_storage_that_fails_for_long_ends_the_run_as_a_failure_that_may_pass(shards, tokenizer, monkeypatch):
    monkeypatch.setattr("infcl.data.samples._STORAGE_SECONDS", 0.0)
    fault = ShardFault("shard_unreadable", "away")
    read = ShardReader.read
    monkeypatch.setattr(ShardReader, "read", lambda *a, **k: [r._replace(fault=fault) for r in read(*a, **k)])
    with pytest.raises(NoBatch, match="1 sample in a row .*shard_unreadable: .*away") as caught:
        list(step_loader(shards, tokenizer))
    assert caught.value.exit_code == 1


def test_each_window_may_have_its_bad_samples_and_a_run_ends_when_one_cannot_end_well(shards, tokenizer, monkeypatch):
    def account(loader: StepLoader, good: int, bad: int) -> None:
        loader._account(
            {"ids": torch.zeros(good)}, new_log() | {"skipped": [("broken_image", "0.tar", "cut off")] * bad}
        )
        if loader.too_many_bad:
            raise loader.too_many_bad

    small = step_loader(shards, tokenizer, max_bad_fraction=0.01)  # 1% of an epoch is less than a sample: 10 may be bad
    account(small, 8, 10)
    with pytest.raises(TooManyBadSamples):
        account(small, 0, 1)
    monkeypatch.setattr("infcl.data.loader._WINDOW", 10)
    monkeypatch.setattr("infcl.data.loader._BAD_ALLOWED", 0)
    loader = step_loader(shards, tokenizer, max_bad_fraction=0.2)
    for good, bad in ((1, 2), (7, 0), (1, 2), (7, 0)):  # two windows of ten
        account(loader, good, bad)
    account(loader, 1, 2)
    with pytest.raises(TooManyBadSamples, match="3 of the last 5 samples of this rank were bad"):
        account(loader, 1, 1)


def test_synthetic_data_has_the_same_interface(shards, tokenizer):
    def synthetic(rank: int, seed: int = 0) -> StepLoader:
        share, sizes = Share(BatchPlan(2, 2, 3), rank), {"image_size": 16, "context_length": 12, "vocab_size": 40}
        return StepLoader(SyntheticSource(share, seed=seed, num_samples=50, **sizes), share, seed=seed)

    loader = synthetic(0)
    whole = digest(loader)
    assert loader.steps_per_epoch == len(whole) == 4 and loader.state_dict()["epoch"] == 1
    assert digest(synthetic(0)) == whole != digest(synthetic(1)) and digest(synthetic(0, seed=1)) != whole
    loader.set_position(0, 2)
    step = next(iter(loader))
    loader.set_position(0, 2)
    assert digest(loader) == whole[2:]
    real = next(iter(step_loader(shards, tokenizer)))
    for name in real[0]:
        assert step[0][name].shape == real[0][name].shape and step[0][name].dtype == real[0][name].dtype
    assert ((step[0]["texts"] == EOS_ID).sum(1) == 1).all()


@pytest.mark.parametrize(("length", "vocab", "end"), [(77, 49408, 49407), (77, 50, 2), (77, 3, 2), (3, 5, 1)])
def test_synthetic_captions_end_once_within_half_of_their_places(length, vocab, end):
    texts = random_captions(4000, length, vocab, end, 0, torch.Generator().manual_seed(0))
    ends, place = (texts == end).int().argmax(1, keepdim=True), torch.arange(length)
    assert ((texts == end).sum(1) == 1).all() and not texts[place > ends].any()
    assert set((ends + 1).flatten().tolist()) == set(range(2, max(2, length // 2) + 1))
    before = texts[place < ends]
    assert before.min() >= 2 - (end == 2) and before.max() < vocab and end not in before


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_that_are_read_again_are_the_same_and_counted_once(shards, tokenizer, workers):
    """Behind each step's four come numbers 1 and 2 once more; the next step and the report know nothing of it."""
    options = {"num_micro_batches": 4, "workers": workers, "aug_cfg": {"scale": (0.5, 1.0)}}
    plain, again = step_loader(shards, tokenizer, **options), step_loader(shards, tokenizer, **options)
    again.set_position(0, 1)
    plain.set_position(0, 1)
    expected = list(plain)
    assert len(expected) == 3
    for step, micro_batches in zip(again.steps(range(1, 3)), expected):
        got = list(step)
        assert len(got) == 6
        for batch, wanted in zip(got, [*micro_batches, *micro_batches[1:3]]):
            assert all(torch.equal(batch[name], wanted[name]) for name in ("images", "texts", "ids"))
    assert again.report() == plain.report()


@pytest.mark.parametrize("failing", [(1,), (2,), (2, 3)])
def test_a_read_that_fails_in_one_pass_only_leaves_both_passes_alike(shards, tokenizer, monkeypatch, failing):
    """The sample that stood in for the unread one in the first pass does so in the second: no run ends for it. Where
    one is gone for good, another comes, and what reads (offload.PixelCache) compares, and ends the step."""
    loader = step_loader(shards, tokenizer, num_micro_batches=4, micro_batch_size=2, aug_cfg={"scale": (0.5, 1.0)})
    plan = EpochPlan(loader._source._sampler.counts, chunk=1, seed=5, epoch=0)
    unread, calls = int(plan.samples(3, 4)[0]), []  # the second of micro-batch 1
    read = ShardReader.read

    def flaky(reader, samples, **options):
        records = read(reader, samples, **options)
        if len(samples) == 2 and unread in samples.tolist():
            calls.append(samples)
            if len(calls) in failing:
                at = samples.tolist().index(unread)
                records[at] = records[at]._replace(fault=ShardFault("shard_unreadable", "away"))
        return records

    monkeypatch.setattr(ShardReader, "read", flaky)
    first = list(next(loader.steps(range(4))))
    assert (unread in first[1]["ids"]) == (failing != (1,)) and len(calls) == (2 if failing == (1,) else 3)
    for index, (before, after) in enumerate(zip(first[:4], first[4:], strict=True)):
        alike = [torch.equal(before[name], after[name]) for name in ("images", "texts", "ids")]
        assert alike == [index != 1 or failing != (2, 3)] * 3


@pytest.fixture
def no_collection():
    """What other tests have left open is closed before, and nothing of it in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.long
def test_a_rank_that_ends_by_an_error_does_not_wait_for_its_workers():
    """A worker outlives one SIGTERM for a time that is endless here, but not that of its own rank's end."""
    script = (
        "import signal\n"
        "from types import SimpleNamespace as Of\n"
        "from infcl.data.workers import make_dataloader\n"
        "signal.alarm = lambda seconds: None\n"
        "data, decoder = Of(workers=1, dist_timeout=0), Of(batch_bytes=lambda rows: 1)\n"
        "share = Of(rows=1, node_readers=1)\n"
        "loader = make_dataloader(range(9), data, decoder, share, persistent_workers=True)\n"
        "items = iter(loader)\n"
        "next(items)\n"
        "raise RuntimeError('the end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and "RuntimeError: the end" in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("words", "is_death"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that", True),
        ("DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details", True),
        ("DataLoader timed out after 3 seconds", False),
    ],
)
def test_a_worker_s_death_is_known_by_torch_s_words(words, is_death):
    message = describe_death(RuntimeError(words), 3, [900.0, 850.4]) or ""
    assert ("loader of rank 3" in message) == ("held 1,750 MB" in message) == is_death


@pytest.mark.parametrize("dataset_type", ["webdataset", "streaming"])
def test_a_loader_that_is_dropped_in_an_epoch_stops_its_workers_without_the_garbage_collector(
    shards, tokenizer, dataset_type, no_collection
):
    """torch waits 10 s for each worker of a loader that only the collector finds."""
    before = set(multiprocessing.active_children())
    loader = step_loader(shards, tokenizer, workers=2, dataset_type=dataset_type, train_num_samples=12)
    steps = loader.steps()
    list(next(steps))
    assert set(multiprocessing.active_children()) - before  # a streaming worker with few samples may have ended
    del steps, loader
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.slow
def test_workers_do_not_grow_over_twenty_epochs_of_small_shards(tmp_path, tokenizer):
    write_images(tmp_path / "shards", 256, 96)
    loader = step_loader(f"{tmp_path}/shards", tokenizer, workers=2, aug_cfg=JITTER, image_size=96)
    memory = []  # [epochs][workers], in MB
    for _ in range(20):
        assert len(list(loader)) == 256 // 6
        memory.append(loader.worker_memory_mb())
    settled, last = memory[3], memory[-1]  # by the fourth Python and torch have allocated what they need
    assert max(after / before for before, after in zip(settled, last)) < 1.05
