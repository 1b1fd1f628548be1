"""`pip install .`: the wheel holds the packages and their data, and the loss runs from it."""

import subprocess
import sys
import zipfile

import pytest

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
def test_the_wheel_is_whole_and_the_loss_runs_from_it(tmp_path):
    source = tmp_path / "source"
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    pip("wheel", "--no-deps", "--no-build-isolation", source, "-w", tmp_path)
    (wheel,) = tmp_path.glob("infcl-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {path.as_posix() for path in tracked("infcl", "megatron_patches")}
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    result = subprocess.run(
        [sys.executable, "-c", LOSS, tmp_path / "site"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
