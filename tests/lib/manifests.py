"""Checkpoint manifests, and the trainer's state in them."""

from infcl.checkpoint.manifest import FORMAT, sealed


def trainer_state_of(step: int) -> dict:
    return {
        "step": step,
        "samples_seen": 64 * step,
        "skipped_steps": 0,
        "train_seconds": 1.5 * step,
        "loader": {"epoch": 0, "step": step},
    }


def manifest_of(step: int, files: dict[str, dict]) -> dict:
    """Return a sealed manifest for files {name: {"bytes": size, "sha256": hex}}."""
    counted = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "optimizer_step")
    manifest = {
        "format": FORMAT,
        "counters": dict.fromkeys(counted, step),
        "optimizer": "adamw",
        "zero_stage": 1,
        "world_size": len(files),
        "trainer": trainer_state_of(step),
        "files": files,
    }
    return sealed(manifest)
