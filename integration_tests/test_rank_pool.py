"""The pool is trusted by every distributed test, so it is tested for what it must survive."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool


def add_ranks(group) -> int:
    total = torch.tensor(dist.get_rank(group) + 1)
    dist.all_reduce(total, group=group)
    return int(total)


def raise_on_rank_one(group) -> int:
    if dist.get_rank(group) == 1:
        raise KeyError("lost")
    return add_ranks(group)  # waits for rank 1, which never comes


def die_on_rank_one(group) -> int:
    if dist.get_rank(group) == 1:
        os._exit(7)
    return add_ranks(group)


def sleep_forever(group) -> None:
    time.sleep(3600)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_form_one_group(pool: RankPool, world_size: int) -> None:
    assert pool.run(add_ranks, world_size) == [world_size * (world_size + 1) // 2] * world_size


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (raise_on_rank_one, r"rank 1: Traceback(.|\n)*KeyError: 'lost'"),
        (die_on_rank_one, "rank 1: died with exit code 7"),
        (raise_on_rank_one, r"rank 0: still running after the timeout(.|\n)*in all_reduce"),
    ],
)
def test_broken_case_is_explained_and_next_case_works(pool, program, message) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(program, 2)
    assert pool.run(add_ranks, 2) == [3, 3]


def test_hanging_case_ends_at_the_timeout() -> None:
    with RankPool(size=1) as pool:
        pool.run(add_ranks, 1)
        pool.timeout = 0.5
        with pytest.raises(RankError, match=r"still running after the timeout(.|\n)*sleep_forever"):
            pool.run(sleep_forever, 1)
