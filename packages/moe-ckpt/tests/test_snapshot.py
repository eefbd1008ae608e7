"""The memory of snapshots: exact copies, used again, never more than was allowed."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_ckpt import HostArena, HostMemoryError, ShardError
from moe_ckpt.snapshot import ALIGNMENT, place
from moe_ckpt.testing import ArrayShard, cut
from moe_ckpt.torch_adapter import PinnedArena


def as_tensors(shards: list[ArrayShard]) -> list[ArrayShard]:
    return [
        ArrayShard(*(getattr(s, f.name) for f in fields(s)[:-1]), torch.from_numpy(s.data))
        for s in shards
    ]


ARENAS = {"numpy": (HostArena, list), "torch": (PinnedArena, as_tensors)}


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([np.float32, np.float64])), max_size=6),
    st.sampled_from(sorted(ARENAS)),
)
def test_a_snapshot_is_a_copy_bit_for_bit_whatever_it_held_before(shapes, arena) -> None:
    buffer, shards_of = ARENAS[arena]
    rng, memory = np.random.default_rng(0), buffer()
    for _ in range(3):
        arrays = {
            (f"t{at}", "master"): rng.integers(0, 2**32, size, np.uint64).astype(dtype)
            for at, (size, dtype) in enumerate(shapes)
        }
        want = {key: array.tobytes() for key, array in arrays.items()}
        snapshot = memory.hold(shards_of(cut(arrays, 0, 1)))
        for array in arrays.values():
            array[:] = -1
        snapshot.ready()
        assert [view.data.tobytes() for view in snapshot.views] == list(want.values())
        assert [view.data.dtype for view in snapshot.views] == [dtype for _, dtype in shapes]
        rng.shuffle(shapes)


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_blocks_lie_apart_and_aligned(sizes) -> None:
    offsets, total = place(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], total], strict=bool(sizes)))
    assert total < sum(sizes) + ALIGNMENT * len(sizes) + 1


def test_tensors_are_checked_before_they_are_copied() -> None:
    def attempt(tensor, match, stop=6):
        with pytest.raises(ShardError, match=match):
            PinnedArena().hold([ArrayShard("w", "master", (6,), 0, stop, tensor)])

    attempt(torch.zeros(6, dtype=torch.bfloat16), r"w/master: data is torch\.bfloat16")
    attempt(torch.zeros(12)[::2], r"strides \(2,\)")
    attempt(torch.zeros(2, 3), "2 axes")
    attempt(torch.zeros(5), r"shape \(5,\), the interval \[0, 6\) needs \(6,\)")
    arena = PinnedArena(limit=10)
    with pytest.raises(HostMemoryError, match="takes 64 bytes of host memory and 10 are allowed"):
        arena.hold([ArrayShard("w", "master", (6,), 0, 6, torch.zeros(6))])
    assert arena.nbytes == 0


@pytest.mark.parametrize("arena", ARENAS)
def test_the_buffer_is_used_again_and_grows_only_when_it_must(arena) -> None:
    buffer, shards_of = ARENAS[arena]
    memory = buffer()
    memory.reserve(1 << 20)
    addresses = set()
    for size in (100, 100_000, 1 << 18):
        shards = cut({("w", "master"): np.zeros(size, np.float32)}, 0, 1)
        addresses.add(memory.hold(shards_of(shards)).views[0].data.ctypes.data)
    assert len(addresses) == 1
    assert memory.nbytes == 1 << 20
    memory.reserve(2 << 20)
    assert memory.nbytes == 2 << 20
    memory.close()
    assert memory.nbytes == 0


@pytest.mark.gpu
def test_the_pinned_buffer_is_page_locked_and_not_rounded_up() -> None:
    arena = PinnedArena()
    arena.reserve((1 << 20) + 64)
    assert arena.nbytes == (1 << 20) + 64
    assert arena._memory.is_pinned()
    arena.close()
