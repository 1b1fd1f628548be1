"""Search icons by words, or by a picture, with a trained model on a CPU.

    python examples/icons/search.py "red heart" --sets node_modules/@iconify-json/mdi node_modules/@iconify-json/noto
    python examples/icons/search.py --image drawing.png --sets icons.jsonl.xz --only tabler lucide

Each set is rendered and embedded once; the embeddings are kept in --cache. The best icons are printed and written to a
page with their pictures.
"""

import argparse
import base64
import hashlib
import html
import os
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from icons import Icon, IconSet, read_source, render, render_svg, svg

from infcl.data.images import decode_image
from infcl.data.records import BadSample
from infcl.data.transforms import EvalTransform
from infcl.evaluate.load import load_model

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "infcl" / "icons"
BATCH = 256  # icons per forward


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="?", help="words")
    parser.add_argument("--image", type=Path, help="search for icons like this picture (png, jpg, webp or svg)")
    parser.add_argument("--sets", nargs="+", type=Path, required=True, help="packages of @iconify(-json), or a file")
    parser.add_argument("--only", nargs="+", default=[], help="only these sets of --sets")
    parser.add_argument("--model", type=Path, default=HERE / "weights", help="run or exported folder [weights]")
    parser.add_argument("--best", type=int, default=20, help="icons to show")
    parser.add_argument("--page", type=Path, default=Path("icons.html"), help="the page to write")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of embeddings")
    args = parser.parse_args(arguments)
    if (args.query is None) == (args.image is None):
        parser.error("give either words or --image")
    if args.best < 1:
        parser.error(f"--best {args.best} must be greater than 0")
    try:
        search(args)
    except (OSError, ValueError) as error:
        sys.exit(f"search.py: {error}")


def search(args: argparse.Namespace) -> None:
    """Print the best icons and write the page. Raises ValueError if sets, model or picture cannot be used."""
    sets: dict[str, IconSet] = {}
    icons: list[Icon] = []
    for source in args.sets:
        found, more = read_source(source, only=args.only, licences=None, max_body=10**6)
        sets, icons = sets | found, icons + more
    clip, tokenize, _ = load_model(args.model, device=torch.device("cpu"))
    encoder = Encoder(clip, tokenize)
    icons, features = embedded(icons, encoder, args.cache)
    drawing = b"" if args.image is None else picture(args.image)
    encoder.text("warm up")  # the first forward allocates
    started = time.perf_counter()
    query = encoder.text(args.query) if args.image is None else encoder.images([drawing])[0]
    scores = features @ query
    order = np.argsort(-scores)[: args.best].tolist()
    milliseconds = 1000 * (time.perf_counter() - started)
    for place, i in enumerate(order, 1):
        print(f"{place:>3}  {scores[i]:.3f}  {icons[i].prefix}:{icons[i].name}")
    title = args.query if args.image is None else args.image.name
    args.page.write_text(page(title, [(icons[i], sets[icons[i].prefix], float(scores[i])) for i in order], len(icons)))
    print(f"{len(icons):,} icons searched in {milliseconds:.0f} ms; {args.page}")


class Encoder:
    """Unit-norm features, float32, of pictures and words."""

    def __init__(self, clip: Any, tokenize: Any):
        self.clip, self.tokenize = clip, tokenize
        self.transform = EvalTransform(clip.cfg.vision_cfg.image_size, clip.cfg.preprocess)
        digest = hashlib.sha256()
        for name, weight in clip.state_dict().items():
            digest.update(name.encode() + weight.float().numpy().tobytes())
        self.sha256 = digest.hexdigest()

    @torch.no_grad()
    def images(self, files: list[bytes]) -> np.ndarray:
        """Return [n, D] of encoded images."""
        pixels = torch.stack([self.transform(decode_image(data)) for data in files])
        return self.clip(pixels, None)["image_features"].float().numpy()

    @torch.no_grad()
    def text(self, words: str) -> np.ndarray:
        """Return [D]."""
        return self.clip(None, self.tokenize([words]))["text_features"][0].float().numpy()


def embedded(icons: list[Icon], encoder: Encoder, cache: Path) -> tuple[list[Icon], np.ndarray]:
    """Return the visible icons and their features [n, D] f32. Each set is embedded once and kept in `cache`."""
    from rich.console import Console
    from rich.progress import Progress

    kept: list[Icon] = []
    blocks = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for prefix, group in groupby(icons, key=lambda icon: icon.prefix):
            members = list(group)
            digest = hashlib.sha256(encoder.sha256.encode())
            for icon in members:
                digest.update(f"{icon.name}\0{icon.box}\0{icon.body}\0".encode())
            path = cache / f"{prefix}-{digest.hexdigest()[:24]}.npz"
            if not path.is_file():
                task = progress.add_task(prefix, total=len(members))
                visible, features = [], []
                for start in range(0, len(members), BATCH):
                    files = [render(icon) for icon in members[start : start + BATCH]]
                    visible += [start + i for i, data in enumerate(files) if data is not None]
                    if shown := [data for data in files if data is not None]:
                        features.append(encoder.images(shown))
                    progress.advance(task, len(files))
                if not features:
                    continue
                cache.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(f".{os.getpid()}.npz")
                np.savez(temporary, visible=visible, features=np.concatenate(features).astype(np.float16))
                os.replace(temporary, path)
            with np.load(path, allow_pickle=False) as stored:
                kept += [members[i] for i in stored["visible"].tolist()]
                blocks.append(stored["features"].astype(np.float32))
    if not blocks:
        raise ValueError("no icon of these sets can be seen")
    return kept, np.concatenate(blocks)


def picture(path: Path) -> bytes:
    """Return an image file's bytes; an SVG is rendered as the icons are. Raises ValueError for what is no image."""
    data = path.read_bytes()
    try:
        if path.suffix.lower() != ".svg":
            decode_image(data)
            return data
        jpeg = render_svg(data.decode())
    except (BadSample, UnicodeDecodeError) as error:
        raise ValueError(f"--image {path}: {error}") from error
    if jpeg is None:
        raise ValueError(f"--image {path}: it is no SVG, or nothing is visible in it")
    return jpeg


def page(title: str, found: list[tuple[Icon, IconSet, float]], searched: int) -> str:
    """Return a page with the pictures, light or dark as the reader's system. It loads nothing and runs no script."""
    cards = "\n".join(
        f'<figure><img class="{"colour" if origin.palette else "mono"}" alt="" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg(icon).encode()).decode()}"><figcaption><b>{html.escape(icon.caption)}</b>'
        f"<span>{html.escape(origin.name)}, {html.escape(origin.license)}</span><span>{score:.3f}</span>"
        "</figcaption></figure>"
        for icon, origin, score in found
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --card: #f3f4f6; --ink: #14171a; --soft: #59626b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171a; --card: #22272c; --ink: #eef1f4; --soft: #a3adb7; }}
  img.mono {{ filter: invert(1); }}
}}
body {{ margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 1rem/1.4 system-ui, sans-serif; }}
p, span {{ color: var(--soft); }}
main {{ display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }}
figure {{ margin: 0; padding: 1rem .75rem; border-radius: .75rem; background: var(--card); text-align: center; }}
img {{ width: 64px; height: 64px; }}
figcaption {{ display: grid; gap: .15rem; margin-top: .6rem; font-size: .85rem; overflow-wrap: anywhere; }}
</style>
<h1>{html.escape(title)}</h1><p>The best {len(found)} of {searched:,} icons, by cosine similarity.</p>
<main>
{cards}
</main>
</html>
"""


if __name__ == "__main__":
    main()
