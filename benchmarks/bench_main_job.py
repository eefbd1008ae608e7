"""Time the main job as a user runs it: one process from its start to the report.

python benchmarks/bench_main_job.py --out benchmarks/results/main_job.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe_train.metrics import read_metrics

SMOKE = ["--train.steps", "3", "--train.eval-sequences", "4", "--train.sample-bytes", "4"]


def measure(words: list[str]) -> dict:
    """Run the job in a new folder and return what it took and reached."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        start = time.perf_counter()
        command = [sys.executable, "-m", "moe_train", "run", "--run-dir", str(folder), *words]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
        return {
            "seconds": round(seconds, 1),
            "training_seconds": round(records[-1]["seconds"], 1),
            "steps": records[-1]["step"],
            "tokens": records[-1]["tokens"],
            "validation_loss": json.loads((folder / "result.json").read_text())["validation_loss"],
            "references": json.loads((folder / "references.json").read_text()),
            "report_bytes": (folder / "report.html").stat().st_size,
            "environment": json.loads((folder / "environment.json").read_text()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="three steps, to see that it works")
    parser.add_argument("--out", type=Path, help="write the results here")
    arguments, words = parser.parse_known_args()
    result = measure([*(SMOKE if arguments.smoke else []), *words])
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
