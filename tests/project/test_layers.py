"""The order of the packages, read from their imports; heavy packages have one home.

Every import counts, at the top of a file or inside a function.
"""

import ast
import subprocess
import sys
from fnmatch import fnmatch

import pytest

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

HOMES = {
    "deepspeed": "infcl/engine/*",
    "megatron": "megatron_patches/*",
    "triton": "infcl/*/triton_*",
}
WITHOUT = {
    "torch.distributed": ("infcl/kernels/*", "infcl/data/*", "infcl/step/grad_cache.py"),
    "torch.autograd": ("infcl/kernels/*", "infcl/loss/links.py", "infcl/loss/ring.py"),
}


def test_a_package_imports_only_those_above_it():
    """Imports for types alone count. infcl/__init__.py shows what users call, so it has no place in the order."""
    against = set()
    for file in FILES:
        own = _package(_module(file))
        imported = {_package(name) for name in _imports(file)} & set(PACKAGES)
        if own in PACKAGES:
            against |= {(file, other) for other in imported if PACKAGES.index(other) > PACKAGES.index(own)}
    assert against == set()


def test_test_files_import_no_test_files_and_benchmarks_no_tests():
    """What tests share is in tests/lib."""
    files = [
        path.relative_to(ROOT).as_posix() for name in ("tests", "benchmarks") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    against = {
        (file, name)
        for file in files
        for name in _imports(file)
        if name.startswith("tests.") and (file.startswith("benchmarks/") or ".test_" in name)
    }
    assert against == set()


def test_no_modules_import_each_other_in_a_circle():
    """What is imported for its types alone does not count."""
    modules = {_module(file): file for file in FILES}
    needs = {
        module: {_known(name, modules) for name in _imports(file, types=False)} for module, file in modules.items()
    }
    reached = {module: _reached(module, needs) for module in modules}
    circles = {frozenset(other for other in reached[m] if m in reached[other]) for m in modules if m in reached[m]}
    assert circles == set()


@pytest.mark.parametrize(
    ("function", "caller"),
    [("read_preset", "infcl/config/spec.py"), ("resolve", "infcl/train/build.py")],
)
def test_a_run_is_resolved_in_one_place(function, caller):
    def calls(file: str) -> int:
        found = [node.func for node in ast.walk(_tree(file)) if isinstance(node, ast.Call)]
        return sum(isinstance(called, ast.Name) and called.id == function for called in found)

    assert {file: n for file in FILES if (n := calls(file))} == {caller: 1}


def test_what_deepspeeds_objects_do_is_replaced_by_patches_alone():
    """A function or method that is assigned to another object's attribute. Data may be."""

    def replaced(file: str) -> list[str]:
        functions = {node.name for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef)}
        found = []
        for node in ast.walk(_tree(file)):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                last = ast.unparse(node.value).rpartition(".")[2]
                of_others = isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
                if of_others and (isinstance(node.value, ast.Lambda) or last in functions):
                    found.append(ast.unparse(node))
        return found

    assert {file: found for file in FILES if file.startswith("infcl/engine/") and (found := replaced(file))} == {}


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_have_one_home(package):
    users = {file for file in FILES for name in _imports(file) if name.split(".")[0] == package}
    assert all(fnmatch(user, HOMES[package]) for user in users), f"{package} is imported in {sorted(users)}"


@pytest.mark.parametrize("facility", WITHOUT)
def test_pure_layers_have_neither_communication_nor_autograd(facility):
    for file in FILES:
        if any(fnmatch(file, pattern) for pattern in WITHOUT[facility]):
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
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package(name: str) -> str:
    """infcl.loss.ring -> loss; infcl.inf_cl_loss -> infcl; megatron_patches.groups -> megatron_patches."""
    first, _, rest = name.partition(".")
    own = rest.partition(".")[0]
    return own if first == "infcl" and own in PACKAGES else first


def _imports(file: str, *, types: bool = True) -> set[str]:
    """Full names: `from a import b` gives a.b, for b may be a module. The project uses no relative imports.

    types: those under `if TYPE_CHECKING` too.
    """
    names, tree = set(), _tree(file)
    of_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    left_out = set() if types else {inner for node in of_types for inner in ast.walk(node)}
    for node in set(ast.walk(tree)) - left_out:
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


def _reached(module: str, needs: dict[str, set[str]]) -> set[str]:
    """What it imports, and what that imports, and so on; itself, where that comes back to it."""
    found: set[str] = set()
    waiting = list(needs[module] - {module})
    while waiting:
        if (one := waiting.pop()) and one not in found:
            found.add(one)
            waiting += needs[one] - {one}
    return found


def _dotted_names(file: str) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(_tree(file)) if isinstance(node, ast.Attribute)}


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))
