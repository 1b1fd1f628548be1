"""A run -> one self-contained HTML page that loads no other file and follows the reader's colour scheme.

page.html is the template, which escapes every text. This module computes the values in it.
"""

import json
import math
import re
import time
from pathlib import Path
from statistics import mean, median

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from infcl.config import TrainConfig, counted, option_of, shown_seconds
from infcl.config.redaction import redacted
from infcl.report.charts import evaluation_charts, train_charts
from infcl.report.drawing import draw_svg
from infcl.report.gallery import retrieval_gallery
from infcl.report.records import Run

PHASES = ("data", "encode", "loss", "replay", "step")
_SHARES = {"r1": "R@1", "r5": "R@5", "r10": "R@10", "top1": "top-1", "top5": "top-5"}
_CAUSES = {"skipped": "replaced while reading", "index": "left out by the index", "noted": "used, with a remark"}
_HERE = Path(__file__).parent


def write_report(run: Run, out: Path) -> Path:
    """Write `out`/index.html. Return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    figures = headline(run)
    templates = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    text = templates.get_template("page.html").render(
        run=run,
        style=(_HERE / "style.css").read_text(),
        script=(_HERE / "read_out.js").read_text(),
        draw_svg=draw_svg,
        facts=_facts(run),
        headline=figures,
        columns=max((6, 5, 4), key=lambda count: (len(figures) - 1) % count),  # no tile is alone in the last row
        groups=train_charts(run),
        phases=_phases(run),
        evaluations=evaluation_charts(run),
        evaluation=_last_evaluations(run),
        later=_later_evaluations(run),
        gallery=retrieval_gallery(run),
        causes=_causes(run),
        settings=_settings(run),
        environment=_environment(run),
        now=time.strftime("%Y-%m-%d %H:%M"),
    )
    page = out / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def headline(run: Run) -> dict[str, str]:
    """Return the run's headline figures, {label: text}."""
    summary, rows = run.summary or {}, {}
    for key, label in (
        ("zero_shot_top1", "zero-shot top-1"),
        ("image_to_text_r1", "image→text recall@1"),
        ("text_to_image_r1", "text→image recall@1"),
    ):
        if summary.get(key) is not None:
            rows[label] = f"{summary[key]:.1%}"
    tail = [record["loss"] for record in run.train[-max(1, len(run.train) // 20) :] if "loss" in record]
    rows["loss, mean of the last 5%"] = f"{mean(tail):.4f}" if tail else "not finite"
    rows["steps"] = f"{run.last['step']:,}"
    rows["samples seen"] = f"{run.last['samples_seen']:,}"
    rows["samples/s, median"] = f"{_median(run, 'samples_per_second'):,.0f}"
    for key, label in (
        ("mfu", "MFU, median"),
        ("data_wait", "data wait, median"),
        ("text_share", "caption tokens encoded, of padded captions"),
    ):
        if any(record.get(key, 1) != 1 for record in run.train):
            rows[label] = f"{_median(run, key):.1%}"
    peak = summary.get("peak_memory_mb") or max(record.get("peak_memory_mb", 0) for record in run.train)
    rows["peak memory per rank"] = f"{peak:,.0f} MiB"
    if run.summary:
        rows["training time"] = shown_seconds(summary["train_seconds"])
        for label, group in (("samples skipped", "skipped/"), ("samples left out by the index", "index/")):
            rows[label] = f"{sum(n for name, n in summary['data'].items() if name.startswith(group)):,}"
    rows["steps skipped"] = f"{run.last.get('skipped_steps', 0):,.0f}"
    return rows


def _facts(run: Run) -> str:
    env, config = run.environment, run.config
    facts = [
        config.get("model"),
        f"loss {config['loss']}" if "loss" in config else None,
        f"{counted(env['world_size'], 'rank')}, {env['device']}" if "world_size" in env else None,
        f"commit {env['commit'][:12]}" if env.get("commit") else None,
        f"started {env['started'][:16].replace('T', ' ')}" if "started" in env else None,
    ]
    return " · ".join(fact for fact in facts if fact)


def _phases(run: Run) -> list[tuple[str, float, float]]:
    """Return (phase, median milliseconds per step, share) of each phase, or [] if the run did not record them."""
    times = {phase: 1000 * _median(run, f"seconds_{phase}") for phase in PHASES}
    total = sum(times.values())
    return [(phase, ms, ms / total) for phase, ms in times.items()] if total else []


def _last_evaluations(run: Run) -> dict[str, str]:
    """Return the last evaluations: {"image→text": "R@1 41.8% · R@5 96.1%", "zero-shot": "top-1 90.0%", ...}."""
    lines: dict[str, str] = {}
    for kind, records in run.evaluations.items():
        lines |= _in_words(kind.replace("_", "-"), records[-1])
    return lines


def _later_evaluations(run: Run) -> list[tuple[str, dict[str, str]]]:
    """Return the results of infcl.evaluate: (weights and data, {line: figures}), the newest last."""
    return [
        (f"{record['checkpoint']} on {record['data']}", _in_words(record["task"], record["metrics"]))
        for record in run.later
    ]


def _in_words(kind: str, metrics: dict) -> dict[str, str]:
    lines: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name in ("kind", "step", "samples_seen") or not (isinstance(value, (int, float)) and math.isfinite(value)):
            continue
        line = kind
        if match := re.fullmatch("(image|text)_to_(image|text)_(.*)", name):
            line, name = f"{match[1]}→{match[2]}", match[3]
        form = ".1%" if name in _SHARES else ",.0f" if value == round(value) else ",.4g"
        lines.setdefault(line, []).append(f"{_SHARES.get(name, name.replace('_', ' '))} {value:{form}}")
    return {line: " · ".join(parts) for line, parts in lines.items()}


def _causes(run: Run) -> list[tuple[str, str, str]]:
    """Return (cause, what happened to the samples, their number), the most frequent first."""
    data = run.summary["data"] if run.summary else {}
    counts = sorted(data.items(), key=lambda entry: -entry[1])
    named = [(*name.partition("/")[::2], count) for name, count in counts if count]
    return [(cause.replace("_", " "), _CAUSES[kind], f"{n:,}") for kind, cause, n in named if kind in _CAUSES]


def _settings(run: Run) -> list[tuple[str, str, bool]]:
    """Return (flag, value, whether it differs from the default)."""
    defaults = vars(TrainConfig())
    return [(option_of(name), _value(value), value != defaults.get(name)) for name, value in run.config.items()]


def _environment(run: Run) -> dict[str, str]:
    values = run.environment | (run.environment.get("packages") or {})
    return {name.replace("_", " "): _value(values[name]) for name in values if name not in ("packages", "command")}


def _median(run: Run, key: str) -> float:
    return median([record[key] for record in run.train if key in record] or [0.0])


def _value(value: object) -> str:
    return redacted(value) if isinstance(value, str) else "–" if value is None else json.dumps(value)
