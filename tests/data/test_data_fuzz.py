"""Mutated shards: no crash, no hang, no lost good sample, correct counts.

Two generators: samples with drawn faults, whose members are written in a drawn order (`broken_samples`), and a good tar
whose bytes are damaged (`damaged_tar`). Few examples in the default suite, thousands under the marker slow.
"""

import io
import json
import pickle
import random
import tarfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infcl.data.index import SampleKeys, scan_shard
from infcl.data.records import BadSample, Record, ShardReader, stream_records
from infcl.data.samples import decode_record
from infcl.data.shards import load_manifest
from tests.lib.shard_files import Payload, encode, pair_members, picture, png_bomb, write_tar
from tests.lib.small_loader import small_loader

FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}
FEW = settings(max_examples=40, derandomize=True, **COMMON)
MANY = settings(max_examples=3000, **COMMON)

# ---- samples with drawn faults ----

_PNG, _TEXT = encode(picture(0)), b"a picture"
_JPEG = encode(picture(0, 64, 64), "JPEG", quality=90)
# kind -> (members without the key, cause: "" usable, "index/..." left out by the index, else skipped; note)
KINDS = {
    "good": ([("png", _PNG), ("txt", _TEXT)], "", None),
    "jpeg": ([("jpg", _JPEG), ("json", b'{"caption": "x"}'), ("txt", _TEXT)], "", None),
    "caption in json": ([("png", _PNG), ("json", b'{"caption": "in json"}')], "", None),
    "broken json next to text": ([("png", _PNG), ("json", b"{"), ("txt", _TEXT)], "", None),
    "megabyte caption": ([("png", _PNG), ("txt", b"long " * 200_000)], "", "caption_cut"),
    "latin-1 caption": ([("png", _PNG), ("txt", "caf\u00e9".encode("latin-1"))], "", "caption_not_utf8"),
    "16 bit grey": ([("png", encode(np.full((20, 20), 40_000, np.uint16))), ("txt", _TEXT)], "", None),
    "duplicate": ([("png", _PNG), ("txt", _TEXT), ("txt", _TEXT)], "", None),
    "pickle": ([("png", _PNG), ("txt", _TEXT), ("pkl", b"PAYLOAD"), ("pyd", b"PAYLOAD")], "", None),
    "truncated": ([("jpg", _JPEG[:700]), ("txt", _TEXT)], "broken_image", None),
    "scan with zeros": ([("jpg", _JPEG[:700] + bytes(200) + _JPEG[900:]), ("txt", _TEXT)], "", None),
    "NUL in the caption": ([("png", _PNG), ("txt", b"a\x00b")], "", None),
    "web page": ([("jpg", b"<html>404</html>"), ("txt", _TEXT)], "not_an_image", None),
    "empty image": ([("webp", b""), ("txt", _TEXT)], "empty_image_file", None),
    "bomb": ([("png", png_bomb(20_000, 20_000)), ("txt", _TEXT)], "image_too_large", None),
    "one pixel wide": ([("png", encode(picture(0, 40, 1))), ("txt", _TEXT)], "image_too_small_or_thin", None),
    "GIF": ([("jpg", encode(picture(1), "GIF")), ("txt", _TEXT)], "not_an_image", None),
    "blank caption": ([("png", _PNG), ("txt", b" \n")], "empty_caption", None),
    "broken json": ([("png", _PNG), ("json", b'{"caption": ')], "bad_json", None),
    "nested json": ([("png", _PNG), ("json", b"[" * 99_999)], "bad_json", None),
    "null caption": ([("png", _PNG), ("json", b'{"caption": null}')], "no_caption", None),
    "no image": ([("txt", _TEXT)], "index/no_image", None),
    "no caption": ([("png", _PNG)], "index/no_caption", None),
}
USABLE = [kind for kind, (_, cause, _) in KINDS.items() if not cause]
UNUSABLE = [kind for kind in KINDS if kind not in USABLE]


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
    payload = pickle.dumps(Payload(folder / "executed"))
    for i, members in enumerate(shards):
        members = [(name, payload if data == b"PAYLOAD" else data) for name, data in members]
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
    assert not (folder / "executed").exists()


@FEW
@given(case=broken_samples())
def test_faults_are_counted_by_cause_and_no_good_sample_is_lost(case, tmp_path_factory, tokenizer):
    check_broken_samples(case, tmp_path_factory.mktemp("broken"), tokenizer)


def test_the_streaming_reader_skips_the_same_samples_by_cause(tmp_path, tokenizer):
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    members = [
        (f"{i}.{extension}", payload if data == b"PAYLOAD" else data)
        for i, (content, _, _) in enumerate(KINDS.values())
        for extension, data in content
    ]
    write_tar(tmp_path / "0.tar", members)
    options = {"dataset_type": "streaming", "num_samples": len(USABLE) + 1}  # a second pass begins
    loader = small_loader(str(tmp_path), tokenizer, max_bad_fraction=1.0, **options)
    assert len({int(batch["ids"]) for (batch,) in loader}) == len(USABLE)
    report = loader.report()
    causes = Counter(cause.removeprefix("index/") for _, cause, _ in KINDS.values() if cause)
    assert {name[8:] for name in report if name.startswith("skipped/")} == causes.keys()
    assert all(report[f"skipped/{cause}"] >= n for cause, n in causes.items())
    assert report["noted/caption_cut"] == report["noted/caption_truncated"] == report["noted/caption_not_utf8"] == 1
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(MANY, max_examples=1000)
@given(case=broken_samples())
def test_faults_are_counted_by_cause_and_no_good_sample_is_lost_many(case, tmp_path_factory, tokenizer):
    check_broken_samples(case, tmp_path_factory.mktemp("broken"), tokenizer)


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


@settings(FEW, max_examples=200)
@given(case=damaged_tar())
def test_damage_to_a_tar_costs_only_the_samples_that_it_touches(case, tmp_path_factory):
    check_damaged_tar(case, tmp_path_factory.mktemp("damaged") / "x.tar")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(MANY, max_examples=20_000)
@given(case=damaged_tar())
def test_damage_to_a_tar_costs_only_the_samples_that_it_touches_many(case, tmp_path_factory):
    check_damaged_tar(case, tmp_path_factory.mktemp("damaged") / "x.tar")


@FEW
@given(
    caption=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda t: json.dumps({"caption": t}).encode()))
)
def test_any_bytes_are_a_caption_or_a_bad_sample(caption):
    for record in (Record(_PNG, caption, None, ""), Record(_PNG, None, caption, "")):
        try:
            _, (text,), _ = decode_record(record)
        except BadSample as bad:
            assert bad.cause in ("empty_caption", "no_caption", "bad_json")
        else:
            assert text.encode() and len(text.encode()) <= 3 * 4096
