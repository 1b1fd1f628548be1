"""Input that never ends or fits in no memory: reading it is bounded, and costs a sample, a shard or the start."""

import os
import tarfile

import numpy as np
import pytest

from infcl.data.evaluation import caption_list
from infcl.data.index import SampleKeys
from infcl.data.records import ShardReader
from infcl.data.shards import load_manifest
from infcl.data.storage import LocalFile
from infcl.data.streaming import stream_records
from infcl.data.table import TableReader
from tests.lib.shard_files import pair_members, write_shards, write_tar


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


@pytest.mark.parametrize("read", [TableReader, caption_list])
def test_a_line_without_an_end_is_no_table_or_list(tmp_path, monkeypatch, read):
    with open(tmp_path / "t", "wb") as file:
        file.write(b"filepath\ttitle\n" if read is TableReader else b"")
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match="t: a line of more than 16 MB"):
        read(tmp_path / "t" if read is caption_list else str(tmp_path / "t"))


def test_an_index_that_is_cut_while_it_is_open_costs_nothing(tmp_path):
    manifest = load_manifest(write_shards(tmp_path, [5]))
    reader = ShardReader(manifest)
    first = reader.read(np.arange(5))
    os.truncate(manifest.shards[0].index_path, 0)
    assert reader.read(np.arange(5)) == first
