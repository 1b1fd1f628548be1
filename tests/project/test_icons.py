"""The icons example: its data set and its search page, from a small package of five sets."""

import html
import importlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch

from infcl.convert.__main__ import main as convert
from infcl.convert.export import export_model
from infcl.evaluate.load import load_model
from infcl.models import CLIP, load_any_config
from infcl.models.preprocess import Preprocess
from tests.lib.checkout import ROOT
from tests.lib.open_clip_stub import import_open_clip, import_transformers

LICENCES = {
    "carbon": "Apache-2.0", "vaadin": "Apache-2.0", "fluent-emoji-flat": "MIT", "fluent-emoji": "MIT", "free": "MIT",
    "by": "CC-BY-4.0", "closed": "CC-BY-NC-4.0",
}  # fmt: skip


@pytest.fixture(scope="module")
def icons():
    """The modules of the example."""
    folder = str(ROOT / "examples" / "icons")
    sys.path.insert(0, folder)
    yield {name: importlib.import_module(name) for name in ("icons", "build", "search", "study", "table")}
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder in the layout of @iconify/json. Every set has a circle, a square and an invisible icon."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "json").mkdir()
    listed = {}
    for number, (prefix, license) in enumerate(LICENCES.items()):
        drawn = {
            "circle": {"body": f'<circle cx="12" cy="12" r="{4 + number}" fill="currentColor"/>'},
            f"square-{number}": {"body": f'<path fill="#f00" d="M2 2h{9 + number}v9H2z"/>'},
            "nothing": {"body": "<g/>"},
            "old": {"body": "<circle r='9'/>", "hidden": True},
            "waving": {"body": "<circle r='9'><animate attributeName='r'/></circle>"},
        }
        aliases = {"disc": {"parent": "circle"}, "turned": {"parent": "circle", "rotate": 1}, "o": {"parent": "disc"}}
        content = {"prefix": prefix, "icons": drawn, "aliases": aliases, "width": 24, "height": 24}
        (folder / "json" / f"{prefix}.json").write_text(json.dumps(content))
        listed[prefix] = {"name": prefix, "author": {"name": "a"}, "license": {"spdx": license}, "palette": False}
    (folder / "collections.json").write_text(json.dumps(listed))
    return folder


def samples(tar) -> list[dict]:
    with tarfile.open(tar) as file:
        return [json.load(file.extractfile(m)) for m in file if m.name.endswith(".json")]


def test_the_data_set_holds_out_sets_and_splits_by_licence_and_a_saved_file_gives_the_same(icons, package, tmp_path):
    icons["build"].main([str(package), "--save", str(tmp_path / "icons.jsonl.xz")])
    for source, out in ((package, "a"), (tmp_path / "icons.jsonl.xz", "b")):
        arguments = [str(source), "--out", str(tmp_path / out), "--workers", "2", "--vocab-size", "30"]
        icons["build"].main(arguments)
    first, second = (sorted((tmp_path / out).rglob("*.*")) for out in "ab")
    assert [path.read_bytes() for path in first if path.is_file()] == [p.read_bytes() for p in second if p.is_file()]
    free = samples(tmp_path / "a" / "train" / "free-00000.tar")
    assert sorted((s["set"], s["name"]) for s in free) == [("free", "circle"), ("free", "square-4")]
    assert {s["set"] for s in samples(tmp_path / "a" / "train" / "attribution-00000.tar")} == {"by"}
    assert next(s for s in free if s["name"] == "circle")["texts"] == ["circle", "disc", "o"]
    val = samples(tmp_path / "a" / "val" / "00000.tar")
    assert [(s["name"], s["seen"]) for s in val] == [
        ("circle", True), ("square-0", False), ("square-1", False), ("square-2", False),
    ]  # fmt: skip
    assert (tmp_path / "a" / "zeroshot" / "vaadin" / "classnames.txt").read_text() == "circle\nsquare 1\n"
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["train_icons"] == 4 and manifest["share_of_shared_names"] == 0.5
    assert {s["prefix"] for s in manifest["sets"]} == LICENCES.keys() - {"fluent-emoji", "closed"}


@pytest.mark.long
def test_search_ranks_by_cosine_and_embeds_a_set_once(icons, package, tmp_path, monkeypatch, capsys):
    icons["build"].main([str(package), "--out", str(tmp_path / "a"), "--workers", "1", "--vocab-size", "30"])
    cfg = json.loads((ROOT / "infcl/models/configs/demo.json").read_text())
    cfg["text_cfg"]["vocab_size"] = 30
    (tmp_path / "small.json").write_text(json.dumps(cfg))
    config = load_any_config(str(tmp_path / "small.json"))
    torch.manual_seed(0)
    export_model(CLIP(config).state_dict(), config, tmp_path / "a" / "tokenizer.model", tmp_path / "model")
    drawing = tmp_path / "drawing.svg"
    drawing.write_text(icons["icons"].svg(icons["icons"].read_source(package, only=["by"])[1][1]))
    arguments = ["--image", str(drawing), "--sets", str(package), "--model", str(tmp_path / "model")]
    arguments += ["--page", str(tmp_path / "page.html"), "--cache", str(tmp_path / "cache"), "--best", "3"]
    capsys.readouterr()
    icons["search"].main(arguments)
    first = capsys.readouterr().out.splitlines()
    assert "by:square-5" in first[0] and "1.000" in first[0] and len(first) == 4
    assert (tmp_path / "page.html").read_text().count("<figure>") == 3
    monkeypatch.setattr(icons["search"], "render", None)  # the embeddings are stored
    icons["search"].main(arguments)
    assert capsys.readouterr().out.splitlines()[:3] == first[:3]


DARK, LIGHT = (0, "rgb(20, 23, 26)"), (1, "rgb(255, 255, 255)")  # Chromium's number of the scheme, the page's colour


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("scheme", "colour"), [DARK, LIGHT])
def test_a_phone_shows_all_pictures_of_the_search_page_in_its_width(scheme, colour, icons, package, tmp_path):
    """In a frame, since Chromium's own window has at least 500 pixels."""
    sets, drawn = icons["icons"].read_source(package)
    found = [(icon._replace(name="<script>" + "long" * 40), sets[icon.prefix], 0.5) for icon in drawn]
    frame = html.escape(icons["search"].page("red & <b>heart", found, 9))
    (tmp_path / "frame.html").write_text(f"""<iframe width=390 height=800 srcdoc="{frame}"></iframe><script>
        onload = () => {{
            const {{contentDocument: page, contentWindow: view}} = document.querySelector("iframe");
            const root = page.documentElement, seen = [...page.images].filter(image => image.naturalWidth > 0);
            document.title = JSON.stringify([page.title, seen.length, root.scrollWidth - root.clientWidth,
                                             view.getComputedStyle(page.body).backgroundColor]);
        }}</script>""")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    title = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown)[1]))
    assert title == ["red & <b>heart", len(found), 0, colour]


def test_search_resizes_a_picture_as_its_model_was_trained(icons):
    squash = Preprocess(resize_mode="squash")
    cfg = SimpleNamespace(vision_cfg=SimpleNamespace(image_size=32), preprocess=squash)
    assert icons["search"].Encoder(SimpleNamespace(cfg=cfg, state_dict=dict), None).transform.preprocess == squash


def test_a_study_takes_relative_folders_and_exits_with_1_if_a_run_failed(icons, tmp_path, monkeypatch, capsys):
    study, trainer, folder = icons["study"], tmp_path / "checkout" / "pretrain_clip.py", tmp_path / "here" / "data"
    trainer.parent.mkdir()
    listing = "os.listdir(sys.argv[sys.argv.index('--train-data') + 1])"
    trainer.write_text(f"import os, sys; sys.exit('data: ' + str({listing}))")
    (folder / "train" / "shards").mkdir(parents=True)
    (folder.parent / "plan.json").write_text('[{"batch": 8, "lr": 0.1}]')
    monkeypatch.setattr(study, "ROOT", trainer.parent)
    monkeypatch.setattr(study, "HeldOut", lambda data: None)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SystemExit, match="1"):
        study.main(["plan.json", "--data", "data", "--logs", "runs", "--gpus", "0", "--commit", "x"])
    assert "exit code 1: data: ['shards']" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"no xz", lzma.compress(b""), lzma.compress(b'[["a", "b"]]\n'), lzma.compress(b"[]")[:9], None]
)
def test_a_source_that_is_damaged_is_one_line_with_its_name(icons, tmp_path, content):
    source = tmp_path / "source"
    if content is None:
        source.mkdir()
        for name in ("icons.json", "info.json"):
            (source / name).write_text("{}")
    else:
        source.write_bytes(content)
    with pytest.raises(ValueError, match="^.*/source is damaged, or has another content: .*$"):
        icons["icons"].read_source(source)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.svg", b"<svg>"), ("a.svg", b"\xff<svg/>"), ("a.svg", b""), ("a.png", b"<svg/>"), ("a.png", b"")],
)
def test_a_picture_that_cannot_be_searched_is_one_line_with_its_name(icons, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^--image .*/{name}: .+$"):
        icons["search"].picture(tmp_path / name)


def test_a_study_reports_runs_of_one_name_that_start_from_different_runs(icons, tmp_path, monkeypatch, capsys):
    """The second one is no repetition of the first: it must not be skipped in silence."""
    study, logs = icons["study"], tmp_path / "runs"
    starts = [{"batch": 8, "lr": lr, "samples": 16} for lr in (0.1, 0.2)]
    plan = [{"batch": 16, "lr": 0.1, "samples": 16, "start": start} for start in starts]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for start in starts:
        (logs / study.name_of(study.DEFAULTS | start)).mkdir(parents=True)
        (logs / study.name_of(study.DEFAULTS | start) / "summary.json").touch()

    def record(self, run, name, slot):
        self.rows[name] = {"name": name, "start": run["start"]["name"], "teacher": ""}

    monkeypatch.setattr(study, "HeldOut", lambda data: None)
    monkeypatch.setattr(study.Study, "_train", lambda *_: True)
    monkeypatch.setattr(study.Study, "_record", record)
    with pytest.raises(SystemExit, match="1"):
        study.main([str(tmp_path / "plan.json"), "--logs", str(logs), "--gpus", "0", "--commit", "x"])
    names = [study.name_of(study.DEFAULTS | start) for start in starts]
    assert f"start is {names[1]}, the run of this name had {names[0]}" in capsys.readouterr().out


def test_a_table_keeps_models_apart(icons, tmp_path, capsys):
    cells = dict.fromkeys(icons["table"].GROUP, "1") | dict.fromkeys(icons["table"].SCORES, "0.5")
    cells |= {"final_loss": "1", "ln_batch": "2", "samples_per_second": "3"}
    (tmp_path / "rows.csv").write_text(
        "\n".join(",".join(row) for row in (cells, {**cells, "model": "a"}.values(), {**cells, "model": "b"}.values()))
    )
    icons["table"].main([str(tmp_path / "rows.csv")])
    assert [row[:5] for row in capsys.readouterr().out.splitlines()[2:]] == ["| a |", "| b |"]


def test_the_weights_give_equal_features_here_in_open_clip_and_in_transformers(tmp_path):
    open_clip, transformers = import_open_clip(), import_transformers()
    folder = ROOT / "examples" / "icons" / "weights"
    assert (folder / "model.safetensors").stat().st_size < 12e6
    pixels = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    captions = ["red heart", "arrow left circle", "calendar"]
    ours, tokenize, _ = load_model(folder, device=torch.device("cpu"))
    peer, tokens = open_clip.create_model(f"local-dir:{folder}").eval(), open_clip.get_tokenizer(f"local-dir:{folder}")
    convert(["import", str(folder), "--format", "hf", "--out", str(tmp_path / "hf")])
    clip = transformers.CLIPModel.from_pretrained(tmp_path / "hf").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = words(captions, padding="max_length", max_length=16, truncation=True, return_tensors="pt")["input_ids"]
    assert torch.equal(ids, tokens(captions))
    with torch.no_grad():
        wanted = ours(pixels, tokenize(captions))
        theirs = peer.encode_image(pixels, normalize=True), peer.encode_text(ids, normalize=True)
        hub = clip(pixel_values=pixels, input_ids=ids)
    for image, text in (theirs, (hub.image_embeds, hub.text_embeds)):
        torch.testing.assert_close(image, wanted["image_features"], rtol=0, atol=1e-6)
        torch.testing.assert_close(text, wanted["text_features"], rtol=0, atol=1e-6)
