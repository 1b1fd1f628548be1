"""Faults of data, made on purpose, and the outcome of each.

    python -m tests.lib.data_faults docs/reference/data-faults.md

A case is 30 good samples in three shards, plus a fault. Both readers make one epoch of it. A row of the table has the
number of good samples used and the counters. tests/data/test_data_faults.py checks the number of every case.
"""

import os
import pickle
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from infcl.data.tokenizer import Tokenizer
from tests.lib.http_server import Behaviour, serving
from tests.lib.shard_files import Payload, encode, pair_members, picture, png_bomb, write_tar
from tests.lib.small_loader import caption_tokenizer, small_loader

GOOD = 30
ENDS = None  # the run of the indexed reader ends with an error that reports the fault


@dataclass
class Place:
    """Files of a case: shards 0, 1, 2 of ten samples each, and a folder for other files."""

    folder: Path
    web: Behaviour
    web_url: str
    options: dict = field(default_factory=dict)

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    @property
    def in_shell(self) -> str:
        """Return `shards` as a word of a shell command."""
        return shlex.quote(str(self.shards))

    def add(self, *members: tuple[str, bytes]) -> str:
        """Add a shard with these members and a good sample, number GOOD."""
        write_tar(self.shards / "3.tar", [*members, *pair_members(GOOD)])
        return str(self.shards)

    def edit(self, change: Callable[[bytes], bytes]) -> str:
        """Change the bytes of shard 1."""
        path = self.shards / "1.tar"
        path.write_bytes(change(path.read_bytes()))
        return str(self.shards)


def image(data: bytes, extension: str = "jpg") -> Callable[[Place], str]:
    return lambda place: place.add((f"bad.{extension}", data), ("bad.txt", b"a caption"))


def caption(data: bytes) -> Callable[[Place], str]:
    return lambda place: place.add(("bad.png", encode(picture(9))), ("bad.txt", data))


def header_in(tar: bytes) -> int:
    """Return the offset of the header of sample 6's image in shard 1, which has ten samples."""
    return next(at for at in range(0, len(tar), 512) if tar[at : at + 9] == b"000000016")


def replaced(place: Place) -> str:
    path = place.shards / "1.tar"
    place.options["before"] = lambda: write_tar(path, [m for i in range(3) for m in pair_members(i)])
    return str(place.shards)


def removed(place: Place) -> str:
    place.options["before"] = (place.shards / "1.tar").unlink
    return str(place.shards)


def stalling(case: Callable[[Place], str], timeout: float = 0.15, attempts: int = 3) -> Callable[[Place], str]:
    def impatient(place: Place) -> str:
        urls = case(place)
        place.options["storage"] = {"TIMEOUT": timeout, "ATTEMPTS": attempts}
        return urls

    return impatient


def on_the_web(**behaviour) -> Callable[[Place], str]:
    def case(place: Place) -> str:
        place.options["before"] = lambda: place.web.__dict__.update(behaviour)
        return place.web_url + "/{0..2}.tar"

    return case


def without_ranges(place: Place) -> str:
    place.web.ranges = False
    return place.web_url + "/{0..2}.tar"


def named(*extra: str) -> Callable[[Place], str]:
    return lambda place: "::".join([str(place.shards), *extra])


def empty_shard(content: bytes) -> Callable[[Place], str]:
    def case(place: Place) -> str:
        (place.shards / "3.tar").write_bytes(content)
        return str(place.shards)

    return case


def payload(place: Place) -> str:
    data = pickle.dumps(Payload(place.folder / "executed"))
    return place.add(*[(f"p.{e}", data) for e in ("pkl", "pickle", "pyd", "pth", "npy")], *pair_members(31, key="p"))


def bad_key(name: str) -> Callable[[Place], str]:
    return lambda place: place.add(*pair_members(31, key=name))


def interleaved(place: Place) -> str:
    return place.add(*[member for pair in zip(pair_members(31), pair_members(32)) for member in pair])


def overwriting(data: bytes) -> Callable[[Place], str]:
    def change(tar: bytes) -> bytes:
        at = header_in(tar)
        return tar[:at] + data + tar[at + len(data) :]

    return lambda place: place.edit(change)


def pipe_then(end: str) -> Callable[[Place], str]:
    return lambda place: pipes(place) + f"::pipe:head -c 2000 {place.in_shell}/0.tar; {end}"


def pipes(place: Place) -> str:
    place.options["allow_pipe"] = True
    return f"pipe:cat {place.in_shell}/" + "{0..2}.tar"


_JPEG = encode(picture(0, 64, 64), "JPEG", quality=90)
_RGBA = Image.fromarray(np.dstack([picture(1), np.full((20, 24), 90, np.uint8)]))
_TWO_FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (16, 16), "blue")]}
_ANIMATION = encode(Image.new("RGB", (16, 16), "red"), "WEBP", **_TWO_FRAMES)
_DEEP = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)

# (fault, how it is made, good samples that an epoch of the indexed reader uses in addition to the 30 of every case)
CASES: list[tuple[str, Callable[[Place], str], int | None]] = [
    ("no fault", named(), 0),
    ("truncated JPEG", image(_JPEG[:600]), 1),
    ("JPEG with damaged data that decodes", image(_JPEG[:700] + bytes(200) + _JPEG[900:]), 2),
    ("web page as image", image(b"<html>404 not found</html>"), 1),
    ("empty image file", image(b""), 1),
    ("16-bit grey PNG", image(encode(_DEEP), "png"), 2),
    ("CMYK JPEG", image(encode(Image.fromarray(picture(1)).convert("CMYK"), "JPEG")), 2),
    ("palette PNG", image(encode(Image.fromarray(picture(1)).convert("P")), "png"), 2),
    ("PNG with alpha", image(encode(_RGBA), "png"), 2),
    ("animation", image(_ANIMATION), 2),
    ("GIF", image(encode(picture(1), "GIF")), 1),
    ("bomb: 20,000 x 20,000 pixels in 1 KB", image(png_bomb(20_000, 20_000), "png"), 1),
    ("one pixel wide image", image(encode(picture(0, 40, 1)), "png"), 1),
    ("missing caption", lambda place: place.add(("bad.png", encode(picture(9)))), 1),
    ("empty caption", caption(b" \n"), 1),
    ("10 MB caption", caption(b"long " * 2_000_000), 2),
    ("malformed UTF-8 in the caption", caption(b"caf\xe9 \xff\xfe"), 2),
    ("NUL bytes in the caption", caption(b"a\x00b"), 2),
    ("broken json, no text", lambda p: p.add(("bad.png", encode(picture(9))), ("bad.json", b'{"caption"')), 1),
    ("deeply nested json, no text", lambda p: p.add(("bad.png", encode(picture(9))), ("bad.json", b"[" * 99_999)), 1),
    ("missing image", lambda place: place.add(("bad.txt", b"text")), 1),
    ("duplicate member", lambda p: p.add(*pair_members(31, key="twice"), *pair_members(32, key="twice")), 2),
    ("members of samples interleaved", interleaved, 3),
    ("names with ..", bad_key("../../../tmp/x"), 2),
    ("absolute names", bad_key("/etc/passwd"), 2),
    ("malformed UTF-8 in names", bad_key("caf\udce9"), 2),
    ("pickles and other code next to a sample", payload, 2),
    ("tar cut in a member", lambda p: p.edit(lambda tar: tar[: header_in(tar) + 600]), -4),
    ("tar cut between members", lambda p: p.edit(lambda tar: tar[: header_in(tar)]), -4),
    ("tar zero-filled from the middle on", lambda p: p.edit(lambda tar: tar[: header_in(tar)] + bytes(10**6)), -4),
    ("one wrong byte in a header", overwriting(b"!"), -1),
    ("a header overwritten by zeros", overwriting(bytes(512)), -1),
    ("two tars in one file", lambda p: p.edit(lambda tar: tar + (p.shards / "2.tar").read_bytes()), 10),
    ("file of 0 bytes", empty_shard(b""), 0),
    ("empty tar", empty_shard(bytes(10240)), 0),
    ("web page as shard", empty_shard(b"<html>404</html>" * 100), 0),
    ("missing shard", named("/no/such/shard.tar"), ENDS),

    ("shard replaced during the run", replaced, -10),
    ("shard removed during the run", removed, -10),
    ("pipe: without --allow-pipe-urls", lambda place: f"pipe:cat {place.in_shell}/0.tar", ENDS),
    ("pipe:", pipes, ENDS),
    ("pipe: that fails after 2 KB", pipe_then("exit 1"), ENDS),
    ("pipe: that stalls", stalling(pipe_then("sleep 60"), 1.5, 1), ENDS),
    ("http, ranged", on_the_web(), 0),
    ("http without ranges", without_ranges, ENDS),
    ("http that answers 503 twice", on_the_web(fail=2), 0),
    ("http that goes away during the run", on_the_web(fail=10**9), ENDS),
    ("http that stalls in the middle of answers", stalling(on_the_web(stall=300)), ENDS),
    ("file replaced on the web server", on_the_web(tag="2"), ENDS),
]  # fmt: skip


@dataclass
class Outcome:
    used: int = 0
    report: dict[str, int] = field(default_factory=dict)
    error: str = ""
    executed: bool = False  # whether any code of the data was executed

    def cell(self, reader: str) -> str:
        """Return the cell of the page's table."""
        counts = [
            f"`{name}`" + f" {n}" * (reader == "indexed")
            for name, n in self.report.items()
            if name not in ("samples", "noted/repeated")
        ]
        return f"ends: {self.error}" if self.error else f"{self.used} used" + "; " * bool(counts) + ", ".join(counts)


def run_case(case: Callable[[Place], str], reader: str, folder: Path, tokenizer: Tokenizer) -> Outcome:
    """Read an epoch with the "indexed" or "streaming" reader."""
    for shard in range(3):
        members = [m for i in range(10 * shard, 10 * shard + 10) for m in pair_members(i)]
        write_tar(folder / "shards" / f"{shard}.tar", members)
    outcome = Outcome()
    with serving(folder / "shards") as (web_url, web):
        place = Place(folder, web, web_url)
        urls, options = case(place), place.options
        before = options.pop("before", None)
        storage = {"TIMEOUT": 5.0, "ATTEMPTS": 3, "BACKOFF": 0.01} | options.pop("storage", {})
        if reader == "streaming":
            options |= {"num_samples": 100, "dataset_type": "streaming"}
        try:
            with patch.multiple("infcl.data.storage", **storage):
                loader = small_loader(
                    urls, tokenizer, max_bad_fraction=0.95, index_cache=str(folder / "index"), **options
                )
                if before:
                    before()
                used = set()
                for (batch,) in loader:
                    used.add(int(batch["ids"]))
                    if reader == "streaming" and len(used) == GOOD + 3:
                        break
            outcome.used, outcome.report = len(used), loader.report()
        except (ValueError, RuntimeError) as error:
            outcome.error = _first_line(str(error), folder, web_url)
    outcome.executed = (folder / "executed").exists()
    return outcome


def _first_line(message: str, folder: Path, web_url: str) -> str:
    line = message.splitlines()[0].replace(str(folder), "").replace(web_url, "http://server")
    return line if len(line) <= 160 else line[:157] + "..."


def main(path: str) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = caption_tokenizer(Path(folder))
        for number, (what, case, _) in enumerate(CASES):
            cells = [
                run_case(case, reader, Path(folder) / f"{number}{reader}", tokenizer).cell(reader)
                for reader in ("indexed", "streaming")
            ]
            rows.append(f"| {what} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
            print(rows[-1], flush=True)
    Path(path).write_text(_HEAD + "\n".join(rows) + "\n")


_HEAD = """# Data faults, case by case

Written by `python -m tests.lib.data_faults docs/reference/data-faults.md`; `tests/data/test_data_faults.py` compares
every case.

A case is 30 good samples in three shards and one fault; most cases add a shard with one more good sample. "Used" counts
the different samples that one epoch used. Nothing crashed, hung or executed a byte of the data. A replacement may be
bad too, so a cause can count more than once. The streaming reader goes around its shards until it has 33 samples or 100
steps, so only its causes are shown. A stalled read ends after 0.15 s here and is tried three times.
[Faults](faults.md#data) explains the names.

| fault | indexed reader | streaming reader |
|---|---|---|
"""

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])
