"""The tutorials and the examples run as they are shown."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.lib.checkout import ROOT
from tests.lib.hf_tokenizers import write_tokenizer
from tests.lib.open_clip_stub import import_transformers
from tests.lib.ranks import free_port, run_ranks
from tests.lib.shown_commands import python_blocks

# what imports torchvision, as open_clip and transformers, does so in spite of the installed torch
PRELUDE = """import sys, types, runpy
from tests.lib.open_clip_stub import declare_torchvision_operators
declare_torchvision_operators()
"""
PANDAS = "import open_clip; sys.modules.setdefault('pandas', types.ModuleType('pandas'))\n"  # for its tables only


def run(command: list[str], cwd=ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run a program without GPUs."""
    variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    variables |= {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=540, env=os.environ | variables)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result


def example(script: str, *arguments: str) -> list[str]:
    program = f"sys.argv = {[script, *arguments]!r}\n"
    program += f"runpy.run_path({str(ROOT / 'examples' / script)!r}, run_name='__main__')"
    return [sys.executable, "-c", PRELUDE + PANDAS * (script == "loss_in_open_clip.py") + program]


def run_page(page: str, folder) -> list[str]:
    """Run the blocks of a page with .data/tutorial replaced by `folder`; return what each printed."""
    printed = []
    for language, source in re.findall(r"```(python|bash)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        source = source.replace(".data/tutorial", str(folder))
        printed.append(
            run([sys.executable, "-c", PRELUDE + source] if language == "python" else ["bash", "-ec", source])
        )
    return printed


@pytest.mark.slow
def test_the_tutorial_leads_from_images_to_open_clip(tmp_path):
    pytest.importorskip("transformers")
    printed = run_page("docs/start/tutorial.md", tmp_path)
    assert json.loads((tmp_path / "result.jsonl").read_text())["metrics"]["top1"] > 0.8
    assert printed[-1].strip() == "red circle"


def ddp_tutorial(rank: int, world_size: int) -> dict:
    names: dict = {"__name__": "tutorial"}
    exec(python_blocks()["docs/start/loss_in_ddp.md 0"], names)
    torch.manual_seed(0)
    batches = [(torch.randn(24, 32), torch.randn(24, 24)) for _ in range(5)]
    torch.manual_seed(1)
    return names["train"](rank, world_size, batches)


def test_the_ddp_loop_of_the_tutorial_trains_as_one_process_on_the_complete_batch():
    (one,), (two, also_two) = run_ranks(ddp_tutorial, 1), run_ranks(ddp_tutorial, 2)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name], also_two[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "row", "flag"),
    [
        ("text_retriever.py", {"query": "a b", "positive": "c", "negatives": ["d", "e f"]}, "--micro-batch-size"),
        (
            "sentence_transformers_trainer.py",
            {"anchor": "a b", "positive": "c", "negative_1": "d"},
            "--mini-batch-size",
        ),
    ],
    ids=["text_retriever", "sentence_transformers_trainer"],
)
def test_an_example_trains_a_text_encoder(script, row, flag, tmp_path):
    if script.startswith("sentence"):
        pytest.importorskip("accelerate")
        pytest.importorskip("datasets")
    import_transformers()
    from transformers import BertConfig, BertModel

    bert = write_tokenizer(tmp_path, bert=True)
    BertModel(BertConfig.from_pretrained(bert)).half().save_pretrained(bert)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"positive": "c" * n}) for n in range(1, 9)))
    flags = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "--batch-size", "4", flag, "2"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = example(script, *flags, "--output", str(tmp_path / "trained"))
    printed = run(command, cwd=tmp_path, **ranks, MASTER_PORT=str(free_port())).stdout
    assert "loss" in printed and list((tmp_path / "trained").rglob("model.safetensors"))
    assert "nan" not in printed


@pytest.mark.slow
def test_wordnet_holds_out_definitions_and_scores_a_perfect_retriever_as_one(tmp_path, monkeypatch):
    pytest.importorskip("bm25s")
    import_transformers()
    monkeypatch.syspath_prepend(ROOT / "examples")
    import wordnet

    lines = [f'{n:08d} 03 n 02 word{n} 0 other_{n % 7} 0 000 | what {n} means; "word{n} is used"  ' for n in range(300)]
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text("\n".join(["  1 licence", *(lines if part == "noun" else [])]))
    wordnet.prepare(tmp_path, tmp_path)
    test = json.loads((tmp_path / "test.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    held_out = {test["words"][word] for word in test["held_out"]}
    unseen = {test["definitions"][definition] for _, definition in test["pairs"]}
    assert held_out and not (held_out | unseen) & {row[side] for row in rows for side in ("query", "positive")}
    assert len(rows) == 2 * (600 - len(test["pairs"])) and "used" not in json.dumps(test)
    right = {0: [5], 3: [7, 9]}
    perfect, second = [[5, *range(20, 29)], [9, 7, *range(20, 28)]], [[1, 5, *range(20, 28)], [-1] * 10]
    assert wordnet.measures(perfect, right) == pytest.approx({"r1": 1, "ndcg10": 1})
    assert wordnet.measures(second, right) == pytest.approx({"r1": 0, "ndcg10": 1 / math.log2(3) / 2})
    assert wordnet.bm25(["a cat"], ["the cat sat", *"bcdefghij"], [0])[0][:2] == [0, -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [("loss_in_ddp.py", "relative error"), ("resume_on_fewer_ranks.py", "then one"), ("loss_in_open_clip.py", "Loss")],
    ids=lambda value: value.removesuffix(".py"),
)
def test_an_example_runs(script, words):
    in_processes = [sys.executable, str(ROOT / "examples" / script)]  # which import the script again
    result = run(example(script) if script == "loss_in_open_clip.py" else in_processes)
    assert words in result.stdout + result.stderr
