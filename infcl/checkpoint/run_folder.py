"""The folder of a run on disk.

LOGS/NAME/
  config.json         every flag, resolved          environment.json   versions, commit, hardware, command line
  model_config.json   open_clip's schema            tokenizer.model, tokenizer/   the run's tokenizer (data/tokenizer)
  metrics.jsonl       a line per step or evaluation tensorboard/       the same as events
  checkpoints/        see load.py
  loss_curve.png      export/                       summary.json       written last; marks a finished run
  report/             python -m infcl.report        profile/, wandb/   by --profile, --report-to wandb
  running.json        the process of rank 0, while it trains
  evaluations.jsonl   a line per python -m infcl.evaluate of this run
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from infcl.checkpoint.records import Running
from infcl.config import TrainConfig
from infcl.config.agreement import OF_ONE_START, WITHOUT_EFFECT
from infcl.config.disk import write_atomic
from infcl.config.json_file import read_record
from infcl.config.words import reason
from infcl.data.tokenizer.open_clip import AnyTokenizer
from infcl.parallel import Parallel, from_first_rank, gather_objects
from infcl.parallel.host_info import git_commit, package_versions

_MAY_DIFFER = {*WITHOUT_EFFECT, *OF_ONE_START, "logs"}  # when a command is repeated


class FolderTaken(RuntimeError):
    """Another process trains in the run folder now."""


class NotWritten(RuntimeError):
    """The run's files cannot be written to storage; the message is one line."""


class RunFolder:
    """Paths of a run, and the files that are written once."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.is_finished = False  # whether an earlier start finished the run
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / "metrics.jsonl"
        self.evaluations = self.root / "evaluations.jsonl"
        self.summary = self.root / "summary.json"
        self.loss_curve = self.root / "loss_curve.png"
        self.export = self.root / "export"
        self.model_config = self.root / "model_config.json"
        self.running = self.root / "running.json"
        self._written: Running | None = None  # what this process wrote to running.json

    def open(
        self,
        config: TrainConfig,
        model_config_json: str,
        parallel: Parallel,
        begins_from: Path | None = None,
        tokenizer: AnyTokenizer | None = None,
    ) -> list[str]:
        """Write the files that identify this run. Collective.

        Args:
            begins_from: another run's checkpoint from which this run starts, or None.

        Returns:
            The flags that differ from those of the unfinished run here, or of the run of `begins_from` (other_flags).

        Raises:
            ValueError: on all ranks, if the folder cannot be written, is in use, or is not shared by all nodes.
        """

        def prepare() -> list[str]:
            changed: list[str] = []
            self.require_free()
            try:
                before = RunFolder(begins_from.resolve().parent.parent) if begins_from else self
                if (before.root / "config.json").is_file():
                    changed = before.other_flags(config)
                    if before.model_config.is_file() and before.model_config.read_bytes() != model_config_json.encode():
                        changed.append(f"{before.model_config.name}: the towers or their preprocessing")
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                write_atomic(self.root / "config.json", config.to_json())
                write_atomic(self.model_config, model_config_json)
                environment = json.dumps(describe_environment(parallel), indent=2)
                write_atomic(self.root / "environment.json", environment + "\n")
                if tokenizer is not None:
                    tokenizer.save(self.root)
                created = psutil.Process().create_time()  # stored, since it changes when the clock is set
                self._written = {"host": socket.gethostname(), "pid": os.getpid(), "created": created}
                write_atomic(self.running, json.dumps(self._written))
            except OSError as error:
                why = reason(error)
                raise ValueError(f"{self.root} cannot be written ({why}): fix that or choose another --logs") from error
            return changed

        changed = from_first_rank(prepare)
        self.require_shared()
        return changed

    def require_free(self) -> None:
        """Raise ValueError if another process of this node trains here. The two would overwrite each other's files."""
        there = self._trainer()
        if there and there["host"] == socket.gethostname() and there["pid"] != os.getpid() and _is_alive(there):
            raise ValueError(
                f"{self.root} is being trained by process {there['pid']} of this host: wait until it exits, stop it, "
                "or choose another --name"
            )

    def taken_by(self) -> str | None:
        """Return the process that began to train here after this one, or None.

        It may be on another node, which cannot check whether this process runs.
        """
        there = self._trainer()
        return f"process {there['pid']} of {there['host']}" if there and there != self._written else None

    def _trainer(self) -> Running | None:
        """Return the process in running.json, or None if the file is missing or damaged (by a full disk, say)."""
        with contextlib.suppress(ValueError):
            return read_record(self.running, Running)
        return None

    def leave(self) -> None:
        """Remove running.json at the end of training. Rank 0 only."""
        if self.taken_by() is None:
            with contextlib.suppress(OSError):  # a file that stays is read as that of a process that has ended
                self.running.unlink(missing_ok=True)

    def flags(self) -> dict[str, Any]:
        """Return the flags of the run here, or {} if config.json is damaged (a full disk may cut it off)."""
        with contextlib.suppress(ValueError):
            return dataclasses.asdict(self.config())
        return {}

    def config(self) -> TrainConfig:
        """Return the flags of the run here, with the defaults of those that it lacks; older flags are left out.

        Raises:
            ValueError: config.json is missing or damaged.
        """
        return read_record(self.root / "config.json", TrainConfig)

    def other_flags(self, config: TrainConfig) -> list[str]:
        """List the flags whose values differ between the run here and `config`: ["lr 0.001 there, 0.002 now", ...]."""
        there, now = self.flags(), json.loads(config.to_json())
        if not there:
            return ["config.json there is damaged"]  # a resume does not need it
        names = sorted(set(now) - _MAY_DIFFER)
        return [f"{n} {there.get(n)} there, {now[n]} now" for n in names if there.get(n) != now[n]]

    def require_shared(self) -> None:
        """Wait up to 15 s until every rank sees what rank 0 wrote. Collective.

        A network file system may show a new file some seconds late.

        Raises:
            ValueError: on all ranks, with the nodes that do not see the files.
        """
        file = self.root / "environment.json"
        written = from_first_rank(file.read_bytes)
        deadline = time.monotonic() + 15
        sees = False
        while not sees and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                sees = file.read_bytes() == written
            time.sleep(0 if sees else 0.2)
        everyone = gather_objects((socket.gethostname(), sees))
        if blind := dict.fromkeys(host for host, sees in everyone if not sees):
            raise ValueError(
                f"{', '.join(blind)}: {self.root} is not the folder that {everyone[0][0]} writes to: --logs has to be "
                "on storage that all hosts share"
            )


def run_of(path: Path) -> RunFolder | None:
    """Return the run to which a run folder, a checkpoint or an exported folder in the run belongs, or None."""
    folders = (path, *path.absolute().parents[:2])
    return next((RunFolder(each) for each in folders if (each / "environment.json").is_file()), None)


def claim_run_folder(config: TrainConfig, parallel: Parallel) -> RunFolder:
    """Return the folder of this run, the same on every rank. Write and remove nothing yet. Collective.

    Raises:
        ValueError: the folder has a run that this command does not repeat or resume.
    """
    name = [config.name or default_name(config, parallel.world_size)]
    dist.broadcast_object_list(name, src=0)
    run = RunFolder(Path(config.logs) / name[0])
    run.is_finished = from_first_rank(lambda: _holds_finished(run, config))
    return run


def _holds_finished(run: RunFolder, config: TrainConfig) -> bool:
    """Return whether an earlier start has finished the run. Rank 0 only."""
    run.require_free()
    if run.checkpoints.is_symlink():  # old checkpoints would be removed from wherever it leads
        raise ValueError(f"{run.checkpoints} is a symbolic link: link --logs, or choose another --name")
    finished = run.summary.is_file()
    if not (run.root / "config.json").is_file():
        return finished
    if finished:
        if others := run.other_flags(config):
            raise ValueError(
                f"{run.root} holds a finished run with other flags ({'; '.join(others)}): choose another --name (with "
                f"--resume {run.checkpoints}/STEP to continue from there)"
            )
    elif config.resume is None:
        raise ValueError(f"{run.root} holds an unfinished run: --resume latest continues it; or choose another --name")
    return finished


def default_name(config: TrainConfig, world_size: int) -> str:
    """Return open_clip's default: time-model-lr-b(atch size)-j (workers)-p(recision), with w(orld size) added."""
    return (
        f"{time.strftime('%Y_%m_%d-%H_%M_%S')}-model_{Path(config.model).stem}-lr_{config.lr:g}-b_{config.batch_size}"
        f"-w_{world_size}-j_{config.workers}-p_{config.precision or 'auto'}"
    )


def _is_alive(there: Running) -> bool:
    """Return whether this node's process still runs. The creation time tells apart processes that share an id."""
    try:
        process = psutil.Process(there["pid"])
        return abs(process.create_time() - there["created"]) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe_environment(parallel: Parallel) -> dict:
    """Return versions, commit, command line and hardware, for environment.json."""
    on_gpu = parallel.device.type == "cuda"
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": git_commit(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "world_size": parallel.world_size,
        "device": torch.cuda.get_device_name(parallel.device) if on_gpu else platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
    }


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
