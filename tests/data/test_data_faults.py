"""Faults of shards and of their storage: what an epoch of each reader uses and counts."""

import gzip
import re
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import pytest

from tests.lib.http_server import Behaviour, serving
from tests.lib.shard_files import pair_members, write_shards, write_tar
from tests.lib.small_loader import small_loader

NO_PIPE = r"'pipe:cat /.*0.tar' runs a shell command: it needs --dataset-type streaming, and --allow-pipe-urls"

NO_ACCESS = "1 of 3 shards cannot be used: http.*the server has no random access: use --dataset-type streaming"


@dataclass
class Place:
    """Three shards of ten samples, a web server of their folder, and what a case makes of them."""

    shards: Path
    web: Behaviour
    web_url: str
    urls: str = ""
    options: dict = field(default_factory=dict)
    during: dict = field(default_factory=dict)  # behaviour of the server once the loader is made

    def edit(self, change) -> None:
        """Change the bytes of shard 1; `change` gets the offset of the header of its seventh image too."""
        path = self.shards / "00001.tar"
        tar = path.read_bytes()
        at = next(at for at in range(0, len(tar), 512) if tar[at : at + 9] == b"000000016")
        path.write_bytes(change(tar, at))


def tar(change):
    return lambda place: place.edit(change)


def two_in_one(place: Place) -> None:
    place.edit(lambda data, _: data + (place.shards / "00002.tar").read_bytes())


def shard(content: bytes):
    return lambda place: (place.shards / "00003.tar").write_bytes(content)


def pipe(*more: str, allow_pipe: bool = True):
    def case(place: Place) -> None:
        folder = quote(str(place.shards))
        place.urls = f"pipe:cat {folder}/" + "::".join(["{00000..00002}.tar", *(each.format(folder) for each in more)])
        place.options["allow_pipe_urls"] = allow_pipe

    return case


def http(ranges: bool = True, tells_size: bool = True, **during):
    def case(place: Place) -> None:
        place.web.ranges, place.web.tells_size, place.during = ranges, tells_size, during
        place.urls = place.web_url + "/{00000..00002}.tar"

    return case


def with_missing(place: Place) -> None:
    place.urls = f"{place.shards}::/no/such/shard.tar"


# name, how it is made, then (samples used, counters) of the indexed and of the streaming reader, or the error
CASES = [
    ("none", lambda place: None, (30, {}), (30, set())),
    ("cut in a member", tar(lambda data, at: data[: at + 600]), (26, {"damaged_shards": 1}), (26, {"damaged_shard"})),
    ("cut between members", tar(lambda data, at: data[:at]), (26, {"damaged_shards": 1}), (26, {"damaged_shard"})),
    ("zero-filled from the middle on", tar(lambda data, at: data[:at] + bytes(10**6)),
     (26, {"damaged_shards": 1}), (26, {"damaged_shard"})),
    ("one wrong byte in a header", tar(lambda data, at: data[:at] + b"!" + data[at + 1 :]),
     (29, {"no_image": 1, "damaged_shards": 1}), (29, {"damaged_shard", "no_image"})),
    ("a header of zeros", tar(lambda data, at: data[:at] + bytes(512) + data[at + 512 :]),
     (29, {"no_image": 1, "damaged_shards": 1}), (29, {"damaged_shard", "no_image"})),
    ("another tar after its end", two_in_one, (40, {"damaged_shards": 1}), (33, {"damaged_shard"})),
    ("a file of 0 bytes", shard(b""), (30, {"damaged_shards": 1}), (30, {"damaged_shard"})),
    ("an empty tar", shard(bytes(10240)), (30, {}), (30, set())),
    ("a compressed tar", shard(gzip.compress(bytes(10240))), "3.tar is compressed", (30, {"damaged_shard"})),
    ("a web page", shard(b"<html>404</html>" * 100), (30, {"damaged_shards": 1}), (30, {"damaged_shard"})),
    ("missing", with_missing, "1 of 4 shards are missing: /no/such/shard.tar", "1 of 4 shards are missing: /no/such"),
    ("pipe: that is not allowed", pipe(allow_pipe=False), NO_PIPE, NO_PIPE),
    ("pipe:", pipe(), NO_PIPE, (30, set())),
    ("pipe: that fails after 2 KB", pipe("pipe:head -c 2000 {}/00000.tar; exit 1"), NO_PIPE,
     (30, {"shard_unreadable"})),
    ("http", http(), (30, {}), (30, set())),
    ("http without ranges", http(ranges=False), NO_ACCESS, (30, set())),
    ("http without sizes", http(tells_size=False), NO_ACCESS, (30, set())),
    ("http that answers 503 twice", http(fail=2), (30, {}), (30, set())),
    ("http that goes away", http(fail=10**9), "100 samples in a row .*shard_unreadable: .*3 attempts failed.* 503",
     "3 samples in a row .*shard_unreadable: .*3 attempts failed, the last with OSError: http status 503"),
    ("replaced on the web server", http(tag="2"), "100 samples in a row .*shard_changed: .*changed during the run",
     (30, set())),
]  # fmt: skip


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("infcl.data.samples._BAD_IN_A_ROW", 100)  # data that cannot be read at all ends soon
    for name, value in {"TIMEOUT": 5.0, "ATTEMPTS": 3, "BACKOFF": 0.01}.items():
        monkeypatch.setattr(f"infcl.data.storage.{name}", value)


@pytest.mark.parametrize("reader", ["indexed", "streaming"])
@pytest.mark.parametrize(
    ("case", "indexed", "streaming"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_fault_of_a_shard_costs_its_own_samples_and_is_counted(
    case, indexed, streaming, reader, tmp_path, tokenizer, soon
):
    write_shards(tmp_path / "shards", [10, 10, 10])
    expected = indexed if reader == "indexed" else streaming
    options = {"max_bad_fraction": 0.95, "index_cache": str(tmp_path / "index")}
    if reader == "streaming":  # a second pass over the shards begins after 30 samples
        options |= {"dataset_type": "streaming", "train_num_samples": 33}
    with serving(tmp_path / "shards") as (url, web):
        place = Place(tmp_path / "shards", web, url)
        case(place)
        try:
            loader = small_loader(place.urls or str(place.shards), tokenizer, **options, **place.options)
            vars(web).update(place.during)
            used = {int(batch["ids"]) for (batch,) in loader}
        except (ValueError, RuntimeError) as error:
            assert isinstance(expected, str) and re.search(expected, str(error).splitlines()[0]), str(error)
            assert "is this a data set of images" not in str(error)  # the storage fails
            return
    counts = {name.partition("/")[2]: n for name, n in loader.report().items() if name.startswith(("index", "skip"))}
    assert (len(used), counts if reader == "indexed" else set(counts)) == expected


def three_pairs(path: Path) -> None:
    write_tar(path, [member for i in range(3) for member in pair_members(i)])


@pytest.mark.parametrize(
    ("change", "opened_before", "counted"),
    [
        (three_pairs, False, "shard_changed"),
        (three_pairs, True, "shard_changed"),
        (Path.unlink, False, "shard_missing"),
    ],
)
def test_a_shard_that_is_replaced_or_removed_during_the_run_costs_its_own_samples(
    tmp_path, tokenizer, change, opened_before, counted
):
    loader = small_loader(write_shards(tmp_path, [10, 10, 10]), tokenizer, max_bad_fraction=0.95)
    if opened_before:
        assert len(list(loader)) == 30
        loader.set_position(0, 0)
    change(tmp_path / "00001.tar")
    assert len({int(batch["ids"]) for (batch,) in loader}) == 20 and loader.report()[f"skipped/{counted}"] == 15
