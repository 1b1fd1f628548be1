"""Check the hosts of a hostfile before a run: reachability, equal software and GPUs, clocks, the shared folder.

    bash launch/check.sh HOSTFILE [SHARED_FOLDER]

Prints one line per problem. Exit codes: 0 no problem, 1 problems, 2 the hostfile cannot be read.
With --report HOST SHARED_FOLDER it prints this host's own report as JSON, which the check fetches over ssh.
"""

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from infcl.cluster.hostfile import for_each, read_hostfile, ssh
from infcl.config import OneLineParser, counted
from infcl.parallel.host_info import differences, software

TIMEOUT_S = 300  # a busy host imports torch slowly
MAX_SKEW_S = 2.0
MIN_FREE_GB = 20.0
_BUSY_MIB = 1024


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m infcl.cluster.check", description=__doc__.splitlines()[0])
    parser.add_argument("hostfile", nargs="?", default="hosts")
    parser.add_argument("shared", nargs="?", type=Path, default=Path(), help="shared folder [working directory]")
    parser.add_argument("--report", nargs=2, metavar=("HOST", "SHARED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.report:
        host, folder = arguments.report
        print(json.dumps(report(Path(folder), host)))
        return 0
    try:
        hosts = read_hostfile(arguments.hostfile)
    except ValueError as error:
        print(f"hostfile: {error}", file=sys.stderr)
        return 2
    shared = arguments.shared.resolve()
    fetch_from = functools.partial(fetch, shared=shared)
    for_each(hosts, fetch_from)  # every host writes its mark
    reports = for_each(hosts, fetch_from)  # and lists those of the others
    for mark in shared.glob(".check-*"):
        mark.unlink(missing_ok=True)
    found = problems(hosts, reports)
    for line in found:
        print(line)
    gpus = sum(len(report.get("gpus", ())) for report in reports.values())
    right = "right" if gpus else "right for ranks on CPUs (no host has nvidia-smi)"
    result = counted(len(found), "problem") if found else right
    counts = counted(len(hosts), "host"), counted(sum(hosts.values()), "slot"), counted(gpus, "GPU")
    print(f"{', '.join(counts)}: {result}")
    return 1 if found else 0


def fetch(host: str, shared: Path) -> dict:
    """Return the host's report with its clock skew, "skew_s" in seconds, or {"error": ...} if it cannot be fetched."""
    words = [sys.executable, "-m", "infcl.cluster.check", "--report", host, str(shared)]
    try:
        done = ssh(host, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}", timeout=TIMEOUT_S)
        sent = time.time()  # a separate connection: the report takes seconds, which would hide a clock error
        clock = ssh(host, "date +%s.%N", timeout=TIMEOUT_S)
        received = time.time()
    except subprocess.TimeoutExpired:
        return {"error": f"did not answer within {TIMEOUT_S} s"}
    except OSError as error:
        return {"error": f"ssh cannot be run here: {error.strerror}"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"{'ssh failed' if done.returncode == 255 else 'its report failed'}: {last}"}
    # the last lines, since the login shell may print something at its beginning
    last_lines = [printed.stdout.strip().rpartition("\n")[2] for printed in (done, clock)]
    try:
        own, there = json.loads(last_lines[0]), float(last_lines[1])
    except ValueError:
        return {"error": "cannot read its report or clock, {!r} and {!r}".format(*(line[-80:] for line in last_lines))}
    return own | {"skew_s": max(sent - there, there - received, 0.0)}


def problems(hosts: dict[str, int], reports: dict[str, dict]) -> list[str]:
    """Return one line per problem.

    Args:
        reports: {host: the return value of `fetch`}.
    """
    lines = [f"{host}: {report['error']}" for host, report in reports.items() if "error" in report]
    there = {host: report for host, report in reports.items() if "error" not in report}
    lines += differences({host: report["software"] for host, report in there.items()})
    marks = {f".check-{host}" for host in there}
    with_gpus = any(report["gpus"] for report in there.values())
    for host, report in there.items():
        if report["skew_s"] > MAX_SKEW_S:
            lines.append(f"{host}: its clock is {report['skew_s']:.0f} s off")
        if report["gpu_error"]:
            lines.append(f"{host}: nvidia-smi fails: {report['gpu_error']}")
        elif with_gpus and len(report["gpus"]) < hosts[host]:
            lines.append(f"{host}: slots={hosts[host]}, but {counted(len(report['gpus']), 'GPU')}")
        for number, gpu in enumerate(report["gpus"][: hosts[host]]):
            if gpu["memory_used_mib"] > _BUSY_MIB:
                lines.append(f"{host}: GPU {number} is in use ({gpu['memory_used_mib']} of {gpu['memory_mib']} MiB)")
        shared = report["shared"]
        if shared["error"]:
            lines.append(f"{host}: cannot write to the shared folder: {shared['error']}")
        elif shared["free_gb"] < MIN_FREE_GB:
            lines.append(f"{host}: {shared['free_gb']:.1f} GB free in the shared folder, {MIN_FREE_GB:.0f} needed")
        if not shared["error"] and not marks <= set(shared["files"]):
            unseen = ", ".join(sorted(mark.removeprefix(".check-") for mark in marks - set(shared["files"])))
            lines.append(f"{host}: the folder is not shared: files that {unseen} wrote there are missing")
    names = {gpu["name"] for report in there.values() for gpu in report["gpus"]}
    return lines + ([f"GPUs of different kinds: {', '.join(sorted(names))}"] if len(names) > 1 else [])


def report(shared: Path, name: str) -> dict:
    """Return this host's {"software", "gpus", "gpu_error", "shared"}. Needs neither a GPU nor a process group.

    Args:
        shared: the shared folder.
        name: the host's name in the hostfile, because two hosts may have the same hostname.
    """
    found, error = gpus()
    return {"software": software(), "gpus": found, "gpu_error": error, "shared": shared_folder(shared, name)}


def gpus() -> tuple[list[dict], str | None]:
    """Query nvidia-smi.

    Returns:
        [{"name", "memory_used_mib", "memory_mib"}], empty without nvidia-smi or if it fails.
        The reason for a failure, else None.
    """
    command = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return [], None
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        first = ((done.stdout + done.stderr).strip().splitlines() or ["no message"])[0]
        return [], f"{first} (exit code {done.returncode})"
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.strip()]
    return [{"name": name, "memory_used_mib": int(used), "memory_mib": int(all_)} for name, used, all_ in rows], None


def shared_folder(folder: Path, name: str) -> dict:
    """Write this host's mark; return {"error": problem or None, "free_gb", "files": names of all hosts' marks}."""
    try:
        (folder / f".check-{name}").write_bytes(os.urandom(1 << 20))
        marks = sorted(path.name for path in folder.glob(".check-*"))
        return {"error": None, "free_gb": shutil.disk_usage(folder).free / 1e9, "files": marks}
    except OSError as error:
        return {"error": f"{error.strerror or error}", "free_gb": 0.0, "files": []}


if __name__ == "__main__":
    sys.exit(main())
