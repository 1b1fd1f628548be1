"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases. The x-axis is samples_seen in both.

A sink takes (kind, step, samples_seen, values) and names a curve kind/key: train/loss, retrieval/image_to_text_r1.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

REPORT_TO = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "all": ("tensorboard", "wandb"),
    "none": (),
}


class Sink(Protocol):
    def log(self, kind: str, step: int, samples_seen: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(report_to: str, run: Path, *, wandb_project_name: str, samples_seen: int = 0) -> list[Sink]:
    """The sinks that --report-to names, writing below the run folder; a run that goes on has `samples_seen` behind it.
    Rank 0 only.
    """
    openers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(run, samples_seen),
        "wandb": lambda: WandbSink(run, wandb_project_name),
    }
    return [openers[name]() for name in REPORT_TO[report_to]]


class TensorBoardSink:
    """RUN/tensorboard. What was written behind `samples_seen` before a resume is done again, and shown no more."""

    def __init__(self, run: Path, samples_seen: int):
        from torch.utils.tensorboard import SummaryWriter

        self.events = SummaryWriter(run / "tensorboard", purge_step=samples_seen + 1)

    def log(self, kind: str, step: int, samples_seen: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.events.add_scalar(f"{kind}/{key}", value, samples_seen)

    def close(self) -> None:
        self.events.close()


class WandbSink:
    """A W&B run named after the run folder, continued when the run is resumed. WANDB_MODE=offline keeps it local.

    W&B's own step counter is left alone: every curve is drawn over samples_seen.
    """

    def __init__(self, run: Path, project: str):
        import wandb

        identity = run / "wandb_id"
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex[:12] + "\n")
        config = run / "config.json"
        self.run = wandb.init(
            project=project,
            name=run.resolve().name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=str(run),
            config=json.loads(config.read_text()) if config.is_file() else None,
        )
        self.run.define_metric("samples_seen")
        self.run.define_metric("*", step_metric="samples_seen")

    def log(self, kind: str, step: int, samples_seen: int, values: dict[str, float]) -> None:
        self.run.log({f"{kind}/{key}": value for key, value in values.items()} | {"samples_seen": samples_seen})

    def close(self) -> None:
        self.run.finish()
