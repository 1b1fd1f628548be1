import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from shlex import quote

import numpy as np
import pytest

from infcl.data.index import SampleKeys, ensure_index
from infcl.data.records import ShardReader
from infcl.data.remote import local_copy, open_shard, within
from infcl.data.shards import load_manifest
from infcl.data.spool import spooled
from infcl.data.storage import ShardFault, StorageOptions, retry
from infcl.data.streaming import stream_records
from infcl.data.table import TableReader
from tests.lib.http_server import serving
from tests.lib.shard_files import pair_members, write_shards, write_tar
from tests.lib.small_loader import small_loader

SIZES = [6, 9]


@pytest.fixture
def web(tmp_path):
    write_shards(tmp_path / "served", SIZES)
    with serving(tmp_path / "served") as (url, behaviour):
        yield url, behaviour


@pytest.fixture
def options(tmp_path):
    return StorageOptions(timeout=5.0, attempts=3, backoff=0.01, cache=str(tmp_path / "spool"), allow_pipe=True)


def captions(urls, options, tmp_path) -> list[str]:
    manifest = load_manifest(urls, storage=options, index_cache=str(tmp_path / "index"))
    records = ShardReader(manifest, storage=options).read(np.arange(manifest.num_samples))
    assert all(record.fault is None and record.image is not None for record in records)
    return [record.text.decode() for record in records]


EXPECTED = [f"picture number {i}" for i in range(sum(SIZES))]


@pytest.mark.parametrize("ranges, redirect", [(True, False), (True, True), (False, False)])
def test_a_web_server_is_read_as_files_are(web, options, tmp_path, ranges, redirect):
    url, behaviour = web
    behaviour.ranges, behaviour.redirect = ranges, redirect
    assert captions(url + "/{00000,00001}.tar", options, tmp_path) == EXPECTED
    assert os.path.exists(options.cache) != ranges  # only what cannot be read at random is spooled
    scans = dict(behaviour.requests)
    assert captions(url + "/{00000,00001}.tar", options, tmp_path) == EXPECTED  # the index is not built again
    if ranges:
        assert all(behaviour.requests[path] - n < n for path, n in scans.items())


def test_ranged_reads_of_neighbours_are_one_request(web, options, tmp_path):
    url, behaviour = web
    manifest = load_manifest(url + "/00001.tar", storage=options, index_cache=str(tmp_path / "index"))
    before = behaviour.requests["/00001.tar"]
    ShardReader(manifest, storage=options).read(np.arange(9))
    assert behaviour.requests["/00001.tar"] - before == 2  # what is there, then all of it


def test_a_read_that_breaks_off_leaves_a_reader_that_reads_on(web, options, tmp_path):
    url, behaviour = web
    manifest = load_manifest(url + "/00000.tar", storage=options, index_cache=str(tmp_path / "index"))
    reader = ShardReader(manifest, storage=options)
    file, _ = reader._file(0)
    behaviour.short = 10
    with pytest.raises(OSError):
        file.pread(1000, 0)
    behaviour.short = None
    assert [record.text.decode() for record in reader.read(np.arange(6))] == EXPECTED[:6]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", ["stall", "short"])
def test_a_transfer_that_stalls_or_breaks_off_ends_by_time_out_and_is_never_used(web, options, tmp_path, fault, ranges):
    url, behaviour = web
    behaviour.ranges, options = ranges, replace(options, timeout=0.4)
    setattr(behaviour, fault, 700)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"1 of 1 shards are missing: .*00000.tar: 3 attempts failed, the last with"):
        load_manifest(url + "/00000.tar", storage=options, index_cache=str(tmp_path / "index"))
    assert time.monotonic() - started < 20
    assert not [name for name in os.listdir(options.cache) if not name.endswith(".lock")] if not ranges else True


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("slow", ["trickle", "drip", "drip_chunk"])
def test_an_answer_that_never_ends_is_stopped(web, options, slow, ranges):
    """A server that sends a byte now and then, in the header, in the length of a chunk or in the body."""
    url, behaviour = web
    behaviour.ranges, options = ranges, replace(options, timeout=0.5, attempts=1)
    file = open_shard(url + "/00000.tar", options) if ranges else None
    setattr(behaviour, slow, 700 if slow == "trickle" else True)
    started = time.monotonic()
    with pytest.raises((TimeoutError, ShardFault), match="slower than 16 KB/s|no answer within 0.5 s"):
        file.pread(5000, 0) if file else local_copy(url + "/00001.tar", options)
    assert time.monotonic() - started < 20


def test_a_copy_ends_at_the_limit_of_the_spool_and_before_the_disk_is_full(web, options, monkeypatch):
    url, behaviour = web
    behaviour.ranges = False
    monkeypatch.setattr("infcl.data.storage._SMALLEST_LIMIT", 0)
    with pytest.raises(ShardFault, match=r"has .* GB, more than 1e-06 GB \(--data-cache-gb"):  # by Content-Length
        open_shard(url + "/00000.tar", replace(options, cache_bytes=1000))
    with pytest.raises(ShardFault, match=r"the shard exceeds 1e-06 GB \(--data-cache-gb"):
        open_shard("pipe:cat /dev/zero", replace(options, cache_bytes=1000))
    monkeypatch.setattr("infcl.data.spool._FREE_BYTES", 1 << 60)
    with pytest.raises(ShardFault, match="MB are free on the disk of the spool"):
        open_shard("pipe:cat /dev/zero", options)


def test_only_regular_files_are_opened(tmp_path, tokenizer):
    """Where a FIFO would wait for its writer, and a device would never end."""
    os.mkfifo(tmp_path / "fifo.tar")
    for name in (str(tmp_path / "fifo.tar"), "/dev/zero"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            load_manifest(name)
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            TableReader(name)
        failures = []
        assert not list(stream_records([name], SampleKeys(), lambda *words, failures=failures: failures.append(words)))
        assert [(cause, url) for cause, url, _ in failures] == [("not_a_file", name)]
        (tmp_path / "a.csv").write_text(f"filepath\ttitle\n{name}\ta dog\n")
        assert TableReader(str(tmp_path / "a.csv")).read(np.array([0]))[0].fault.cause == "not_a_file"
    (tmp_path / "shards" / "x.tar").mkdir(parents=True)
    with pytest.raises(ValueError, match="x.tar is not a regular file"):
        load_manifest(str(tmp_path / "shards"))


def test_a_member_without_end_ends_the_shard_of_the_streaming_reader(tmp_path, monkeypatch):
    """A header may promise 9e18 bytes, of a member that is read or skipped, and a hole of a sparse tar is free."""
    for name in ("b.bin", "b.jpg"):
        path = write_tar(tmp_path / "a.tar", pair_members(0))
        endless = tarfile.TarInfo(name)
        endless.size = 9 * 10**18
        whole = path.read_bytes().rstrip(b"\0")
        path.write_bytes(whole + bytes(-len(whole) % 512) + endless.tobuf(tarfile.GNU_FORMAT))
        failures = []
        records = list(
            stream_records([str(path)], SampleKeys(), lambda *words, failures=failures: failures.append(words))
        )
        assert len(records) == 1 and failures
    monkeypatch.setattr("infcl.data.streaming.MAX_IMAGE_BYTES", 9999)
    write_tar(tmp_path / "a.tar", [("a.jpg", bytes(10_000)), ("a.txt", b"a"), *pair_members(1)])
    faults = [record.fault and record.fault.cause for _, record in stream_records([str(path)], SampleKeys(), None)]
    assert faults == ["image_file_too_large", None]


def test_a_shard_that_is_replaced_on_the_server_is_noticed(web, options, tmp_path):
    url, behaviour = web
    manifest = load_manifest(url + "/00000.tar", storage=options, index_cache=str(tmp_path / "index"))
    reader = ShardReader(manifest, storage=options)
    assert reader.read(np.array([1]))[0].fault is None
    behaviour.tag = "2"
    assert reader.read(np.array([1]))[0].fault.cause == "shard_changed"
    assert load_manifest(url + "/00000.tar", storage=options, index_cache=str(tmp_path / "index")).num_samples == 6


def test_pipes_are_spooled_and_their_exit_status_counts(tmp_path, options):
    folder = write_shards(tmp_path / "a", SIZES)
    assert captions(f"pipe:cat {quote(folder)}/" + "{00000,00001}.tar", options, tmp_path) == EXPECTED
    for command, message in [
        (f"head -c 2000 {quote(folder)}/00000.tar; exit 3", "exit status 3 after 2000 bytes"),
        ("true", "exit status 0 after 0 bytes"),
        (f"head -c 2000 {quote(folder)}/00000.tar; sleep 30", "no output for 0.4 s"),
    ]:
        impatient = replace(options, timeout=0.4 if "sleep" in command else 5.0)
        with pytest.raises(ShardFault, match=message) as caught:
            local_copy(f"pipe:{command}", impatient)
        assert caught.value.cause == "shard_unreadable"
    assert len([name for name in os.listdir(options.cache) if name.endswith(".tar")]) == 2


def test_shards_that_do_not_fit_in_the_spool_are_rejected_by_the_indexed_reader(tmp_path, options):
    folder = write_shards(tmp_path / "a", SIZES)
    small = replace(options, cache_bytes=30_000)
    with pytest.raises(ValueError, match="2 shards of .* GB cannot be read at random.*or use --dataset-type streaming"):
        captions(f"pipe:cat {quote(folder)}/" + "{00000,00001}.tar", small, tmp_path)


def test_fsspec_reads_any_storage_and_ends_calls_that_hang(tmp_path, options, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    folder, memory = write_shards(tmp_path / "a", SIZES), fsspec.filesystem("memory")
    for i in range(2):
        with open(f"{folder}/{i:05d}.tar", "rb") as file:
            memory.pipe(f"/bucket/{i:05d}.tar", file.read())
    assert captions("memory://bucket/{00000,00001}.tar", options, tmp_path) == EXPECTED
    with pytest.raises(ShardFault) as caught:
        ensure_index("memory://bucket/00009.tar", SampleKeys(), str(tmp_path), options)
    assert caught.value.cause == "shard_missing"
    with open(local_copy("memory://bucket/00000.tar", options), "rb") as copy:
        assert copy.read() == memory.cat_file("/bucket/00000.tar")
    file = open_shard("memory://bucket/00000.tar", options)
    assert not file.changed()
    memory.pipe("/bucket/00000.tar", b"other bytes")
    monkeypatch.setattr("infcl.data.remote._SECONDS_BETWEEN_CHECKS", 0.0)
    assert file.changed()
    monkeypatch.setattr(type(memory), "cat_file", lambda *a, **k: time.sleep(10))
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        open_shard("memory://bucket/00000.tar", replace(options, timeout=0.4)).pread(10, 0)
    assert time.monotonic() - started < 8
    memory.rm("/bucket", recursive=True)
    with pytest.raises(ValueError, match="nosuch:// needs fsspec's driver"):
        open_shard("nosuch://bucket/x.tar", options)
    with pytest.raises(OSError, match="No host specified"):
        open_shard("http:///x.tar", options)


def test_the_spool_keeps_what_was_used_last_and_fetches_once(tmp_path):
    options = StorageOptions(cache=str(tmp_path / "spool"), cache_bytes=2500)
    fetched = []

    def fetch(name: str):
        path = spooled(name, lambda file: (fetched.append(name), file.write(bytes(1000))), options)
        os.utime(path, ns=(len(fetched) * 10**9, 0))  # as if time passed
        return path

    a, b = fetch("a"), fetch("b")
    assert fetch("a") == a and fetched == ["a", "b"]
    os.utime(b, ns=(0, 0))
    fetch("c")
    assert a.exists() and not b.exists()

    def breaks(file):
        file.write(bytes(500))
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        spooled("d", breaks, options)
    assert not [name for name in os.listdir(options.cache) if name.endswith(".tmp")]


def test_the_spool_removes_what_dead_writers_left_and_counts_what_living_ones_write(tmp_path):
    options = StorageOptions(cache=str(tmp_path), cache_bytes=2500)
    killed = (
        "import os\n"
        "from infcl.data.spool import spooled\n"
        "from infcl.data.storage import StorageOptions\n"
        "write = lambda file: (file.write(bytes(1000)), file.flush(), os.kill(os.getpid(), 9))\n"
        f"spooled('dead', write, StorageOptions(cache={str(tmp_path)!r}))\n"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    (left,) = tmp_path.glob("*.tmp")
    os.utime(left, (0, 0))

    def writes_long(file):
        file.write(bytes(2000))
        file.flush()
        (ours,) = set(tmp_path.glob("*.tmp")) - {left}
        os.utime(ours, (0, 0))  # silent for long, but its lock is held
        spooled("short", lambda other: other.write(bytes(400)), options)
        assert list(tmp_path.glob("*.tmp")) == [ours]
        assert not before.exists()  # 2000 + 400 + 400 bytes are too many

    before = spooled("before", lambda file: file.write(bytes(400)), options)
    assert left.exists() is False and before.exists()
    left.write_bytes(bytes(1000))
    os.utime(left, (0, 0))
    long = spooled("long", writes_long, options)
    assert long.stat().st_size == 2000 and not list(tmp_path.glob("*.tmp"))


def test_retry_waits_longer_each_time_and_says_what_was_last(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)

    def attempt():
        raise ConnectionResetError("reset by peer")

    with pytest.raises(ShardFault, match="x: 4 attempts failed, the last with ConnectionResetError: reset by peer"):
        retry(attempt, "x", StorageOptions())
    assert len(waits) == 3 and all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 4)))
    assert within(1, lambda: 3, "why") == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_hangs_ends_the_run_with_the_name_of_its_shard(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "never")
    write_tar(tmp_path / "0.tar", [member for i in range(6) for member in pair_members(i)])
    # the worker begins to read within the time-out
    loader = small_loader(str(tmp_path), tokenizer, micro_batch_size=2, workers=1, timeout=3.0)
    dataset = loader._source._loader.dataset
    dataset.collection._read_shard = lambda *a: open(tmp_path / "never")  # nobody ever writes to it
    with pytest.raises(RuntimeError, match=r"no batch for 3 s; worker 0 reads .*0.tar for [0-9]+ s"):
        next(iter(loader))
    loader._source._loader._iterator._workers[0].kill()  # or torch would wait for it


def test_a_server_that_does_not_tell_a_files_size_is_read_whole(web, options, tmp_path):
    url, behaviour = web
    behaviour.tells_size = False
    assert captions(url + "/{00000,00001}.tar", options, tmp_path) == EXPECTED
    assert os.path.exists(options.cache)


def test_bytes_from_another_place_than_asked_are_not_used(web, options):
    url, behaviour = web
    file = open_shard(url + "/00000.tar", options)
    assert len(file.pread(10, 512)) == 10
    behaviour.shift = 1
    with pytest.raises(OSError, match="bytes from 512 were requested, the server sent bytes 513-522/"):
        file.pread(10, 512)
    file.close()
