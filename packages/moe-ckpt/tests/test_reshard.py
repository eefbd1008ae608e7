"""What any ranks wrote, any other ranks read, bit for bit; and the files do not tell who wrote."""

import hashlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_ckpt import grid, load, open_checkpoint, pack, plan, save, verify
from moe_ckpt.testing import ArrayShard, blank, cut, run_ranks
from moe_ckpt.torch_adapter import TorchCommunicator

Arrays = Mapping[tuple[str, str], np.ndarray]


class Layout(NamedTuple):
    """For each rank, for each array, the intervals it holds."""

    size: int
    held: list[dict[tuple[str, str], list[tuple[int, int]]]]

    def shards(self, arrays: Arrays, rank: int) -> list[ArrayShard]:
        return [
            ArrayShard(*key, arrays[key].shape, a, b, arrays[key].reshape(-1)[a:b])
            for key, intervals in self.held[rank].items()
            for a, b in intervals
        ]


@st.composite
def bits(draw, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits at all: NaN with payloads, -0.0, subnormals; or all zeros."""
    dtype, word = draw(st.sampled_from([(np.float32, np.uint32), (np.float64, np.uint64)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    words = rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True)
    special = np.array([0.0, -0.0, np.nan, np.inf], dtype).view(word)
    kind = draw(st.sampled_from(["bits", "zeros", "special", "payload"]))
    if kind == "zeros":
        words = np.zeros(shape, word)
    elif kind == "special":
        words = rng.choice(special, shape)
    elif kind == "payload":
        words = words | special[3]
    return np.asarray(words, word).view(dtype)


@st.composite
def states(draw) -> Arrays:
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=3))
    return {
        (f"layers.{at}.w", kind): draw(bits(tuple(shape)))
        for at, shape in enumerate(shapes)
        for kind in ("master", "exp_avg")
    }


@st.composite
def layouts(draw, arrays: Arrays) -> Layout:
    size = draw(st.integers(1, 4))
    held = [{} for _ in range(size)]
    for key, array in arrays.items():
        n = array.size
        cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=5))})
        for a, b in itertools.pairwise(cuts) if n else [(0, 0)]:
            held[draw(st.integers(0, size - 1))].setdefault(key, []).append((a, b))
    return Layout(size, held)


@st.composite
def cases(draw) -> tuple[Arrays, Layout, Layout, int]:
    arrays, below = draw(states()), draw(st.sampled_from([0, 40, 1000]))
    return arrays, draw(layouts(arrays)), draw(layouts(arrays)), below


@contextmanager
def small_chunks(below: int):
    """Give small arrays several chunks, small fragments several rounds, small tensors packs."""
    with (
        mock.patch.multiple(grid, LOWER_BYTES=24, UPPER_BYTES=64),
        mock.patch.object(plan.rounds, "__defaults__", (40,)),
        mock.patch.multiple(pack, PACKED_BYTES=below, PACK_BYTES=2 * below),
    ):
        yield


def write(root: Path, arrays: Arrays, layout: Layout) -> Path:
    def program(comm):
        return save(root, layout.shards(arrays, comm.rank), step=5, state={"a": [1]}, comm=comm)

    paths = run_ranks(layout.size, program)
    assert set(paths) == {paths[0]}
    return paths[0]


def tree(path: Path) -> dict[str, str]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def equal_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@given(cases())
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(case) -> None:
    arrays, writers, readers, below = case
    with tempfile.TemporaryDirectory() as root, small_chunks(below):
        write(Path(root), arrays, writers)

        def program(comm):
            shards = readers.shards(arrays, comm.rank)
            into = blank(shards)
            loaded = load(root, into, comm=comm)
            assert (loaded.step, loaded.state, loaded.skipped) == (5, {"a": [1]}, ())
            for got, want in zip(into, shards, strict=True):
                equal_bits(got.data, want.data)
            return True

        assert all(run_ranks(readers.size, program))


@given(cases())
def test_the_files_are_the_same_whoever_wrote_them(case) -> None:
    arrays, first, second, below = case
    with tempfile.TemporaryDirectory() as top, small_chunks(below):
        trees = [
            tree(write(Path(top) / str(at), arrays, w)) for at, w in enumerate([first, second])
        ]
    assert trees[0] == trees[1]
    assert len(trees[0]) > 4


@settings(max_examples=10)
@given(states(), st.sampled_from([0, 40, 1000]))
def test_plain_tensorstore_reads_the_same_values(arrays, below) -> None:
    with tempfile.TemporaryDirectory() as root, small_chunks(below):
        path = save(root, cut(arrays, 0, 1), step=0, state={})
        reader = open_checkpoint(path)
        for (name, kind), want in arrays.items():
            info = reader.info(name, kind)
            kvstore = {"driver": "file", "path": f"{info.array.directory(path)}/"}
            got = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
            values = np.asarray(got.read().result()).reshape(-1)
            equal_bits(values[info.start : info.start + info.size].reshape(info.shape), want)
            equal_bits(reader.read(name, kind), want)
            assert reader.shape(name, kind) == want.shape
            assert reader.dtype(name, kind) == want.dtype
        assert set(reader.names) == {name for name, _ in arrays}
        verify(path)


def experts() -> Arrays:
    rng = np.random.default_rng(1)
    return {
        ("layers.0.experts.w_down", "master"): rng.standard_normal((8, 1024, 640), np.float32),
        ("layers.0.experts.w_down", "exp_avg_sq"): np.zeros((8, 1024, 640), np.float32),
        ("embed", "master"): rng.standard_normal((1000, 333)),
        ("norm", "master"): rng.standard_normal(1024, np.float32),
    }


def rank_program(group, top: str, world_size: int) -> tuple[list[int], int]:
    """Save as ``world_size`` ranks, then load again one rank further."""
    comm, arrays = TorchCommunicator(group), experts()
    mixed = comm.all_gather(bytes([comm.rank]) * (comm.rank % 2 * 7))
    parts = comm.exchange([bytes([comm.rank]) * to for to in range(comm.size)])
    shards = cut(arrays, comm.rank, comm.size)
    save(Path(top) / str(world_size), shards, step=world_size, state={}, comm=comm)
    shards = cut(arrays, (comm.rank + 1) % comm.size, comm.size)
    tensors = [torch.from_numpy(s.data) for s in blank(shards)]
    into = [
        ArrayShard(s.name, s.kind, s.global_shape, s.flat_start, s.flat_stop, t)
        for s, t in zip(shards, tensors, strict=True)
    ]
    loaded = load(Path(top) / str(world_size), into, comm=comm)
    comm.barrier()
    wrong = sum(
        t.numpy().tobytes() != s.data.tobytes() for t, s in zip(tensors, shards, strict=True)
    )
    sound = mixed == [bytes([r]) * (r % 2 * 7) for r in range(comm.size)]
    sound &= parts == [bytes([r]) * comm.rank for r in range(comm.size)]
    return [wrong, int(sound)], loaded.bytes_read


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_of_torch_distributed_save_and_load_into_tensors(pool, tmp_path, world_size) -> None:
    for (wrong, sound), nbytes in pool.run(rank_program, world_size, str(tmp_path), world_size):
        assert (wrong, sound) == (0, 1)
        assert nbytes > 0
    alone = save(tmp_path / "alone", cut(experts(), 0, 1), step=world_size, state={})
    assert tree(tmp_path / str(world_size) / alone.name) == tree(alone)


def test_a_rank_reads_only_the_chunks_it_needs(tmp_path) -> None:
    arrays = experts()
    save(tmp_path, cut(arrays, 0, 1), step=0, state={})
    key = ("layers.0.experts.w_down", "master")  # chunks of 2 experts, 2.5 MiB each
    want = arrays[key].reshape(-1)
    each = 1024 * 640
    shard = ArrayShard(*key, arrays[key].shape, 2 * each, 4 * each, np.empty(2 * each, np.float32))
    loaded = load(tmp_path, [shard], allow_extra=["*"])
    assert loaded.bytes_read == 2 * each * 4 + 4
    np.testing.assert_array_equal(shard.data, want[2 * each : 4 * each])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2)])
def test_scalars_and_empty_tensors_come_back(tmp_path, shape) -> None:
    arrays = {("w", "master"): np.full(shape, -0.0, np.float32)}
    save(tmp_path, cut(arrays, 0, 1), step=0, state={})
    into = blank(cut(arrays, 0, 1))
    load(tmp_path, into)
    equal_bits(into[0].data, arrays["w", "master"].reshape(-1))


NCCL = """
import sys
from pathlib import Path
import numpy as np, torch, torch.distributed as dist
from moe_ckpt import load, save
from moe_ckpt.testing import blank, cut
from moe_ckpt.torch_adapter import TorchCommunicator
torch.cuda.set_device(0)
store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=1)
comm = TorchCommunicator()
assert comm.device.type == "cuda"
assert comm.all_gather(b"abc") == [b"abc"] and comm.exchange([b""]) == [b""]
assert comm.exchange([b"xy"]) == [b"xy"]
shards = cut({("w", "master"): np.arange(9.0)}, 0, 1)
save(Path(sys.argv[1]), shards, step=1, state={}, comm=comm)
into = blank(shards)
load(Path(sys.argv[1]), into, comm=comm)
assert (into[0].data == shards[0].data).all()
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_bytes_travel_through_the_device_with_nccl(tmp_path) -> None:
    subprocess.run([sys.executable, "-c", NCCL, str(tmp_path)], check=True)
