"""``moe-train doctor``: what this machine can do, and what it lacks."""

from dataclasses import dataclass
from pathlib import Path

from moe_train.commands.options import read_options, say, say_json
from moe_train.doctor import BAD, GOOD, LACKS, exchanges, extras, hardware, software, system


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What to look at.

    Attributes:
        run_dir: Where a run would write.
        quick: Do not try each way in which ranks share memory, which takes seconds.
        json: Print JSON.
    """

    run_dir: Path = Path("runs/main")
    quick: bool = False
    json: bool = False


FLAGS = {"": DoctorOptions}


def main(argv: list[str]) -> int:
    """Print what was found. Returns 1 if something would stop a run."""
    options = read_options(
        DoctorOptions, argv, prog="moe-train doctor",
        about="Say what this machine can do and what it lacks. Exits with 1 if something would "
        "stop a run here. Nothing is changed.",
        examples=("moe-train doctor", "moe-train doctor --quick --json"),
    ).config  # fmt: skip
    sections = {
        "software": software(),
        "hardware": hardware(),
        "system": system(options.run_dir),
        "extras": extras(),
    }
    if not options.quick:
        sections["exchange"] = exchanges()
    every = [finding for findings in sections.values() for finding in findings]
    counts = {state: sum(f.state == state for f in every) for state in (GOOD, LACKS, BAD)}
    if options.json:
        rows = {name: [f._asdict() for f in found] for name, found in sections.items()}
        say_json({"counts": counts, **rows})
        return int(counts[BAD] > 0)
    for name, findings in sections.items():
        say(f"{name}\n" + "\n".join(f"  {finding.text()}" for finding in findings) + "\n")
    verdict = "a run can start here" if not counts[BAD] else "what is bad would stop a run"
    say(f"{counts[GOOD]} good, {counts[LACKS]} lacking, {counts[BAD]} bad: {verdict}")
    return int(counts[BAD] > 0)
