"""``moe-train report``: write the report of a run again."""

from dataclasses import dataclass
from pathlib import Path

from moe_train.commands.options import read_options, say
from moe_train.errors import RunError
from moe_train.report import write_report


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """The report of a run.

    Attributes:
        run: The run's folder.
    """

    run: Path


FLAGS = {"": ReportOptions}


def main(argv: list[str]) -> int:
    """Write the page and print where it is."""
    options = read_options(
        ReportOptions, argv, prog="moe-train report", places=("run",),
        about="Write RUN/report.html again from what the run has recorded.",
        examples=("moe-train report runs/main",),
    ).config  # fmt: skip
    if not (options.run / "metrics.jsonl").is_file():
        raise RunError(f"{options.run} holds no run: it has no metrics.jsonl")
    say(str(write_report(options.run)))
    return 0
