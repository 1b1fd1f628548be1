"""Forty SIGKILLs at random moments of ranks, launchers and whole groups: five runs end as if nothing had happened.

Losses, sample ids, weights, optimizer states and exports are those of uninterrupted runs, to the bit.
"""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from infcl.report import read_metrics
from tests.lib.entry import command
from tests.lib.kill_run import Starter, members
from tests.lib.waiting import wait_until

STEPS, KILLS, LATEST = 120, 8, 8.0  # more than an epoch; of each run; seconds after a start
CASES = [("zero1", "0"), ("zero1", "2"), ("zero3", "0"), ("zero3", "2"), ("zero1", "1")]  # preset, --workers


def kill(session: int, victim: str, dice: random.Random) -> bool:
    """Whether there was somebody to kill."""
    processes = [psutil.Process(pid) for pid in members(session)]
    ranks = [process.pid for process in processes if process.ppid() == session]
    choice = {"group": [one.pid for one in processes], "launcher": [session], "rank": ranks and [dice.choice(ranks)]}
    for pid in choice[victim]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(choice[victim])


def run(
    starter: Starter, demo_folder, folder: Path, case: tuple[str, str], kills: int, dice: random.Random
) -> list[str]:
    """Start until the run is finished; what was killed."""
    folder.mkdir()
    more = ("--steps", str(STEPS), "--save-every-n-steps", "2", "--save-frequency", "0", "--dist-timeout", "2")
    more += ("--batch-size", "8", "--deepspeed_config", case[0], "--workers", case[1], "--resume", "latest")
    arguments = command(demo_folder, folder, *more, "--device", "cpu", "--log-every-n-steps", "1")[1:]
    killed: list[str] = []
    for _ in range(3 * KILLS):
        session = starter.start(arguments, folder)
        if len(killed) < kills:
            time.sleep(dice.uniform(0, LATEST))
            victim = dice.choice(("rank", "launcher", "group"))
            killed += [victim] * kill(session, victim, dice)
        wait_until(lambda session=session: not members(session), 300, lambda: (folder / "log").read_text()[-3000:])
        if (folder / "run" / "summary.json").exists():
            return killed
    raise AssertionError((folder / "log").read_text()[-3000:])


def outcome(folder: Path) -> dict:
    """What must be equal. A step that was done again had the same samples."""
    ids: dict[str, list[int]] = {}
    for path in sorted(folder.glob("ids.*")):
        for line in path.read_text().splitlines():
            step, own = json.loads(line)
            assert ids.setdefault(f"{path.suffix} {step}", own) == own, f"{path.name}: another order in step {step}"
    records = read_metrics(folder / "run" / "metrics.jsonl", "train")
    newest = folder / "run" / "checkpoints" / (folder / "run" / "checkpoints" / "latest").read_text().strip()
    tensors = {
        f"{path.name} {name}": hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()
        for path in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    exports = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "run" / "export").glob("*.safetensors"))
    }
    assert len(ids) == 2 * STEPS and tensors and exports
    losses = [(record["step"], record["loss"]) for record in records]
    return {"losses": losses, "ids": ids, "state": tensors, "export": exports}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_kills_change_no_bit(demo_folder, tmp_path):
    dice, killed = random.Random(os.environ.get("KILL_SEED", "7")), []
    starter = Starter()
    try:
        for number, case in enumerate(CASES):
            run(starter, demo_folder, tmp_path / f"whole{number}", case, 0, dice)
            expected = outcome(tmp_path / f"whole{number}")
            own = run(starter, demo_folder, tmp_path / f"killed{number}", case, KILLS, dice)
            found = outcome(tmp_path / f"killed{number}")
            for name, value in expected.items():
                assert found[name] == value, f"{case}: another {name} after kills of {own}"
            print(f"{case}: {len(own)} kills ({', '.join(own)}), equal", flush=True)
            killed += own
    finally:
        starter.process.kill()
    assert len(killed) >= 0.75 * KILLS * len(CASES), killed
