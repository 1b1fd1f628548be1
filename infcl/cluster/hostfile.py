"""The hostfile: one "worker-1 slots=8" per line, '#' begins a comment. Parsed strictly, before ssh is used.

`python -m infcl.cluster.hostfile check|alive|counts HOSTS` reports an invalid line, prints the hosts that ssh reaches
(with a global batch size, as many of the first ones as divide it), or prints with how many nodes a run can continue.
The launch scripts start it as a file, because the package would import torch, which takes seconds.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

# BatchMode: ssh must not prompt. ssh gives up a host that stops answering after 45 s (three intervals).
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
T = TypeVar("T")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Read a hostfile into {host: slots}, in the file's order.

    Raises:
        ValueError: the file cannot be read, has no host, or has an invalid line (reported with its number and text).
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; write one line per node there, like 'worker-1 slots=8'") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if problem := _problem(words):
            raise ValueError(f"{path}, line {number}: {line.strip()[:80]!r}: {problem}")
        host, slots = words[0], int(words[1].removeprefix("slots="))
        if host in hosts:
            raise ValueError(f"{path}, line {number}: {host} occurs twice")
        hosts[host] = slots
    if not hosts:
        raise ValueError(f"{path} has no host; write one line per node, like 'worker-1 slots=8'")
    return hosts


def _problem(words: list[str]) -> str | None:
    if not _NAME.fullmatch(words[0]):
        return "a host is a name or address of letters, digits, dots, hyphens and colons"
    if len(words) != 2 or not re.fullmatch(r"slots=\d+", words[1]):
        return "after the host comes slots=N, and nothing else"
    return "slots must be at least 1" if int(words[1].removeprefix("slots=")) < 1 else None


def ssh(host: str, command: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a shell command on the host, without a password and without input.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds.
        OSError: there is no ssh here.
    """
    words = [*_SSH, host, command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def for_each(hosts: Iterable[str], function: Callable[[str], T]) -> dict[str, T]:
    """Return {host: function(host)}, for up to 32 hosts at a time."""
    hosts = list(hosts)
    with ThreadPoolExecutor(32) as pool:
        return dict(zip(hosts, pool.map(function, hosts)))


def answers(host: str) -> bool:
    """Return whether ssh can log in to the host and run a command, without a password."""
    try:
        return ssh(host, "true", timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def choose_alive(hosts: dict[str, int], alive: set[str], *, min_hosts: int, global_batch_size: int | None) -> dict:
    """Choose the nodes to continue with: as many of the first reachable ones as divide the global batch.

    Args:
        global_batch_size: None accepts any number of ranks.

    Returns:
        {host: slots} in the file's order.

    Raises:
        ValueError: fewer than `min_hosts` can be used.
    """
    chosen = [host for host in hosts if host in alive]
    if global_batch_size:
        counts = dividing_counts({host: hosts[host] for host in chosen}, global_batch_size)
        chosen = chosen[: max(counts, default=0)]
    if len(chosen) < min_hosts:
        silent = ", ".join(host for host in hosts if host not in alive) or "none"
        batch = f"; the ranks have to divide a batch of {global_batch_size}" if global_batch_size else ""
        raise ValueError(
            f"{len(chosen)} of {len(hosts)} hosts can be used, at least {min_hosts} are needed "
            f"(without an answer: {silent}{batch})"
        )
    return {host: hosts[host] for host in chosen}


def dividing_counts(hosts: dict[str, int], global_batch_size: int) -> list[int]:
    """Return each number of hosts, taken from the first one on, whose ranks divide the global batch."""
    return [n for n, ranks in enumerate(accumulate(hosts.values()), start=1) if global_batch_size % ranks == 0]


def check_counts(hosts: dict[str, int], *, min_hosts: int, global_batch_size: int | None) -> str:
    """Describe with which numbers of hosts a run can continue.

    Raises:
        ValueError: `min_hosts` is out of range, or a run could not continue after the loss of any host.
    """
    if not 1 <= min_hosts <= len(hosts):
        raise ValueError(f"--min-hosts {min_hosts} must be in [1, {len(hosts)}], the hosts of the file")
    if global_batch_size is None:
        return f"at least {min_hosts} of {len(hosts)} hosts"
    counts = dividing_counts(hosts, global_batch_size)
    named = ", ".join(map(str, counts)) or "none"
    text = f"a batch of {global_batch_size} is divided by the ranks of {named} of {len(hosts)} hosts"
    usable = [count for count in counts if count >= min_hosts]
    if not usable or (usable == [len(hosts)] and min_hosts < len(hosts)):
        raise ValueError(f"--min-hosts {min_hosts}: the run could not continue without one of the hosts: {text}")
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infcl.cluster.hostfile", description=__doc__.splitlines()[0])
    actions = "check: report an invalid line; alive: print the hosts that answer; counts: print how many can continue"
    parser.add_argument("action", choices=("check", "alive", "counts"), help=actions)
    parser.add_argument("hostfile")
    parser.add_argument("--min-hosts", type=int, default=1, help="fewest hosts to continue with")
    parser.add_argument("--global-batch-size", type=int, help="samples per step, which the ranks have to divide")
    arguments = parser.parse_args(argv)
    try:
        hosts = read_hostfile(arguments.hostfile)
        if arguments.action == "counts":
            print(check_counts(hosts, min_hosts=arguments.min_hosts, global_batch_size=arguments.global_batch_size))
        if arguments.action == "alive":
            alive = {host for host, answer in for_each(hosts, answers).items() if answer}
            options = {"min_hosts": arguments.min_hosts, "global_batch_size": arguments.global_batch_size}
            for host, slots in choose_alive(hosts, alive, **options).items():
                print(f"{host} slots={slots}")
    except ValueError as error:
        print(f"hostfile: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
