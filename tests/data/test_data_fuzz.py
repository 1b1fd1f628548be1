"""Mutated shards: no crash, no hang, no lost good sample, correct counts.

Two generators: samples with drawn faults, whose members are written in a drawn order (`broken_samples`), and a good tar
whose bytes are damaged (`damaged_tar`). Few examples in the default suite, thousands under the marker slow.
"""

import io
import json
import random
import tarfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from infcl.data.index import SampleKeys, scan_shard
from infcl.data.records import BadSample, Record, ShardReader, stream_records
from infcl.data.shards import load_manifest
from tests.lib.sample_kinds import EXECUTED, KINDS, UNUSABLE, USABLE, write_kinds
from tests.lib.shard_files import encode, pair_members, picture, write_tar
from tests.lib.small_loader import decode_record, small_loader

FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}
FEW = settings(max_examples=40, derandomize=True, **COMMON)


def often(few: int, many: int):
    """Run a test with so many examples in the suite, and as slow with so many others."""
    cases = settings(FEW, max_examples=few), settings(max_examples=many, **COMMON)
    slow = pytest.param(cases[1], marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("examples", [cases[0], slow], ids=["few", "many"])


# ---- samples with drawn faults ----


@st.composite
def broken_samples(draw):
    """([(name, kind)], shards as lists of (member name, bytes), tar format); at most a quarter of them is unusable."""
    usable = draw(st.lists(st.sampled_from(USABLE), min_size=9, max_size=14))
    unusable = draw(st.lists(st.sampled_from(UNUSABLE), max_size=3))
    folders = draw(
        st.sampled_from(["", "../../../tmp/", "/etc/", "a/b/", "caf\udce9/", "d" * 60 + "/" + "e" * 60 + "/"])
    )
    samples = [(f"{folders}{i:04d}", kind) for i, kind in enumerate(usable + unusable)]
    rng = random.Random(draw(st.integers(0, 2**32)))
    shards = []
    for part in np.array_split(np.array(rng.sample(range(len(samples)), len(samples))), draw(st.integers(1, 3))):
        members = [(f"{samples[i][0]}.{e}", data) for i in part for e, data in KINDS[samples[i][1]][0]]
        if draw(st.booleans()):
            rng.shuffle(members)
        shards.append(members)
    return samples, shards, draw(FORMATS)


def check_broken_samples(case, folder, tokenizer):
    samples, shards, tar_format = case
    for i, members in enumerate(shards):
        write_tar(folder / f"{i}.tar", members, tar_format)
    expected = Counter(KINDS[kind][1] for _, kind in samples)
    left_out = {cause: n for cause, n in expected.items() if cause.startswith("index/")}
    if duplicates := sum(kind == "duplicate" for _, kind in samples):
        left_out["index/duplicate_member"] = duplicates
    notes = Counter(f"noted/{KINDS[kind][2]}" for _, kind in samples if KINDS[kind][2])

    # each sample on its own: exact causes
    manifest = load_manifest(str(folder))
    found, bad = Counter(), set()
    for number, record in enumerate(ShardReader(manifest).read(np.arange(manifest.num_samples))):
        try:
            decode_record(record)
            found[""] += 1
        except BadSample as error:
            found[error.cause] += 1
            bad.add(number)
    assert found == {cause: n for cause, n in expected.items() if cause not in left_out}

    # an epoch of the loader: every good sample is used, bad ones are replaced
    loader = small_loader(str(folder), tokenizer, max_bad_fraction=1.0)
    used = [int(batch["ids"]) for (batch,) in loader]
    report = loader.report()
    assert len(used) == manifest.num_samples and set(used) == set(range(manifest.num_samples)) - bad
    assert {name: n for name, n in report.items() if name.startswith("index/")} == left_out
    skipped = {name[8:]: n for name, n in report.items() if name.startswith("skipped/")}
    assert skipped.keys() == found.keys() - {""} and all(n >= found[cause] for cause, n in skipped.items())
    assert all(report.get(name, 0) >= n for name, n in notes.items())
    assert not EXECUTED.exists()


EVERY_KIND = [(f"{i:02d}", kind) for i, kind in enumerate(KINDS)]
THEIR_MEMBERS = [(f"{key}.{extension}", data) for key, kind in EVERY_KIND for extension, data in KINDS[kind][0]]


@often(40, 1000)
def test_faults_are_counted_by_cause_and_no_good_sample_is_lost(examples, tmp_path_factory, tokenizer):
    @examples
    @given(case=broken_samples())
    @example(case=(EVERY_KIND, [THEIR_MEMBERS], tarfile.PAX_FORMAT))
    def check(case):
        check_broken_samples(case, tmp_path_factory.mktemp("broken"), tokenizer)

    check()


def test_the_streaming_reader_skips_the_same_samples_by_cause(tmp_path, tokenizer):
    options = {"dataset_type": "streaming", "train_num_samples": len(USABLE), "max_bad_fraction": 1.0}
    loader = small_loader(write_kinds(tmp_path), tokenizer, **options)
    assert len({int(batch["ids"]) for (batch,) in loader}) == len(USABLE)
    expected = Counter(f"skipped/{cause.removeprefix('index/')}" for _, cause, _ in KINDS.values() if cause)
    expected |= Counter(f"noted/{note}" for _, _, note in KINDS.values() if note)
    assert loader.report() == expected | {"samples": len(USABLE), "noted/caption_truncated": 1}
    assert not EXECUTED.exists()


# ---- bytes of a tar ----


def good_tar(tar_format: int, long_names: bool) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as tar:
        for i in range(7):
            folder = "f" * 70 + "/" + "g" * 70 + "/" if long_names else ""
            for name, data in pair_members(i, key=folder + chr(97 + i) * 8):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                if tar_format == tarfile.PAX_FORMAT:
                    info.mtime = 1.5  # a PAX header for each member, as webdataset's writer makes by default
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


TARS = {
    (f, long): good_tar(f, long)
    for f in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    for long in (False, True)
}


def extents(tar: bytes) -> list[tuple[int, int, bytes, str]]:
    """(first byte, end of its data, data, key letter) of each member; its long-name headers belong to it."""
    members, begin = [], 0
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for info in archive:
            data = tar[info.offset_data : info.offset_data + info.size]
            members.append((begin, info.offset_data + info.size, data, info.name.rpartition("/")[2][0]))
            begin = info.offset_data + (info.size + 511) // 512 * 512
    return members


@st.composite
def damaged_tar(draw):
    """(bytes, the samples that no damage touches: {image, json, text})."""
    original = TARS[draw(st.sampled_from(sorted(TARS)))]
    members = extents(original)
    data = bytearray(original)
    touched = set()
    flips = draw(st.lists(st.integers(0, len(data) - 1), max_size=6, unique_by=lambda at: at // 512))
    for at in flips:  # one in a block: the sum of a header's bytes is its only guard
        data[at] ^= draw(st.integers(1, 255))
        touched.add(at)
    for block in draw(st.lists(st.integers(0, len(data) // 512 - 1), max_size=2)):
        data[512 * block : 512 * block + 512] = bytes(512)
        touched.update(at for at in range(512 * block, 512 * block + 512) if original[at])
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    whole = {}
    for first, last, content, letter in members:
        intact = last <= end and not any(first <= at < last for at in touched)
        whole.setdefault(letter, []).append(content if intact else None)
    return bytes(data[:end]), [tuple(parts) for parts in whole.values() if None not in parts]


def check_damaged_tar(case, path):
    data, intact = case
    path.write_bytes(data)
    shard, members = scan_shard(str(path), SampleKeys())
    found = []
    for row in members.tolist():
        image, text, metadata = (data[o : o + n] if o >= 0 else None for o, n in zip(row[::2], row[1::2]))
        assert all(o + n <= len(data) for o, n in zip(row[::2], row[1::2]))
        found.append((image, metadata, text))
        try:
            decode_record(Record(image, text, metadata, "here"))
        except BadSample:
            pass
    assert set(intact) <= set(found)
    if len(members) < 7 and not shard.rejected:
        end = max((o + n for row in members.tolist() for o, n in zip(row[::2], row[1::2])), default=0)
        assert shard.damage or not any(data[end:])  # a tar whose rest was zeroed looks like one that ends there
    failures = []
    streamed = list(stream_records([str(path)], SampleKeys(), lambda *failure: failures.append(failure)))
    assert len(streamed) <= 21


@often(200, 20_000)
def test_damage_to_a_tar_costs_only_the_samples_that_it_touches(examples, tmp_path_factory):
    @examples
    @given(case=damaged_tar())
    def check(case):
        check_damaged_tar(case, tmp_path_factory.mktemp("damaged") / "x.tar")

    check()


@FEW
@given(
    caption=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda t: json.dumps({"caption": t}).encode()))
)
def test_any_bytes_are_a_caption_or_a_bad_sample(caption):
    image = encode(picture(0))
    for record in (Record(image, caption, None, ""), Record(image, None, caption, "")):
        try:
            (text,) = decode_record(record).texts
        except BadSample as bad:
            assert bad.cause in ("empty_caption", "no_caption", "bad_json")
        else:
            assert text.encode() and len(text.encode()) <= 3 * 4096
