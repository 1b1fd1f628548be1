"""One host about itself, one line of JSON: python -m infcl.cluster.host_report SHARED_FOLDER (check.py asks for it)."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from infcl.cluster.facts import software


def report(shared: Path) -> dict:
    """{"host", "software", "gpus", "shared"}; nothing of it needs a GPU or a process group."""
    return {
        "host": socket.gethostname(),
        "software": software(),
        "gpus": gpus(),
        "shared": shared_folder(shared),
    }


def gpus() -> list[dict]:
    """[{"name", "memory_used_mib", "memory_mib"}] by nvidia-smi; [] where there is none."""
    fields = "name,memory.used,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 2) for line in printed.splitlines() if line.strip()]
    return [{"name": name.strip(), "memory_used_mib": int(used), "memory_mib": int(all_)} for name, used, all_ in rows]


def shared_folder(folder: Path) -> dict:
    """{"error": None or what is wrong, "free_gb", "files": names of the marks that other hosts left}."""
    mark = folder / f".check-{socket.gethostname()}"
    try:
        mark.write_bytes(os.urandom(1 << 20))
        marks = sorted(path.name for path in folder.glob(".check-*"))
        return {"error": None, "free_gb": shutil.disk_usage(folder).free / 1e9, "files": marks}
    except OSError as error:
        return {"error": f"{error.strerror or error}", "free_gb": 0.0, "files": []}


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]))))
