"""What a person sees of a run: the table at its end, the picture of its loss, and a page with everything.

    records.py   RUN on disk -> what is known of it          summary.py   the closing table of a terminal
    charts.py    records -> which curves are drawn           drawing.py   a chart -> SVG text, or a PNG
    gallery.py   retrieval results with pictures             page.py      all of it -> one self-contained HTML file

`python -m infcl.report RUN [RUN_B ...]` writes the page; docs/howto/monitor.md says what is on it.
"""

from infcl.report.drawing import draw_loss_curve
from infcl.report.records import read_metrics
from infcl.report.summary import summary_table

__all__ = ["draw_loss_curve", "read_metrics", "summary_table"]
