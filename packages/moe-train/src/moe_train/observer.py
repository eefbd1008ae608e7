"""Everything that a run says of itself while it trains, and where it goes.

``Job`` tells what happens; here it becomes numbers, alarms and words. What costs a wait for the
device is done only where a record is written.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from moe_train.alarms import RouterWatch
from moe_train.config import RunConfig
from moe_train.console import Console
from moe_train.folder import RunFolder
from moe_train.health import router_health
from moe_train.labels import labels
from moe_train.metrics import MetricsLog, read_metrics
from moe_train.profiling import StepProfiler
from moe_train.sinks import Sink, numbers, open_sinks, run_id
from moe_train.trainer import StepResult, Trainer
from moe_train.utilisation import Utilisation


class Observer:
    """Watches one start of a run.

    Args:
        config: The run.
        folder: Its folder.
        trainer: Of this rank, at the step that the run starts or goes on from.
        target: Step at which the run ends.

    Raises:
        RunError: If steps are to be profiled, or replayed, that the run or the recording has not.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, trainer: Trainer, target: int):
        self.config, self.folder, self.trainer = config, folder, trainer
        self.first = trainer.steps_done
        self.leads = trainer.mesh.rank == 0
        self.labels = labels(config.routing)
        self.profiler = StepProfiler(config.log, folder.root, trainer.device)
        self.notes = [note] if (note := self.profiler.check(self.first, target)) else []
        trainer.tape.check(self.first, target)
        c = config.model
        self.watch = RouterWatch(config.log.window, config.log.gerrymander, c.top_k, c.num_experts)
        world = trainer.mesh.plan.world_size
        self.utilisation = Utilisation(config, trainer.device, world)
        self._rows_LE = torch.zeros_like(trainer.load_LE, dtype=torch.int64)
        self._saved = self.first, time.monotonic()
        self._ringing: set[str] = set()
        self._sinks: list[Sink] = []
        self._log: MetricsLog | None = None
        self._console: Console | None = None

    def open(self, log: MetricsLog | None, console: Console) -> None:
        """Begin to write. Forgets the records of steps that are done again."""
        self._log, self._console = log, console
        if log is None:
            return
        log.truncate_after(self.first)
        self.watch.resume(read_metrics(log.path))
        self._sinks = open_sinks(self.config, self.folder.root, self.first)
        world = self.trainer.mesh.plan.world_size
        start = {"kind": "run", "step": self.first, "world_size": world}
        self.write(start | {"run_id": run_id(self.folder.root)})
        for note in [*self.labels, *self.notes]:
            console.say(note)

    def close(self) -> None:
        """Write what was held back."""
        self.profiler.close()
        self.trainer.tape.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def before_step(self) -> None:
        """Say that a step begins."""
        if self.leads:
            self.profiler.before(self.trainer.steps_done + 1)

    def after_step(self, result: StepResult) -> None:
        """Count a step. Does not wait for the device."""
        self.profiler.after(self.trainer.steps_done)
        self._rows_LE += result.count_LE * ~result.overflowed

    def saved(self, step: int) -> None:
        """Say that the checkpoint of a step is safe."""
        self._saved = step, time.monotonic()
        self.write({"kind": "save", "step": step})

    def details(self, result: StepResult, tokens_per_second: float) -> dict[str, Any]:
        """Return what a training record says besides losses. Waits for the device.

        Args:
            result: Of the step.
            tokens_per_second: Of all ranks.
        """
        parts = self.trainer.clock.read()
        if not self.leads:
            return {}
        health = router_health(result, self._rows_LE, self.trainer.mesh.plan.ep)
        self._rows_LE.zero_()
        record = health | {"step": self.trainer.steps_done}
        record |= self.watch.look(record)
        if self.config.log.experts:
            record["load"] = result.load_LE.tolist()
        step, when = self._saved
        record["checkpoint_age_steps"] = self.trainer.steps_done - step
        record["checkpoint_age_seconds"] = round(time.monotonic() - when, 3)
        record["parts"] = {k: round(v, 6) for k, v in parts.items()}
        return record | self.utilisation.of(tokens_per_second) | self._memory()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record everywhere, and ring where it has an alarm that the last one had not."""
        if self.labels:
            record = {**record, "labels": self.labels}
        if self._log is not None:
            self._log.write(record)
        if self._console is None:
            return
        self._ring(record)
        self._console.update(record)
        if record["kind"] in ("train", "eval") and self._sinks:
            values = numbers(record)
            for sink in self._sinks:
                sink.write(record["step"], values)

    def _ring(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "train" or self._console is None:
            return
        alarms = {line.partition(":")[0]: line for line in record.get("alarms", [])}
        for name in sorted(alarms.keys() - self._ringing):
            self._console.say(f"ALARM at step {record['step']}: {alarms[name]}")
        for name in sorted(self._ringing - alarms.keys()):
            self._console.say(f"over at step {record['step']}: {name}")
        self._ringing = set(alarms)

    def _memory(self) -> dict[str, int]:
        device = self.trainer.device
        if device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory_bytes": peak, "memory_reserved_bytes": reserved}
