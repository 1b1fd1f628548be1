import json
import os
import tarfile
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from infcl.config import BatchPlan
from infcl.data import shards, tar
from infcl.data.index import SampleKeys, ensure_index, scan_shard
from infcl.data.plan import EpochPlan, Share, chunk_size, draw
from infcl.data.records import ShardReader, stream_records
from infcl.data.shards import expand_shards, load_manifest, main
from infcl.data.storage import LocalFile
from tests.lib.shard_files import pair_members, write_shards, write_tar

KEYS = SampleKeys()


def three_pairs() -> list[tuple[str, bytes]]:
    return [member for i in range(3) for member in pair_members(i)]


def test_braces_lists_globs_folders_and_files_of_urls_name_the_same_shards(tmp_path):
    folder = write_shards(tmp_path / "it's (a)", [1, 1, 1])
    expected = [f"{folder}/{i:05d}.tar" for i in range(3)]
    names = tmp_path / "urls.txt"
    names.write_text(f"# all\n{tmp_path}/it*/0000[01].tar\n\n  {tmp_path}/it*/00002.tar  \r\n")
    braces, globs = folder + "/{00000..00002}.tar", folder + "/*.tar"
    for urls in (folder, braces, globs, "::".join(expected), f"@{names}"):
        assert expand_shards(urls) == expected
    assert [shard.factor for shard in load_manifest(f"@{names}", factors=[1, 2]).shards] == [1, 1, 2]
    assert expand_shards("pipe:cat x{0..1}.tar", allow_pipe=True) == ["pipe:cat x0.tar", "pipe:cat x1.tar"]
    chained = ["filecache::https://host/0.tar", "filecache::s3://host/1.tar"]
    assert expand_shards("::".join(chained)) == chained


def test_shards_that_are_missing_or_named_twice_are_an_error_that_counts_them(tmp_path):
    folder = write_shards(tmp_path / "s", [1, 1])
    (tmp_path / "empty").mkdir()
    for urls, message in [
        (f"{folder}::{folder}/../s/00001.tar", "1 of 2 shards are listed more than once: .*00001.tar: their samples"),
        ("https://host/0.tar::https://host/0.tar", "1 of 1 shards .*upsampling-factors"),
        (folder + "/{00000..00003}.tar", "2 of 4 shards are missing: .*00002.tar, .*00003.tar"),
        (str(tmp_path / "empty"), r"no \*.tar in this folder"),
        ("@/nowhere", "cannot read the urls of @/nowhere: "),
        ("@/dev/zero", "cannot read the urls of @/dev/zero: .*is not a regular file"),
        ("pipe:cat x", "runs a shell command: it needs --dataset-type streaming, and --allow-pipe-urls"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_manifest(urls)


SHORT_NAMES = ["", "a/b/", "d" * 60 + "/" + "f" * 90, "../../etc/"]
LONG_NAMES = ["deep/" * 25 + "x" * 160]  # do not fit a ustar header


@pytest.mark.parametrize(
    "format, prefix",
    [(format, prefix) for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT) for prefix in SHORT_NAMES]
    + [(format, prefix) for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT) for prefix in LONG_NAMES],
)
def test_index_points_at_the_bytes_that_tarfile_reads(tmp_path, format, prefix):
    members = [member for i in range(3) for member in pair_members(i, key=f"{prefix}{i:03d}")]
    path = write_tar(tmp_path / "x.tar", members, format)
    shard, rows = scan_shard(str(path), KEYS)
    data = path.read_bytes()
    assert shard.damage is None and not shard.rejected
    found = [data[offset : offset + size] for row in rows.tolist() for offset, size in zip(row[::2], row[1::2])]
    image_text_json = [members[3 * i + j][1] for i in range(3) for j in (0, 2, 1)]
    assert found == image_text_json


def test_only_regular_members_with_known_extensions_are_indexed(tmp_path):
    path, link = tmp_path / "x.tar", tarfile.TarInfo("000.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    others = [("000.txt", b"a link's caption"), ("001.pkl", b""), ("._002.jpg", b"x"), ("003.seg.png", b"x")]
    write_tar(path, [*others, *pair_members(7)])
    path.write_bytes(link.tobuf() + path.read_bytes())
    shard, _ = scan_shard(str(path), KEYS)
    assert shard.samples == 1 and shard.rejected == {"no_image": 1} and shard.damage is None


def test_pairs_lost_to_a_dot_in_their_names_are_counted(tmp_path):
    """Their key ends at the first dot. An image without a caption of its own, as of another view, is no lost pair."""
    members = [("a.png", b"x"), ("a.txt", b"y"), ("a.left.png", b"x"), ("b.5x.png", b"x"), ("b.5x.txt", b"y")]
    members += [("b.7x.PNG", b"x"), ("b.7x.json", b"{}"), ("v1.0/c.png", b"x"), ("v1.0/c.txt", b"y"), ("._d.png", b"x")]
    shard, _ = scan_shard(str(write_tar(tmp_path / "x.tar", members)), KEYS)
    assert shard.samples == 2 and shard.rejected == {"dotted_name": 2}


@pytest.mark.parametrize("members", [("short", "txt"), ("txt", "short")])
def test_of_several_alternatives_the_one_named_first_is_read_wherever_it_lies(tmp_path, members):
    pairs = [(f"0.{name}", name.encode()) for name in ("jpg", "png", *members)]
    path = str(write_tar(tmp_path / "x.tar", pairs))
    for image, text, expected in (
        ("png;jpg", "short;txt;short", (b"png", b"short")),
        ("jpg", "a;txt", (b"jpg", b"txt")),
    ):
        keys = SampleKeys(image, text)
        assert scan_shard(path, keys)[0].rejected == {}  # nothing is there twice
        (record,) = ShardReader(load_manifest(path, keys=keys), keys).read(np.arange(1))
        ((_, streamed),) = stream_records([path], keys, None)
        assert (record.image, record.text) == (streamed.image, streamed.text) == expected


def test_the_sidecar_is_reused_until_the_shard_or_the_sidecar_changes(tmp_path):
    path = write_tar(tmp_path / "x.tar", three_pairs())
    shard = ensure_index(str(path), KEYS)
    assert shard.index_path == f"{path}.infcl.idx" and shard.samples == 3
    sidecar = Path(shard.index_path)
    written = sidecar.stat().st_mtime_ns
    assert ensure_index(str(path), KEYS) == shard and sidecar.stat().st_mtime_ns == written
    write_tar(path, three_pairs()[:6])
    os.utime(path, ns=(1, 1))
    assert ensure_index(str(path), KEYS).samples == 2
    content = sidecar.read_bytes()
    for damaged in (content[:80], content.replace(b"infcl-index-4", b"infcl-index-3")):
        sidecar.write_bytes(damaged)
        ensure_index(str(path), KEYS)
        assert sidecar.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "x.tar.infcl.idx"]
    sidecar.unlink()
    os.mkfifo(sidecar)  # nobody writes to it
    assert ensure_index(str(path), KEYS).samples == 2


@pytest.mark.parametrize("in_folder", [True, False])
def test_another_run_that_reads_other_members_leaves_the_index_of_this_one_alone(tmp_path, in_folder):
    names = ["0.jpg", "0.long", "1.jpg", "1.txt", "2.jpg", "2.txt", "2.long"]
    path = str(write_tar(tmp_path / "x.tar", [(name, name.encode()) for name in names]))
    if not in_folder:
        (tmp_path / "x.tar.infcl.idx").mkdir()
    cache = str(tmp_path / "cache")
    default = ShardReader(load_manifest(path, index_cache=cache))  # opens its index when it reads first
    for keys, samples in ((SampleKeys(text="long;txt"), 3), (SampleKeys(text="long"), 2)):
        assert load_manifest(path, keys=keys, index_cache=cache).num_samples == samples
    assert [record.text for record in default.read(np.arange(2))] == [b"1.txt", b"2.txt"]


def test_the_manifest_names_the_data_not_the_place(tmp_path):
    a, b = write_shards(tmp_path / "a", [3, 2]), write_shards(tmp_path / "b", [3, 2])
    other = write_shards(tmp_path / "c", [2, 3])
    assert load_manifest(a).sha256 == load_manifest(b).sha256 != load_manifest(other).sha256


def test_shards_are_opened_at_the_same_time_and_those_of_other_ranks_not_at_all(tmp_path, monkeypatch):
    folder, opened, both = write_shards(tmp_path / "a", [1] * 5), [], threading.Barrier(2, timeout=30)
    manifest, open_one = load_manifest(folder), shards.ensure_index

    def ensure(path, *args, **kwargs):
        opened.append(path)
        both.wait()  # raises if one is opened after the other
        return open_one(path, *args, **kwargs)

    monkeypatch.setattr(shards, "ensure_index", ensure)
    of_others = {shard.path: shard for shard in manifest.shards[::2]}
    assert load_manifest(folder, indexed=of_others).sha256 == manifest.sha256
    assert sorted(opened) == [shard.path for shard in manifest.shards[1::2]]


def test_the_command_lists_damaged_shards_and_the_samples_that_are_left_out(tmp_path, capsys):
    members = [
        *three_pairs(),
        *[(f"x\u00e9\x1b.{kind}", b"a") for kind in ("npy", "txt", "gif")],
        ("y.jpg", b"a"),
        *[(f"z{i}.txt", b"a") for i in range(30)],
    ]
    first = write_tar(tmp_path / "a" / "0.tar", members)
    cut = write_tar(tmp_path / "a" / "1.tar", three_pairs())
    end = -(-len(cut.read_bytes().rstrip(b"\0")) // 512) * 512
    os.truncate(cut, end)
    for _ in range(2):  # built, then read
        main(["index", str(tmp_path / "a"), "--jobs", "2"])
        out = capsys.readouterr().out
        assert "2 shards" in out and f"damaged shard, its intact samples are used: {cut}: ends at byte {end}" in out
        assert f"left out, no_caption: 1\n    {first}: y\n" in out
        assert f"left out, no_image: 31\n    {first}: x\\xe9\\x1b (it has gif, npy)\n    {first}: z0\n" in out
        assert "z18\n    and 11 more\n" in out
    manifest = load_manifest(str(tmp_path / "a"))
    assert [shard.path for shard in manifest.shards if shard.damage] == [str(cut)]
    (tmp_path / "README.md").write_text("no tar" * 200)
    with pytest.raises(SystemExit) as stop:
        main(["index", str(tmp_path / "README.md")])
    assert stop.value.code == 2 and "error: no sample has an image (jpg;" in capsys.readouterr().err


def with_rows(change) -> Callable[[bytes, int], bytes]:
    """Return (index, bytes of its shard) -> the index whose array of members `change` has written to."""

    def damage(data: bytes, file_bytes: int) -> bytes:
        head, _, rest = data.partition(b"\n")
        rows = np.frombuffer(rest, "<i8").reshape(-1, 6).copy()
        change(rows, file_bytes)
        return head + b"\n" + rows.tobytes()

    return damage


def with_header(**wrong) -> Callable[[bytes, int], bytes]:
    def damage(data: bytes, _: int) -> bytes:
        head, _, rest = data.partition(b"\n")
        return json.dumps(json.loads(head) | wrong).encode() + b"\n" + rest

    return damage


DAMAGED_ROWS = {
    "offset": lambda data, _: data[:-48] + b"\x7f" * 48,
    "cut": lambda data, _: data[:40],
    "gone": None,
    "more than the file in all": with_rows(lambda rows, size: np.copyto(rows[:, :2], [0, size])),
    "no image": with_rows(lambda rows, _: rows[:, :2].fill(-1)),
    "no size": with_rows(lambda rows, _: rows[0, 1:2].fill(-1)),
}
WRONG_TYPES = [{"samples": "3"}, {"samples": -3}, {"rejected": {"\x1b[31m": 1}}]


@pytest.mark.parametrize(
    ("damage", "open_reader"),
    [(damage, True) for damage in DAMAGED_ROWS.values()] + [(with_header(**wrong), False) for wrong in WRONG_TYPES],
    ids=[*DAMAGED_ROWS, *map(str, WRONG_TYPES)],
)
def test_a_damaged_index_is_built_again(tmp_path, damage, open_reader):
    """By the next run; one that has read the header before finds its samples all the same."""
    manifest = load_manifest(write_shards(tmp_path / "a", [3]))
    index = Path(manifest.shards[0].index_path)
    data = index.read_bytes()
    index.write_bytes(damage(data, manifest.shards[0].file_bytes)) if damage else index.unlink()
    if open_reader:
        records = ShardReader(manifest).read(np.arange(3))
        assert [record.text for record in records] == [f"picture number {i}".encode() for i in range(3)]
        assert not index.exists()
    assert load_manifest(str(tmp_path / "a")).shards == manifest.shards and index.read_bytes() == data
    index.write_bytes(with_header(damage="\x1b[31mred")(data, 0))  # another user may have written it
    assert load_manifest(str(tmp_path / "a")).warnings[0].endswith(r"00000.tar: \x1b[31mred")


def test_the_reader_returns_any_samples_in_the_order_asked_for(tmp_path, monkeypatch):
    manifest = load_manifest(write_shards(tmp_path / "a", [3, 0, 5, 1]))
    monkeypatch.setattr("infcl.data.records._OPEN_FILES", 1)
    reader = ShardReader(manifest)
    order = np.array([8, 0, 4, 3, 2, 7, 0])
    records = reader.read(order)
    assert [record.text.decode() for record in records] == [f"picture number {i}" for i in order]
    assert [record.image for record in records] == [pair_members(int(i))[0][1] for i in order]
    assert all(record.image is None for record in reader.read(order, images=False))


def test_a_fault_that_is_reported_again_does_not_grow(tmp_path):
    reader = ShardReader(load_manifest(write_shards(tmp_path / "a", [3])))
    (tmp_path / "a" / "00000.tar").unlink()
    depths = []
    for _ in range(4):
        (record,) = reader.read(np.arange(1))
        depths.append(len(traceback.extract_tb(record.fault.__traceback__)))
    assert len(set(depths[1:])) == 1


def test_plans_and_draws_never_change_between_releases():
    """Golden values: a change here breaks the resume of every run."""
    for factors in (None, np.ones(1)):
        plan = EpochPlan([10], chunk=1, seed=1, epoch=2, factors=factors)
        assert plan.samples(0, 10).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]
    upsampled = EpochPlan([10], chunk=1, seed=1, epoch=2, factors=np.array([1.5])).samples(0, 15)
    assert upsampled.tolist() == [4, 1, 2, 2, 0, 6, 1, 5, 4, 9, 8, 7, 9, 7, 3]
    two = EpochPlan([4, 2], chunk=1, seed=1, epoch=2, factors=np.array([1.5, 2.0])).samples(0, 10)
    assert two.tolist() == [1, 2, 0, 4, 1, 2, 5, 4, 5, 3]
    assert draw(1, 2, 3, stream=4, count=2).tolist() == [479415053854723494, 8851612858779230248]


def test_parts_of_a_micro_batch_put_together_are_what_one_process_reads():
    """Tensor-parallel ranks: the same samples in the same places, for any number of parts."""

    def positions(share: Share) -> list[int]:
        return [first for _, first in islice(share.positions(0, 1, 2, range(1, 3)), 20)]

    batch = BatchPlan(2, 3, 12)
    for rank in range(2):
        whole = [p + i for p in positions(Share(batch, rank)) for i in range(12)]
        for parts in (2, 3, 4):
            shares = [Share(batch, rank, part, parts) for part in range(parts)]
            rows = zip(*map(positions, shares))
            assert [p + i for starts in rows for p in starts for i in range(12 // parts)] == whole
    assert sorted(Share(batch, rank, part, 3).reader for rank in (0, 1) for part in range(3)) == list(range(6))


def test_chunks_leave_512_of_them_in_a_batch():
    assert [chunk_size(b) for b in (256, 1024, 32768, 10**6)] == [1, 2, 64, 256]


def test_a_tar_that_was_never_filled_to_its_end_is_reported(tmp_path):
    path = write_tar(tmp_path / "x.tar", three_pairs())
    end = int(scan_shard(str(path), KEYS)[1][1, 0]) - 512  # the header of the second sample
    original = path.read_bytes()
    for content, samples, says in [
        (original[:end] + bytes(200_000), 1, "200000 zero bytes at the end"),
        (original[:end] + bytes(512), 1, "512 zero bytes at the end"),
        (original[:end] + bytes(1024) + original[end:], 3, f"data after the end-of-archive block at byte {end}"),
        (original[:end] + bytes(1024) + b"garbage" * 200, 1, f"data after the end-of-archive block at byte {end}"),
        (original[:end] + bytes(1024), 1, ""),
    ]:
        path.write_bytes(content)
        shard, _ = scan_shard(str(path), KEYS)
        assert shard.samples == samples and (shard.damage or "").startswith(says) and bool(shard.damage) == bool(says)


def test_names_and_headers_that_are_long_or_odd_cost_no_time(tmp_path):
    names = ["/" * 60_000 + "x.png", "a/.png", ".png", "a.b/c", "caf\udce9/\udcff.png", "line\nbreak.png", "A.PNG"]
    members = [member for name in names for member in [(name, b"image"), (name[:-3] + "txt", b"text")]]
    path = write_tar(tmp_path / "x.tar", members, tarfile.GNU_FORMAT)
    started = time.process_time()
    assert scan_shard(str(path), KEYS)[0].samples == 4
    assert len(list(stream_records([str(path)], KEYS, lambda *failure: None))) >= 3
    assert len(tar._pax_records(b"9 k=abcd\n" * 116_000)) == 1
    assert time.process_time() - started < 5


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_of_megabytes_is_not_read_into_memory(tmp_path, monkeypatch, kind):
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 50 << 20
    path = write_tar(tmp_path / "0.tar", pair_members(0))
    begin = path.read_bytes().rstrip(b"\0")
    begin += bytes(-len(begin) % 512)
    path.write_bytes(begin + info.tobuf() + bytes(50 << 20) + bytes(1024))
    pread, sizes = LocalFile.pread, []
    monkeypatch.setattr(LocalFile, "pread", lambda file, size, at: sizes.append(size) or pread(file, size, at))
    ((_, record),) = stream_records([str(path)], SampleKeys(), lambda *failure: None)
    assert record.text == b"picture number 0" and max(sizes) <= 2 << 20


def test_an_index_that_is_cut_while_it_is_open_costs_nothing(tmp_path):
    manifest = load_manifest(write_shards(tmp_path, [5]))
    reader = ShardReader(manifest)
    first = reader.read(np.arange(5))
    os.truncate(manifest.shards[0].index_path, 0)
    assert reader.read(np.arange(5)) == first


def test_a_cache_that_cannot_be_written_is_one_line_with_the_fix(tmp_path, monkeypatch):
    shards = write_shards(tmp_path / "a", [3])
    for path in (tmp_path / "a").glob("*.tar"):
        Path(f"{path}.infcl.idx").mkdir()  # where the index would be stored
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"cannot be stored in .*home/\.cache/infcl/index .*--index-cache"):
        load_manifest(shards)
    assert load_manifest(shards, index_cache=str(tmp_path / "cache")).num_samples == 3


def test_a_password_in_a_list_of_urls_is_rejected_and_not_shown(tmp_path):
    (tmp_path / "urls").write_text("a.tar\nhttps://me:hunter2@host/0.tar\n")
    for urls in (f"@{tmp_path}/urls", "a.tar::https://hunter2@host/0.tar"):
        with pytest.raises(ValueError, match="one of the 2 urls holds a password") as rejected:
            expand_shards(urls)
        assert "hunter2" not in str(rejected.value)
