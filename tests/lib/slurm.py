"""A real Slurm over the hosts of hosts.py: `with Slurm(hosts, folder) as slurm:` starts its daemons.

    job = slurm.submit(["--nodes", "2", "launch/slurm.sbatch", ...])      slurm.state(job)["JobState"]
    slurm.run("scancel", "--signal=USR1", job)

One munged serves all hosts through its socket. A requeued job waits until its credentials expire, after 5 s here
instead of two minutes. Memory is not limited (no control groups). task/affinity binds tasks to their cores; each host
has all cores of the machine. Tested with Slurm 22.05.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.lib.hosts import PATH, Hosts
from tests.lib.waiting import wait_until

PROGRAMS = ("slurmctld", "slurmd", "munged")
_CONF = """
ClusterName=tests
SlurmctldHost=worker-1({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
TaskPluginParam=autobind=threads
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MessageTimeout=30
SlurmdTimeout=6
ReturnToService=0
"""


def missing() -> str | None:
    """Return why Slurm cannot run here, or None."""
    absent = [program for program in PROGRAMS if not (shutil.which(program) or Path("/usr/sbin", program).exists())]
    return f"not installed: {', '.join(absent)} (slurm-wlm)" if absent else None


class Slurm:
    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        self.daemons: list[subprocess.Popen] = []
        self.environment = [f"SLURM_CONF={folder}/slurm.conf", f"PATH={PATH}", f"HOME={hosts.folder}"]

    def __enter__(self) -> "Slurm":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for folder in ("", "state", *(host.name for host in self.hosts.all)):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        nodes = "".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={os.cpu_count()}\n" for host in self.hosts.all
        )
        settings = _CONF.format(controller=self.hosts[0].address, folder=self.folder)
        (self.folder / "slurm.conf").write_text(f"{settings}{nodes}PartitionName=all Nodes=ALL Default=YES\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v1 is not probed at the start
        key = self.folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "seed", "log")]
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge", *own]
        self._keep(munged, "munged", on=0)
        self._keep(["slurmctld", "-D"], "slurmctld", on=0)
        for number in range(len(self.hosts.all)):
            self.start_node(number)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%D %t") == f"{len(self.hosts.all)} idle\n", 30)

    def return_node(self, number: int) -> None:
        """Restart a crashed host and resume its node by hand, as many administrators do.

        With ReturnToService=2 a job starts there within a second after slurmd. The controller's late message to the
        lost slurmd, to end the job's tasks, may then reach the new tasks (1 of 72 times).
        """
        self.hosts.restart(number)
        self.start_node(number)
        name = self.hosts[number].name
        self.wait_until(lambda: self.run("sinfo", "-h", "-n", name, "-o", "%t") == "down\n", 60)  # down*: no answer
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def start_node(self, number: int) -> None:
        name = self.hosts[number].name
        self._keep(["slurmd", "-D", "-N", name], name, on=number)

    def _keep(self, command: list[str], name: str, on: int) -> None:
        words = self.hosts[on].command(["env", "-i", *self.environment, *command])
        with open(self.folder / f"{name}.out", "w") as output:
            self.daemons.append(subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL))

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for `condition`; after `seconds` raise AssertionError with the state of nodes, jobs and daemons."""
        wait_until(condition, seconds, lambda: f"not within {seconds:.0f} s\n{self._known()}")

    def _known(self) -> str:
        jobs = self.run("scontrol", "--oneliner", "show", "job")
        texts = {"nodes": self.run("sinfo", "--long", "--Node"), "jobs": jobs}
        files = [*map(Path, re.findall(r"StdOut=(\S+)", jobs)), *sorted(self.folder.glob("*.out"))]
        texts |= {path.name: path.read_text()[-2000:] for path in files if path.exists()}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def __exit__(self, *_) -> None:
        for host in self.hosts.all:  # the daemons are not children of the processes that started them
            if host.is_up:
                host.run(["pkill", "-KILL", "slurm|munged"])
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()

    def run(self, *words, cwd=None) -> str:
        """Run a command on the first host; return its output."""
        done = self.hosts[0].run(["env", "-i", *self.environment, *words], cwd, timeout=120)
        return done.stdout + done.stderr

    def submit(self, words: list, cwd=None) -> str:
        """Submit a job; return its number."""
        printed = self.run("sbatch", "--parsable", *words, cwd=cwd)
        assert printed.strip().isdigit(), printed
        return printed.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`, empty if the controller does not answer in time."""
        return dict(re.findall(r"(\w+)=(\S+)", self.run("scontrol", "show", "job", job)))

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until none is left."""
        self.run("scancel", "--user", "root")
        self.wait_until(lambda: self.run("squeue", "-h") == "", 120)

    def wait(self, job: str, seconds: float = 180) -> dict[str, str]:
        """Wait until the job has ended; return its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(lambda: self.state(job).get("JobState") in ends, seconds)
        return self.state(job)
