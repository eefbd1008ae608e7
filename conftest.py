"""Settings of every test in the repository."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from rank_pool import RankPool

# Without a GPU, kernels run in Triton's interpreter. That is decided when they are imported, so
# it is set here, before any test file of any package is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# dev: quick, random, remembers failures. ci: the same cases on every run, so that a red build
# is red because of the change. smoke: the same, few. nightly: random again, and many. None of
# them measures time: on a shared machine that finds neighbours, not bugs. Programs that hang are
# the pool's business.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", patient, max_examples=25)
settings.register_profile(
    "ci", patient, max_examples=25, derandomize=True, database=None, print_blob=True
)
settings.register_profile("smoke", patient, max_examples=5, derandomize=True, database=None)
settings.register_profile("nightly", patient, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that live as long as the test session."""
    with RankPool(size=4, timeout=120) as pool:
        yield pool
