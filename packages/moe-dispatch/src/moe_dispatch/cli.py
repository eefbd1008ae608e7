"""``moe-dispatch``: what works on this machine, and what an exchange would need."""

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from moe_dispatch.doctor.report import examine
from moe_dispatch.plan import RowPlan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if versions of NVSHMEM do not fit together."""
    parser = argparse.ArgumentParser(prog="moe-dispatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what works on this machine")
    doctor.add_argument("--json", action="store_true", help="for programs")
    plan = commands.add_parser("plan", help="say how many bytes each rank needs")
    for name, default in (
        ("world-size", None), ("num-experts", None), ("max-tokens", None), ("top-k", None),
        ("dim", None),
    ):  # fmt: skip
        plan.add_argument(f"--{name}", type=int, required=True, default=default)
    plan.add_argument("--dtype", default="bfloat16")
    plan.add_argument("--overflow", default="exact")
    plan.add_argument("--capacity-factor", type=float)
    plan.add_argument("--dedup", action="store_true")
    plan.add_argument("--combine", default="pull")
    plan.add_argument("--wire", default="plain")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return _doctor(given.json)
    return _plan(parser, given)


def _doctor(as_json: bool) -> int:
    report = examine()
    if as_json:
        facts = report._asdict()
        facts["heaps"] = {kind: found._asdict() for kind, found in report.heaps.items()}
        _say(json.dumps(facts, indent=1))
    else:
        _say(report.text())
    return int(bool(report.refusal))


def _plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    options = {k: v for k, v in vars(given).items() if k not in {"command", "dtype"}}
    try:
        plan = RowPlan(dtype=getattr(torch, given.dtype, given.dtype), **options)
    except ValueError as error:
        parser.error(str(error))
    memory = plan.memory()
    _say(f"{plan.capacity} rows for the experts of a rank, of at most {plan.hard_bound}")
    for name, count in (*memory._asdict().items(), ("one layer in flight", memory.layer)):
        _say(f"{name:20} {count / 2**20:12.1f} MiB")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
