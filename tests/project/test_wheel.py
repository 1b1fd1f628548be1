"""The wheel holds the packages, their data and the commands; what `make` installs runs from any folder; the citation is
current.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import infcl
from tests.lib.checkout import ROOT, tracked
from tests.lib.entry import losses
from tests.lib.ranks import free_port

LOSS = """
import sys, torch, infcl
assert infcl.__file__.startswith(sys.argv[1]), infcl.__file__
features = torch.nn.functional.normalize(torch.randn(2, 5, 8), dim=-1).requires_grad_()
infcl.inf_cl_loss(features[0], features[1], torch.tensor(10.0)).backward()
assert features.grad.isfinite().all()
from infcl.models import list_models
assert "ViT-B-32" in list_models()
"""


def run(*arguments, where: Path, seconds: float = 1200) -> str:
    """Run a command in a folder without this environment's variables; return what it prints."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name}
    done = subprocess.run(
        [*map(str, arguments)], cwd=where, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the wheel from the tracked files and install it with its extra "train" into an empty environment.

    The wheel, and the folder of the environment's programs.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / path).write_bytes((ROOT / path).read_bytes())
    venv.create(folder / "empty", with_pip=True)
    programs = folder / "empty" / "bin"
    run(programs / "pip", "-q", "install", "build", where=folder)
    run(programs / "python", "-m", "build", "--outdir", folder, folder / "source", where=folder)
    (wheel,) = folder.glob(f"infcl-{infcl.__version__}-*.whl")
    run(programs / "pip", "-q", "install", f"{wheel}[train]", where=folder)
    return wheel, programs


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_wheel_is_complete_and_its_loss_runs(installed, tmp_path):
    wheel, programs = installed
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    presets = {f"infcl/{path.as_posix()}" for path in tracked("ds_configs/*.json")}
    code = {path.as_posix() for path in tracked("infcl", "megatron_patches", "pretrain_clip.py")}
    assert packed == code | presets
    run(programs / "python", "-c", LOSS, programs.parent, where=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_installed_trainer_trains_the_demo_from_any_folder_with_a_preset_by_name(installed, tmp_path):
    """One rank by the command, two by DeepSpeed's launcher; both see the same samples."""
    _, programs = installed
    run(programs / "python", "-m", "infcl.data.demo", "--out", "data", "--num-train", "256", where=tmp_path)
    flags = "--train-data data/train --tokenizer data/tokenizer.model --model demo --workers 0 --global-batch-size 32"
    flags += " --batch-size 16 --steps 4 --warmup 2 --deepspeed_config zero2 --device cpu --logs . --name"
    launcher = [programs / "deepspeed", "-q", "--num_gpus", "2", "--master_port", free_port(), "--module"]
    run(programs / "infcl-train", *flags.split(), "one", where=tmp_path)
    run(programs / "python", *launcher, "pretrain_clip", *flags.split(), "two", where=tmp_path)
    one, two = (losses(tmp_path, name) for name in ("one", "two"))
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-4)
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["zero_stage"] == 2


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
