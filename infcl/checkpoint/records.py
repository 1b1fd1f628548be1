"""The JSON records of a run folder and its checkpoints, as they are read back: the keys that a reader relies on."""

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt
from typing_extensions import NotRequired, TypedDict


class Running(TypedDict):
    """running.json: a process, told apart from others with its id by the time of its creation."""

    host: str
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    created: FiniteFloat


class Environment(TypedDict):
    """environment.json."""

    world_size: PositiveInt
    started: NotRequired[str]
    commit: NotRequired[str | None]
    device: NotRequired[str]
    packages: NotRequired[dict[str, str | None]]


class Paths(TypedDict):
    run: str
    loss_curve: str
    export: str
    checkpoint: str | None


class Summary(TypedDict):
    """summary.json of a finished run."""

    zero_shot_top1: FiniteFloat | None
    image_to_text_r1: FiniteFloat | None
    text_to_image_r1: FiniteFloat | None
    samples_seen: NonNegativeInt
    steps: NonNegativeInt
    train_seconds: FiniteFloat
    peak_memory_mb: FiniteFloat
    zero_stage: int
    world_size: PositiveInt
    data: dict[str, int]
    paths: Paths


class Metrics(TypedDict):
    """A line of metrics.jsonl."""

    kind: str
    step: NonNegativeInt
    samples_seen: NonNegativeInt


class Evaluation(TypedDict):
    """A line of evaluations.jsonl."""

    checkpoint: str
    task: str
    data: str
    metrics: dict[str, float]


class Position(TypedDict):
    epoch: NonNegativeInt
    step: NonNegativeInt


class TrainerState(TypedDict):
    """The training loop in a checkpoint."""

    step: NonNegativeInt
    samples_seen: NonNegativeInt
    skipped_steps: NonNegativeInt
    skipped_in_a_row: NonNegativeInt
    train_seconds: FiniteFloat
    graphs: NotRequired[dict[str, Any]]
    loader: Position


class Counters(TypedDict):
    """The engine in a checkpoint; the last four are those of a dynamic loss scaler."""

    global_steps: NonNegativeInt
    global_samples: NonNegativeInt
    micro_steps: NonNegativeInt
    skipped_steps: NonNegativeInt
    optimizer_step: NonNegativeInt
    ema_updates: NotRequired[NonNegativeInt]
    cur_scale: NotRequired[FiniteFloat]
    cur_iter: NotRequired[int]
    last_overflow_iter: NotRequired[int]
    cur_hysteresis: NotRequired[int]


class TensorFile(TypedDict):
    bytes: NonNegativeInt
    sha256: str


class Manifest(TypedDict):
    """infcl.json of a checkpoint."""

    format: Literal[3]
    counters: Counters
    optimizer: str
    trainer: TrainerState
    files: Annotated[dict[str, TensorFile], Field(min_length=1)]
    sha256: str
