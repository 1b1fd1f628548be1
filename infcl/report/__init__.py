"""Reports of a run: the summary table, the plot of its loss, and an HTML page.

    records.py   run folder -> records                       summary.py   the summary table for a terminal
    charts.py    records -> curves                           drawing.py   a chart -> SVG text, or a PNG
    gallery.py   retrieval results with images               page.py      everything -> one self-contained HTML file

`python -m infcl.report RUN` writes the page; docs/howto/monitor.md describes it.
"""

from infcl.report.drawing import draw_loss_curve
from infcl.report.records import read_metrics
from infcl.report.summary import summary_table
