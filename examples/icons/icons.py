"""Icon sets of Iconify: read their SVG bodies, names and licences, and render them to 64 x 64 pixels.

In:  a package folder of npm (`@iconify/json`, or one of `@iconify-json/*`), or the one file that `save_icons` wrote.
Out: `Icon`s with the set's licence, and JPEG files: quality 95 without subsampling, which the loader decodes several
     times as fast as PNG; grey where the icon has no colour.

`npm install @iconify/json emojibase-data` fetches 238 sets and the keywords of emoji. Nothing else is downloaded.
"""

import io
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SIZE = 64
FREE = ("MIT", "Apache-2.0", "CC0-1.0", "ISC")  # weights may be trained on these without further duties
ATTRIBUTION = ("CC-BY-4.0", "OFL-1.1", "MPL-2.0", "BSD-3-Clause", "Unlicense")
MAX_BODY = 3000  # characters of SVG; the longer 5% are drawings that 64 pixels do not show
_DAMAGED = (lzma.LZMAError, EOFError, StopIteration, LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError)


class IconSet(NamedTuple):
    """Origin of a set of icons."""

    prefix: str  # its short name, such as "mdi"
    name: str
    author: str
    url: str
    license: str  # SPDX identifier
    palette: bool  # whether the icons have colours of their own


class Icon(NamedTuple):
    """One drawing and its names."""

    prefix: str  # of its set
    name: str  # as in the set, such as "arrow-left"
    body: str  # SVG elements
    box: tuple[float, float, float, float]  # left, top, width, height
    texts: tuple[str, ...]  # further captions: aliases and, for emoji, keywords

    @property
    def caption(self) -> str:
        return words(self.name)


def words(name: str) -> str:
    """'arrow-left-fill' -> 'arrow left fill'."""
    return " ".join(name.replace("_", "-").split("-")).strip()


def read_source(
    source: Path,
    *,
    emoji: Path | None = None,
    only: Sequence[str] = (),
    licences: Sequence[str] | None = FREE + ATTRIBUTION,
    max_body: int = MAX_BODY,
) -> tuple[dict[str, IconSet], list[Icon]]:
    """Read all icons of a package, or of a file of `save_icons`.

    Hidden and animated icons, and bodies of `max_body` characters and more, are left out.

    Args:
        source: the package folder or file.
        emoji: folder of emojibase-data, for the keywords of emoji. A file of `save_icons` contains them.
        only: prefixes of the sets to read; empty: all.
        licences: SPDX identifiers of the sets to read; None: all.
        max_body: characters of SVG.

    Returns:
        The sets by their prefix, and the icons in the order of the source.

    Raises:
        ValueError: the source is no such package, is damaged, or has no icons that are wanted.
    """

    def is_wanted(origin: IconSet) -> bool:
        return (licences is None or origin.license in licences) and (not only or origin.prefix in only)

    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    try:
        if source.is_file():
            sets, icons = load_icons(source)
        else:
            keywords = emoji_keywords(emoji) if emoji else {}
            sets, icons = {}, []
            for origin, path in _packages(source):
                sets[origin.prefix] = origin
                if is_wanted(origin):
                    icons += _icons_of(origin.prefix, json.loads(path.read_text(encoding="utf-8")), keywords)
    except _DAMAGED as error:
        raise ValueError(f"{source} is damaged, or has another content: {type(error).__name__}: {error}") from error
    chosen = {prefix: origin for prefix, origin in sets.items() if is_wanted(origin)}
    if not (icons := [icon for icon in icons if icon.prefix in chosen and len(icon.body) < max_body]):
        raise ValueError(f"{source}: no icons{' of ' + ', '.join(only) if only else ''} that may be used")
    return chosen, icons


def render(icon: Icon, size: int = SIZE) -> bytes | None:
    """Return the icon as a JPEG file, black or coloured on white, or None if nothing is visible."""
    return render_svg(svg(icon), size)


def svg(icon: Icon, size: int = SIZE) -> str:
    """Return the SVG document of an icon. `currentColor` is black."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{size}" height="{size}" viewBox="{" ".join(f"{side:g}" for side in icon.box)}">{icon.body}</svg>'
    )


def render_svg(document: str, size: int = SIZE) -> bytes | None:
    """Return an SVG document as a JPEG of `size` x `size` pixels on white, or None if nothing is visible."""
    import resvg_py
    from PIL import Image

    try:
        pixels = resvg_py.svg_to_bytes(
            svg_string=document, width=size, height=size, background="white", skip_system_fonts=True
        )
    except ValueError:
        return None
    picture = Image.open(io.BytesIO(bytes(pixels))).convert("RGB")
    bands = picture.getextrema()
    if all(low == high for low, high in bands):
        return None
    red, green, blue = picture.split()
    if red.tobytes() == green.tobytes() == blue.tobytes():
        picture = red  # one channel instead of three: smaller, and faster to decode
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=95, subsampling=0)
    return jpeg.getvalue()


def save_icons(path: Path, sets: dict[str, IconSet], icons: Iterable[Icon]) -> None:
    """Write sets and icons to one .jsonl.xz file: a line of sets, then a line per icon."""
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as file:
        file.write(json.dumps([list(info) for info in sets.values()]) + "\n")
        for icon in icons:
            file.write(json.dumps(list(icon), ensure_ascii=False, separators=(",", ":")) + "\n")


def load_icons(path: Path) -> tuple[dict[str, IconSet], list[Icon]]:
    """Read a file that `save_icons` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        sets = {fields[0]: IconSet(*fields) for fields in json.loads(next(file))}
        icons = [
            Icon(prefix, name, body, tuple(box), tuple(texts))
            for prefix, name, body, box, texts in map(json.loads, file)
        ]
    return sets, icons


def emoji_keywords(folder: Path, language: str = "en") -> dict[str, str]:
    """Return label -> keywords of every emoji of emojibase, such as 'red heart' -> 'emotion heart love'."""
    with open(folder / language / "data.json", encoding="utf-8") as file:
        entries = json.load(file)
    return {entry["label"].lower(): " ".join(entry["tags"]) for entry in entries if entry.get("tags")}


def _packages(folder: Path) -> Iterator[tuple[IconSet, Path]]:
    """Yield the sets of a package folder with their JSON file."""
    if (folder / "collections.json").is_file():
        with open(folder / "collections.json", encoding="utf-8") as file:
            listed = json.load(file)
        files = [(prefix, info, folder / "json" / f"{prefix}.json") for prefix, info in listed.items()]
    elif (folder / "icons.json").is_file() and (folder / "info.json").is_file():
        with open(folder / "info.json", encoding="utf-8") as file:
            info = json.load(file)
        files = [(info["prefix"], info, folder / "icons.json")]
    else:
        raise ValueError(f"{folder}: neither @iconify/json (collections.json) nor a set of @iconify-json (icons.json)")
    for prefix, info, path in files:
        author, license = info["author"], info["license"]
        origin = IconSet(
            prefix, info["name"], author["name"], author.get("url", ""), license.get("spdx", ""), bool(info["palette"])
        )
        yield origin, path


def _icons_of(prefix: str, content: dict, keywords: dict[str, str]) -> Iterator[Icon]:
    """Yield the icons of one set. An alias that turns or mirrors its parent is another drawing and gives no caption."""
    aliases: dict[str, list[str]] = {}
    for alias, entry in content.get("aliases", {}).items():
        parent, turned = alias, False
        for _ in range(5):  # aliases of aliases
            step = content["aliases"].get(parent)
            if step is None:
                break
            turned |= bool({"rotate", "hFlip", "vFlip"} & step.keys())
            parent = step["parent"]
        if not turned and not entry.get("hidden"):
            aliases.setdefault(parent, []).append(words(alias))
    for name, entry in content["icons"].items():
        body = entry["body"]
        if entry.get("hidden") or "<animate" in body or "<set " in body:
            continue
        left, top, width, height = (
            entry.get(side, content.get(side, default))
            for side, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        caption = words(name)
        texts = [text for text in aliases.get(name, []) if text != caption]
        texts += [keywords[caption]] if caption in keywords else []
        yield Icon(prefix, name, body, (left, top, width, height), tuple(texts))
