"""split_batch: every kind of batch is split by its rows."""

from collections import namedtuple

import pytest
import torch

from infcl import split_batch

Pair = namedtuple("Pair", "image text")
IMAGES, TEXTS, WORDS = torch.arange(12).view(4, 3), torch.arange(20).view(4, 5), ("a", "b", "c", "d")
RAGGED = [torch.arange(3 * rows).view(3, rows) for rows in (1, 2, 3, 4)]  # images of different widths


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        ([IMAGES, TEXTS], (IMAGES[2:], TEXTS[2:])),  # default_collate
        ([IMAGES, WORDS], (IMAGES[2:], ["c", "d"])),  # default_collate of samples with a string
        ([IMAGES, list(WORDS)], (IMAGES[2:], ["c", "d"])),
        (list(WORDS), ["c", "d"]),
        ((list(WORDS), WORDS), (["c", "d"], ["c", "d"])),
        (Pair(IMAGES, WORDS), Pair(IMAGES[2:], ["c", "d"])),
        ({"image": IMAGES.numpy(), "n": 3}, {"image": IMAGES.numpy()[2:], "n": 3}),
        ((RAGGED, WORDS), (RAGGED[2:], ["c", "d"])),
        ((IMAGES, [[1], [1, 2], [1, 2, 3], []]), (IMAGES[2:], [[1, 2, 3], []])),
        (((IMAGES, TEXTS), [IMAGES, TEXTS], WORDS), ((IMAGES[2:], TEXTS[2:]), [IMAGES[2:], TEXTS[2:]], ["c", "d"])),
        ((IMAGES, [{"x": row} for row in WORDS]), (IMAGES[2:], [{"x": "c"}, {"x": "d"}])),
    ],
)
def test_each_kind_of_batch_is_split_by_its_rows(batch, second):
    micro_batches = split_batch(batch, 2)
    assert len(micro_batches) == 2
    assert type(micro_batches[1]) is type(second)
    assert repr(micro_batches[1]) == repr(second)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3, 2)), "a batch of 4 rows"),
        ((torch.zeros(4, 2), ["a", "b"]), r"list\('a', 'b'\) in a batch of 4 rows"),
        ({"x": 3}, "no tensor with rows"),
        (([torch.zeros(3, 2)] * 4,), "may have 3 or 4 rows"),
        ((torch.zeros(2, 2), [torch.zeros(2, 3)] * 2), r"\) in a batch of 2 rows"),
    ],
)
def test_a_batch_that_has_no_common_rows_or_several_is_rejected(batch, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)
