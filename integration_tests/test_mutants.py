"""The session of mutants tells apart what tests find, what they miss and what says nothing."""

from dataclasses import replace
from pathlib import Path

import mutants
import pytest
from mutants import Bench, Mutant, choose, read_mutants

SOURCE = """
def double(x):
    return 2 * x


def hundred():
    return 50 + 50
"""
TESTS = """
import toy


def test_double():
    assert toy.double(3) == 6


def test_that_fails():
    assert toy.double(3) == 7


def test_that_waits():
    import time
    while toy.double(3) != 6:
        time.sleep(0.1)
"""
FAULT = Mutant(
    name="fault", package="toy", fault="", file="__init__.py", old="2 * x", new="3 * x",
    tests=("packages/toy/tests/test_toy.py::test_double",),
)  # fmt: skip
OF_THE_FILE = "packages/toy/tests/test_toy.py::"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    package = tmp_path / "packages" / "toy"
    (package / "src" / "toy").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "toy" / "__init__.py").write_text(SOURCE)
    (package / "tests" / "test_toy.py").write_text(TESTS)
    return Bench(tmp_path, limit=60)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, "killed", "test_double"),
        ({"old": "50 + 50", "new": "50 + 51"}, "survived", ""),
        ({"old": "3 * x"}, "broken", "occurs 0 times"),
        ({"old": "50"}, "broken", "occurs 2 times"),
        ({"new": "2 * x"}, "broken", "are the same"),
        ({"new": "2 *"}, "broken", "no failure of a test"),
        ({"file": "lost.py"}, "broken", "lost.py"),
        ({"tests": (OF_THE_FILE + "test_that_fails",)}, "broken", "test_that_fails fails"),
        ({"tests": (OF_THE_FILE + "test_doub",)}, "broken", "without the fault"),
    ],
)
def test_a_verdict_says_what_became_of_the_fault(bench, changes, outcome, reason) -> None:
    [verdict] = bench.judge_all([replace(FAULT, **changes)])
    assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict
    package = bench.root / "packages" / "toy"
    assert (package / "src" / "toy" / "__init__.py").read_text() == SOURCE


def test_a_mutant_that_says_nothing_does_not_silence_the_others(bench) -> None:
    lost = replace(FAULT, name="lost", tests=(OF_THE_FILE + "test_doub",))
    assert [v.outcome for v in bench.judge_all([lost, FAULT])] == ["broken", "killed"]


def test_tests_that_never_end_are_no_verdict(bench) -> None:
    bench = replace(bench, limit=8)
    [verdict] = bench.judge_all([replace(FAULT, tests=(OF_THE_FILE + "test_that_waits",))])
    assert (verdict.outcome, verdict.reason) == ("broken", "no answer within 8 s")


def test_another_copy_of_the_package_is_noticed(bench, monkeypatch) -> None:
    # The test imports the tree, as it would if something stood before PYTHONPATH.
    tests = bench.root / "packages" / "toy" / "tests" / "test_toy.py"
    tree = bench.root / "packages" / "toy" / "src"
    tests.write_text(f"import sys\nsys.path.insert(0, {str(tree)!r})\n{TESTS}")
    [verdict] = bench.judge_all([FAULT])
    assert verdict.outcome == "broken"
    assert "was imported from" in verdict.reason


def test_every_mutant_fits_the_source_and_names_a_test() -> None:
    for mutant in read_mutants():
        path = mutants.source(mutants.ROOT, mutant)
        assert mutants.plant(path.read_text(), mutant), mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (mutants.ROOT / file).read_text()
            assert f"def {name.partition('[')[0]}(" in text, test


def test_the_shards_are_the_whole() -> None:
    everything = read_mutants()
    parts = [choose(everything, [], f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(m.name for part in parts for m in part) == sorted(m.name for m in everything)
    assert [m.name for m in choose(everything, [everything[3].name], "1/1")] == [everything[3].name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "there is no mutant nothing"),
        (["--shard", "5/4"], "1 <= i <= n"),
        (["--shard", "half"], "1 <= i <= n"),
    ],
)
def test_wrong_usage_is_refused(arguments, said, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        mutants.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
