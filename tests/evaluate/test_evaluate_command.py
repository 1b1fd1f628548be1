"""python -m infcl.evaluate: every kind of checkpoint, any number of ranks, folders and shards: the same figures.

Parity with open_clip on the same weights and images: its own transform, tokenizer, classifier and metrics.
"""

import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from infcl.convert.__main__ import main as convert
from infcl.convert.export import export_model
from infcl.data.demo import DIGIT_NAMES
from infcl.data.index import SampleKeys
from infcl.data.records import stream_records
from infcl.evaluate.__main__ import main
from infcl.models import CLIP
from infcl.models.config import parse_model_config
from infcl.report import read_metrics
from infcl.report.gallery import retrieval_gallery
from infcl.report.records import read_run
from tests.lib.checkout import ROOT
from tests.lib.open_clip_stub import declare_torchvision_operators, import_open_clip
from tests.lib.ranks import run_ranks
from tests.lib.shard_files import encode, picture, write_tar
from tests.lib.small_clip import small_config
from tests.lib.small_loader import eval_samples
from tests.lib.training import demo_config, fit

IMAGES = 120


def records_of(path):
    return [record for _, record in stream_records([str(path)], SampleKeys(), None)]


@pytest.fixture(scope="module")
def data(demo_folder, tmp_path_factory):
    """The first demo images: labelled as shards and as class folders, captioned as shards and as a list."""
    folder = tmp_path_factory.mktemp("evaluation")
    zero_shot, val = (records_of(demo_folder / name / "00000.tar")[:IMAGES] for name in ("zeroshot", "val"))
    shards, cls, lines, captioned = [], [], [], []
    for i, record in enumerate(zero_shot):
        label = json.loads(record.json)["label"]
        path = folder / "folders" / DIGIT_NAMES[label] / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record.image)
        shards += [(path.name, record.image), (f"{i:04d}.json", json.dumps({"label": label}).encode())]
        cls += [(path.name, record.image), (f"{i:04d}.cls", str(label).encode())]
    for i, record in enumerate(val):
        caption = record.text.decode()
        captions = [caption, caption.upper() + "!", caption.split(",")[0]][: 1 + i % 3]
        (folder / "list").mkdir(exist_ok=True)
        (folder / "list" / f"{i:04d}.png").write_bytes(record.image)
        lines.append(json.dumps({"image": f"{i:04d}.png", "captions": captions}))
        captioned += [(f"{i:04d}.png", record.image), (f"{i:04d}.txt", "\n".join(captions).encode())]
    (folder / "list" / "captions.jsonl").write_text("\n".join(lines) + "\n")
    write_tar(folder / "labels" / "0.tar", shards)
    write_tar(folder / "cls" / "0.tar", cls)
    write_tar(folder / "captions" / "0.tar", captioned)
    for place in ("folders", "labels", "cls"):
        for name in ("classnames.txt", "templates.txt"):
            (folder / place / name).write_text((demo_folder / "zeroshot" / name).read_text())
    return folder


@pytest.fixture(scope="module")
def exports(demo_folder, tmp_path_factory):
    """A small random ViT whose image size is not the images', in every form."""
    from infcl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(demo_folder / "tokenizer.model", 20)
    fields = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 24, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 20, "width": 32, "heads": 4, "layers": 2},
    }
    ids = {name: getattr(tokenizer, name) for name in ("vocab_size", "context_length", "eos_id", "pad_id")}
    cfg = parse_model_config(fields).with_tokenizer(**ids)
    torch.manual_seed(5)
    model = CLIP(cfg).eval()
    with torch.no_grad():  # features of a random model hardly differ: spread them
        for block in [*model.visual.transformer.resblocks, *model.transformer.resblocks]:
            block.mlp.c_proj.weight.mul_(8)
    folder = tmp_path_factory.mktemp("exports")
    for format in ("open_clip", "hf"):
        export_model(model.state_dict(), cfg, demo_folder / "tokenizer.model", folder / format, format=format)
    torch.save({"state_dict": model.state_dict()}, folder / "weights.pt")
    (folder / "config.json").write_text(cfg.to_json())
    return folder


def command(rank, world_size, arguments):
    import infcl.evaluate.__main__ as module

    module.destroy_parallel = lambda *_: None  # the test's processes continue
    return main([*arguments, "--device", "cpu"])


def evaluate(world_size, tmp_path, *arguments) -> dict:
    out = tmp_path / "results.jsonl"
    assert run_ranks(command, world_size, [str(a) for a in (*arguments, "--out", out)]) == [0] * world_size
    return json.loads(out.read_text().splitlines()[-1])["metrics"]


def test_every_form_of_the_weights_and_of_the_labels_gives_the_same_figures(data, exports, demo_folder, tmp_path):
    bare = ("--model", exports / "config.json", "--tokenizer", demo_folder / "tokenizer.model")
    results = [
        evaluate(ranks, tmp_path, "--task", "zeroshot", "--data", data / place, "--checkpoint", exports / name, *more)
        for ranks, place, name, more in (
            (2, "labels", "open_clip", ()),
            (2, "labels", "hf", ()),
            (2, "folders", "open_clip", ()),
            (1, "cls", "weights.pt", bare),
        )
    ]
    assert results == [results[0]] * 4
    assert results[0]["num_samples"] == IMAGES and 0 < results[0]["top1"] < results[0]["top5"] < 1


def test_ranks_and_batch_sizes_change_no_figure(data, exports, tmp_path):
    arguments = ("--task", "retrieval", "--checkpoint", exports / "open_clip", "--loss-batch-size", 12)
    one = evaluate(1, tmp_path, *arguments, "--data", data / "list" / "captions.jsonl")
    assert (one["num_samples"], one["num_captions"]) == (IMAGES, IMAGES * 2)
    many = evaluate(2, tmp_path, *arguments, "--data", data / "captions", "--captions", "lines", "--batch-size", 7)
    assert many == one | {"val_loss": pytest.approx(one["val_loss"], rel=1e-5)}


def test_images_without_pixels_or_captions_are_counted_once_whatever_the_ranks(data, exports, tmp_path):
    good = encode(picture(1, 40, 30))
    members = [(f"{i}.png", b"broken" if i in (2, 5) else good) for i in range(9)]
    captions = [b" " if i == 7 else b"a picture" for i in range(8)]  # the ninth has none
    members = [pair for i, own in enumerate(members) for pair in (own, *[(f"{i}.txt", c) for c in captions[i : i + 1]])]
    write_tar(tmp_path / "shards" / "0.tar", members)
    arguments = ("--task", "retrieval", "--checkpoint", exports / "open_clip", "--data", tmp_path / "shards")
    for world_size in (1, 2):
        metrics = evaluate(world_size, tmp_path, *arguments)
        assert (metrics["num_samples"], metrics["num_skipped"]) == (5, 4)
        assert (metrics["num_skipped_not_an_image"], metrics["num_skipped_no_caption"]) == (2, 2)
        assert metrics["text_to_image_median_rank"] == 3.0, "equal images and captions differ by chance only"


@pytest.mark.long
def test_a_zero_3_run_evaluates_to_what_training_reported_and_exports_to_clip_model(demo_folder, tmp_path):
    (tmp_path / "tiny.json").write_text(small_config().to_json())
    sets = {"val_data": str(demo_folder / "val"), "zeroshot_data": str(demo_folder / "zeroshot")}
    zero_3 = {"model": str(tmp_path / "tiny.json"), "deepspeed_config": "ds_configs/zero3.json"}
    zero_3 |= {"matryoshka_widths": [3, 8], "duplicates": "mask", "false_negative_margin": 1.5}
    run_ranks(fit, 2, demo_config(demo_folder, tmp_path, steps=2, **sets, **zero_3))
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    reported, prompt = summary["evaluation"], summary["evaluated_with"]["zero_shot"]
    assert (prompt["prompts"], prompt["classes"]) == (8, 10) and prompt["prompt_source"].endswith(
        "zeroshot/templates.txt"
    )
    assert prompt.items() <= read_metrics(run / "metrics.jsonl", "zero_shot")[-1].items()
    assert reported["retrieval"]["val_loss_batch"] == 2 * 64
    assert {f"width_{width}_text_to_image_r1" for width in (3, 8)} <= reported["retrieval"].keys()
    assert {f"width_{width}_top1" for width in (3, 8)} <= reported["zero_shot"].keys()
    arguments = ("--task", "retrieval", "--data", demo_folder / "val", "--loss-batch-size", 2 * 64)
    alone = evaluate(1, tmp_path, "--checkpoint", run, *arguments)
    assert alone == pytest.approx(reported["retrieval"], rel=1e-4)
    assert convert(["export", str(run), "--format", "hf"]) == 0
    for checkpoint in (run / "export", run / "export-hf", run / "checkpoints" / "step_00000002"):
        arguments = ("--task", "zeroshot", "--data", sets["zeroshot_data"], "--checkpoint", checkpoint)
        assert evaluate(1, tmp_path, *arguments) == pytest.approx(reported["zero_shot"], rel=1e-6)
    assert len(read_run(run).later) == 4, "the report shows them too"
    card = (run / "export-hf" / "README.md").read_text()
    rows = "| batch | 128 samples", "| shorter embeddings | the first 3, 8 numbers", "| duplicates | mask |"
    assert all(row in card for row in (*rows, "| margin of false negatives | 1.5 |"))


@pytest.mark.long
def test_what_a_run_read_as_captions_and_pixels_is_what_is_evaluated_and_shown(demo_folder, tmp_path):
    """The text members are wrong, the json ones are right; the image member has an extension of its own."""
    colours = ["red", "green", "blue", "black", "white", "grey"]
    members = []
    for i, colour in enumerate(colours):
        image = Image.fromarray(picture(i, 30 + 9 * i, 60))
        members += [(f"{i}.photo", encode(image, "PNG")), (f"{i}.txt", b"wrong"), (f"{i}.png", b"wrong")]
        members += [(f"{i}.json", json.dumps({"title": f"one {colour} digit", "captions": ["wrong", "too"]}).encode())]
    write_tar(tmp_path / "data" / "0.tar", members)
    fields = {"embed_dim": 24, "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}}
    fields["text_cfg"] = {"context_length": 12, "width": 32, "heads": 4, "layers": 1, "vocab_size": 90}
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
    (tmp_path / "model.json").write_text(json.dumps({"model_cfg": fields, "preprocess_cfg": preprocess}))
    config = demo_config(
        demo_folder, tmp_path, model=f"open_clip:{tmp_path}/model.json", steps=2, batch_size=6, accum_freq=1,
        train_data=str(tmp_path / "data"), val_data=str(tmp_path / "data"), json_text_key="title", image_key="photo",
    )  # fmt: skip
    import_open_clip()
    run_ranks(fit_with_open_clip, 1, config)
    run = tmp_path / "run"
    reported = json.loads((run / "summary.json").read_text())["evaluation"]["retrieval"]
    assert (reported["num_samples"], reported["num_captions"]) == (6, 6)
    command = ("--task", "retrieval", "--data", tmp_path / "data", "--loss-batch-size", 6)
    shutil.copytree(run / "export", tmp_path / "elsewhere")
    for place in ("run", "run/checkpoints/step_00000002", "run/export", "elsewhere"):
        more = ("--json-text-key", "title", "--image-key", "photo") if place == "elsewhere" else ()
        assert evaluate(1, tmp_path, *command, "--checkpoint", tmp_path / place, *more) == pytest.approx(reported)
    gallery = retrieval_gallery(read_run(run))
    assert {result.query.text for result in gallery.text_to_image} == {f"one {colour} digit" for colour in colours}
    found = [result.rank == 1 for result in gallery.text_to_image]
    assert sum(found) / 6 == pytest.approx(reported["text_to_image_r1"], abs=1e-6)


def fit_with_open_clip(rank, world_size, config):
    declare_torchvision_operators()
    return fit(rank, world_size, config)


def test_a_subset_of_classes_competes_alone_and_a_label_may_have_several(data, exports, tmp_path):
    arguments = ("--task", "zeroshot", "--checkpoint", exports / "open_clip", "--data", data / "folders")
    subset, several = tmp_path / "subset.txt", tmp_path / "several.txt"
    subset.write_text(f"{DIGIT_NAMES[3]}\t3\n{DIGIT_NAMES[7]}\t7\n")
    several.write_text("".join(f"{name}\t{','.join(map(str, range(10)))}\n" for name in DIGIT_NAMES))
    chosen = evaluate(2, tmp_path, *arguments, "--zeroshot-classes", subset)
    files = [len(list((data / "folders" / DIGIT_NAMES[k]).iterdir())) for k in (3, 7)]
    assert chosen["num_samples"] == sum(files) and chosen["num_skipped"] == IMAGES - sum(files) and chosen["top5"] == 1
    assert evaluate(2, tmp_path, *arguments, "--zeroshot-classes", several)["top1"] == 1.0


@pytest.fixture
def theirs(exports):
    """open_clip's model, transform and tokenizer of the same export."""
    open_clip, folder = import_open_clip(), f"local-dir:{exports / 'open_clip'}"
    model, _, preprocess = open_clip.create_model_and_transforms(folder)
    return model.eval(), preprocess, open_clip.get_tokenizer(folder)


def test_zero_shot_equals_open_clips_on_the_same_weights_and_images(data, exports, theirs, tmp_path):
    model, preprocess, tokenizer = theirs
    names = (data / "labels" / "classnames.txt").read_text().split("\n")[:10]
    templates = (data / "labels" / "templates.txt").read_text().strip().split("\n")
    classifier = import_open_clip().build_zero_shot_classifier(
        model, tokenizer, names, [lambda name, t=t: t.format(name) for t in templates], num_classes_per_batch=10
    )
    records = records_of(data / "labels" / "0.tar")
    images = torch.stack([preprocess(Image.open(io.BytesIO(record.image))) for record in records])
    labels = torch.tensor([json.loads(record.json)["label"] for record in records])
    with torch.no_grad():
        scores = model.encode_image(images, normalize=True) @ classifier
    arguments = ("--task", "zeroshot", "--checkpoint", exports / "open_clip", "--data", data / "labels")
    hits = scores.topk(5).indices == labels[:, None]
    top1, top5 = hits[:, 0].double().mean().item(), hits.any(1).double().mean().item()
    expected = {"top1": top1, "top5": top5, "num_samples": IMAGES, "num_skipped": 0}
    assert evaluate(2, tmp_path, *arguments, "--image-resize", "pil") == expected


def test_retrieval_equals_open_clips_on_the_same_weights_and_images(data, exports, theirs, tmp_path):
    model, preprocess, tokenizer = theirs
    records = records_of(data / "captions" / "0.tar")
    captions = [record.text.decode().split("\n") for record in records]
    pixels = torch.stack([preprocess(Image.open(io.BytesIO(record.image))) for record in records])
    with torch.no_grad():
        images = model.encode_image(pixels, normalize=True)
        texts = model.encode_text(tokenizer([text for listed in captions for text in listed]), normalize=True)
    owner = torch.repeat_interleave(torch.arange(len(records)), torch.tensor([len(c) for c in captions]))
    scores = texts @ images.T  # [captions, images]
    arguments = ("--task", "retrieval", "--checkpoint", exports / "open_clip", "--data", data / "captions")
    ours = evaluate(2, tmp_path, *arguments, "--captions", "lines", "--image-resize", "pil")
    for k in (1, 5, 10):
        found = (scores.topk(k).indices == owner[:, None]).any(1)
        assert ours[f"text_to_image_r{k}"] == pytest.approx(found.double().mean().item(), abs=1e-6)
        found = (owner[scores.T.topk(k).indices] == torch.arange(len(records))[:, None]).any(1)
        assert ours[f"image_to_text_r{k}"] == pytest.approx(found.double().mean().item(), abs=1e-6)


@pytest.mark.parametrize("mode", ["P", "1", "CMYK", "RGBA", "LA", "I;16"])
def test_the_pillow_path_has_open_clips_pixels_of_images_that_are_not_rgb(tmp_path, mode):
    """Those of its zero-shot evaluation, whose ImageFolder converts an image before the transform, as its shards do."""
    open_clip = import_open_clip()
    from torchvision.datasets.folder import default_loader

    small = picture(3, 31, 50)
    image = Image.fromarray(small[..., 0].astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(small)
    image = image if mode == "I;16" else image.convert(mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(small[..., 1]))
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(data)
    (sample,) = eval_samples(str(tmp_path), image_size=24, resize="pil")
    transform = open_clip.image_transform(24, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
    theirs = transform(default_loader(tmp_path / "a" / "x.png"))
    assert torch.equal(sample.image, (255 * theirs).round().to(torch.uint8))


def on_a_full_disk(rank, world_size, arguments):
    """The error, and what was printed."""
    from unittest import mock

    with mock.patch("infcl.evaluate.__main__.report_mistake") as report, mock.patch("sys.stdout", io.StringIO()) as out:
        main([*arguments, "--out", "/dev/full"])
    return str(report.call_args.args[1]), out.getvalue()


def test_a_result_that_cannot_be_written_is_printed(data, exports):
    arguments = ["--task", "retrieval", "--data", str(data / "captions"), "--checkpoint", str(exports / "open_clip")]
    error, printed = run_ranks(on_a_full_disk, 1, [*arguments, "--device", "cpu"])[0]
    assert error == "--out /dev/full: No space left on device"
    assert json.loads(printed.splitlines()[-1])["metrics"]["num_samples"] == IMAGES


@pytest.mark.long
def test_torchrun_starts_it_and_a_table_is_printed(data, exports):
    command = [sys.executable, *"-m torch.distributed.run --nproc-per-node 2 --standalone -m infcl.evaluate".split()]
    command += ["--task", "retrieval", "--data", data / "list" / "captions.jsonl", "--device", "cpu"]
    command += ["--checkpoint", exports / "open_clip"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "image to text r1" in result.stdout and result.stdout.count("median rank") == 2
    line = json.loads(result.stdout.strip().splitlines()[-1])
    assert line["world_size"] == 2 and line["metrics"]["num_samples"] == IMAGES
