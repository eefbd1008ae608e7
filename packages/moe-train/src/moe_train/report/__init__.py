"""The report of a run: one HTML file that needs nothing but itself.

Read in this order: `run_data` (what a run directory holds), `scale` (numbers to places and
words), `line_chart` and `heat_map` (places to SVG), `charts`, `router_charts`, `loads` and
`figures` (what is shown of a run), `page` (all of them on one page).
"""

from moe_train.report.page import write_report

__all__ = ["write_report"]
