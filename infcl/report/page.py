"""One or more runs -> one self-contained HTML page: it loads nothing, and its colours follow the reader's system.

Every text from outside is escaped.
"""

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template

from infcl.config import TrainConfig, counted
from infcl.report.charts import Chart, evaluation_charts, train_charts
from infcl.report.drawing import draw_png, draw_svg, legend
from infcl.report.gallery import Gallery, Item, Result, retrieval_gallery
from infcl.report.records import Run
from infcl.report.summary import skipped_by_cause

PHASES = ("data", "encode", "loss", "replay", "step")
_SHARES = {"r1": "R@1", "r5": "R@5", "r10": "R@10", "top1": "top-1", "top5": "top-5"}
_CAUSES = {"skipped": "replaced while reading", "index": "left out by the index", "noted": "used, with a remark"}
_HERE = Path(__file__).parent


def write_report(runs: list[Run], out: Path) -> Path:
    """Write `out`/index.html (compare_B.html for runs A, B) and a PNG per chart; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    groups = train_charts(runs)
    evaluations = evaluation_charts(runs)
    stem = "index" if len(runs) == 1 else "compare_" + "_".join(run.name for run in runs[1:])
    for chart in [*(chart for charts in groups.values() for chart in charts), *evaluations]:
        draw_png(chart, out / (f"{chart.name}.png" if len(runs) == 1 else f"{stem}_{chart.name}.png"))
    page = out / f"{stem}.html"
    page.write_text(render_page(runs, groups, evaluations), encoding="utf-8")
    return page


def render_page(runs: list[Run], groups: dict[str, list[Chart]], evaluations: list[Chart]) -> str:
    after = {"Speed and memory": phases_block(runs)}
    blocks = [header_block(runs), summary_block(runs)]
    if len(runs) > 1:
        blocks.append(_section("Flags that differ", flags_block(runs)))
    for title, charts in groups.items():
        blocks.append(_section(title, _charts(charts) + after.get(title, "")))
    blocks += [
        _section("Evaluation", _charts(evaluations) + evaluation_block(runs)),
        *(_section(_of("Retrieval", run, runs), gallery_block(retrieval_gallery(run))) for run in runs),
        _section("Data", data_block(runs)),
        _section("Settings", "".join(settings_block(run, runs) for run in runs) + environment_block(runs)),
        f"<footer>Written by infcl.report on {time.strftime('%Y-%m-%d %H:%M')}.</footer>",
    ]
    return Template((_HERE / "page.html").read_text()).substitute(
        title=escape(" vs ".join(run.name for run in runs)),
        style=(_HERE / "style.css").read_text(),
        script=(_HERE / "read_out.js").read_text(),
        body="\n".join(blocks),
    )


def _of(title: str, run: Run, runs: list[Run]) -> str:
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _charts(charts: list[Chart]) -> str:
    figures = "".join(_figure(chart) for chart in charts)
    return f'<div class="charts">{figures}</div>' if charts else ""


def _figure(chart: Chart) -> str:
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    keys = f'<div class="keys">{"".join(map(legend, chart.series))}</div>' if len(chart.series) > 1 else ""
    caption = f"<figcaption><h3>{escape(chart.title)}</h3>{note}{keys}</figcaption>"
    return f'<figure class="card chart">{caption}{draw_svg(chart)}</figure>'


# ---- the parts of the page that are not curves: runs -> HTML ----


def header_block(runs: list[Run]) -> str:
    if len(runs) > 1:
        return f'<h1 style="margin-bottom:14px">{escape(" vs ".join(run.name for run in runs))}</h1>'
    (run,) = runs
    state = '<span class="state">finished</span>' if run.finished else '<span class="state open">not finished</span>'
    env, config = run.environment, run.config
    facts = [
        config.get("model"),
        f"loss {config['loss']}" if "loss" in config else None,
        _hardware(env) if "world_size" in env else None,
        f"commit {env['commit'][:12]}" if env.get("commit") else None,
        f"started {env['started'][:16].replace('T', ' ')}" if "started" in env else None,
    ]
    return f'<h1>{escape(run.name)}</h1><p class="soft">{state} {escape(" · ".join(f for f in facts if f))}</p>'


def headline(run: Run) -> dict[str, str]:
    """The few numbers that answer "how did it go"."""
    summary, rows = run.summary or {}, {}
    for key, label in (
        ("zero_shot_top1", "zero-shot top-1"),
        ("image_to_text_r1", "image→text recall@1"),
        ("text_to_image_r1", "text→image recall@1"),
    ):
        if summary.get(key) is not None:
            rows[label] = f"{summary[key]:.1%}"
    tail = [record["loss"] for record in run.train[-max(1, len(run.train) // 20) :] if "loss" in record]
    rows["loss, mean of the last 5%"] = f"{sum(tail) / len(tail):.4f}" if tail else "not finite"
    rows["steps"] = f"{run.last['step']:,}"
    rows["samples seen"] = f"{run.last['samples_seen']:,}"
    rows["samples/s, median"] = f"{_median(run, 'samples_per_second'):,.0f}"
    if any("mfu" in record for record in run.train):
        rows["MFU, median"] = f"{_median(run, 'mfu'):.1%}"
    if any("data_wait" in record for record in run.train):
        rows["data wait, median"] = f"{_median(run, 'data_wait'):.1%}"
    if any(record.get("text_share", 1) < 1 for record in run.train):
        rows["caption tokens encoded, of padded captions"] = f"{_median(run, 'text_share'):.1%}"
    peak = summary.get("peak_memory_mb") or max(record.get("peak_memory_mb", 0) for record in run.train)
    rows["peak memory per rank"] = f"{peak:,.0f} MiB"
    if run.finished:
        rows["training time"] = _duration(summary["train_seconds"])
        counts = skipped_by_cause(summary["data"])
        for label, group in (("samples skipped", "skipped/"), ("samples left out by the index", "index/")):
            rows[label] = f"{sum(n for name, n in counts.items() if name.startswith(group)):,}"
    rows["steps skipped"] = f"{run.last.get('skipped_steps', 0):,.0f}"
    return rows


def summary_block(runs: list[Run]) -> str:
    if len(runs) == 1:
        facts = headline(runs[0]).items()
        tiles = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts)
        columns = max((6, 5, 4), key=lambda count: (len(facts) - 1) % count)  # no tile stands alone in the last row
        return f'<div class="tiles" style="--columns: {columns}">{"".join(tiles)}</div>'
    columns = [headline(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name, "–") for column in columns]) for name in names]
    rows = [(name, values + [_difference(values[0], value) for value in values[1:]]) for name, values in rows]
    heads = [f"{run.name} − {runs[0].name}" for run in runs[1:]]
    return _card(_run_table(runs, rows, heads))


def _difference(first: str, other: str) -> str:
    """'1,200' and '1,260' -> '+60 (+5.0%)'; of percentages in points; nothing for what is no number."""
    numbers = [re.fullmatch(r"([\d,]+(?:\.\d+)?)(%| MiB)?", text) for text in (first, other)]
    if not numbers[0] or not numbers[1]:
        return ""
    if first == other:
        return "same"
    before, after = (float(number[1].replace(",", "")) for number in numbers if number)
    digits = len(other.rstrip("% MiB").partition(".")[2])
    change = f"{after - before:+,.{digits}f}"
    if numbers[0][2] == "%":
        return f"{change} points"
    return change + (f" ({after / before - 1:+.1%})" if before else "")


def _hardware(environment: dict) -> str:
    """'8 ranks, NVIDIA H200', '2 ranks on a CPU (x86_64)'."""
    device = environment["device"]
    where = f" on a CPU ({device})" if device in ("x86_64", "aarch64", "arm64", "AMD64", "") else f", {device}"
    return counted(environment["world_size"], "rank") + where


def flags_block(runs: list[Run]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    rows = []
    for name in names:
        values = [json.dumps(run.config.get(name)) for run in runs]
        if len(set(values)) > 1 and name not in ("name", "logs", "resume", "overwrite"):
            rows.append((_option(name), [_value(run.config.get(name)) for run in runs]))
    return _card(_run_table(runs, rows) if rows else '<p class="note">None: the same flags.</p>')


def phases_block(runs: list[Run]) -> str:
    """Median milliseconds of each phase of a step, as a bar per run."""
    bars = []
    for run in runs:
        times = {phase: _median(run, f"seconds_{phase}") for phase in PHASES}
        total = sum(times.values())
        if not total:
            continue
        parts = "".join(f'<i class="b{i}" style="flex:{t / total:.4f}"></i>' for i, t in enumerate(times.values()))
        keys = "".join(
            f'<span><i class="dot b{i}"></i>{phase} {1000 * t:,.1f} ms ({t / total:.0%})</span>'
            for i, (phase, t) in enumerate(times.items())
        )
        name = f"{escape(run.name)}: " if len(runs) > 1 else ""
        bars.append(
            f"<h3>{name}Where a step's {1000 * total:,.0f} ms go</h3>"
            f'<div class="bar">{parts}</div><div class="phases">{keys}</div>'
        )
    return f'<div class="card" style="margin-top:14px">{"<br>".join(bars)}</div>' if bars else ""


def evaluation_block(runs: list[Run]) -> str:
    """The last evaluation of each kind, a line per direction or task."""
    last = [
        {line: text for kind, records in run.evaluations.items() for line, text in _results(kind, records[-1]).items()}
        for run in runs
    ]
    names = list(dict.fromkeys(name for column in last for name in column))
    if not names:
        return '<p class="note">Not evaluated: give --val-data or --zeroshot-data.</p>'
    table = _run_table(runs, [(name, [column.get(name, "–") for column in last]) for name in names])
    return f'<div class="card" style="margin-top:14px">{table}</div>'


def data_block(runs: list[Run]) -> str:
    blocks = []
    for run in runs:
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        if run.summary is None:
            bad = run.last.get("skipped_samples", 0)
            blocks.append(f'{name}<p class="note">{bad:,} samples skipped so far; causes are counted at the end.</p>')
            continue
        data = run.summary["data"]
        rows = "".join(
            f"<tr><td>{escape(cause.partition('/')[2].replace('_', ' '))}</td>"
            f'<td>{_CAUSES[cause.partition("/")[0]]}</td><td class="number">{n:,}</td></tr>'
            for cause, n in sorted(data.items(), key=lambda entry: -entry[1])
            if n and cause.partition("/")[0] in _CAUSES
        )
        used = f'<p class="note">{data.get("samples", 0):,} samples read since the last start; '
        if rows:
            head = '<tr><th>cause</th><th>what happened</th><th class="number">samples</th></tr>'
            blocks.append(f"{name}<table><thead>{head}</thead><tbody>{rows}</tbody></table>")
        else:
            blocks.append(f"{name}{used}none was skipped, none left out.</p>")
    return _card("".join(blocks))


def gallery_block(gallery: Gallery | str) -> str:
    if isinstance(gallery, str):
        return _card(f'<p class="note">{escape(gallery)}</p>')
    note = (
        f"Queries are spread evenly over the validation data, not chosen; candidates are {gallery.candidates:,} of its "
        "samples. A frame or a tick marks the right answer; the number is the cosine."
    )
    texts = "".join(_text_query(result) for result in gallery.text_to_image)
    images = "".join(_image_query(result) for result in gallery.image_to_text)
    return (
        f'<p class="note" style="margin-bottom:12px">{note}</p><div class="columns">'
        f'<div class="card"><h3>A caption finds pictures</h3>{texts}</div>'
        f'<div class="card"><h3>A picture finds captions</h3>{images}</div></div>'
    )


def settings_block(run: Run, runs: list[Run]) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    rows = "".join(
        f'<tr><th>{_option(name)}</th><td class="{"changed" if _differs(value, defaults.get(name)) else ""}">'
        f"<code>{escape(_value(value))}</code></td></tr>"
        for name, value in run.config.items()
    )
    title = f"All flags of {escape(run.name)}" if len(runs) > 1 else "All flags"
    table = f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div>'
    return _card(f"<details><summary>{title} (bold: not the default)</summary>{table}</details>")


def environment_block(runs: list[Run]) -> str:
    flat = []
    for run in runs:
        facts = {k: v for k, v in run.environment.items() if k not in ("packages", "command")}
        flat.append(facts | (run.environment.get("packages") or {}))
    names = list(dict.fromkeys(name for facts in flat for name in facts))
    table = _run_table(runs, [(name.replace("_", " "), [_value(facts.get(name)) for facts in flat]) for name in names])
    commands = "".join(
        f"<p><code>{escape(' '.join(run.environment['command']))}</code></p>"
        for run in runs
        if run.environment.get("command")
    )
    return _card(f"<details open><summary>Environment</summary>{commands}{table}</details>")


def _text_query(result: Result) -> str:
    def cell(item: Item) -> str:
        right = "right" if item.right else ""
        return f'<div class="{right}"><img src="{item.image}" alt="">{item.score:.2f}</div>'

    return (
        f'<div class="result"><div class="query">“{escape(result.query.text or "")}” {_rank(result)}</div>'
        f'<div class="pictures">{"".join(map(cell, result.found))}</div></div>'
    )


def _image_query(result: Result) -> str:
    def line(item: Item) -> str:
        tick, right = (" ✓", ' class="right"') if item.right else ("", "")
        return f"<li{right}>{escape(item.text or '')}{tick} <span>{item.score:.2f}</span></li>"

    return (
        f'<div class="result with-picture"><div><img src="{result.query.image}" alt=""></div>'
        f"<div><ol>{''.join(map(line, result.found))}</ol>{_rank(result)}</div></div>"
    )


def _rank(result: Result) -> str:
    return "" if result.rank <= len(result.found) else f'<span class="rank">its own is at rank {result.rank:,}</span>'


def _results(kind: str, record: dict) -> dict[str, str]:
    """{"image→text": "R@1 41.8% · R@5 96.1% · ...", "zero-shot": "top-1 90.0% · ..."} of one evaluation."""
    lines: dict[str, list[str]] = {}
    for key, value in record.items():
        if key in ("kind", "step", "samples_seen"):
            continue
        line, name = kind.replace("_", "-"), key
        for direction in ("image_to_text", "text_to_image"):
            if key.startswith(direction + "_"):
                line, name = direction.replace("_to_", "→"), key.removeprefix(direction + "_")
        share = name in _SHARES
        text = f"{value:.1%}" if share else f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"
        lines.setdefault(line, []).append(f"{_SHARES.get(name, name.replace('_', ' '))} {text}")
    return {line: " · ".join(parts) for line, parts in lines.items()}


def _run_table(runs: list[Run], rows: list[tuple[str, list[str]]], more: Sequence[str] = ()) -> str:
    """Rows of a label and a value per run; heads with the runs' colours where there are several, and of `more`."""
    names = [f'<i class="dot b{i % 6}"></i>{escape(run.name)}' for i, run in enumerate(runs)] + [*map(escape, more)]
    head = f"<thead><tr><th></th>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>" if len(runs) > 1 else ""
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<div class="scroll"><table class="facts">{head}<tbody>{body}</tbody></table></div>'


def _card(body: str) -> str:
    return f'<div class="card" style="margin-bottom:14px">{body}</div>'


def _median(run: Run, key: str) -> float:
    return median([record[key] for record in run.train if key in record] or [0.0])


def _differs(value: object, default: object) -> bool:
    return value not in (default, {}) if default is dataclasses.MISSING else value != default


def _option(name: str) -> str:
    return escape("--" + name.replace("_", "-"))


def _value(value: object) -> str:
    return value if isinstance(value, str) else "–" if value is None else json.dumps(value)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"
