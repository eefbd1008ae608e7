"""What is made ahead is what would have been made when asked for."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_train.data import Sequences
from moe_train.data.prefetch import Prefetcher, Request

CPU = torch.device("cpu")


def threads() -> int:
    return sum(t.name == "moe-train prefetch" for t in threading.enumerate())


def request(first=0, number=4, source=None) -> Request:
    source = source or Sequences(np.arange(251, dtype=np.uint8), 5)
    return Request(source, first, number, seed=3, rank=0, size=1)


@given(
    depth=st.integers(0, 3),
    asked=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4)), max_size=5),
)
def test_batches_are_those_of_the_requests_however_they_jump(depth, asked) -> None:
    prefetcher, source = Prefetcher(CPU, depth), request().source
    for first, number, times in asked:
        for i in range(times):
            wanted = request(first + i * number, number, source)
            got = prefetcher.get(wanted)
            assert torch.equal(got.targets_BS, wanted.batch().targets_BS)
    prefetcher.close()


class Slow(Sequences):
    """Counts what is made, and breaks at one position."""

    def __init__(self, breaks_at=-1):
        super().__init__(np.arange(251, dtype=np.uint8), 5)
        self.made, self.breaks_at = 0, breaks_at

    def batch(self, numbers, device=None):
        if self.made == self.breaks_at:
            self.breaks_at = -1
            raise OSError("the disk went away")
        self.made += 1
        return super().batch(numbers, device)


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_more_is_made_ahead_than_asked_for() -> None:
    source, prefetcher = Slow(), Prefetcher(CPU, 3)
    prefetcher.get(request(0, 4, source))
    until(lambda: source.made == 4)
    time.sleep(0.05)
    assert source.made == 4
    prefetcher.get(request(4, 4, source))
    until(lambda: source.made == 5)
    prefetcher.close()


def test_an_error_is_raised_at_its_own_step_in_its_own_words_and_can_be_got_over() -> None:
    source, prefetcher = Slow(breaks_at=2), Prefetcher(CPU, 4)
    for i in range(2):
        prefetcher.get(request(4 * i, 4, source))
    with pytest.raises(OSError, match="the disk went away"):
        prefetcher.get(request(8, 4, source))
    assert torch.equal(
        prefetcher.get(request(8, 4, source)).inputs_BS, request(8).batch().inputs_BS
    )
    prefetcher.close()


def test_the_thread_ends_with_its_owner() -> None:
    before = threads()
    prefetcher = Prefetcher(CPU, 2)
    prefetcher.get(request())
    assert threads() == before + 1
    del prefetcher
    gc.collect()
    until(lambda: threads() == before)


@pytest.mark.gpu
def test_no_batch_is_waited_for_on_the_way_to_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    prefetcher = Prefetcher(device, 2)
    prefetcher.get(request())
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = prefetcher.get(request(4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.inputs_BS.device == device
    assert torch.equal(got.inputs_BS.cpu(), request(4).batch().inputs_BS)
    prefetcher.close()
