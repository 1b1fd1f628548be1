"""Measure the data layer's rate on one core, and the number of GPUs that it feeds: `python -m benchmarks.data`.

Images: random crops of the photograph that matplotlib ships (Grace Hopper, 512 x 600), enlarged to --size with a
little sensor noise, JPEG quality 90, about 65 KB each at 512 px. Captions have 12 words. The samples are written as
webdataset shards to a temporary folder and read from the page cache.

The stages are measured alone (read, decode, augment, tokenise) and together (batch: the work of a worker for a
micro-batch, with the loader's own code). open_clip's worker path runs on the same shards in the same rounds:
webdataset's tar reader and Pillow decoder, open_clip's `image_transform(is_train=True)` and tokenizer, and stacking.
The result is the best of --rounds in CPU seconds of one thread, so that other load on the machine has little effect.
"""

import argparse
import io
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.clock import hardware
from benchmarks.rows import append, parser_of_rows
from infcl.data.images import ImageLimits, decode_image
from infcl.data.index import SampleKeys, scan_shard
from infcl.data.indexed import IndexedDataset
from infcl.data.pack import write_shard
from infcl.data.plan import EpochPlan
from infcl.data.records import ShardReader
from infcl.data.samples import SampleDecoder
from infcl.data.shards import load_manifest
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer
from infcl.data.transforms import TrainTransform
from infcl.data.workers import NoBatch

WORDS = "a photo of the red old small house near river with two people walking under bright evening sky".split()
JITTER = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}


def main() -> None:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--size", type=int, default=512, help="pixels of a side of the stored images")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side that the model receives")
    parser.add_argument("--images", type=int, default=192, help="number of images")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), arguments)
    where = hardware(arguments.commit)
    what: dict[str, str | float] = {"images": f"{arguments.size} px crops of matplotlib's photograph", "cpu": _cpu()}
    what |= {"load": round(os.getloadavg()[0], 1), "torch": where["torch"], "commit": where["commit"]}
    print(", ".join(f"{name} {value}" for name, value in what.items()))
    for name, rate in rates.items():
        print(f"{name:<36} {rate:>10.0f} samples/s/core")
    append(arguments.csv, [{"stage": name, "samples_per_second_per_core": rate} | what for name, rate in rates.items()])


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return {stage: samples per second of one core}."""
    captions = write_images(folder / "shards", arguments.images, arguments.size)
    small = folder / "small.tar"  # for the index, which reads only headers
    write_shard(small, [{"jpg": bytes(2000), "json": b"{}", "txt": b"a caption"}] * 10_000)
    model = folder / "spm.model"
    train_tokenizer([" ".join(np.random.default_rng(i).permutation(WORDS)) for i in range(3000)], model, 160)
    tokenizer, reader = Tokenizer(model, 64), ShardReader(load_manifest(str(folder / "shards")))
    order = np.random.default_rng(0).permutation(arguments.images)
    records = reader.read(order)
    jpegs = [record.image for record in records if record.image is not None]  # all have one
    pixels = [decode_image(jpeg) for jpeg in jpegs[:32]]
    size, random = arguments.image_size, np.random.default_rng(0)

    def dataset(**augmentation) -> IndexedDataset:
        transform = TrainTransform(size, **augmentation)
        decoder = SampleDecoder(tokenizer, transform, seed=0, keys=SampleKeys(), limits=ImageLimits())
        return IndexedDataset(reader, decoder)

    def augment(**augmentation) -> Callable[[], int]:
        transform = TrainTransform(size, **augmentation)
        return lambda: len([transform(image, random.random(33)) for image in pixels])

    def a_batch(data: IndexedDataset) -> int:
        item = data[(0, 0, order)]
        assert not isinstance(item, NoBatch) and item[0] is not None, item
        return len(item[0]["ids"])

    batches = {
        "ours/batch": dataset(),
        "ours/batch, scale (0.08, 1)": dataset(scale=(0.08, 1.0)),
        "ours/batch, color jitter": dataset(**JITTER),
        "ours/batch, scaled decode": dataset(scaled_decode=True),
    }
    stages: dict[str, Callable[[], int]] = {
        "ours/plan an epoch, chunks of 16": lambda: EpochPlan([10_000] * 1000, chunk=16, seed=0, epoch=0).num_samples,
        "ours/index": lambda: len(scan_shard(str(small), SampleKeys())[1]),
        "ours/read": lambda: len(reader.read(order)),
        "ours/read, chunks of 16": lambda: sum(
            len(reader.read(np.arange(i, min(i + 16, len(order))))) for i in range(0, len(order), 16)
        ),
        "ours/decode": lambda: len([decode_image(jpeg) for jpeg in jpegs]),
        "ours/augment": augment(),
        "ours/augment, color jitter": augment(**JITTER),
        "ours/tokenise": lambda: sum(len(tokenizer(captions)) for _ in range(10)),
        **{name: partial(a_batch, data) for name, data in batches.items()},
        **open_clip_stages(folder / "shards", jpegs, captions, size),
    }
    best = dict.fromkeys(stages, 0.0)
    for _ in range(arguments.rounds):
        for name, stage in stages.items():
            started = time.thread_time()
            count = stage()
            best[name] = max(best[name], count / (time.thread_time() - started))
    return {name: round(rate, 1) for name, rate in best.items()}


def write_images(folder: Path, count: int, size: int) -> list[str]:
    """Write shards of `count` photographs; return their captions."""
    import matplotlib
    import webdataset
    from PIL import Image

    photo = Image.open(os.path.join(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")).convert("RGB")
    rng, captions = np.random.default_rng(0), []
    folder.mkdir(parents=True)
    with webdataset.ShardWriter(f"{folder}/%05d.tar", maxcount=max(1, count // 4), verbose=0, mtime=0) as writer:
        for i in range(count):
            side = int(rng.integers(256, 500))
            left, top = int(rng.integers(0, photo.width - side + 1)), int(rng.integers(0, photo.height - side + 1))
            crop = photo.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
            noisy = np.clip(np.asarray(crop) + rng.normal(0, 1.0, (size, size, 3)), 0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(noisy).save(file, "JPEG", quality=90)
            captions.append(" ".join(rng.permutation(WORDS)[:12]))
            writer.write({"__key__": f"{i:09d}", "jpg": file.getvalue(), "json": b"{}", "txt": captions[-1]})
    return captions


def open_clip_stages(shards: Path, jpegs: list[bytes], captions: list[str], size: int) -> dict[str, Callable[[], int]]:
    """Return the stages of open_clip's own worker path on the same shards; {} if it is not installed."""
    try:
        from benchmarks.cpu_torchvision import declare_torchvision_operators

        declare_torchvision_operators()
        import open_clip
        import webdataset
        from PIL import Image
    except ImportError:
        return {}
    tokenizer, urls = open_clip.get_tokenizer("ViT-B-32"), sorted(map(str, shards.glob("*.tar")))

    def batch(**augmentation) -> Callable[[], int]:
        transform = open_clip.image_transform(size, is_train=True, aug_cfg=augmentation or None)

        def run() -> int:
            data = webdataset.WebDataset(urls, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "txt")
            pairs = [(transform(image), tokenizer(text)[0]) for image, text in data]
            torch.stack([image for image, _ in pairs]), torch.stack([text for _, text in pairs])
            return len(pairs)

        return run

    plain = open_clip.image_transform(size, is_train=True)
    return {
        "open_clip/decode": lambda: len([Image.open(io.BytesIO(jpeg)).convert("RGB") for jpeg in jpegs]),
        "open_clip/decode and augment": lambda: len(
            [plain(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in jpegs]
        ),
        "open_clip/tokenise": lambda: len(tokenizer(captions)),
        "open_clip/batch": batch(),
        "open_clip/batch, scale (0.08, 1)": batch(scale=(0.08, 1.0)),
        "open_clip/batch, color jitter": batch(**JITTER),
    }


def _cpu() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
