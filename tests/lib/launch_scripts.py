"""Run the scripts of launch/ with stubs for the programs that they call."""

import shutil
import subprocess
from pathlib import Path

from tests.lib.checkout import ROOT


def executable(path: Path, script: str) -> None:
    """Write a program of bash."""
    path.write_text("#!/usr/bin/env bash\n" + script)
    path.chmod(0o755)


def run(script: str, *arguments, tmp_path, programs: dict[str, str], where=None, **environment: str):
    """Run launch/SCRIPT in an empty copy of the repository, or in the folder `where`.

    `programs` ({name: shell script}) come first in the PATH.
    """
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        executable(bin_folder / name, text)
    if not (tmp_path / "launch").exists():
        shutil.copytree(ROOT / "launch", tmp_path / "launch")
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path)} | environment
    command = ["bash", str(tmp_path / "launch" / script), *map(str, arguments)]
    return subprocess.run(command, cwd=where or tmp_path, env=environment, capture_output=True, text=True, timeout=300)
