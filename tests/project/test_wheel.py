"""The wheel holds the packages, their data and the commands; what `make` installs runs from any folder; the citation is
current.
"""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import infcl
from tests.lib.checkout import ROOT, tracked

LOSS = """
import sys, torch, infcl
assert infcl.__file__.startswith(sys.argv[1]), infcl.__file__
features = torch.nn.functional.normalize(torch.randn(2, 5, 8), dim=-1).requires_grad_()
infcl.inf_cl_loss(features[0], features[1], torch.tensor(10.0)).backward()
assert features.grad.isfinite().all()
from infcl.models import list_models
assert "ViT-B-32" in list_models()
"""


def pip(*arguments) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, arguments)], check=True, timeout=240)


@pytest.mark.slow
def test_the_wheel_is_complete_and_its_loss_runs(tmp_path):
    source = tmp_path / "source"
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    pip("wheel", "--no-deps", "--no-build-isolation", source, "-w", tmp_path)
    (wheel,) = tmp_path.glob(f"infcl-{infcl.__version__}-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {path.as_posix() for path in tracked("infcl", "megatron_patches")}
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    result = subprocess.run(
        [sys.executable, "-c", LOSS, tmp_path / "site"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


HELP = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv, printed = [path, "--help"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__") if "/" in path else runpy.run_module(path, run_name="__main__")
    assert "usage" in printed.getvalue(), path
"""


def test_commands_and_modules_of_the_installed_package_run_from_any_folder(tmp_path):
    """In one process, which imports torch once."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    scripts = [f"{sysconfig.get_path('scripts')}/{name}" for name in names]
    if not Path(scripts[0]).exists():
        pytest.skip("infcl is not installed here; make installs it")
    command = [sys.executable, "-c", HELP, *scripts, "infcl.data.demo"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr


def test_the_citation_names_this_version_and_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == infcl.__version__
    assert citation["cff-version"] == "1.2.0" and citation["references"][0]["url"].endswith("2410.17243")
