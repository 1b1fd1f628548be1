"""Documentation: links lead somewhere, shown commands have flags that exist, docstrings have every argument."""

import argparse
import csv
import inspect
import re
import runpy
import shlex
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import infcl
from infcl.config import make_parser
from tests.lib.checkout import ROOT
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.ranks import run_ranks
from tests.lib.shown_commands import python_blocks, shown_commands


@cache
def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m module`."""
    found = []
    if module == "infcl.integrations.open_clip":  # open_clip_train's parser
        import_open_clip()
        sys.modules.setdefault("pandas", types.ModuleType("pandas"))

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
    """Return the modules that a command starts, with their arguments."""
    words = [word for word in shlex.split(line, comments=True) if word not in ("...", "FLAGS")]
    starts = [
        (place, words[place + 1] if word == "-m" else "pretrain_clip.py", place + 1 + (word == "-m"))
        for place, word in enumerate(words)
        if word.endswith("pretrain_clip.py")
        or re.fullmatch(r"launch/(local|torchrun|lit|hostfile)\.sh|launch/slurm.sbatch", word)
        or (word == "-m" and re.match(r"infcl\.(?!integrations)|benchmarks\.", words[place + 1]))  # flags of others
    ]
    ends = [place for place, _, _ in starts[1:]] + [len(words)]
    return [(program, words[first:end]) for (_, program, first), end in zip(starts, ends)]


def options_of(program: str) -> set[str]:
    parsers = [make_parser() if program == "pretrain_clip.py" else parser_of(program)]
    if program in ("benchmarks.step", "benchmarks.largest_batch", "infcl.plan"):
        parsers.append(make_parser())
    options = set()
    for parser in parsers:
        for action in parser._actions:
            options |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return options


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_flags_of_shown_commands_exist():
    shown = shown_commands()
    assert len(shown) > 50
    for line, files in shown.items():
        for program, words in programs_of(line):
            flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(words)))
            assert flags - {"--help"} <= options_of(program), (line, files)
    explained = " ".join(re.findall(r"(?m)^(`--.*)\n: ", (ROOT / "docs/reference/flags.md").read_text()))
    assert "--resume" in explained and set(re.findall(r"--[\w-]+", explained)) <= options_of("pretrain_clip.py")


@pytest.mark.parametrize("page", ["README.md", "docs/start/quickstart.md"])
def test_the_demo_figures_are_those_of_the_last_raw_row(page):
    with (ROOT / "docs/results/demo.csv").open(newline="") as file:
        row = [row for row in csv.DictReader(file) if row["preset"] == "zero1"][-1]
    names = {"zero-shot top-1": "zero_shot_top1", "image->text recall@1": "image_to_text_r1"}
    names |= {"text->image recall@1": "text_to_image_r1"}
    steps = int(row["steps"])
    lines = [f"    {shown:<20}  {float(row[name]):.3f}" for shown, name in names.items()]
    lines += [f"    samples seen          {steps * int(row['global_batch']):,}  ({steps} steps)"]
    assert "\n".join(lines) in (ROOT / page).read_text()
    assert f"STEPS={steps}" in (ROOT / "launch/demo.sh").read_text()
    assert f"| zero1 | 2 | fp32 | {steps} | " in (ROOT / "docs/benchmarks/index.md").read_text()


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ds_configs/*.md")]


def headings(page: Path) -> list[str]:
    """Return the headings as links name them: lower case, hyphens for spaces, without punctuation."""
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


def readmes_loss(rank, world_size):
    """Return the loss of the README's code, and the loss by its definition."""
    features = [torch.nn.functional.normalize(torch.randn(5, 8), dim=1).requires_grad_() for _ in range(2)]
    names = {"log_scale": torch.tensor(2.0, requires_grad=True), "rank": rank, "world_size": world_size}
    names |= {"image_features": features[0], "text_features": features[1]}
    exec(python_blocks()["README.md 0"], names)
    logits = names["log_scale"].exp() * features[0] @ features[1].T
    labels = torch.arange(5)
    expected = (torch.nn.functional.cross_entropy(x, labels) for x in (logits, logits.T))
    assert features[0].grad is not None and names["log_scale"].grad is not None
    return names["loss"].detach(), (sum(expected) / 2).detach()


def test_the_readmes_loss_runs_as_shown():
    (found,) = run_ranks(readmes_loss, 1)
    torch.testing.assert_close(*found)


def test_the_examples_of_the_page_about_objectives_run_as_shown():
    sides = [F.normalize(torch.randn(5, 512), dim=1) for _ in range(6)]
    names = ("image_features", "text_features", "queries", "documents", "first_views", "second_views")
    given = dict(zip(names, sides)) | {"teacher_images": sides[0], "teacher_texts": sides[1], "group": None}
    given |= {"scale": 10.0, "bias": -5.0, "positives": torch.arange(5), "ids": torch.arange(5)}
    blocks = [text for name, text in python_blocks().items() if "objectives" in name and "TarWriter" not in text]
    for block in blocks:
        exec(block, names := dict(given))
        assert names["value"].isfinite()
    assert len(blocks) == 4


def shown_steps(rank, world_size):
    """Run the blocks of the page about any encoders; return what they compute, each next to its definition."""

    def features(rows, width):
        return F.normalize(torch.randn(rows, width, dtype=torch.float64), dim=1)

    def run(number, **names):
        exec(python_blocks()[f"docs/howto/any-encoders.md {number}"], names)
        return names

    class Encoder(torch.nn.Linear):
        def forward(self, inputs):
            return types.SimpleNamespace(pooler_output=super().forward(inputs))

    torch.manual_seed(0)
    queries, documents, hard = (features(6, 8) for _ in range(3))
    both, positives = torch.cat([documents, hard]), torch.arange(6)
    found = [(run(1)["loss"](queries, documents, hard), F.cross_entropy(50 * queries @ both.T, positives))]
    shown = run(2, queries=queries, documents=both, positives=positives)["loss"]
    found.append((shown, F.cross_entropy(20 * queries @ both.T, positives)))
    encoders = {f"{name}_encoder": Encoder(8, 4).double() for name in ("image", "text")}
    optimizer = torch.optim.SGD([p for encoder in encoders.values() for p in encoder.parameters()], lr=0.0)
    batch = features(256, 8), features(256, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "cuda", lambda module: module)
        shown = run(0, **encoders, loader=[batch], optimizer=optimizer)["value"]
    sides = [F.normalize(encoder(x).pooler_output) for encoder, x in zip(encoders.values(), batch)]
    logits = sides[0] @ sides[1].T / 0.07
    found.append((shown, sum(F.cross_entropy(x, torch.arange(256)) for x in (logits, logits.T)) / 2))
    return [tuple(value.detach().float() for value in values) for values in found]


def test_the_steps_of_the_page_about_any_encoders_run_as_shown():
    (found,) = run_ranks(shown_steps, 1)
    for value, expected in found:
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", infcl.__all__)
def test_public_functions_document_their_arguments(name):
    thing = getattr(infcl, name)
    text = inspect.getdoc(thing)
    assert text
    if re.search("(options are those of|arguments as in) `inf_cl_loss`", text):
        text += inspect.getdoc(infcl.inf_cl_loss)
    parameters = set(inspect.signature(thing).parameters) if inspect.isfunction(thing) else set()
    assert {parameter for parameter in parameters if parameter not in text} == set()
