"""The report page: what is on it, that it needs nothing else, and what it does with runs that are not whole."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from infcl.convert.export import export_model
from infcl.data.tokenizer import Tokenizer, ids_of
from infcl.models import CLIP, load_model_config
from infcl.report import read_metrics
from infcl.report.__main__ import main
from infcl.report.charts import Chart, Series
from infcl.report.drawing import draw_loss_curve, draw_svg
from infcl.report.gallery import Gallery, retrieval_gallery
from infcl.report.page import headline
from infcl.report.records import read_run
from infcl.report.summary import summary_table


def step_record(step: int) -> dict:
    rising = {"loss": 4.0 / step, "micro_loss_image_to_text": 3.0 / step, "micro_loss_text_to_image": 3.1 / step}
    rising |= {"micro_accuracy": 1 - 1 / step, "logit_scale": 14.0 + step, "samples_per_second": 100.0 + step}
    norms = {"grad_norm": 5.0, "grad_norm_image": 3.0, "grad_norm_text": 4.0}
    constant = {"lr": 1e-3, "data_wait": 0.1, "text_share": 0.375, "peak_memory_mb": 500.0, "skipped_steps": 0}
    phases = {f"seconds_{phase}": 0.01 for phase in ("data", "encode", "loss", "replay", "step")}
    return {"kind": "train", "step": step, "samples_seen": 64 * step} | rising | norms | constant | phases


def write_run(root, **config):
    """A finished run of 30 steps, evaluated twice, without a model."""
    root.mkdir(parents=True)
    records = [step_record(step) for step in range(1, 31)]
    recalls = {"image_to_text_r1": 0.5, "text_to_image_r1": 0.25}
    for step in (15, 30):
        place = {"step": step, "samples_seen": 64 * step}
        records.append({"kind": "retrieval", **place, **recalls, "val_loss": 1.5})
        records.append({"kind": "zero_shot", **place, "top1": 0.75, "top5": 1.0})
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    environment = {"started": "2030-01-01T10:00:00+0000", "commit": "c0ffee", "world_size": 2, "device": "<GPU & co>"}
    counts = {"samples": 1920, "skipped/broken_image": 3, "index/no_caption": 4, "noted/caption_cut": 5}
    summary = {"zero_shot_top1": 0.75, **recalls, "train_seconds": 75.0, "peak_memory_mb": 512.0, "data": counts}
    summary |= {"samples_seen": 1920, "steps": 30, "zero_stage": 1, "world_size": 2}
    summary["paths"] = {"run": "R", "loss_curve": "L", "export": "E", "checkpoint": None}
    later = {"checkpoint": "runs/first", "task": "zeroshot", "data": "imagenet/val", "metrics": {"top1": 0.125}}
    (root / "evaluations.jsonl").write_text(json.dumps(later) + "\n[1]\n{")
    for name, values in (
        ("config", {"model": "demo", "loss": "inf_cl", "batch_size": 32, "lr": 1e-3} | config),
        ("environment", environment | {"command": ["pretrain_clip.py", "--lr", "1e-3"]}),
        ("summary", summary),
    ):
        (root / f"{name}.json").write_text(json.dumps(values))
    return root


class Page(HTMLParser):
    """Checks that tags nest, and collects the addresses that a browser would load."""

    VOID = {"meta", "img", "br", "line", "circle", "path", "rect", "link"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.loads = [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "first"))


def test_the_page_shows_curves_evaluation_data_and_settings_and_loads_nothing(run):
    assert main([str(run.root)]) == 0
    text = (run.root / "report" / "index.html").read_text()
    for shown in (
        "Loss of the global batch", "Loss by direction", "Accuracy in the micro-batch", "among 32 samples",
        "Logit scale", "text tower",
        "Learning rate", "Samples per second", "Peak memory", "Recall@1", "Zero-shot accuracy",
        "runs/first on imagenet/val", "top-1 12.5%",
        "R@1 50.0%", "top-1 75.0%", "validation", "replay 10.0 ms (20%)", "broken image", "left out by the index",
        "512 MiB", "1:15", "--batch-size", "pretrain_clip.py --lr 1e-3", "finished", "No gallery",
        "samples seen</text>", "caption tokens encoded", "37.5%", "2 ranks, &lt;GPU &amp; co&gt;",
        "prefers-color-scheme: dark", "max-width: 560px",
    ):  # fmt: skip
        assert shown in text, shown
    assert text.count('<figure class="card chart">') == 11
    assert Page(text).loads == []
    assert "@import" not in text and not re.search(r"url\((?!#)", text) and "<GPU" not in text


def test_a_run_that_died_is_still_shown(tmp_path):
    """No summary, no config, the last line torn by the crash, bytes before it that are no text."""
    root = tmp_path / "dead"
    root.mkdir()
    lines = [json.dumps(step_record(step)) for step in (1, 2, 2, 3)]
    (root / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n\x00\xff\n0\n{}\n{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(root / "metrics.jsonl", "train")] == [1, 2, 3]
    assert main([str(root)]) == 0
    text = (root / "report" / "index.html").read_text()
    Page(text)
    assert "not finished" in text and "causes are counted at the end" in text


def test_what_a_resumed_run_had_done_behind_its_checkpoint_is_forgotten(tmp_path):
    steps = [("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4), ("val", 4), ("train", 3), ("train", 4)]
    lines = [
        json.dumps({"kind": kind, "step": step, "samples_seen": step, "line": line})
        for line, (kind, step) in enumerate(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    kept = {kind: [r["line"] for r in read_metrics(tmp_path / "metrics.jsonl", kind)] for kind in ("train", "val")}
    assert kept == {"train": [0, 1, 6, 7], "val": [2]}


def test_the_gallery_shows_the_best_of_the_validation_data(demo_folder, tmp_path):
    root = write_run(tmp_path / "run", val_data=str(demo_folder / "val"))
    tokenizer = Tokenizer(str(demo_folder / "tokenizer.model"))
    cfg = load_model_config("demo").with_tokenizer(**ids_of(tokenizer))
    torch.manual_seed(0)
    export_model(CLIP(cfg).state_dict(), cfg, demo_folder / "tokenizer.model", root / "export")
    gallery = retrieval_gallery(read_run(root))
    assert isinstance(gallery, Gallery) and gallery.candidates == 1024
    for result in (*gallery.text_to_image, *gallery.image_to_text):
        scores = [item.score for item in result.found]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert (result.rank <= 5) <= any(item.right for item in result.found)
    assert all(item.image.startswith("data:image/png;base64,") for item in gallery.text_to_image[0].found)
    assert main([str(root)]) == 0
    assert len(Page((root / "report" / "index.html").read_text()).loads) == 36
    (root / "config.json").write_text(json.dumps({"val_data": "/no/such/folder"}))
    assert "is not there (" in retrieval_gallery(read_run(root))


def test_the_reports_counts_of_skipped_samples_agree(run):
    """The run's table, its chart and the table of causes count the same: what the index left out has its own row."""
    rows = headline(run)
    assert (rows["samples skipped"], rows["samples left out by the index"]) == ("3", "4")


def test_the_curve_of_a_run_without_a_loss_is_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    draw_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "x.png")
    assert (tmp_path / "x.png").is_file()


def test_a_long_noisy_run_makes_no_large_picture_and_keeps_its_spikes():
    ys = [2.0 + n % 7 / 10 for n in range(100_000)]
    ys[5000:5400] = [9.0] * 400
    svg = draw_svg(Chart("long", "y", series=[Series("y", [float(n) for n in range(len(ys))], ys, 0, noisy=True)]))
    assert len(svg) < 100_000
    heights = [float(y) for y in re.findall(r"L [\d.]+ ([\d.]+)", svg)]
    assert min(heights) < 20


def test_the_closing_table_tells_failed_saves_and_skipped_steps(run):
    summary = run.summary | {"samples_seen": 960, "steps": 30, "zero_stage": 1, "world_size": 2}
    summary["paths"] = {"run": "R", "loss_curve": "L", "export": "E", "checkpoint": "R/checkpoints/step_9"}
    whole = summary_table(summary | {"failed_saves": 0, "skipped_steps": 0})
    assert "failed saves" not in whole and "skipped steps" not in whole
    torn = summary_table(summary | {"failed_saves": 2, "skipped_steps": 7})
    assert re.search(r"samples seen +960  \(1 step, 75 s\)", summary_table(summary | {"steps": 1}))
    for line in (
        "skipped steps +7 of 30: their gradients were not finite",
        "failed saves +2; the newest checkpoint is R/checkpoints/step_9",
    ):
        assert re.search(line, torn)


def test_a_run_whose_files_are_damaged_is_shown_without_them(tmp_path, caplog):
    root = write_run(tmp_path / "run")
    (root / "config.json").write_text('{"model": "de')
    (root / "environment.json").write_text("[]")  # JSON, but not what is written there
    (root / "summary.json").write_text('{"steps": "30"}')
    assert main([str(root)]) == 0
    Page((root / "report" / "index.html").read_text())
    for damage in ("config.json: not JSON", "environment.json: the record is []", "summary.json: zero_shot_top1 is"):
        assert damage in caplog.text
