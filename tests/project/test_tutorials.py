"""The tutorials run as they are shown: their Python and bash blocks, one after another, in a folder of the test."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.lib.checkout import ROOT

# open_clip as the other tests import it: without torchvision where that does not fit the installed torch
OPEN_CLIP = "from tests.lib.open_clip_stub import import_open_clip\nimport_open_clip()\n"


def run_page(page: str, folder) -> list[str]:
    """Run the blocks of a page with .data/tutorial replaced by `folder`; return what each printed."""
    printed = []
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    for language, source in re.findall(r"```(python|bash)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        program = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
        result = subprocess.run(
            [*program, OPEN_CLIP * ("import open_clip" in source) + source.replace(".data/tutorial", str(folder))],
            cwd=ROOT, capture_output=True, text=True, timeout=540, env=environment,
        )  # fmt: skip
        assert result.returncode == 0, f"{source}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        printed.append(result.stdout)
    return printed


@pytest.mark.slow
def test_the_tutorial_leads_from_images_to_open_clip(tmp_path):
    pytest.importorskip("transformers")
    printed = run_page("docs/start/tutorial.md", tmp_path)
    assert json.loads((tmp_path / "result.jsonl").read_text())["metrics"]["top1"] > 0.5
    assert printed[-1].strip() == "red circle"
