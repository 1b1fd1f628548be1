"""Checkpoint manifests, the trainer's state in them, and writers without an engine."""

from types import SimpleNamespace
from typing import Any

from infcl.checkpoint.manifest import FORMAT, sealed
from infcl.checkpoint.run_folder import RunFolder
from infcl.checkpoint.write import CheckpointWriter
from infcl.parallel.rendezvous import Node

_COUNTED = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "optimizer_step")


def trainer_state_of(step: int) -> dict:
    return {
        "step": step,
        "samples_seen": 64 * step,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "train_seconds": 1.5 * step,
        "loader": {"epoch": 0, "step": step},
    }


def manifest_of(step: int, files: dict[str, dict]) -> dict:
    """Return a sealed manifest for files {name: {"bytes": size, "sha256": hex}}."""
    manifest = {
        "format": FORMAT,
        "counters": dict.fromkeys(_COUNTED, step),
        "optimizer": "adamw",
        "zero_stage": 1,
        "world_size": len(files),
        "trainer": trainer_state_of(step),
        "files": files,
    }
    return sealed(manifest)


def writer_on(run: RunFolder, rank: int = 0, world_size: int = 1, *, keep_last: int = 0) -> CheckpointWriter:
    """Return a writer on a rank of two nodes, with an engine that has no state. Tests replace `_own_tensors`."""
    nodes = (Node("worker-1", 0, 1), Node("worker-2", 1, 1))
    parallel: Any = SimpleNamespace(rank=rank, world_size=world_size, hosts=2, nodes=nodes)
    engine: Any = SimpleNamespace(counters=lambda: dict.fromkeys(_COUNTED, 0), optimizer_name="adamw", zero_stage=1)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    return CheckpointWriter(engine, run, parallel, keep_last=keep_last)
