"""Training over the hosts of hosts.py with the README's commands, and checks of its results."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from tests.lib.entry import command
from tests.lib.hosts import PATH, Hosts
from tests.lib.waiting import finish, wait_until

MARKS = [pytest.mark.cluster, pytest.mark.timeout(900)]  # conftest.py skips them if hosts cannot be made
SOON = {"PDSH_SSH_ARGS_APPEND": "-oServerAliveInterval=3"}  # pdsh gives a silent host up after 9 s, not after 30
DEEPSPEED = ["deepspeed", "-q", "--launcher", "pdsh", "--hostfile"]


def flags(demo_folder, logs, *more: str) -> list[str]:
    """Return pretrain_clip.py and its flags, without characters that a shell would interpret."""
    words = command(demo_folder, logs, "--device", "cpu", "--workers", "0", "--log-every-n-steps", "1", *more)
    start = words.index("--aug-cfg")
    return words[:start] + words[start + 3 :]


def start(hosts: Hosts, arguments: list, *, on: int = 0, **environment: str) -> subprocess.Popen:
    """Start a command on a host, as a user would type it there."""
    settings = [
        f"{name}={value}" for name, value in ({"PATH": PATH, "HOME": hosts.folder, **SOON} | environment).items()
    ]
    return subprocess.Popen(
        hosts[on].command(["env", "-i", *settings, *arguments], ROOT),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def train(hosts: Hosts, arguments: list, **environment: str) -> tuple[int, str]:
    """Run the README's command on the first host; return its exit code and output."""
    return finish(start(hosts, [*DEEPSPEED, hosts.hostfile, *arguments], on=0, **environment))


def train_without_launcher(hosts: Hosts, arguments: list, program: str = "python") -> list[subprocess.Popen]:
    """Start a rank on each host, for what the ranks alone decide: a launcher takes longer than they do."""
    common = {"WORLD_SIZE": str(len(hosts.all)), "LOCAL_RANK": "0", "MASTER_ADDR": hosts[0].address}
    common |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return [start(hosts, [program, *arguments], on=rank, RANK=str(rank), **common) for rank in range(len(hosts.all))]


def ranks_on(host) -> list:
    return host.processes("--local_rank=")


def wait_until_gone(hosts: Hosts, seconds: float) -> float:
    """Wait until no rank is left on any host that is up; return the seconds."""

    def left() -> list[tuple[str, int]]:
        return [(host.name, process.pid) for host in hosts.all for process in ranks_on(host)]

    started = time.monotonic()
    wait_until(lambda: not left(), seconds, lambda: f"ranks stayed behind: {left()}")
    return time.monotonic() - started


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system, which hosts made inside share. Skip the test if mount is missing or fails."""
    if absent := [program for program in ("mount", "umount") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(absent)} (util-linux)")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if (mounted := subprocess.run(mount, capture_output=True, text=True)).returncode != 0:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def launch_script(hosts: Hosts, arguments: list, **environment: str) -> subprocess.Popen:
    """Start launch/hostfile.sh on the first host."""
    settings = {"HOSTS": str(hosts.hostfile), "INTERFACE": "eth0"} | environment
    return start(hosts, ["bash", "launch/hostfile.sh", *arguments[1:]], on=0, **settings)
