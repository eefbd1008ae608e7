"""A trace of some steps, by flag."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from moe_train.config import LogConfig
from moe_train.errors import RunError

_ALLOCATIONS = 1_000_000
_ROWS = 60


class StepProfiler:
    """Profiles the steps that ``log.profile`` names, on one rank.

    Writes ``profile/steps-10-13.json``, a trace for Perfetto or ``chrome://tracing``, and ``.txt``,
    a table of operators by time; with ``log.memory_snapshot`` also ``.pickle``, for torch's memory
    viewer. Names of the parts of layers are those of `moe_train.ranges.part`.

    Args:
        config: What to profile.
        root: The run's folder.
        device: Where the steps are computed.

    Raises:
        RunError: If what is asked for needs a GPU.
    """

    def __init__(self, config: LogConfig, root: Path, device: torch.device):
        for name, asked in (("memory_snapshot", config.memory_snapshot), ("nvtx", config.nvtx)):
            if asked and device.type != "cuda":
                raise RunError(f"log.{name} needs a GPU, and this run is on {device.type}")
        self.steps = config.profile_steps if config.profile else None
        self.device, self.snapshot = device, config.memory_snapshot
        self.folder = root / "profile"
        self._profiler: torch.profiler.profile | None = None

    def check(self, first: int, last: int) -> str | None:
        """Return what to say when the steps are over already.

        Args:
            first: Steps done at the start.
            last: Step at which the run ends.

        Raises:
            RunError: If the run ends before them.
        """
        if self.steps is None:
            return None
        if self.steps[0] > last:
            raise RunError(
                f"log.profile asks for steps {self.steps[0]} to {self.steps[1]}, and this run ends "
                f"at step {last}"
            )
        if self.steps[0] <= first:
            return f"nothing is profiled: step {self.steps[0]} of log.profile is done already"
        return None

    def before(self, step: int) -> None:
        """Start, if the step that begins, counted from 1, is the first to profile."""
        if self.steps is None or step != self.steps[0]:
            return
        if self.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Stop and write, if the step that ended, counted from 1, is the last to profile."""
        if self._profiler is not None and self.steps is not None and step >= self.steps[1]:
            self.close()

    def close(self) -> None:
        """Write what there is, also of a run that ends amid the steps."""
        if self._profiler is None or self.steps is None:
            return
        profiler, self._profiler = self._profiler, None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        stem = self.folder / f"steps-{self.steps[0]}-{self.steps[1]}"
        profiler.export_chrome_trace(f"{stem}.json")
        by = "self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=_ROWS)
        Path(f"{stem}.txt").write_text(table + "\n", encoding="utf-8")
        if self.snapshot:
            torch.cuda.memory._dump_snapshot(f"{stem}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


def marked(config: LogConfig) -> AbstractContextManager[object]:
    """Emit NVTX ranges inside, if ``log.nvtx`` asks for them."""
    return torch.autograd.profiler.emit_nvtx() if config.nvtx else nullcontext()
