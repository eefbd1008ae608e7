"""The metrics of a run: JSON lines that only grow, one record a line.

Kinds of records; each also has ``kind`` and ``step``, the number of updates done:

* ``train``: ``loss`` (nats a token, cross-entropy alone), ``balance_loss``, ``z_loss``,
  ``grad_norm``, ``lr``, ``tokens`` and ``seconds`` (both since the start of the first run),
  ``tokens_per_second``, ``imbalance`` (largest over layers of largest to mean expert load),
  ``entropy`` (nats, per layer), ``load`` (fraction per expert, per layer); since the record before:
  ``skipped`` (updates) and ``unrouted`` (tokens whose scores were not finite).
* ``eval``: ``loss`` (nats a token), ``nats_per_byte`` and ``tokens`` (how many it was measured on);
  of a mixture also ``losses``, by source.
* ``save``: the step was committed.
* ``run``: ``world_size`` and whatever else describes the processes that start at ``step``.

JSON has no NaN and no infinity, so those are written as the strings that stand for them in
JavaScript, and `read_metrics` gives them back as floats. Every line is valid JSON for any reader.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_train.errors import RunError

Record = dict[str, Any]
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(RunError):
    """A file of metrics is damaged."""


class MetricsLog:
    """The file of metrics of one run, open for appending by one process.

    Opening repairs a last line that a crash cut short.

    Args:
        path: The file; it is made, with its directory, if it does not exist.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> log = MetricsLog(path)
        >>> log.write({"kind": "eval", "step": 5, "loss": 2.5, "tokens": 4096})
        >>> log.write({"kind": "eval", "step": 9, "loss": math.inf, "tokens": 4096})
        >>> log.truncate_after(5)
        >>> log.close()
        >>> read_metrics(path)
        [{'kind': 'eval', 'step': 5, 'loss': 2.5, 'tokens': 4096}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        content = path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record with a single write, so that a crash can cut only the last line.

        Raises:
            ValueError: If the record has no ``kind`` or no ``step``.
            OSError: If the disk takes only a part of the line.
        """
        if "kind" not in record or "step" not in record:
            raise ValueError(f"a record needs kind and step, got {sorted(record)}")
        line = json.dumps(_encode(record), allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a run that resumes at ``step`` does again.

        The file is replaced at once: a crash leaves the old or the new one.
        """
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        lines = [json.dumps(_encode(record), allow_nan=False) + "\n" for record in kept]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        temporary.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. Nothing is held back, so a crash before this loses nothing."""
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Return all records of a file, without a last line that is still being written.

    Raises:
        MetricsError: If another line is not a record; the message names file and line.
    """
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["kind"], str) or not isinstance(record["step"], int):
                raise TypeError("kind is a string and step a whole number")
        except (ValueError, TypeError, KeyError) as error:
            raise MetricsError(
                f"{path}:{number} is not a metrics record: {line[:60]!r}; move the file away to "
                "go on without it"
            ) from error
        # Looking is ten times faster than rebuilding the lists of a record.
        odd = b'"NaN"' in line or b'Infinity"' in line
        records.append(_decode(record) if odd else record)
    return records


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) else value
