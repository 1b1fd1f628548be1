"""Folders of other people ask for their code to be run: no command that opens one runs it."""

import json

import pytest
import torch

from infcl.convert import __main__ as convert
from infcl.convert.import_weights import load_pretrained
from infcl.data.tokenizer.source import find_tokenizer
from infcl.evaluate.__main__ import main as evaluate
from infcl.models import CLIP
from infcl.report.gallery import retrieval_gallery
from infcl.report.records import read_run
from tests.lib.open_clip_stub import import_open_clip, import_transformers
from tests.lib.small_clip import CONTEXT_LENGTH, small_config


@pytest.fixture
def planted(tokenizer_model, tmp_path, monkeypatch):
    """A run folder whose configs name code in its export, and the file that this code would write."""
    import_open_clip()
    import_transformers()
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a user who confirms whatever transformers asks
    torch.manual_seed(0)
    model = CLIP(small_config())
    root, mark = tmp_path / "run", tmp_path / "code_ran"
    folder = root / "export"
    tokenizer = f"open_clip:local-dir:{folder}"
    root.mkdir()
    step = {"kind": "train", "step": 1, "samples_seen": 8, "loss": 1.0}
    (root / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (root / "config.json").write_text(json.dumps({"val_data": str(tmp_path / "val"), "tokenizer": tokenizer}))
    convert.export_model(model.state_dict(), model.cfg, tokenizer_model, folder)
    (folder / "spiece.model").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Planted\n"
    (folder / "planted.py").write_text(code)
    auto_map = {"AutoConfig": "planted.Planted", "AutoTokenizer": ["planted.Planted", "planted.Planted"]}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "Planted"}))
    fields = json.loads((folder / "open_clip_config.json").read_text())
    fields["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    (folder / "open_clip_config.json").write_text(json.dumps(fields))
    (root / "model_config.json").write_text(json.dumps(fields["model_cfg"]))
    return root, tokenizer, mark, model


@pytest.mark.parametrize("named", [True, False])
def test_evaluating_a_foreign_folder_runs_no_code(planted, named, tmp_path, capsys):
    root, tokenizer, mark, model = planted
    with pytest.raises(ValueError):
        find_tokenizer(tokenizer if named else root / "export", model.cfg).open(CONTEXT_LENGTH)
    command = ["--checkpoint", str(root / "export"), "--task", "retrieval", "--data", str(tmp_path / "val")]
    try:
        assert evaluate([*command, "--tokenizer", tokenizer] if named else command) == 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not mark.exists()
    shown = capsys.readouterr().err
    assert ("not a model that is built into open_clip" if named else "without running code from it") in shown
    assert "trust_remote_code" not in shown


def test_the_report_of_a_foreign_run_runs_no_code_and_says_why_it_has_no_gallery(planted, tmp_path, monkeypatch):
    root, _, mark, _ = planted
    monkeypatch.setattr("infcl.data.evaluation.eval_source", lambda *_: None)
    assert "without running code from it" in retrieval_gallery(read_run(root))
    assert not mark.exists()


def test_exporting_a_foreign_run_and_starting_from_its_weights_run_no_code(planted, tmp_path, monkeypatch):
    root, _, mark, model = planted
    found = root, {"trainer": {"step": 1, "samples_seen": 8}, "counters": {}}
    monkeypatch.setattr(convert, "newest_intact", lambda run: found)
    monkeypatch.setattr(convert, "weights_of", lambda *_, **__: model.state_dict())
    for format in convert.FORMATS:
        out = tmp_path / format
        assert convert.main(["export", str(root), "--format", format, "--out", str(out)]) in (0, 2)
        assert convert.main(["import", str(root / "export"), "--format", format, "--out", str(out)]) in (0, 2)
    load_pretrained(CLIP(small_config()), str(root / "export"))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["local-dir:/x", "hf-hub:a/b", "ViT-B-32-none", "../x", ""])
def test_only_models_that_are_built_into_open_clip_name_a_tokenizer(name):
    import_open_clip()
    with pytest.raises(ValueError, match="built in"):
        find_tokenizer(f"open_clip:{name}", small_config())
    assert find_tokenizer("open_clip:ViT-B/32", small_config()).open(77).vocab_size == 49408
