"""Report of one host as one line of JSON: python -m infcl.cluster.host_report SHARED_FOLDER NAME.

check.py runs it over ssh. NAME is the host's name in the hostfile, because two hosts may have the same hostname.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from infcl.parallel.host_info import software


def report(shared: Path, name: str) -> dict:
    """Return {"software", "gpus", "gpu_error", "shared"}. Needs neither a GPU nor a process group."""
    found, error = gpus()
    return {"software": software(), "gpus": found, "gpu_error": error, "shared": shared_folder(shared, name)}


def gpus() -> tuple[list[dict], str | None]:
    """Query nvidia-smi.

    Returns:
        [{"name", "memory_used_mib", "memory_mib"}], empty without nvidia-smi or if it fails.
        The reason for a failure, else None.
    """
    fields = "name,memory.used,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return [], None
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        return [], f"{said[0]} (exit code {done.returncode})"
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.strip()]
    found = [{"name": name.strip(), "memory_used_mib": int(used), "memory_mib": int(all_)} for name, used, all_ in rows]
    return found, None


def shared_folder(folder: Path, name: str) -> dict:
    """Write this host's mark; return {"error": problem or None, "free_gb", "files": names of all hosts' marks}."""
    try:
        (folder / f".check-{name}").write_bytes(os.urandom(1 << 20))
        marks = sorted(path.name for path in folder.glob(".check-*"))
        return {"error": None, "free_gb": shutil.disk_usage(folder).free / 1e9, "files": marks}
    except OSError as error:
        return {"error": f"{error.strerror or error}", "free_gb": 0.0, "files": []}


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]), sys.argv[2])))
