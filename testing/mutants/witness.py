"""Pytest plugin that writes down which tests passed or failed and which package they imported."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness-file", type=Path, help="where to write")
    parser.addoption("--witness-package", help="the package whose origin is written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Witness(), "witness-of-tests")
    # The first counterexample decides; a smaller one would only take time.
    profile = settings.get_profile(settings.get_current_profile_name())
    settings.register_profile("mutants", profile, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


class Witness:
    """What was seen.

    Attributes:
        passed: Tests that ran and passed.
        failed: Tests that failed.
        errors: What failed and is no test: collecting files, setting up, cleaning up.
    """

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"collecting {report.nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            where = self.failed if report.when == "call" else self.errors
            where.append(
                report.nodeid if report.when == "call" else f"{report.when} of {report.nodeid}"
            )
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        name = session.config.getoption("--witness-package")
        seen = {
            "origin": origin(name),
            "passed": self.passed,
            "failed": self.failed,
            "errors": self.errors,
        }
        session.config.getoption("--witness-file").write_text(json.dumps(seen))


def origin(name: str) -> str:
    """Return the file that ``name`` was imported from, or would be."""
    if name in sys.modules:
        return sys.modules[name].__file__ or ""
    spec = importlib.util.find_spec(name)
    return (spec and spec.origin) or ""
