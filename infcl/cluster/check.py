"""Check the hosts of a hostfile before a run: reachability, equal software and GPUs, clocks, the shared folder.

    bash launch/check.sh HOSTFILE [SHARED_FOLDER]        then measures links and GPUs too (links.py)

Prints one line per problem. Exit codes: 0 no problem, 1 problems, 2 the hostfile cannot be read.
"""

import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infcl.cluster.hostfile import SSH_OPTIONS, read_hostfile
from infcl.parallel.host_info import differences

TIMEOUT_S = 300  # a busy host imports torch slowly
MAX_SKEW_S = 2.0
MIN_FREE_GB = 20.0
_BUSY_MIB = 1024


def ask(host: str, shared: Path) -> dict:
    """Return the host's report with its clock skew, "skew_s" in seconds, or {"error": ...} if it cannot be fetched."""
    words = [sys.executable, "-m", "infcl.cluster.host_report", str(shared), host]
    try:
        done = _ssh(host, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}")
        sent = time.time()  # a separate connection: the report takes seconds, which would hide a clock error
        clock = _ssh(host, "date +%s.%N")
        received = time.time()
    except subprocess.TimeoutExpired:
        return {"error": f"did not answer within {TIMEOUT_S} s"}
    except OSError as error:
        return {"error": f"ssh cannot be run here: {error.strerror}"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"{'ssh failed' if done.returncode == 255 else 'its report failed'}: {last}"}
    try:
        report = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except ValueError:  # the login shell prints something at its end, or runs no command
        return {"error": f"its report is no JSON but ends in {done.stdout.strip()[-80:]!r}"}
    try:
        there = float((clock.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        return {"error": f"its clock cannot be read: date +%s.%N ends in {clock.stdout.strip()[-80:]!r}"}
    report["skew_s"] = max(sent - there, there - received, 0.0)
    return report


def _ssh(host: str, command: str) -> subprocess.CompletedProcess[str]:
    words = ["ssh", *SSH_OPTIONS, host, command]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)


def problems(hosts: dict[str, int], reports: dict[str, dict]) -> list[str]:
    """Return one line per problem.

    Args:
        hosts: {host: slots}.
        reports: {host: the return value of `ask`}.
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
            lines.append(f"{host}: slots={hosts[host]}, but {len(report['gpus'])} GPUs")
        for number, gpu in enumerate(report["gpus"][: hosts[host]]):
            if gpu["memory_used_mib"] > _BUSY_MIB:
                lines.append(f"{host}: GPU {number} is in use ({gpu['memory_used_mib']} of {gpu['memory_mib']} MiB)")
        shared = report["shared"]
        if shared["error"]:
            lines.append(f"{host}: the shared folder cannot be written: {shared['error']}")
        elif shared["free_gb"] < MIN_FREE_GB:
            lines.append(f"{host}: {shared['free_gb']:.1f} GB free in the shared folder, {MIN_FREE_GB:.0f} wanted")
        if not shared["error"] and not marks <= set(shared["files"]):
            unseen = ", ".join(sorted(mark.removeprefix(".check-") for mark in marks - set(shared["files"])))
            lines.append(f"{host}: the folder is not shared: what {unseen} wrote there is not seen")
    names = {gpu["name"] for report in there.values() for gpu in report["gpus"]}
    return lines + ([f"GPUs of different kinds: {', '.join(sorted(names))}"] if len(names) > 1 else [])


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) not in (1, 2):
        print("usage: python -m infcl.cluster.check HOSTFILE [SHARED_FOLDER]", file=sys.stderr)
        return 2
    shared = Path(arguments[1] if len(arguments) == 2 else ".").resolve()
    try:
        hosts = read_hostfile(arguments[0])
    except ValueError as error:
        print(f"hostfile: {error}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda host: ask(host, shared), hosts))  # every host writes its mark
        reports = dict(zip(hosts, pool.map(lambda host: ask(host, shared), hosts)))  # and lists those of the others
    for mark in shared.glob(".check-*"):
        mark.unlink(missing_ok=True)
    found = problems(hosts, reports)
    for line in found:
        print(line)
    gpus = sum(len(report.get("gpus", ())) for report in reports.values())
    right = "right" if gpus else "right for ranks on CPUs (no host has nvidia-smi)"
    print(
        f"{len(hosts)} hosts, {sum(hosts.values())} slots, {gpus} GPUs: "
        + (f"{len(found)} problems" if found else right)
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
