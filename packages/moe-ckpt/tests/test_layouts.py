"""Every layout reads what every other wrote, and the run that goes on from it is the same run."""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from moe_ckpt import load, open_checkpoint, save, verify
from moe_ckpt.testing import ArrayShard, apart, blank, run_ranks

LAYERS, EXPERTS, D, F = 4, 8, 6, 5
SHAPES = {"embedding": (11, D), "norm": (D,), "head": (11, D)}
for at in range(LAYERS):
    SHAPES |= {
        f"layers.{at}.attention.q": (D, D),
        f"layers.{at}.moe_norm": (D,),
        f"layers.{at}.moe.gate_up": (EXPERTS, 2 * F, D),
        f"layers.{at}.moe.down": (EXPERTS, D, F),
    }
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Mesh(NamedTuple):
    """Stages, copies of experts, and ranks that divide them: rank = (pp EDP + edp) EP + ep."""

    pp: int
    edp: int
    ep: int

    @property
    def size(self) -> int:
        return self.pp * self.edp * self.ep

    def intervals(self, rank: int):
        """Yield the interval that a rank holds of each tensor of its stage."""
        stage, rest = divmod(rank, self.edp * self.ep)
        edp, ep = divmod(rest, self.ep)
        for name, shape in SHAPES.items():
            first = 0 if name == "embedding" else LAYERS - 1
            layer = int(name.split(".")[1]) if name.startswith("layers") else first
            if layer * self.pp // LAYERS != stage:
                continue
            size = int(np.prod(shape))
            if ".moe." in name:  # whole experts of one ep rank, a flat part of them for each edp
                mine = size // self.ep
                begin = ep * mine
                yield name, begin + mine * edp // self.edp, begin + mine * (edp + 1) // self.edp
            else:  # a flat part for each rank of the stage
                parts = self.edp * self.ep
                yield name, size * rest // parts, size * (rest + 1) // parts

    def shards(self, arrays, rank: int) -> list[ArrayShard]:
        return [
            ArrayShard(name, kind, SHAPES[name], a, b, arrays[name, kind].reshape(-1)[a:b].copy())
            for name, a, b in self.intervals(rank)
            for kind in KINDS
        ]


MESHES = [
    Mesh(1, 1, 1), Mesh(1, 1, 4), Mesh(1, 1, 8), Mesh(1, 3, 1), Mesh(1, 2, 2), Mesh(1, 7, 1),
    Mesh(2, 2, 2), Mesh(2, 3, 1), Mesh(4, 1, 2),
]  # fmt: skip


def beginning() -> dict[tuple[str, str], np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        (name, kind): rng.random(shape, np.float32) for name, shape in SHAPES.items()
        for kind in KINDS
    }  # fmt: skip


def adam(shards: list[ArrayShard], steps: range) -> None:
    """Train: each element by itself, from its own value and moments and the step."""
    of = {(shard.name, shard.kind): shard.data for shard in shards}
    for step in steps:
        for name in {shard.name for shard in shards}:
            w, m, v = (of[name, kind] for kind in KINDS)
            g = np.sin(w * np.float32(step + 1))
            m += np.float32(0.1) * (g - m)
            v += np.float32(0.05) * (g * g - v)
            w -= np.float32(0.01) * m / (np.sqrt(v) + np.float32(1e-6))


def digests(path: Path) -> dict[str, str]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.fixture(scope="module", params=[500, 1 << 18], ids=["both", "packed"])
def roots(request):
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=directory) as top, apart(request.param):
        arrays, found = beginning(), {}
        for mesh in MESHES:
            found[mesh] = Path(top) / "-".join(map(str, mesh))

            def program(comm, mesh=mesh):
                shards = mesh.shards(arrays, comm.rank)
                adam(shards, range(2))
                return save(found[mesh], shards, step=2, state={"at": 2}, comm=comm)

            run_ranks(mesh.size, program)
        yield found


def test_the_files_do_not_tell_the_layout(roots, request) -> None:
    trees = [digests(root / "step-00000002") for root in roots.values()]
    assert all(tree == trees[0] for tree in trees)
    below = request.node.callspec.params["roots"]
    large = [shape for shape in SHAPES.values() if 4 * np.prod(shape) >= below]
    assert len(trees[0]) == 4 + 2 * len(large) * len(KINDS) + 2  # and one pack


@pytest.mark.parametrize("reader", MESHES, ids=lambda mesh: "pp{}-edp{}-ep{}".format(*mesh))
def test_three_more_steps_are_the_same_from_every_layout_into_every_other(
    roots, reader, tmp_path
) -> None:
    whole = Mesh(1, 1, 1).shards(beginning(), 0)
    adam(whole, range(5))
    want = {(shard.name, shard.kind): shard.data for shard in whole}
    for writer in MESHES:

        def program(comm, writer=writer):
            shards = reader.shards(beginning(), comm.rank)
            into = blank(shards)
            loaded = load(roots[writer], into, comm=comm)
            adam(into, range(loaded.state["at"], 5))
            return (
                all(
                    s.data.tobytes() == want[s.name, s.kind][s.flat_start : s.flat_stop].tobytes()
                    for s in into
                )
                and len(into) > 0
            )

        assert all(run_ranks(reader.size, program)), writer


def test_what_else_is_state_comes_back_as_it_was(tmp_path) -> None:
    torch.manual_seed(3)
    rng, streams = np.random.default_rng(7), torch.get_rng_state()
    state = {
        "step_count": 2**53 + 1,
        "lr": {"now": 0.1 + 0.2, "warmup": 5e-324, "milestones": [1000, 2000]},
        "rng": {"numpy": rng.bit_generator.state, "torch": streams.numpy().tobytes().hex()},
        "cursor": {"samples_seen": 123456789012345, "epoch": 2, "text": "sha256:00ff"},
        "balancing": {"rate": 1e-3, "sign": True},
    }
    bias = np.array([0.1, -0.0, 1e-45, 3.0], np.float32)
    load_average = np.array([1 / 3, 2 / 3])
    buffers = [
        ArrayShard("layers.0.moe.router_bias", "buffer", (4,), 0, 4, bias),
        ArrayShard("layers.0.moe.load", "buffer", (2,), 0, 2, load_average),
    ]
    path = save(tmp_path, buffers, step=7, state=state)
    into = blank(buffers)
    back = load(tmp_path, into).state
    assert back == state
    assert [s.data.tobytes() for s in into] == [s.data.tobytes() for s in buffers]
    assert open_checkpoint(path).state["lr"]["now"].hex() == (0.1 + 0.2).hex()
    other = np.random.default_rng(0)
    other.bit_generator.state = back["rng"]["numpy"]
    assert (other.random(5) == rng.random(5)).all()
    want = torch.rand(5)
    torch.set_rng_state(
        torch.frombuffer(bytearray.fromhex(back["rng"]["torch"]), dtype=torch.uint8)
    )
    assert torch.equal(torch.rand(5), want)


def test_the_manifest_tells_the_configuration_and_who_made_the_bytes(tmp_path) -> None:
    shards = Mesh(1, 1, 1).shards(beginning(), 0)
    found = [
        open_checkpoint(save(tmp_path, shards, step=at, state=state)).manifest
        for at, state in enumerate(
            [{"config": {"a": 1, "b": 2}}, {"config": {"b": 2, "a": 1}}, {"config": {"a": 2}}, {}]
        )
    ]
    assert found[0].config_sha256 == found[1].config_sha256
    assert found[2].config_sha256 not in (None, found[0].config_sha256)
    assert found[3].config_sha256 is None
    text = b'{\n "a": 1,\n "b": 2\n}\n'
    assert found[0].config_sha256 == hashlib.sha256(text).hexdigest()
    assert found[0].producers["numpy"] == np.__version__
    assert set(found[0].producers) == {"moe-ckpt", "numpy", "tensorstore"}


def test_a_source_tree_that_was_not_installed_saves_and_says_so(tmp_path, monkeypatch) -> None:
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    path = save(tmp_path, Mesh(1, 1, 1).shards(beginning(), 0), step=0, state={})
    assert set(open_checkpoint(path).manifest.producers.values()) == {"from a source tree"}
    assert verify(path).step == 0


def test_zarr_python_reads_every_tensor(tmp_path) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    arrays = beginning()
    with apart(500):
        path = save(tmp_path, Mesh(1, 1, 1).shards(arrays, 0), step=0, state={})
    rows = json.loads((path / "manifest.json").read_bytes())["arrays"]
    assert {("pack" in row) for row in rows} == {True, False}
    for row in rows:
        want = arrays[row["name"], row["kind"]]
        if "pack" in row:
            pack = zarr.open_array(str(path / "packs" / f"{row['pack']:05}"), mode="r")
            got = pack[row["start"] : row["start"] + want.size].reshape(row["shape"])
        else:
            got = zarr.open_array(str(path / "arrays" / row["name"] / row["kind"]), mode="r")[...]
        assert got.tobytes() == want.tobytes(), row["name"]


def test_state_that_only_some_ranks_have_is_refused_and_of_several_rank_0s_is_kept(
    tmp_path,
) -> None:
    def program(comm, state):
        shards = Mesh(1, 2, 1).shards(beginning(), comm.rank)
        try:
            save(tmp_path, shards, step=1, state=state(comm.rank), comm=comm, overwrite=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return open_checkpoint(tmp_path / "step-00000001").state

    alone = run_ranks(2, lambda comm: program(comm, lambda rank: {"rng": 1} if rank else {}))
    assert alone[0] == alone[1]
    assert alone[0].startswith("StateError: state has ['rng'] on one of rank 0 and rank 1 only")
    both = run_ranks(2, lambda comm: program(comm, lambda rank: {"rng": rank}))
    assert both == [{"rng": 0}] * 2


@pytest.mark.parametrize("below", [0, 500])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "pp{}-edp{}-ep{}".format(*mesh))
def test_every_byte_is_written_once(mesh, below, tmp_path, monkeypatch) -> None:
    from moe_ckpt.array import ChunkWriter

    written, real = [], ChunkWriter.write

    def write(self, info, number, values):
        written.append((info.name, info.kind, number, values.nbytes))
        return real(self, info, number, values)

    monkeypatch.setattr(ChunkWriter, "write", write)
    arrays = beginning()
    with apart(below):
        run_ranks(mesh.size, lambda comm: save(
            tmp_path, mesh.shards(arrays, comm.rank), step=0, state={}, comm=comm))  # fmt: skip
    assert len({item[:3] for item in written}) == len(written)
    assert sum(item[3] for item in written) == sum(array.nbytes for array in arrays.values())
