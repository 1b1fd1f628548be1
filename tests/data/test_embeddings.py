"""Stored embeddings of a teacher: what cannot be used costs its own sample, under a name."""

import io
import json

import numpy as np
import pytest

from infcl.data.embeddings import decode_embeddings
from infcl.data.index import SampleKeys, ensure_index
from infcl.data.records import BadSample
from tests.lib.shard_files import encode, pair_members, picture, write_tar
from tests.lib.small_loader import small_loader
from tests.lib.teachers import as_npy

KEYS = SampleKeys(teacher="t.npy", teacher_width=8)


def rows_of(number, captions=1, width=8):
    return np.random.default_rng(number).standard_normal((1 + captions, width)).astype(np.float16)


def with_teacher(number, data):
    """The members of a good pair with `data` as its teacher's member; None: it has none."""
    return pair_members(number) + ([] if data is None else [(f"{number:09d}.t.npy", data)])


def archive(rows):
    file = io.BytesIO()
    np.savez(file, rows)
    return file.getvalue()


GOOD = as_npy(rows_of(0))
BAD = {
    "missing": (None, "no_teacher", "is missing"),
    "larger than 1 MiB": (as_npy(np.zeros((2, 2**18), np.float16)), "no_teacher", "is missing"),
    "float32": (as_npy(rows_of(0).astype(np.float32)), "bad_teacher", r"is <f4 \(2, 8\), needed <f2 \(2, 8\)"),
    "big-endian": (as_npy(rows_of(0).astype(">f2")), "bad_teacher", "is >f2"),
    "narrow": (as_npy(rows_of(0, width=6)), "bad_teacher", r"is <f2 \(2, 6\), needed <f2 \(2, 8\)"),
    "of two captions": (as_npy(rows_of(0, 2)), "bad_teacher", r"\(3, 8\), needed .*, for the image and 1 caption"),
    "one dimension": (as_npy(rows_of(0)[0]), "bad_teacher", r"\(8,\)"),
    "by columns": (as_npy(np.asfortranarray(rows_of(0))), "bad_teacher", "no .npy"),
    "a number that is not finite": (as_npy(np.full((2, 8), np.inf, np.float16)), "bad_teacher", "not finite"),
    "truncated": (GOOD[:-1], "bad_teacher", "31 bytes of 32"),
    "too long": (GOOD + b"\0", "bad_teacher", "33 bytes of 32"),
    "cut in the header": (GOOD[:60], "bad_teacher", "no .npy"),
    "empty": (b"", "bad_teacher", "no .npy"),
    "an archive": (archive(rows_of(0)), "bad_teacher", "no .npy"),
    "a pickle": (as_npy(np.array([{}], object)), "bad_teacher", r"is \|O"),
    "a header that is code": (GOOD.replace(b"(2, 8)", b"(2**9)"), "bad_teacher", "no .npy"),
}  # fmt: skip


@pytest.mark.parametrize("reader", ["webdataset", "streaming"])
def test_a_bad_member_costs_its_own_sample_and_is_counted(reader, tmp_path, tokenizer):
    bad = [with_teacher(100 + i, data) for i, (data, _, _) in enumerate(BAD.values())]
    good = [with_teacher(i, as_npy(rows_of(i))) for i in range(20)]
    write_tar(tmp_path / "0.tar", [member for sample in [*good, *bad] for member in sample])
    options = {"dataset_type": reader, "train_num_samples": len(good) + len(bad), "max_bad_fraction": 1.0}
    loader = small_loader(str(tmp_path), tokenizer, keys=KEYS, **options)
    for step in loader:
        (batch,) = step
        found = batch["teacher"][0].numpy()
        assert any((found == rows_of(i)).all() for i in range(20))
    report, causes = loader.report(), [cause for _, cause, _ in BAD.values()]
    skipped = {name: count for name, count in report.items() if name.startswith("skipped/")}
    assert set(skipped) == {"skipped/no_teacher", "skipped/bad_teacher"}
    assert all(skipped[f"skipped/{cause}"] >= causes.count(cause) for cause in set(causes))
    assert "skipped/bad_teacher in " in loader.table()


@pytest.mark.parametrize("what", [what for what in BAD if what != "larger than 1 MiB"])
def test_the_message_about_a_bad_member_has_the_numbers(what):
    data, cause, message = BAD[what]
    with pytest.raises(BadSample, match=message) as caught:
        decode_embeddings(data, captions=1, width=8)
    assert caught.value.cause == cause


def test_the_embedding_is_that_of_the_drawn_caption(tmp_path, tokenizer):
    captions = ["picture number 1", "from json", "number 7"]
    rows = rows_of(1, captions=3)
    metadata = json.dumps({"caption": captions}).encode()
    members = [("a.png", encode(picture(1))), ("a.json", metadata), ("a.t.npy", as_npy(rows))]
    write_tar(tmp_path / "0.tar", members)
    loader, drawn = small_loader(str(tmp_path), tokenizer, keys=KEYS), set()
    tokens = tokenizer(captions).tolist()
    for epoch in range(12):
        loader.set_position(epoch, 0)
        ((batch,),) = loader
        drawn.add(which := tokens.index(batch["texts"][0].tolist()))
        assert (batch["teacher"][0].numpy() == rows[[0, 1 + which]]).all()
    assert drawn == {0, 1, 2}


def test_the_teachers_members_have_an_index_of_their_own(tmp_path):
    path = str(write_tar(tmp_path / "0.tar", [m for i in range(3) for m in with_teacher(i, GOOD)]))
    sizes = {}
    for keys in (SampleKeys(), KEYS, SampleKeys(teacher="other.npy", teacher_width=8)):
        shard = ensure_index(path, keys)
        assert ensure_index(path, keys) == shard
        header, _, rows = open(shard.index_path, "rb").read().partition(b"\n")
        sizes[shard.index_path] = len(rows), b"teacher_key" in header
    assert list(sizes.values()) == [(3 * 48, False), (3 * 64, True), (3 * 64, True)]
