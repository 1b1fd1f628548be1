import contextlib
import os
import tarfile
import tempfile
import time
from itertools import product
from pathlib import Path
from shlex import quote

import numpy as np
import pytest

from infcl.data import storage
from infcl.data.index import SampleKeys, ensure_index
from infcl.data.records import ShardReader, stream_records
from infcl.data.shards import load_manifest
from infcl.data.storage import ShardFault, open_copy, open_shard, retry
from infcl.data.table import TableReader
from tests.lib.http_server import serving
from tests.lib.shard_files import pair_members, write_shards, write_tar
from tests.lib.small_loader import eval_samples, small_loader

SIZES = [6, 9]
EXPECTED = [f"picture number {i}" for i in range(sum(SIZES))]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(storage, "TIMEOUT", 5.0)
    monkeypatch.setattr(storage, "ATTEMPTS", 3)
    monkeypatch.setattr(storage, "BACKOFF", 0.01)


@pytest.fixture
def web(tmp_path):
    write_shards(tmp_path / "served", SIZES)
    with serving(tmp_path / "served") as (url, behaviour):
        yield url, behaviour


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A file system of fsspec with the shards in /bucket."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(storage, "SCHEMES", (*storage.SCHEMES, "memory"))
    monkeypatch.setitem(fsspec.config.conf, "filecache", {"cache_storage": str(tmp_path / "cache")})
    memory, folder = fsspec.filesystem("memory"), write_shards(tmp_path / "a", SIZES)
    for i in range(2):
        memory.pipe(f"/bucket/{i:05d}.tar", Path(f"{folder}/{i:05d}.tar").read_bytes())
    yield memory
    memory.store.clear()


def captions(urls: str, tmp_path) -> list[str]:
    manifest = load_manifest(urls, index_cache=str(tmp_path / "index"))
    records = ShardReader(manifest).read(np.arange(manifest.num_samples))
    assert all(record.fault is None and record.image is not None for record in records)
    return [record.text.decode() for record in records]


def streamed(*urls: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return (captions, [(cause, message)] of the shards that failed)."""
    faults: list[tuple[str, str]] = []
    stream = stream_records(urls, SampleKeys(), lambda cause, _, error: faults.append((cause, str(error))))
    return [record.text.decode() for _, record in stream], faults


@pytest.mark.parametrize("redirect", ["", "/moved"])
def test_a_web_server_is_read_as_files_are(web, tmp_path, redirect):
    url, behaviour = web
    behaviour.redirect = redirect
    assert captions(url + "/{00000,00001}.tar", tmp_path) == EXPECTED
    scans = dict(behaviour.requests)
    assert captions(url + "/{00000,00001}.tar", tmp_path) == EXPECTED  # the index is not built again
    assert all(behaviour.requests[path] - n < n for path, n in scans.items())
    behaviour.tag = "2"  # the shards are replaced
    assert captions(url + "/{00000,00001}.tar", tmp_path) == EXPECTED
    assert streamed(f"{url}/00000.tar", f"{url}/00001.tar") == (EXPECTED, [])


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("reader", "ranges"), [("indexed", True), *product(["streaming", "table", "evaluation"], [True, False])]
)
def test_a_connection_that_breaks_after_any_answers_headers_costs_a_retry_only(web, tmp_path, reader, ranges):
    url, behaviour = web
    behaviour.ranges = ranges
    (tmp_path / "t.csv").write_text(f"filepath\ttitle\n{url}/00000.tar\ta\n{url}/00001.tar\tb\n")
    files = [(tmp_path / "served" / f"0000{i}.tar").read_bytes() for i in range(2)]
    for behaviour.breaks_at in range(1, 13):
        behaviour.requests.clear()
        if reader == "indexed":
            assert captions(url + "/{00000,00001}.tar", tmp_path / str(behaviour.breaks_at)) == EXPECTED
        elif reader == "streaming":
            assert streamed(f"{url}/00000.tar", f"{url}/00001.tar") == (EXPECTED, [])
        elif reader == "table":
            assert [each.image for each in TableReader(str(tmp_path / "t.csv")).read(np.arange(2))] == files
        else:
            samples = eval_samples(url + "/{00000,00001}.tar", image_size=8)
            assert [sample.caption for sample in samples] == EXPECTED and not samples.skipped


def test_ranks_share_the_copies_of_remote_shards(web):
    url, behaviour = web

    def read(rank: int, ranks: int) -> list[str]:
        return [s.caption for s in eval_samples(url + "/{00000,00001}.tar", image_size=8, rank=rank, world_size=ranks)]

    assert read(0, 1) == EXPECTED
    alone = dict(behaviour.requests)
    behaviour.requests.clear()
    assert read(0, 2) + read(1, 2) == EXPECTED
    assert dict(behaviour.requests) == alone  # each rank copied both
    assert sorted(read(0, 3) + read(1, 3) + read(2, 3)) == sorted(EXPECTED)


@pytest.mark.parametrize("error", [KeyError, UnicodeError, MemoryError])
def test_whatever_a_driver_raises_is_a_counted_fault(memory, monkeypatch, error):
    def fail(*_, **__):
        raise error("of a driver")

    monkeypatch.setattr(type(memory), "info", fail)
    assert streamed("memory://bucket/0.tar")[1][0][0] == "shard_unreadable"
    with pytest.raises(ValueError, match=f"3 attempts failed, the last with {error.__name__}"):
        load_manifest("memory://bucket/0.tar")


def test_what_a_server_sends_is_neither_trusted_nor_shown_as_it_is(web, monkeypatch):
    url, behaviour = web
    behaviour.size = "\u00b2\u00b3"  # digits, which int() does not read
    with pytest.raises(ShardFault, match="no random access"):
        open_shard(url + "/00000.tar")
    behaviour.size, behaviour.coding = None, "gzip\x1b[31m"
    with pytest.raises(ShardFault, match=r"the server compresses it \(gzip\\x1b\[31m\)"):
        open_copy(url + "/00000.tar")
    behaviour.coding, behaviour.redirect = None, url  # from an address of the net to one of this host
    monkeypatch.setattr(storage, "is_of_this_host", lambda to: "127.0.0.1" in to)
    with pytest.raises(ShardFault, match="localhost:.* redirects to http://127.0.0.1.*which is of this host"):
        open_copy(url.replace("127.0.0.1", "localhost") + "/00000.tar")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "0.0.0.0", "[fe80::1]"])
def test_loopback_and_link_local_addresses_are_of_this_host(host):
    assert storage.is_of_this_host(f"http://{host}:80/x") and not storage.is_of_this_host("http://192.0.2.1/x")


def test_ranged_reads_of_neighbours_are_one_request(web, tmp_path):
    url, behaviour = web
    manifest = load_manifest(url + "/00001.tar", index_cache=str(tmp_path / "index"))
    before = behaviour.requests["/00001.tar"]
    ShardReader(manifest).read(np.arange(9))
    assert behaviour.requests["/00001.tar"] - before == 2  # what is there, then all of it


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("after", "fault", "ranges"),  # 0: in the opening request too
    [(0, "stall", True), (700, "stall", False), (0, "short", False), (700, "short", True)]
    + [(700, "stall", True), (0, "stall", False), (700, "short", False), (0, "short", True)],
)
def test_a_transfer_that_stalls_or_breaks_off_ends_by_time_out_and_is_never_used(
    web, monkeypatch, fault, ranges, after
):
    url, behaviour = web
    behaviour.ranges = ranges
    monkeypatch.setattr(storage, "TIMEOUT", 0.4)
    setattr(behaviour, fault, after)
    texts, ((cause, message),) = streamed(url + "/00000.tar")
    assert texts == [] and cause == "shard_unreadable" and "00000.tar: 3 attempts failed, the last with" in message
    setattr(behaviour, fault, None)
    assert streamed(url + "/00000.tar") == (EXPECTED[:6], [])


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("slow", ["trickle", "drip", "drip_chunk"])
def test_an_answer_that_never_ends_is_stopped(web, monkeypatch, slow, ranges):
    """A server that sends a byte now and then, in the header, in the length of a chunk or in the body."""
    url, behaviour = web
    behaviour.ranges = ranges
    monkeypatch.setattr(storage, "TIMEOUT", 0.5)
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    file = open_shard(url + "/00000.tar") if ranges else None
    setattr(behaviour, slow, 700 if slow == "trickle" else True)
    with pytest.raises((TimeoutError, ShardFault), match="slower than 16 KB/s|no answer within 0.[58]"):
        file.pread(5000, 0) if file else open_copy(url + "/00001.tar")


def test_bytes_from_another_place_than_asked_are_not_used(web):
    url, behaviour = web
    file = open_shard(url + "/00000.tar")
    assert len(file.pread(10, 512)) == 10
    behaviour.shift = 1
    with pytest.raises(OSError, match="bytes from 512 were requested, the server sent bytes 513-522/"):
        file.pread(10, 512)
    behaviour.shift, behaviour.short = 0, 10
    with pytest.raises(OSError, match="1000 bytes were requested, the server sent 10"):
        file.pread(1000, 0)
    behaviour.short = None
    assert len(file.pread(1000, 0)) == 1000
    file.close()


def test_an_open_shard_that_is_replaced_on_the_server_is_noticed(web, tmp_path):
    url, behaviour = web
    reader = ShardReader(load_manifest(url + "/00000.tar", index_cache=str(tmp_path / "index")))
    assert reader.read(np.array([1]))[0].fault is None
    behaviour.tag = "2"
    assert reader.read(np.array([1]))[0].fault.cause == "shard_changed"


def test_a_copy_ends_before_the_disk_is_full_and_leaves_no_file(web, tmp_path, monkeypatch):
    url, behaviour = web
    behaviour.ranges = False
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    assert streamed(f"{url}/00000.tar") == (EXPECTED[:6], [])
    monkeypatch.setattr(storage, "_FREE_BYTES", 1 << 60)
    for shard in (f"{url}/00000.tar", "pipe:cat /dev/zero"):
        with pytest.raises(ShardFault, match=r"MB are free for a copy in .*copies \(TMPDIR\)"):
            open_copy(shard)
    assert os.listdir(tmp_path / "copies") == []


def test_pipes_are_copied_and_their_exit_status_counts(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "a", SIZES)
    assert streamed(*[f"pipe:cat {quote(folder)}/0000{i}.tar" for i in range(2)]) == (EXPECTED, [])
    for command, message in [
        (f"head -c 2000 {quote(folder)}/00000.tar; exit 3", "exit status 3 after 2000 bytes"),
        ("true", "exit status 0 after 0 bytes"),
        (f"head -c 2000 {quote(folder)}/00000.tar; sleep 30", "no answer within 0.4 s"),
        (f"head -c 2000 {quote(folder)}/00000.tar; exec >&-; sleep 30", "no answer within 0.4 s"),
    ]:
        monkeypatch.setattr(storage, "TIMEOUT", 0.4 if "sleep" in command else 5.0)
        with pytest.raises(ShardFault, match=message) as caught:
            open_copy(f"pipe:{command}")
        assert caught.value.cause == "shard_unreadable"


def test_fsspec_reads_any_storage_and_ends_calls_that_hang(memory, tmp_path, monkeypatch):
    assert captions("memory://bucket/{00000,00001}.tar", tmp_path) == EXPECTED
    assert streamed("memory://bucket/00000.tar") == (EXPECTED[:6], [])
    with pytest.raises(ShardFault) as caught:
        ensure_index("memory://bucket/00009.tar", SampleKeys(), str(tmp_path))
    assert caught.value.cause == "shard_missing"
    file = open_shard("memory://bucket/00000.tar")
    assert not file.changed()
    memory.pipe("/bucket/00000.tar", b"other bytes")
    monkeypatch.setattr(storage, "_SECONDS_BETWEEN_CHECKS", 0.0)
    assert file.changed()
    monkeypatch.setattr(type(memory), "cat_file", lambda *a, **k: time.sleep(10))
    monkeypatch.setattr(storage, "TIMEOUT", 0.4)
    with pytest.raises(TimeoutError, match="no answer within 0.4"):
        open_shard("memory://bucket/00000.tar").pread(10, 0)
    for url in ("nosuch://bucket/x.tar", "zip://x.tar::memory://x.zip", "memory://x::zip://y"):
        with pytest.raises(ShardFault, match="is not a url of file, http"):
            open_shard(url)
    monkeypatch.setattr(storage, "SCHEMES", ("nosuch", "http"))
    with pytest.raises(ShardFault, match="driver for it is missing"):
        open_shard("nosuch://bucket/x.tar")
    with pytest.raises(ValueError, match="1 of 1 shard cannot be used: http:///x.tar: 3 attempts failed.*host"):
        load_manifest("http:///x.tar")


def test_a_cache_of_fsspec_holds_the_shards_of_any_storage(memory, tmp_path, monkeypatch):
    urls = "filecache::memory://bucket/00000.tar::filecache::memory://bucket/00001.tar"
    assert captions(urls, tmp_path) == EXPECTED
    monkeypatch.setattr(type(memory), "cat_file", None)
    monkeypatch.setattr(type(memory), "_open", None)  # the storage is not read again
    assert captions(urls, tmp_path) == EXPECTED


def test_only_regular_files_are_opened(tmp_path):
    """A FIFO would wait for its writer, and a device would never end."""
    os.mkfifo(tmp_path / "fifo.tar")
    for name in (str(tmp_path / "fifo.tar"), "/dev/zero"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            load_manifest(name)
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            TableReader(name)
        assert streamed(name) == ([], [("not_a_file", f"{name} is not a regular file")])
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
        texts, faults = streamed(str(path))
        assert len(texts) == 1 and faults
    monkeypatch.setattr("infcl.data.records.MAX_IMAGE_BYTES", 9999)
    write_tar(tmp_path / "a.tar", [("a.jpg", bytes(10_000)), ("a.txt", b"a"), *pair_members(1)])
    faults = [record.fault and record.fault.cause for _, record in stream_records([str(path)], SampleKeys(), None)]
    assert faults == ["image_file_too_large", None]


def test_retry_waits_longer_each_time_and_reports_the_last_failure(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(storage, "ATTEMPTS", 4)
    monkeypatch.setattr(storage, "BACKOFF", 1.0)

    def attempt():
        raise ConnectionResetError("reset by peer")

    with pytest.raises(ShardFault, match="x: 4 attempts failed, the last with ConnectionResetError: reset by peer"):
        retry(attempt, "x")
    with pytest.raises(TypeError):  # an error of ours
        retry(lambda: len(3), "x")
    assert len(waits) == 3 and all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 4)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_hangs_ends_the_run(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "never")
    write_shards(tmp_path, [6])
    loader = small_loader(str(tmp_path), tokenizer, micro_batch_size=2, workers=1, dist_timeout=0.1)
    dataset = loader._source._loader.dataset
    dataset.collection._read_shard = lambda *a: open(tmp_path / "never")  # nobody ever writes to it
    with pytest.raises(RuntimeError, match=r"no batch for 2 s \(a third of --dist-timeout\): storage hangs"):
        next(iter(loader))
    worker = loader._source._loader._iterator._workers[0]
    with contextlib.suppress(RuntimeError):  # torch's, in its signal handler
        worker.kill()  # or torch would wait for it
        worker.join()
