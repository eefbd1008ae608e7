"""The folder of a run: what is in it, who may write to it, and what is found there.

::

    run_dir/
      config.toml        the resolved configuration of the last start
      environment.json   machine and versions of the last start
      references.json    losses of tables of counts on the same held-out text
      metrics.jsonl      one record a line, over all starts
      checkpoints/       written by moe-ckpt, see its FORMAT.md
      sample.txt         text generated at the end of the last run
      result.json        last validation
      run_id             name of the run for trackers, the same over all starts
      tensorboard/       events, with log.tensorboard
      profile/           traces, with log.profile
      report.html        all of this, to look at
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_train.errors import RunError
from moe_train.metrics import read_metrics


class RunFolder:
    """Paths of a run, and the right to write them.

    Args:
        root: The folder. It is made if it does not exist.

    Raises:
        RunError: If files cannot be made there.
    """

    def __init__(self, root: Path):
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.jsonl"
        probe = root / f".probe-{os.getpid()}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            # A whole block, so that a full disk is found now and not at the first checkpoint.
            probe.write_bytes(bytes(4096))
            probe.unlink()
        except OSError as error:
            raise RunError(f"run_dir {root} cannot be written: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run at a time.

        Raises:
            RunError: If another process holds it.
        """
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    f"another process is running in {self.root}; wait for it, or set run_dir"
                ) from error
            yield

    def write_text(self, name: str, text: str) -> None:
        """Replace a file as a whole."""
        partial = self.root / f".{name}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.root / name)
        except OSError as error:  # a full disk is reported without the name of the file
            raise OSError(error.errno, error.strerror, str(self.root / name)) from error

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file as a whole."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def saved_steps(self) -> list[int]:
        """Return the steps that the metrics say were saved, whether they are still there or not.

        Raises:
            MetricsError: If the file is damaged.
        """
        if not self.metrics.exists():
            return []
        records = read_metrics(self.metrics)
        return [r["step"] for r in records if r["kind"] == "save"]
