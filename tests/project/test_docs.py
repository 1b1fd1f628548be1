"""Every command and python block of the documentation: known, with flags that exist, and executed (doc_commands.py).

Those that a CPU can run: python -m pytest -m slow -o addopts='' tests/project/test_docs.py.
"""

import argparse
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.step_losses import installed_open_clip_loss
from infcl.config import make_parser
from infcl.models import load_model_config
from tests.lib.checkout import ROOT
from tests.lib.doc_commands import COMMANDS, PYTHON_BLOCKS, Command
from tests.lib.ranks import run_ranks
from tests.lib.shown_commands import documents, python_blocks, shown_commands

PLACES = ("here", "gpu", "multigpu", "cluster")
# Flags of other programs, or of open_clip as it is compared with.
OTHERS = set("--hostfile --nodes --nproc-per-node --skips-fail --local-loss --gather-with-grad --infloss".split())
OTHERS |= {"--master_port", "--master-port", "--length-bucketing", "--kill-on-bad-exit", "--wait"}
NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", ".hypothesis", ".data", "runs", "logs", "build")
SCRIPTS = {"launch/supervise.sh": {"--hostfile", "--min-hosts", "--batch"}}


def executed() -> list[tuple[str, str, Command]]:
    return [(place, line, command) for command in COMMANDS for place in PLACES if (line := getattr(command, place))]


def flags_of(line: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line))


@cache
def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser with which `python -m module` begins."""
    found = []

    def take(self, *_, **__):
        found.append(self)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", take)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", take)
        patch.setattr(sys, "argv", [module])
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__")
    return found[0]


def programs_of(line: str) -> list[tuple[str, list[str]]]:
    """The modules that a line starts, with their arguments."""
    words = [word for word in shlex.split(line, comments=True) if word not in ("...", "FLAGS")]
    starts = [
        (place, words[place + 1] if word == "-m" else "pretrain_clip.py", place + 1 + (word == "-m"))
        for place, word in enumerate(words)
        if word.endswith("pretrain_clip.py")
        or re.fullmatch(r"launch/(local|torchrun|lit|hostfile)\.sh|launch/slurm.sbatch", word)
        or (word == "-m" and words[place + 1].startswith(("infcl.", "benchmarks.")))
    ]
    ends = [place for place, _, _ in starts[1:]] + [len(words)]
    return [(program, words[first:end]) for (_, program, first), end in zip(starts, ends)]


def options_of(program: str) -> set[str]:
    parsers = [make_parser() if program == "pretrain_clip.py" else parser_of(program)]
    if program in ("benchmarks.step", "benchmarks.step_losses", "benchmarks.largest_batch", "benchmarks.demo"):
        parsers.append(make_parser())
    options = set()
    for parser in parsers:
        for action in parser._actions:
            options |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return options


def test_every_command_of_the_documentation_is_executed_somewhere():
    known = {command.shown for command in COMMANDS}
    shown = shown_commands()
    assert len(known) == len(COMMANDS)
    unknown = {command: files for command, files in shown.items() if command not in known}
    assert not unknown, f"say in tests/lib/doc_commands.py what is executed for {unknown}"
    assert known - set(shown) == set(), "no document shows these any more"
    for command in COMMANDS:
        assert any(getattr(command, place) for place in (*PLACES, "by", "only")), command.shown


def test_the_tests_that_stand_for_a_command_exist():
    for name in {command.by for command in COMMANDS if command.by} | set(PYTHON_BLOCKS.values()):
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), name
    assert set(PYTHON_BLOCKS) == set(python_blocks())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.shown[:60])
def test_what_is_executed_has_the_flags_that_are_shown(command):
    for place in PLACES:
        if line := getattr(command, place):
            assert flags_of(command.shown) - set(command.without) <= flags_of(line)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_flags_of_shown_and_executed_commands_exist():
    lines = [command.shown for command in COMMANDS] + [line for _, line, _ in executed()]
    for line in lines:
        for program, words in programs_of(line):
            assert flags_of(" ".join(words)) - {"--help"} <= options_of(program), line


def test_flags_in_the_prose_exist():
    modules = {program for _, line, _ in executed() for program, _ in programs_of(line)}
    known = OTHERS.union(*SCRIPTS.values(), *map(options_of, modules))
    for path in documents():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert flags_of(text) - known == set(), path


@pytest.mark.parametrize(
    "arguments",
    [
        ("infcl.data.shards", "index", "/no/such.tar"),
        ("infcl.data.tokenizer.__main__", "train", "--train-data", "/no/such.tar", "--vocab-size", "60", "--out", "x"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_path_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(arguments[0]).main(arguments[1:])
    assert stop.value.code == 2 and "/no/such.tar" in capsys.readouterr().err


# ---- executed ----


@pytest.fixture(scope="module")
def clone(tmp_path_factory, demo_folder) -> Path:
    """A copy of the working tree with the data that the table's head names."""
    root = tmp_path_factory.mktemp("clone") / "infcl"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
    shutil.copytree(demo_folder, root / "data")
    shutil.copy(root / "data" / "tokenizer.model", root / "spm.model")
    fields = load_model_config("demo").to_dict()  # without what CLIPModel of transformers has not
    del fields["vision_cfg"]["conv_stem"]
    (root / "tiny.json").write_text(json.dumps(fields | {"vision_cfg": fields["vision_cfg"] | {"pool_type": "tok"}}))
    write_captions(root)
    (root / "dist").mkdir()  # not linted
    shutil.copy(installed_open_clip_loss(), root / "dist" / "open_clip_loss.py")
    return root


@pytest.fixture(scope="module")
def clone_with_runs(clone) -> Path:
    """... and with the runs: not made where only commands without them are chosen."""
    train = (
        "python pretrain_clip.py --train-data data/train --tokenizer data/tokenizer.model --val-data data/val "
        "--zeroshot-data data/zeroshot --model tiny.json --batch-size 16 --warmup 1 --workers 1 --steps 3 "
        "--ema-decay 0.9 --compile-blocks off --logs runs --name first"
    )
    result = execute(train, clone)
    assert result.returncode == 0, result.stdout + result.stderr
    for other in ("runs/demo-zero1", "runs/other"):
        shutil.copytree(clone / "runs" / "first", clone / other)
    shutil.copy(clone / "runs/first/export/open_clip_model.safetensors", clone / "weights.safetensors")
    return clone


def write_captions(root: Path) -> None:
    from PIL import Image

    with open(root / "captions.jsonl", "w") as file:
        for number in range(4):
            Image.new("RGB", (32, 32), (60 * number, 9, 90)).save(root / f"{number}.png")
            file.write(json.dumps({"image": f"{number}.png", "captions": [f"colour {number}", "plain"]}) + "\n")


def execute(line: str, root: Path) -> subprocess.CompletedProcess:
    on_cpu = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    programs = Path(sys.executable).parent
    environment = os.environ | on_cpu | {"PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(programs.parent)}
    for new in ("runs/new", "logs/new", "new"):
        shutil.rmtree(root / new, ignore_errors=True)
    for new in root.glob("new.*"):  # another command's rows
        new.unlink()
    return subprocess.run(["bash", "-c", line], cwd=root, env=environment, capture_output=True, text=True, timeout=280)


def marked(place: str, line: str, command: Command):
    marks = () if place == "here" and command.quick else getattr(pytest.mark, "slow" if place == "here" else place)
    return pytest.param(line, id=f"{place}: {command.shown[:70]}", marks=marks)


@pytest.mark.parametrize("line", [marked(*entry) for entry in executed()])
def test_the_command_runs(request, line):
    needs_runs = re.search(r"\b(runs/(first|demo|other)|weights\.safetensors)", line) is not None
    result = execute(line, request.getfixturevalue("clone_with_runs" if needs_runs else "clone"))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


NO_PAGES_TO_FOLLOW = {"data_faults.md", "log.md"}  # written by a program; what was run once


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ds_configs/*.md")]


def headings(page: Path) -> list[str]:
    """As links name them: lower case, hyphens for spaces, without punctuation."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    return [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"(?m)^#+ (.+)$", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_or_to_one_heading_and_tables_have_a_line_for_each_row(page):
    text, own = page.read_text(), headings(page)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]
    for link in links:
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not heading or headings(target).count(heading) == 1, link
    assert page.name == "CHANGELOG.md" or len(own) == len(set(own))
    lines = [line.strip() for line in text.splitlines()]
    rows = [line for line in lines if re.search(r"\| ?:?-+:? ?\|", line) or line.startswith("|")]
    assert not [row for row in rows if not row.startswith("|") or not row.endswith("|")]


def test_the_activation_is_shown_before_the_first_command_that_needs_it():
    looked = 0
    for path in documents():
        text = path.read_text()
        first = re.search(r"(?m)(^ {4}|`)(python|pytest|deepspeed|torchrun) ", text)
        if first and path.name not in NO_PAGES_TO_FOLLOW:
            assert 0 < text.find("source .venv/bin/activate") < first.start(), path
            looked += 1
    assert looked > 10


def test_a_newcomers_shell_runs_a_shown_command_behind_the_shown_activation(tmp_path):
    """In a PATH without the environment, which is made anew here and finds the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "those_here.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    (tmp_path / "infcl").symlink_to(ROOT / "infcl")
    command = next(c.shown for c in COMMANDS if c.shown.startswith("python -m infcl.plan --model ViT-L-14 --gpus 32"))
    assert command in shown_commands() and "source .venv/bin/activate" in shown_commands()
    result = subprocess.run(
        ["bash", "-c", f"source .venv/bin/activate && {command}"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0 and "GiB" in result.stdout, result.stdout + result.stderr


def test_open_clips_own_loss_beside_ours_is_the_installed_packages():
    from benchmarks.loss_impls import make

    features = [torch.nn.functional.normalize(torch.randn(6, 8), dim=1) for _ in range(2)]
    scale, bias = torch.tensor(7.0), torch.tensor(-10.0)
    for theirs, ours in (("official_open_clip", "clip"), ("official_siglip", "siglip")):
        loss, expected = (
            make(name, None, {}, installed_open_clip_loss())(*features, scale, bias) for name in (theirs, ours)
        )
        torch.testing.assert_close(loss, expected)


def readmes_loss(rank, world_size):
    """-> the loss as the README takes it, the definition's."""
    features = [torch.nn.functional.normalize(torch.randn(5, 8), dim=1).requires_grad_() for _ in range(2)]
    names = {"torch": torch, "logit_scale": torch.tensor(2.0, requires_grad=True)}
    names |= {"image_features": features[0], "text_features": features[1]}
    exec(python_blocks()["README.md 0"], names)
    logits = names["logit_scale"].exp() * features[0] @ features[1].T
    labels = torch.arange(5)
    expected = (torch.nn.functional.cross_entropy(x, labels) for x in (logits, logits.T))
    assert features[0].grad is not None and names["logit_scale"].grad is not None
    return names["loss"].detach(), (sum(expected) / 2).detach()


def test_the_readmes_loss_runs_as_shown():
    (found,) = run_ranks(readmes_loss, 1)
    torch.testing.assert_close(*found)


def test_the_documented_megatron_loop_is_made_of_what_there_is(monkeypatch):
    from tests.megatron_patches.test_megatron_lm import encode, get_batch, stub_training_package

    for module in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, module, None)
    stub_training_package()
    import megatron.training.training as loop

    plain, started = loop.get_forward_backward_func, []
    names = {"get_batch": get_batch, "encode": encode, "pretrain": lambda *arguments: started.append(arguments)}
    names |= dict.fromkeys(("datasets_provider", "model_provider"))
    names["ModelType"] = argparse.Namespace(encoder_or_decoder=None)
    exec(python_blocks()["docs/megatron.md 0"], names)
    assert started[0][-1] is names["step"] and loop.get_forward_backward_func is not plain
