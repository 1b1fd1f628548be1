"""The paper's tables and figures, and the other figures of docs/, rendered from the raw results under docs/results.

    __main__.py   python -m benchmarks.paper --table 1 --figure 4, or --write: every region and plot
    regions.py    documents with marked regions -> the same with the regions' text made anew
    raw.py        reading docs/results
    memory.py     Tables 1 and 2, Figure 1            speed.py     the losses, Table 4, Figure 4, tiling
    accuracy.py   Table 3, Figure 5, gradients        towers.py    steps of whole towers, measured and planned
    draw.py       one style for all plots

Nothing here measures; a cell without a raw result says so.
"""
