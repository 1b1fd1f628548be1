"""Read a run folder. Every file except metrics.jsonl may be missing: the run may be active, or have crashed."""

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infcl.checkpoint.records import Environment, Evaluation, Metrics, Summary
from infcl.config import TrainConfig
from infcl.config.json_file import parse_record, read_record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    root: Path
    name: str
    train: list[dict]  # one record per step
    evaluations: dict[str, list[dict]]  # "retrieval", "zero_shot", ... -> records
    later: list[dict]  # by infcl.evaluate: "task", "data", "checkpoint", "metrics", ...
    config: dict
    environment: dict
    summary: dict | None  # None while the run is not finished

    @property
    def last(self) -> dict:
        return self.train[-1]


def read_run(root: str | Path) -> Run:
    """Read a run folder. Raises ValueError if the folder is not a run's, or has no step yet."""
    root = Path(root)
    metrics = root / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{root}: not a run folder (no metrics.jsonl)")
    evaluations = _by_kind(metrics)
    if not (train := evaluations.pop("train", [])):
        raise ValueError(f"{metrics}: no step yet")
    config, environment = _read(root / "config.json", TrainConfig), _read(root / "environment.json", Environment)
    flags = dataclasses.asdict(config) if config else {}
    evaluations, summary = dict(sorted(evaluations.items())), _read(root / "summary.json", Summary)
    later = _lines(root / "evaluations.jsonl", Evaluation)
    return Run(root, root.resolve().name, train, evaluations, later, flags, environment or {}, summary)


def read_metrics(path: Path, kind: str) -> list[dict]:
    """Return the records of one kind, ordered by step, without the steps that a resumed run repeated."""
    return _by_kind(path).get(kind, [])


def _by_kind(path: Path) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for record in read_records(path):
        found.setdefault(record["kind"], [])
        for kind, kept in found.items():
            if record["kind"] in ("train", kind):
                while kept and kept[-1]["step"] >= record["step"]:
                    kept.pop()
        found[record["kind"]].append(record)
    return {kind: kept for kind, kept in found.items() if kept}


def read_records(path: Path) -> list[dict]:
    """Return the records of metrics.jsonl."""
    return _lines(path, Metrics)


def _lines(path: Path, kind: type) -> list[dict]:
    """Return the complete lines of a file, if any. A crash may leave a partial line, or bytes that are not text."""
    records: list[dict] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            records.append(dict(parse_record(line, kind, str(path))))
    return records


def _read(path: Path, kind: type) -> Any:
    """Return a record, or None if the file is missing or damaged, for example by a full disk."""
    try:
        return read_record(path, kind) if path.is_file() else None
    except ValueError as error:
        log.warning("damaged, so the page goes without it: %s", error)
        return None
