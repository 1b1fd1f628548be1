"""Whether hard-negative captions teach word order.

    python -m benchmarks.hard_negatives --csv docs/results/word_order.csv

Scenes of the embedded data set show two objects ("a blue ring left of a green square"); a hard negative is the caption
with its two objects exchanged. For each seed one model is trained without hard negatives and one with --negatives-key,
on the same samples in the same order. A row holds the share of held-out scenes whose own caption scores above the
exchanged one (chance: 0.5). Other flags are pretrain_clip.py's.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.clock import hardware
from benchmarks.rows import append
from infcl.data.demo import prepare_demo
from infcl.data.evaluation import EvalShards
from infcl.data.index import DEFAULT_KEYS
from infcl.data.render import COLOURS, SHAPES
from infcl.data.streaming import stream_records
from infcl.evaluate.load import load_model

_OBJECT = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})")
_ARMS: dict[str, list[str]] = {"none": [], "exchanged": ["--negatives-key", "negative"]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path(".data/demo"), help="folder of the demo's data set")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="for the CSV; default: git's HEAD")
    options, flags = parser.parse_known_args(arguments)
    demo = prepare_demo(options.data)
    with tempfile.TemporaryDirectory() as folder:
        for part in ("train", "val"):
            write_scenes(demo / part, Path(folder) / part)
        common = ["--train-data", f"{folder}/train", "--val-data", f"{folder}/val", "--json-text-key", "caption"]
        common += ["--tokenizer", str(demo / "tokenizer.model"), "--model", "demo", "--lr", "1e-3", "--wd", "0.05"]
        common += ["--steps", str(options.steps), "--warmup", "50", "--batch-size", str(options.batch_size)]
        common += ["--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)", "--save-frequency", "0", "--report-to", "none"]
        for seed in range(options.seeds):
            for arm, own in _ARMS.items():
                run = ["--logs", f"{folder}/logs", "--name", f"{arm}-{seed}", "--seed", str(seed)]
                subprocess.run([sys.executable, "pretrain_clip.py", *common, *own, *run, *flags], check=True)
                root = Path(folder) / "logs" / f"{arm}-{seed}"
                accuracy, count = word_order(root / "export", f"{folder}/val")
                row = {"negatives": arm, "seed": seed, "word_order": round(accuracy, 4), "scenes": count}
                row |= {"steps": options.steps, "batch_size": options.batch_size}
                print(row, flush=True)
                if options.csv:
                    append(options.csv, [row | hardware(options.commit)])


def exchanged(caption: str) -> str | None:
    """The caption with its two objects in each other's place; None where it has not two."""
    found = list(_OBJECT.finditer(caption))
    if len(found) != 2:
        return None
    first, second = found
    between = caption[first.end() : second.start()]
    return caption[: first.start()] + second[0] + between + first[0] + caption[second.end() :]


def write_scenes(source: Path, folder: Path) -> None:
    """One tar of the scenes in the shards of `source`: png, and json with "caption" and "negative"."""
    from webdataset import TarWriter

    folder.mkdir(parents=True)
    with TarWriter(str(folder / "00000.tar"), encoder=False, mtime=0) as writer:
        for key, record in stream_records(sorted(map(str, source.glob("*.tar"))), DEFAULT_KEYS, _fail):
            caption = (record.text or b"").decode()
            if negative := exchanged(caption):
                texts = json.dumps({"caption": caption, "negative": negative}).encode()
                writer.write({"__key__": key, "png": record.image, "json": texts})


def _fail(cause: str, url: str, error: Exception) -> None:
    raise RuntimeError(f"{cause}: {url}") from error


@torch.no_grad()
def word_order(weights: Path, data: str) -> tuple[float, int]:
    """(the share of images whose caption scores above the exchanged one, how many images)."""
    clip, tokenizer = load_model(weights, device=torch.device("cpu"))
    right = count = 0
    for sample in EvalShards(data, image_size=clip.cfg.vision_cfg.image_size):
        texts = tokenizer([sample.metadata["caption"], sample.metadata["negative"]])
        output = clip(sample.image[None], texts)
        own, other = (output["text_features"] @ output["image_features"][0]).tolist()
        right, count = right + (own > other), count + 1
    return right / count, count


if __name__ == "__main__":
    main()
