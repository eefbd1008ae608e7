"""Fixtures of these tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN (largest integer), so that forgetting to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.zeros(2).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def poison():
    return poisoned


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep these small products on one thread; meeting others takes longer than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
