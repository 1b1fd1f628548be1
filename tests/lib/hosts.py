"""Hosts on one machine: `with Hosts(4, folder) as hosts:` makes worker-1 .. worker-4, each with its own sshd.

A host is a set of namespaces (network, PID, mount, host name) with one veth link to a bridge, its own address and host
key. The bridge is in a namespace without a route, so nothing is reachable from outside. Nothing in ~/.ssh or /etc of
the machine changes: `ip netns exec` mounts /etc/netns/NAME over /etc. File systems are shared, as on a cluster with the
same paths on all nodes. Needs root, iproute2, util-linux and openssh-server; `missing()` reports what is missing.

    host.run([...])              run on the host, in `cwd`    host.link("down")     pull its cable
    host.processes("text")       its processes by command     host.shape("tbf rate ...") apply tc to what it sends
    host.crash()                 kill all its processes at once
    hosts.restart(1)             start the second host again, with only sshd

While hosts exist, SIGTERM raises KeyboardInterrupt, so that they are removed. It is deferred during the removal.
"""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.lib.waiting import wait_until

NET, NET_6 = "10.203.77", "fd77:203"
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin"  # PATH of commands on a host
_sets = itertools.count()
_SSHD_OPTIONS = (
    "StrictModes=no", "PermitRootLogin=prohibit-password", "PasswordAuthentication=no", "UsePAM=no", "MaxStartups=100",
    "SetEnv=OMP_NUM_THREADS=1",
)  # fmt: skip


@functools.cache
def missing() -> str | None:
    """Return why this machine cannot make hosts, or None. Does not try `Hosts`, whose errors must not be hidden."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    programs = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd", "pdsh")
    if absent := [program for program in programs if shutil.which(program) is None]:
        return f"not installed: {', '.join(absent)} (iproute2, util-linux, openssh-server, pdsh)"
    name = f"infcl{os.getpid()}probe"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip -n {name} link add br0 type bridge",
            f"ip -n {name} link add eth0 type veth peer name p1",
            f"tc -n {name} qdisc replace dev eth0 root tbf rate 1gbit burst 64kb latency 400ms",
            f"ip netns exec {name} unshare --uts --pid --mount-proc --fork --kill-child true",
        ):
            _run(*command.split())
    except RuntimeError as error:
        return f"this machine makes no namespaces: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


class Host:
    def __init__(self, hosts: "Hosts", number: int):
        self.hosts, self.name = hosts, f"worker-{number}"
        self.address = f"{NET_6}:77::{number}" if hosts.ipv6 else f"{NET}.{number}"
        self.namespace, self.port = f"{hosts.prefix}h{number}", f"p{number}"
        self.process: subprocess.Popen | None = None  # None before `start`

    def start(self) -> None:
        folder = self.hosts.folder
        key = folder / f"{self.name}.key"
        if not key.exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        options = (f"ListenAddress={self.address}", f"PidFile={folder}/{self.name}.pid", *_SSHD_OPTIONS)
        options += (f"AuthorizedKeysFile={folder}/id.pub",)
        sshd = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", "-h", key, "-E", folder / f"{self.name}.log"]
        sshd += [word for option in options for word in ("-o", option)]
        self.process = subprocess.Popen(
            [
                *f"nice -n 5 ip netns exec {self.namespace}".split(),
                *"unshare --uts --pid --mount-proc --fork --kill-child".split(),
                *("sh", "-c", 'hostname "$0" && exec "$@"', self.name, *map(str, sshd)),
            ],
            stdin=subprocess.DEVNULL,
        )

    def command(self, arguments: list, cwd=None) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        assert self.process is not None, f"{self.name} was not started"
        started = psutil.Process(self.process.pid)
        wait_until(started.children, 20, f"{self.name} was not started")  # it may have started just now
        inside = str(started.children()[0].pid)
        enter = ["nsenter", "-t", inside, "--net", "--uts", "--pid", "--mount", f"--wd={cwd or Path.cwd()}"]
        return [*enter, "--", *map(str, arguments)]

    def run(self, arguments: list, cwd=None, **options) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(arguments, cwd), capture_output=True, text=True, **options)

    def processes(self, text: str = "") -> list[psutil.Process]:
        """Return the host's live processes with `text` in the command line, except sshd and its sessions."""
        if self.process is None or not self.is_up:
            return []
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
                if text in line and "sshd" not in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                pass
        return found

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def link(self, state: str) -> None:
        _run("ip", "-n", self.hosts.bridge, "link", "set", self.port, state)

    def shape(self, discipline: str, *, device: str = "eth0") -> None:
        """Apply a queueing discipline of tc; raise RuntimeError if the kernel does not have it."""
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", device, "root", *discipline.split())

    def crash(self) -> None:
        assert self.process is not None, f"{self.name} was not started"
        self.process.kill()
        self.process.wait()


class Hosts:
    """`count` hosts with `slots` each.

    Args:
        count: number of hosts.
        folder: for files (keys, hostfile).
        slots: ranks of each host.
        nics: more than one gives every host eth0, eth1, ..., each in its own network (10.203.77.0, 10.203.78.0, ...).
        ipv6: hosts have no IPv4 address except the loopback.
    """

    def __init__(self, count: int, folder: Path, *, slots: int = 1, nics: int = 1, ipv6: bool = False):
        self.folder = folder
        self.prefix = f"infcl{os.getpid()}s{next(_sets)}"
        self.bridge = f"{self.prefix}br"
        self.slots, self.nics, self.ipv6 = slots, nics, ipv6
        self.on_sigterm: Any = None  # the previous handler
        self.all = [Host(self, number) for number in range(1, count + 1)]

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    @property
    def hostfile(self) -> Path:
        return self.folder / "hosts"

    def __enter__(self) -> "Hosts":
        try:
            if threading.current_thread() is threading.main_thread():
                self.on_sigterm = signal.signal(signal.SIGTERM, _interrupt)
            self._make()
        except BaseException:  # otherwise namespaces would remain
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "id")
        _run("ip", "netns", "add", self.bridge)
        _run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.bridge, "link", "set", "br0", "up")
        names = "".join(f"{host.address} {host.name}\n" for host in self.all)
        ssh_config = (
            f"Host *\n IdentityFile {self.folder}/id\n UserKnownHostsFile {self.folder}/known_hosts\n BatchMode yes\n"
        )
        for host in self.all:
            overlay = Path("/etc/netns") / host.namespace
            (overlay / "ssh").mkdir(parents=True)
            (overlay / "hosts").write_text("127.0.0.1 localhost\n" + names)
            (overlay / "ssh" / "ssh_config").write_text(ssh_config)
            _run("ip", "netns", "add", host.namespace)
            for number in range(self.nics):
                self._connect(host, number)
            _run(*f"ip -n {host.namespace} link set lo up".split())
            host.start()
        keys = [f"{host.name},{host.address} {(self.folder / f'{host.name}.key.pub').read_text()}" for host in self.all]
        (self.folder / "known_hosts").write_text("".join(keys))
        self.hostfile.write_text("".join(f"{host.name} slots={self.slots}\n" for host in self.all))
        for host in self.all:
            self._wait_for(host)

    def _connect(self, host: Host, number: int) -> None:
        """Connect the host's eth`number` to the bridge."""
        device, port = f"eth{number}", host.port if number == 0 else f"{host.port}n{number}"
        last = host.address.rsplit(":" if self.ipv6 else ".", 1)[1]
        if self.ipv6:
            address = f"{NET_6}:{77 + number}::{last}/64 nodad"
        else:
            address = f"{NET.rsplit('.', 1)[0]}.{77 + number}.{last}/24"
        _run(*f"ip link add {device} netns {host.namespace} type veth peer name {port} netns {self.bridge}".split())
        _run(*f"ip -n {self.bridge} link set {port} master br0 up".split())
        _run(*f"ip -n {host.namespace} addr add {address} dev {device}".split())
        _run(*f"ip -n {host.namespace} link set {device} up".split())

    def restart(self, number: int) -> None:
        """Start a host that crashed, and wait until it answers."""
        self[number].start()
        self._wait_for(self[number])

    def _wait_for(self, host: Host) -> None:
        log = self.folder / f"{host.name}.log"
        wait_until(
            lambda: self[0].run(["ssh", host.name, "true"]).returncode == 0,
            20,
            lambda: f"{host.name} does not answer: {log.read_text() if log.exists() else ''}",
        )

    def __exit__(self, *_) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._take_down()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if self.on_sigterm is not None:
                signal.signal(signal.SIGTERM, self.on_sigterm)

    def _take_down(self) -> None:
        for host in self.all:
            if host.is_up:
                host.crash()
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        for name in (*(host.namespace for host in self.all), self.bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _interrupt(*_) -> None:
    raise KeyboardInterrupt("SIGTERM")


def _run(*arguments) -> None:
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
