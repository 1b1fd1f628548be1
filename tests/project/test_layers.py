"""The order of the packages, read from their imports; heavy packages have one home.

Every import counts, at the top of a file or inside a function.
"""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter

import pytest

from dev.check_language import prose
from tests.lib.checkout import ROOT

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("infcl/**/*.py"), *ROOT.glob("megatron_patches/**/*.py"), ROOT / "pretrain_clip.py"]
)

# In the order of the data (docs/concepts/architecture.md). A package imports only those above it.
PACKAGES = (
    "config",
    "parallel",
    "kernels",
    "loss",
    "models",
    "data",
    "step",
    "megatron_patches",
    "engine",
    "checkpoint",
    "convert",
    "evaluate",
    "plan",
    "cluster",
    "report",
    "train",
    "integrations",
    "pretrain_clip",
)

HOMES = {"deepspeed": "infcl/engine/*", "megatron": "megatron_patches/*", "triton": "infcl/*/triton_*"}
WITHOUT = {
    "torch.distributed": ("infcl/kernels/*", "infcl/data/*", "infcl/step/grad_cache.py"),
    "torch.autograd": ("infcl/kernels/*", "infcl/loss/links.py", "infcl/loss/ring.py"),
}
# What launchers tell a rank. PET_ variables are torchrun's flags, which infcl/cluster/torchrun.py sets.
OF_LAUNCHERS = re.compile(
    "(GROUP_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|MASTER_(ADDR|PORT)|(OMPI|PMIX?|SLURM|TORCHELASTIC)_.*"
)
ENVIRONMENT_USERS = {
    "infcl/cluster/torchrun.py",  # sets torchrun's flags
    "infcl/data/tokenizer/open_clip.py",  # TOKENIZERS_PARALLELISM, the only switch of that package's threads
    "infcl/kernels/__init__.py",  # TRITON_INTERPRET
    "infcl/models/attention.py",  # TRITON_INTERPRET
}
# Functions stored in attributes of other objects, outside of the two Patch classes.
STORED_FUNCTIONS = {
    ("infcl/integrations/open_clip.py", "main.create_loss"),  # its documented place for a loss
    ("infcl/models/attention.py", "block.attn.attend"),  # our own block
    ("infcl/step/zero.py", "setattr(owner, name)"),  # Patch.apply
    ("infcl/train/compile.py", "block.run"),  # our own block
    ("infcl/train/finite.py", "blocks.on_input_gradient"),  # our own towers
    ("infcl/train/graphs.py", "self.blocks.on_input_gradient"),  # the same, while a graph is captured
    ("megatron_patches/patches.py", "setattr(importlib.import_module(path), name)"),  # patch
    ("megatron_patches/towers.py", "setattr(owner, name)"),  # a parameter
    ("megatron_patches/towers.py", "setattr(part, ATTRIBUTE)"),  # a mark
}


def test_a_package_imports_only_those_above_it():
    """Imports for types alone count. infcl/__init__.py shows what users call, so it has no place in the order."""
    assert {file for file in FILES if _package(_module(file)) not in PACKAGES} == {"infcl/__init__.py"}
    violations = set()
    for file in FILES:
        own = _package(_module(file))
        imported = {_package(name) for name in _imports(file)} & set(PACKAGES)
        if own in PACKAGES:
            violations |= {(file, other) for other in imported if PACKAGES.index(other) > PACKAGES.index(own)}
    assert violations == set()


def test_test_files_import_no_test_files_and_benchmarks_no_tests():
    """What tests share is in tests/lib."""
    files = [
        path.relative_to(ROOT).as_posix() for name in ("tests", "benchmarks") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    violations = {
        (file, name)
        for file in files
        for name in _imports(file)
        if name.startswith("tests.") and (file.startswith("benchmarks/") or ".test_" in name)
    }
    assert violations == set()


def test_no_modules_import_each_other_in_a_circle():
    """Imports for types alone do not count."""
    modules = {_module(file): file for file in FILES}
    needs = {
        module: {_known(name, modules) for name in _imports(file, types=False)} - {module, ""}
        for module, file in modules.items()
    }
    TopologicalSorter(needs).prepare()  # raises CycleError with the circle


def test_only_the_patches_replace_functions_of_other_objects():
    """Functions stored in an attribute of another object are listed. Data may be stored anywhere."""

    def defined(file: str) -> set[str]:
        return {node.name for node in _nodes(file) if isinstance(node, ast.FunctionDef)}

    anywhere = set().union(*map(defined, FILES))

    def stored(file: str) -> set[tuple[str, str]]:
        functions = defined(file) | {name.rpartition(".")[2] for name in _imports(file)} & anywhere
        found = set()
        for node in _nodes(file):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                of_others = isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
                last = ast.unparse(node.value).rpartition(".")[2]
                method = ast.unparse(target).rpartition(".")[2] in anywhere
                if of_others and (isinstance(node.value, ast.Lambda) or last in functions or method):
                    found.add((file, ast.unparse(target)))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                owner, name, value = node.args
                if not isinstance(value, (ast.Constant, ast.Subscript)):
                    found.add((file, f"setattr({ast.unparse(owner)}, {ast.unparse(name)})"))
        return found

    assert set().union(*map(stored, FILES)) == STORED_FUNCTIONS


def test_launchers_environment_is_read_in_one_package():
    def launcher_names(file: str) -> set[str]:
        texts = {node.value for node in _nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return set(filter(OF_LAUNCHERS.fullmatch, texts))

    named = {file for file in FILES if launcher_names(file)}
    used = {file for file in FILES if {"os.environ", "os.getenv"} & (_dotted_names(file) | _imports(file))}
    assert "infcl/parallel/environment.py" in named
    assert {file for file in named if not file.startswith("infcl/parallel/")} == set()
    assert {file for file in used if not file.startswith("infcl/parallel/")} == ENVIRONMENT_USERS


def test_code_names_no_commits():
    """A commit hash in a comment or a string: 7 to 40 hexadecimal digits, some of them letters."""
    found = [
        (file, line)
        for file in FILES
        for _, line in prose((ROOT / file).read_text(encoding="utf-8"), ".py")
        if re.search(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b", line)
    ]
    assert found == []


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_have_one_home(package):
    users = {file for file in FILES for name in _imports(file) if name.split(".")[0] == package}
    assert users and all(fnmatch(user, HOMES[package]) for user in users), f"{package} is imported in {sorted(users)}"


@pytest.mark.parametrize(("facility", "pattern"), [(name, pattern) for name in WITHOUT for pattern in WITHOUT[name]])
def test_pure_layers_have_neither_communication_nor_autograd(facility, pattern):
    files = [file for file in FILES if fnmatch(file, pattern)]
    assert files
    for file in files:
        used = _imports(file) | _dotted_names(file)
        assert not any(name.startswith(facility) for name in used), f"{file} uses {facility}"


def test_the_loss_and_the_towers_need_torch_alone():
    code = """
import sys
from importlib.metadata import packages_distributions

hidden = set(packages_distributions()) - {"infcl", "torch", "torchgen", "functorch"}
hidden -= {"typing_extensions", "filelock", "fsspec", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"}

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import torch
import infcl
import infcl.models
features = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=-1).requires_grad_()
infcl.inf_cl_loss(features[0], features[1], torch.tensor(10.0)).backward()
assert features.grad.isfinite().all()
assert not {"numpy", "triton", "deepspeed", "torch._dynamo"} & set(sys.modules)  # each takes its time
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package(name: str) -> str:
    """infcl.loss.ring -> loss; infcl.inf_cl_loss -> infcl; megatron_patches.groups -> megatron_patches."""
    first, _, rest = name.partition(".")
    own = rest.partition(".")[0]
    return own if first == "infcl" and own in PACKAGES else first


@cache
def _imports(file: str, *, types: bool = True) -> set[str]:
    """Full names: `from a import b` gives a.b, for b may be a module. The project uses no relative imports.

    types: those under `if TYPE_CHECKING` too.
    """
    names, nodes = set(), _nodes(file)
    of_types = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = set() if types else {inner for node in of_types for inner in ast.walk(node)}
    for node in set(nodes) - left_out:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import in line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _known(name: str, modules: dict[str, str]) -> str:
    """The module that a full name is in, "" where it is none of ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


@cache
def _dotted_names(file: str) -> set[str]:
    return {ast.unparse(node) for node in _nodes(file) if isinstance(node, ast.Attribute)}


@cache
def _nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
