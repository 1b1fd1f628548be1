"""One or more runs -> one self-contained HTML page: it loads nothing, and its colours follow the reader's system."""

import time
from html import escape
from pathlib import Path
from string import Template

from infcl.report.blocks import (
    data_block,
    environment_block,
    evaluation_block,
    flags_block,
    gallery_block,
    header_block,
    phases_block,
    settings_block,
    summary_block,
)
from infcl.report.charts import Chart, evaluation_charts, train_charts
from infcl.report.drawing import draw_png, draw_svg, legend
from infcl.report.gallery import retrieval_gallery
from infcl.report.records import Run

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
    return f'<p class="note">Over samples seen.</p><div class="charts">{figures}</div>' if charts else ""


def _figure(chart: Chart) -> str:
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    keys = f'<div class="keys">{"".join(map(legend, chart.series))}</div>' if len(chart.series) > 1 else ""
    caption = f"<figcaption><h3>{escape(chart.title)}</h3>{note}{keys}</figcaption>"
    return f'<figure class="card chart">{caption}{draw_svg(chart)}</figure>'
