"""Plant known faults one by one: the tests must find each.

A mutant is one small change of a source file that restates a fault which users of MoE trainers
have reported, with the tests that must fail because of it. They stand in ``mutants/*.toml``, a
file for each package::

    [[mutant]]
    name = "tie-to-the-wrong-expert"
    fault = "Of experts with equal scores, the one with the higher id is taken."
    file = "routing/choice/reference.py"      # below packages/moe-kernels/src/moe_kernels
    old = "..."                               # occurs exactly once in the file
    new = "..."
    tests = ["packages/moe-kernels/tests/test_routing.py::test_any_k_up_to_e_works..."]

The source of the package is copied, changed there, and put first on ``PYTHONPATH``; the working
tree stays as it is. A mutant is *killed* if one of its tests fails, *survived* if none does. It is
*broken* if that says nothing: the old text is not there once, no test runs, the tests fail without
the change, the changed package cannot be imported, another copy of it was imported, or the tests
ran into the time limit.

    python testing/mutants.py [--list] [--only NAME] [--shard 1/4]

Exit code 0 if every mutant is killed, 1 if one is not, 2 for wrong usage.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().with_suffix("")
LIMIT = 300.0
"""Seconds that the tests of one mutant may take. A rank that hangs is ended after 120."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A fault to plant.

    Attributes:
        name: What to call it.
        package: Name of the folder in ``packages``.
        fault: One sentence: what goes wrong.
        file: Path below the source of the package.
        old: Text that occurs exactly once in the file.
        new: What takes its place.
        tests: Ids of tests, of which one must fail.
    """

    name: str
    package: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """Name under which the package is imported."""
        return self.package.replace("-", "_")


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: The fault.
        outcome: "killed", "survived" or "broken".
        reason: The test that failed, or why nothing can be said.
        seconds: With the fault alone, without the run on clean code.
    """

    mutant: Mutant
    outcome: str
    reason: str
    seconds: float


class Tested(NamedTuple):
    """What a run of tests showed.

    Attributes:
        passed: Ids of the tests that ran and passed.
        failed: Ids of those that failed.
        trouble: Why the run says nothing, or "".
    """

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    trouble: str


def read_mutants(folder: Path = DATA) -> list[Mutant]:
    """Return the mutants of every package.

    Raises:
        ValueError: If a name occurs twice, or a mutant lacks something or has something unknown.
    """
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            try:
                tests = tuple(entry.pop("tests"))
                mutants.append(Mutant(package=path.stem, tests=tests, **entry))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path}: {entry.get('name')}: {error}") from error
    twice = [name for name, count in Counter(m.name for m in mutants).items() if count > 1]
    if twice:
        raise ValueError(f"names of mutants must differ, {', '.join(twice)} occur twice")
    return mutants


def plant(text: str, mutant: Mutant) -> str:
    """Return the text with the fault.

    Raises:
        ValueError: If the old text does not occur exactly once, or nothing would change.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"the old text occurs {count} times in {mutant.file}, it must once")
    if mutant.old == mutant.new:
        raise ValueError("old and new text are the same")
    return text.replace(mutant.old, mutant.new)


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs mutants, one at a time.

    Attributes:
        root: The repository.
        limit: Seconds that the tests of one mutant may take.
    """

    root: Path = ROOT
    limit: float = LIMIT

    def judge_all(self, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
        """Say of each mutant what becomes of it, after its package's tests ran on clean code."""
        batches: dict[str, Tested] = {}
        for mutant in mutants:
            if mutant.package not in batches:
                peers = [m for m in mutants if m.package == mutant.package]
                tests = sorted({test for peer in peers for test in peer.tests})
                # One run for all of them: most of the time of a run goes into its start.
                batches[mutant.package] = self._test(mutant, tests, None)
            clean = batches[mutant.package]
            if _unusable(mutant, clean):  # maybe through the tests of another mutant
                clean = self._test(mutant, mutant.tests, None)
            yield self.judge(mutant, clean)

    def judge(self, mutant: Mutant, clean: Tested) -> Verdict:
        """Say what becomes of a mutant.

        Args:
            mutant: The fault.
            clean: What its tests, and maybe others, showed without it.
        """
        try:
            changed = plant(source(self.root, mutant).read_text(encoding="utf-8"), mutant)
        except (OSError, ValueError) as error:
            return Verdict(mutant, "broken", str(error), 0.0)
        if reason := _unusable(mutant, clean):
            return Verdict(mutant, "broken", f"without the fault: {reason}", 0.0)
        since = time.monotonic()
        found = self._test(mutant, mutant.tests, changed)
        seconds = time.monotonic() - since
        if found.trouble:
            return Verdict(mutant, "broken", found.trouble, seconds)
        if found.failed:
            return Verdict(mutant, "killed", found.failed[0], seconds)
        return Verdict(mutant, "survived", "", seconds)

    def _test(self, mutant: Mutant, tests: Sequence[str], changed: str | None) -> Tested:
        """Run tests on a copy of a mutant's package, with its file as ``changed`` if not None."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
            copy, report = Path(directory) / "source", Path(directory) / "report.json"
            original = self.root / "packages" / mutant.package / "src"
            shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
            options = [f"--witness-file={report}", f"--witness-package={mutant.module}", *tests]
            limit = self.limit
            if changed is None:
                limit *= len(tests)
            else:
                (copy / mutant.module / mutant.file).write_text(changed, encoding="utf-8")
                options.append("--exitfirst")
            try:
                code = _run_pytest(self.root, copy, options, limit)
            except OSError as error:  # a machine that others use may be short of processes
                return Tested((), (), f"pytest could not be started: {error}")
            if code is None:
                return Tested((), (), f"no answer within {limit:.0f} s")
            if not report.exists():
                return Tested((), (), f"pytest ended with {code} before it could report")
            seen = json.loads(report.read_text())
        if not Path(seen["origin"]).is_relative_to(copy):
            return Tested((), (), f"{mutant.module} was imported from {seen['origin']}")
        if seen["errors"] and not seen["failed"]:
            return Tested((), (), f"no failure of a test: {seen['errors'][0]}")
        return Tested(tuple(seen["passed"]), tuple(seen["failed"]), "")


def source(root: Path, mutant: Mutant) -> Path:
    """Return the file that a mutant changes."""
    return root / "packages" / mutant.package / "src" / mutant.module / mutant.file


def _unusable(mutant: Mutant, clean: Tested) -> str:
    """Return why a failure of the mutant's tests would say nothing, or ""."""
    if clean.trouble:
        return clean.trouble
    for test in mutant.tests:
        within = tuple(test + more for more in ("[", "::"))
        for name in clean.failed:
            if name == test or name.startswith(within):
                return f"{name} fails"
        if not any(name == test or name.startswith(within) for name in clean.passed):
            return f"{test} runs no test"
    return ""


def _run_pytest(root: Path, copy: Path, options: Sequence[str], limit: float) -> int | None:
    """Run pytest with a copy of a package; return its exit code, or None past the limit."""
    # Without the cache, which would be written into the tree.
    plugins = ["-p", "no:cacheprovider", "-p", "witness"]
    paths = [str(copy), str(DATA), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HYPOTHESIS_PROFILE": "ci",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", f"--rootdir={root}", *plugins, *options],
        cwd=root,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def choose(mutants: Sequence[Mutant], only: Sequence[str], shard: str) -> list[Mutant]:
    """Return the mutants that were asked for.

    Args:
        mutants: All of them.
        only: Names; none stands for all.
        shard: ``i/n``, the i-th of n parts, counted from 1.

    Raises:
        ValueError: If a name is unknown or there is no such part.
    """
    unknown = set(only) - {mutant.name for mutant in mutants}
    if unknown:
        raise ValueError(f"there is no mutant {', '.join(sorted(unknown))}; --list shows them")
    part, _, parts = shard.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--shard must be i/n with 1 <= i <= n, got {shard!r}")
    chosen = [mutant for mutant in mutants if not only or mutant.name in only]
    return chosen[int(part) - 1 :: int(parts)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Plant known faults; the tests must find each.")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="one of them")
    parser.add_argument("--shard", metavar="I/N", default="1/1", help="the I-th of N parts")
    options = parser.parse_args(arguments)
    try:
        mutants = choose(read_mutants(), options.only, options.shard)
    except ValueError as error:
        parser.error(str(error))
    width = max((len(mutant.name) for mutant in mutants), default=0)
    if options.list:
        for mutant in mutants:
            _say(f"{mutant.package:12}  {mutant.name:{width}}  {mutant.fault}")
        return 0
    since, verdicts = time.monotonic(), []
    for verdict in Bench().judge_all(mutants):
        verdicts.append(verdict)
        killed, fault = verdict.outcome == "killed", verdict.mutant.fault
        what = verdict.reason.rpartition("::")[2] if killed else fault
        _say(
            f"{verdict.outcome:8}  {verdict.mutant.name:{width}}  {verdict.seconds:5.1f} s  {what}"
        )
        if verdict.outcome == "broken":
            _say(f"{'':8}  {verdict.reason}")
    count = Counter(verdict.outcome for verdict in verdicts)
    rate = 100 * count["killed"] / max(1, len(verdicts))
    rest = f"{count['survived']} survived, {count['broken']} broken"
    seconds = time.monotonic() - since
    _say(f"{count['killed']} of {len(verdicts)} killed ({rate:.1f} %), {rest}, in {seconds:.0f} s")
    return int(count["killed"] < len(verdicts))


def _say(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
