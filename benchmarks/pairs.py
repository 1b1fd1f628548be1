"""Data sets of benchmarks.accuracy with duplicate images or hard negatives, made from the demo's images.

In:  a folder of the demo (infcl/data/demo.py). Out: a folder of the same layout, with other captions.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from infcl.data.demo import BACKGROUNDS, COLOURS, SHAPES, VOCAB_SIZE
from infcl.data.evaluation import EvalShards
from infcl.data.index import DEFAULT_KEYS
from infcl.data.plan import random_order
from infcl.data.streaming import stream_records
from infcl.data.tokenizer.learn import shard_captions, train_tokenizer
from infcl.evaluate.load import load_model

POPULAR, COPIES = 20, 5  # one image in POPULAR occurs COPIES times with each of its captions

_OBJECT = rf"(?:{'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)})"
_SCENE = re.compile(rf"({_OBJECT}) (left of|right of|above|below) a ({_OBJECT})")
_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_DIGIT = re.compile(r"a handwritten (\w+) at ([\w ]+), (\w+) on (\w+)")


def write_captioned(demo: Path, folder: Path) -> None:
    """Write each training image with five captions, and one image in twenty 25 times, with identical image bytes.

    The order is random, because the loader reads neighbours together. A complete folder is not written again.
    """
    if (folder / "tokenizer.model").exists():
        return
    samples = [
        {"png": image, "txt": caption.encode()}
        for i, (image, original) in enumerate(_pairs(demo / "train"))
        for caption in captions_of(original) * (1 if i % POPULAR else COPIES)
    ]
    _write(folder / "train", (samples[i] for i in random_order(len(samples), 0, 0)))
    for part in ("val", "zeroshot"):
        shutil.copytree(demo / part, folder / part, dirs_exist_ok=True)
    train_tokenizer(shard_captions(str(folder / "train"), 1 << 14), folder / "tokenizer.model", VOCAB_SIZE)


def captions_of(caption: str) -> list[str]:
    """Return five captions with the meaning of a caption of the demo."""
    if digit := _DIGIT.fullmatch(caption):
        name, place, ink, paper = digit.groups()
        return [
            caption,
            f"{ink} on {paper}, a handwritten {name} at {place}",
            f"at {place} a handwritten {name}, {ink} on {paper}",
            f"a {name} at {place}, {ink} on {paper}",
            f"handwritten at {place}, a {name}, {ink} on {paper}",
        ]
    if not (scene := _SCENE.search(caption)):
        raise ValueError(f"the demo has no such caption: {caption!r}")
    first, relation, second = scene.groups()
    (background,) = re.findall("|".join(BACKGROUNDS), caption)
    inverse = _INVERSE[relation]
    return [
        f"a {first} {relation} a {second} on a {background} background",
        f"{background} background with a {first} {relation} a {second}",
        f"there is a {first} {relation} a {second}, all on {background}",
        f"a {second} {inverse} a {first} on a {background} background",
        f"there is a {second} {inverse} a {first}, all on {background}",
    ]


def write_scenes(demo: Path, folder: Path) -> None:
    """Write the demo's scenes. "negative" in the json is the caption with its two objects exchanged."""
    if (folder / "tokenizer.model").exists():
        return
    for part in ("train", "val"):
        samples = (
            {"png": image, "txt": caption.encode(), "json": json.dumps({"negative": negative}).encode()}
            for image, caption in _pairs(demo / part)
            if (negative := exchanged(caption))
        )
        _write(folder / part, samples)
    shutil.copy(demo / "tokenizer.model", folder)


def exchanged(caption: str) -> str | None:
    """Return the caption with its two objects exchanged; None if it does not describe a scene."""
    return _SCENE.sub(r"\3 \2 a \1", caption) if _SCENE.search(caption) else None


@torch.no_grad()
def word_order(weights: Path, data: Path) -> dict[str, float]:
    """Evaluate word order on held-out scenes.

    Returns:
        "word_order", the share of scenes whose caption scores above the exchanged one, and "scenes", their number.
    """
    clip, tokenizer = load_model(weights, device=torch.device("cpu"))
    samples = list(EvalShards(str(data / "val"), image_size=clip.cfg.vision_cfg.image_size))
    texts = tokenizer([text for sample in samples for text in (sample.caption, sample.metadata["negative"])])
    output = clip(torch.stack([sample.image for sample in samples]), texts)
    scores = torch.einsum("nd,ntd->nt", output["image_features"], output["text_features"].unflatten(0, (-1, 2)))
    return {"word_order": (scores[:, 0] > scores[:, 1]).double().mean().item(), "scenes": len(samples)}


def _pairs(folder: Path) -> Iterator[tuple[bytes, str]]:
    for _, record in stream_records(sorted(map(str, folder.glob("*.tar"))), DEFAULT_KEYS, _fail):
        yield record.image or b"", (record.text or b"").decode()


def _fail(cause: str, url: str, error: Exception) -> None:
    raise RuntimeError(f"{cause}: {url}") from error


def _write(folder: Path, samples: Iterator[dict[str, bytes]]) -> None:
    from webdataset import TarWriter

    folder.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(folder / "00000.tar"), encoder=False, mtime=0) as writer:
        for i, members in enumerate(samples):
            writer.write({"__key__": f"{i:09d}"} | members)
