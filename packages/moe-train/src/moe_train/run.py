"""The main job: find the run or begin it, train, validate, save, and report.

Read ``run`` first: it is the life of a run in order. Everything that can be refused is refused in
``prepare.py``, before any work.
"""

import time
from contextlib import closing, nullcontext
from hashlib import sha256
from typing import Any

import torch
from moe_ckpt import DamageError
from moe_parallel import Mesh, check_same

from moe_train.checkpoints import Checkpoints
from moe_train.config import RunConfig
from moe_train.console import Console
from moe_train.corpus import reference_losses
from moe_train.counts import Counts
from moe_train.determinism import determinism
from moe_train.environment import environment
from moe_train.errors import RunError
from moe_train.load_config import to_toml
from moe_train.metrics import MetricsLog
from moe_train.observer import Observer
from moe_train.parameters import param_specs
from moe_train.prepare import Prepared, prepare
from moe_train.profiling import marked
from moe_train.ranks import RankInfo, join, pick_device
from moe_train.report import write_report
from moe_train.resume import check_continuation, find_state, target_step
from moe_train.sample import generate
from moe_train.stop import StopRequest
from moe_train.trainer import StepResult, Trainer
from moe_train.votes import Votes

KEPT = 4
"""Steps to remember; more are never repeated at once."""
MAX_SKIPPED = 20
"""Steps in a row with a gradient that is not finite, after which a run gives up."""


def run(config: RunConfig, info: RankInfo) -> None:
    """Train for ``config.train.steps`` steps more, from wherever the run in ``run_dir`` is."""
    prepared = prepare(config, info.world_size)
    device = pick_device(config, info)
    folder = prepared.folder.locked() if info.rank == 0 else nullcontext()
    with folder, determinism(config.train.deterministic):
        if info.rank == 0 and find_state(prepared.folder) != prepared.state:
            raise RunError(f"another process has just saved in {config.run_dir}; start again")
        join(info, device)
        mesh = Mesh.create(prepared.plan)
        check_same(_start_of(config, prepared), "the start of the run", mesh)
        trainer = Trainer(config, mesh, device, prepared.data.train, prepared.data.validation)
        Job(config, prepared, trainer).go()


def _start_of(config: RunConfig, prepared: Prepared) -> str:
    """Return what ranks must agree on, short enough to print when they do not."""
    settings = sha256(repr(config).encode()).hexdigest()[:12]
    found = "no checkpoint" if prepared.state is None else f"step {prepared.state['steps_done']}"
    return f"settings {settings}, text {prepared.data.digest[:12]}, {found}"


class Job:
    """One start of a run, from the step it finds to the step where it ends.

    Args:
        config: The run.
        prepared: What ``prepare`` found.
        trainer: Of this rank.
    """

    def __init__(self, config: RunConfig, prepared: Prepared, trainer: Trainer):
        self.config, self.prepared, self.trainer = config, prepared, trainer
        self.folder = prepared.folder
        self.leads = trainer.mesh.rank == 0
        self.seconds, self.tokens = 0.0, 0
        self.checkpoints = Checkpoints(self.folder, trainer, prepared.data)
        self.passed_over: list[str] = []
        self.changes: list[str] = []
        # Counted on the device and read when a record is written, so that no step waits.
        self.counts = Counts(*torch.zeros(5, dtype=torch.int64, device=trainer.device))

    def go(self) -> None:
        """Train to the end, or until somebody asks to stop; then leave everything on disk."""
        self.target = self._continue()
        first, self.logged = self.trainer.steps_done, self.tokens
        self.observer = Observer(self.config, self.folder, self.trainer, self.target)
        log = MetricsLog(self.folder.metrics) if self.leads else nullcontext()
        with (
            StopRequest().listening() as stop,
            Console(self.target, first, enabled=self.leads) as self.console,
            log as self.log,
            closing(self.observer),
            marked(self.config.log),
            self.checkpoints,
            self.trainer.exchange,
        ):
            self._introduce()
            self.observer.open(self.log, self.console)
            stopped = self._train(stop)
            self._finish(stopped, stop)

    def _continue(self) -> int:
        """Take over the newest checkpoint that is whole. Returns the step to train to."""
        steps = self.config.train.steps
        if self.prepared.state is None:
            return target_step(None, steps)
        try:
            loaded = self.checkpoints.load()
        except DamageError as error:
            raise RunError(
                f"no checkpoint in {self.folder.checkpoints} is whole: {error}. To begin a new "
                "run, set run_dir to another folder or remove this one"
            ) from error
        # What was loaded may be older than what `prepare` has looked at.
        self.changes = check_continuation(loaded.state, self.config, self.prepared.data.digest)
        self.seconds, self.tokens = loaded.state["seconds"], loaded.state["tokens"]
        self.passed_over = [f"{s.path}: {s.reason}" for s in loaded.skipped]
        return target_step(loaded.state, steps)

    def _train(self, stop: StopRequest) -> bool:
        """Take steps to the target. Returns whether somebody stopped it before."""
        c, trainer, votes = self.config.train, self.trainer, Votes(self.trainer.mesh)
        first = trainer.steps_done
        if c.eval_first and first == 0:
            self._evaluate()
        since, stopping = time.monotonic(), False
        before = {first: self.tokens}  # of the last steps, as some may have to be repeated
        while trainer.steps_done < self.target:
            self.observer.before_step()
            result = trainer.step()
            self.observer.after_step(result)
            step = trainer.steps_done
            self.tokens = before[step - 1] + trainer.step_tokens
            before[step] = self.tokens
            before.pop(step - KEPT, None)
            self.counts = self.counts.after(result)
            stopped, failed = votes.cast([stop.signal is not None, self.checkpoints.poll()])
            if failed:
                self.checkpoints.settle()
                raise RunError("a checkpoint could not be saved on another rank")
            self._record_saves()
            stopping = stopping or stopped
            ends = stopping or step == self.target
            saves = ends or _due(step, c.save_every) or step - first == c.save_first
            logs = saves or step % c.log_every == 0
            validates = not ends and _due(step, c.eval_every)
            if (logs or validates) and not trainer.settle():
                continue  # it went back to a step that has to be repeated
            if (logs or validates) and trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)  # what is queued takes time of these steps
            if logs:
                self._log(result, time.monotonic() - since)
                since = time.monotonic()
            paused = time.monotonic()
            if validates:
                self._evaluate()
            if saves:
                self._save()
            since += time.monotonic() - paused
            if ends:
                break
        votes.settle()
        return trainer.steps_done < self.target

    def _log(self, result: StepResult, seconds: float) -> None:
        """Record a step, and what happened since the record before. Waits for the device."""
        trainer = self.trainer
        in_a_row, skipped, spikes, repeated, unrouted = torch.stack(self.counts).tolist()
        if in_a_row >= MAX_SKIPPED:
            raise RunError(
                f"the gradient was not finite in {in_a_row} steps in a row, up to step "
                f"{self.trainer.steps_done}; none of them changed the weights. A smaller "
                "optimizer.lr may help"
            )
        self.counts = Counts(self.counts.in_a_row, *torch.zeros_like(torch.stack(self.counts[1:])))
        self.seconds += seconds
        for note in trainer.exchange.take_notes():
            self.console.say(f"step {trainer.steps_done}: {note}")
        tokens, self.logged = self.tokens - self.logged, self.tokens
        load_LE, rate_of_tokens = result.load_LE, tokens / max(seconds, 1e-9)
        self.observer.write(
            {
                "kind": "train",
                "step": trainer.steps_done,
                "loss": float(result.loss),
                "balance_loss": float(result.balance_loss),
                "z_loss": float(result.z_loss),
                "grad_norm": float(result.grad_norm),
                "lr": trainer.learning_rate(trainer.steps_done - 1),
                "skipped": skipped,
                "spikes": spikes,
                "repeated": repeated,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "tokens_per_second": rate_of_tokens,
                "imbalance": float(load_LE.max()) * load_LE.shape[1],
                "entropy": result.entropy_L.tolist(),
                "unrouted": unrouted,
            }
            | self.observer.details(result, rate_of_tokens)
        )

    def _evaluate(self) -> float:
        data, trainer, step = self.prepared.data, self.trainer, self.trainer.steps_done
        loss, tokens, losses = self._validate()
        record: dict[str, Any] = {"kind": "eval", "step": step, "loss": loss, "tokens": tokens}
        record["nats_per_byte"] = loss / data.bytes_per_token
        each = ", ".join(f"{name} {one:.4f}" for name, one in losses.items())
        said = data.describe(loss) + (f" ({each})" if len(losses) > 1 else "")
        if self.config.train.eval_ema and trainer.averages is not None:
            with trainer.averages.in_use():
                record["ema_loss"], _, _ = self._validate()
            said += f"; with averaged weights {data.describe(record['ema_loss'])}"
        self.observer.write(record | ({"losses": losses} if len(losses) > 1 else {}))
        if self.leads:
            self.console.say(f"step {step}: validation loss {said}")
        return loss

    def _validate(self) -> tuple[float, int, dict[str, float]]:
        """Return the mean loss over all held-out sets, its tokens, and the loss of each set."""
        data = self.prepared.data
        sets = {name: self.trainer.evaluate(source) for name, source in data.held_out.items()}
        losses = {name: loss for name, (loss, _) in sets.items()}
        return data.mean(losses), sum(tokens for _, tokens in sets.values()), losses

    def _save(self) -> None:
        self.checkpoints.save(target=self.target, seconds=self.seconds, tokens=self.tokens)
        self._record_saves()

    def _record_saves(self) -> None:
        for step in self.checkpoints.take_committed():
            self.observer.saved(step)

    def _introduce(self) -> None:
        """Say what was found and write down what is known at the start."""
        if not self.leads:
            return
        p, c, say = self.prepared, self.config, self.console.say
        data, mesh = p.data, self.trainer.mesh.plan
        world, steps = mesh.world_size, self.target - self.trainer.steps_done
        for line in data.about:
            say(line)
        references = {} if data.text is None else reference_losses(data.text)
        for name, loss in references.items():
            say(f"reference: a {name} table reaches {loss:.2f} nats a byte on the held-out files")
        parameters = sum(
            spec.parameter.numel() * (mesh.ep if spec.is_expert else 1)
            for spec in param_specs(self.trainer.model)
        )
        say(mesh.describe() if world > 1 else f"1 rank on {self.trainer.device.type}")
        if p.state is None:
            where = f"no checkpoint in {c.run_dir}: beginning a new run of {steps} steps"
        else:
            done = self.trainer.steps_done
            where = f"found step {done} in {c.run_dir}: continuing to step {self.target}"
        say(f"{parameters:,} parameters; {where}")
        for damaged in self.passed_over:
            say(f"passed over {damaged}")
        for change in self.changes:
            say(f"changed since that checkpoint: {change}")
        self.folder.write_text("config.toml", to_toml(c))
        self.folder.write_json("references.json", references)
        self.folder.write_json("environment.json", environment(self.trainer.device, world))

    def _finish(self, stopped: bool, stop: StopRequest) -> None:
        """Validate, write a sample and the report. A stopped run is left as it is, reported."""
        step, say = self.trainer.steps_done, self.console.say
        if stopped:
            self._settle()
            if self.leads:
                name = stop.signal.name if stop.signal else "a signal to another rank"
                report = write_report(self.folder.root)
                say(f"stopped by {name} after step {step} of {self.target}; saved")
                say(f"run the same command again to go on; report: {report}")
            return
        loss = self._evaluate()
        length = self.config.train.sample_bytes
        data, trainer = self.prepared.data, self.trainer
        sample = (
            trainer.repeated(lambda: generate(trainer, length, data.tokenizer)) if length else ""
        )
        self._settle()
        if not self.leads:
            return
        self.folder.write_text("sample.txt", sample)
        result: dict[str, Any] = {"step": step, "validation_loss": loss, "seconds": self.seconds}
        result["nats_per_byte"] = loss / data.bytes_per_token
        if self.observer.labels:
            result["labels"] = self.observer.labels
        self.folder.write_json("result.json", result)
        report = write_report(self.folder.root)
        if sample:
            say(f"a sample:\n{sample}")
        say(f"validation loss {data.describe(loss)} after {step} steps")
        say(f"checkpoints: {self.folder.checkpoints}")
        say(f"report: {report}")

    def _settle(self) -> None:
        """Wait until the last checkpoint is safe."""
        self.checkpoints.settle()
        self._record_saves()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
