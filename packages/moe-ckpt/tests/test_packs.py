"""Small tensors share files: as whole, and as easy to tell apart, as in files of their own."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt import (
    CorruptChunkError,
    CorruptFileError,
    MissingChunkError,
    SwappedChunkError,
    TruncatedChunkError,
    compare,
    export_safetensors,
    load,
    open_checkpoint,
    pack,
    problems,
    reader,
    save,
    verify,
)
from moe_ckpt.__main__ import main
from moe_ckpt.manifest import sha256
from moe_ckpt.testing import ArrayShard, apart, blank, cut, run_ranks
from safetensors.numpy import load_file

RNG = np.random.default_rng(0)
ARRAYS = {
    ("arrays", "master"): RNG.random((3, 2), np.float32),
    ("bias", "exp_avg"): RNG.random(50, np.float32),
    ("bias", "master"): RNG.random(50, np.float32),
    ("empty", "master"): np.zeros((0, 7), np.float32),
    ("large", "master"): RNG.random((256, 257), np.float32),
    ("packs", "00000"): RNG.random(4),
    ("scale", "master"): np.array(-0.0, np.float32),
    ("wide", "master"): RNG.random(9),
}


@pytest.fixture
def path(tmp_path) -> Path:
    return save(tmp_path, cut(ARRAYS, 0, 1), step=1, state={})


def test_only_large_tensors_have_files_of_their_own(path) -> None:
    folders = {str(file.parent.relative_to(path)) for file in path.rglob("zarr.json")}
    assert folders == {"arrays/large/master", "packs/00000", "packs/00001"}
    assert verify(path).chunks == 3
    for (name, kind), want in ARRAYS.items():
        got = open_checkpoint(path).read(name, kind)
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


forms = st.lists(
    st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 3 * pack.PACK_BYTES // 40)),
    max_size=60,
)


@given(forms)
def test_every_tensor_is_in_one_pack_of_its_dtype_and_no_pack_is_too_large(forms) -> None:
    found = list(pack.groups(forms))
    assert sorted(at for _, group in found for at in group) == list(range(len(forms)))
    for dtype, group in found:
        assert group == sorted(group)
        assert {forms[at][0] for at in group} == {dtype}
        nbytes = np.dtype(dtype).itemsize * sum(forms[at][1] for at in group)
        assert nbytes <= pack.PACK_BYTES
    # And none is left half empty: two that follow one another would not fit together.
    for (dtype, first), (other, second) in itertools.pairwise(found):
        if dtype == other:
            elements = sum(forms[at][1] for at in [*first, second[0]])
            assert np.dtype(dtype).itemsize * elements > pack.PACK_BYTES


def test_a_flipped_bit_names_the_tensor_and_the_file_it_is_in(path) -> None:
    rng = np.random.default_rng(int(np.random.SeedSequence().entropy % 2**32))
    opened = open_checkpoint(path)
    for info in opened.manifest.arrays[1:]:
        chunk = info.chunk_file(path, 0)
        good, width = chunk.read_bytes(), np.dtype(info.dtype).itemsize
        for bit in {0, 8 * len(good) - 1, *map(int, rng.integers(8 * len(good), size=40))}:
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            chunk.write_bytes(data)
            hit = [m for m in info.members if m.start * width <= bit // 8 < m.stop * width]
            [problem] = problems(path)
            assert str(chunk) in str(problem)
            assert problem.details["pack"] == int(info.kind)
            if not hit:  # the checksum itself
                assert type(problem) in (SwappedChunkError, CorruptChunkError)
                assert problem.details["tensors"] == pack.labels(info.members)
                continue
            assert type(problem) is CorruptChunkError
            assert problem.details["tensors"] == pack.labels(hit)
            assert f"tensor {hit[0].name}/{hit[0].kind} in pack {info.kind}" in str(problem)
            with pytest.raises(CorruptChunkError, match=f"{hit[0].name}/{hit[0].kind}"):
                opened.read(hit[0].name, hit[0].kind)
            with pytest.raises(CorruptChunkError, match=f"{hit[0].name}/{hit[0].kind}"):
                load(path.parent, blank(cut(ARRAYS, 0, 1)), step=1)
        chunk.write_bytes(good)
    verify(path)


def test_a_pack_that_is_lost_cut_or_another_is_named_with_what_it_holds(path, tmp_path) -> None:
    changed = {key: (array + 1).astype(array.dtype) for key, array in ARRAYS.items()}
    other = save(tmp_path / "other", cut(changed, 0, 1), step=1, state={})
    chunk = path / "packs/00000/c.0"
    good = chunk.read_bytes()
    for data, kind in (
        (good[:-1], TruncatedChunkError),
        (good + b"x", TruncatedChunkError),
        (b"", TruncatedChunkError),
        ((other / "packs/00000/c.0").read_bytes(), SwappedChunkError),
        (None, MissingChunkError),
    ):
        chunk.unlink()
        if data is not None:
            chunk.write_bytes(data)
        for fast in (False, True):
            [problem] = problems(path, fast=fast)
            assert type(problem) is kind
            assert "pack 00000 of 5 tensors, arrays/master to scale/master" in str(problem)
            assert problem.details["tensors"][1] == "bias/exp_avg"
        with pytest.raises(kind):
            load(path.parent, blank(cut(ARRAYS, 0, 1)), step=1)
        chunk.touch()
    chunk.write_bytes(good)
    (path / "packs/00001/stray").touch()
    assert [type(problem) for problem in problems(path)] == [CorruptFileError]


def sealed(path: Path, manifest) -> None:
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_text(f"{sha256(data)}  manifest.json\n")


def test_a_manifest_that_contradicts_itself_about_packs_is_refused(path) -> None:
    good = json.loads((path / "manifest.json").read_bytes())
    at = {row["name"] + "/" + row["kind"]: n for n, row in enumerate(good["arrays"])}
    for name, field, value in (
        ("bias/master", "start", 3),
        ("bias/master", "pack", 1),
        ("bias/master", "pack", 7),
        ("bias/master", "pack", -2),
        ("bias/master", "shape", [49]),
        ("bias/master", "shape", [-1, -50]),
        ("wide/master", "dtype", "float32"),
        ("scale/master", "shape", [2]),
        ("bias/master", "name", "../bias"),
    ):
        manifest = json.loads(json.dumps(good))
        manifest["arrays"][at[name]][field] = value
        sealed(path, manifest)
        with pytest.raises(CorruptFileError, match="cannot be understood"):
            open_checkpoint(path)
    for packs in ([], good["packs"][:1], [*good["packs"], {"dtype": "float32", "elements": 0}]):
        sealed(path, {**good, "packs": packs})
        with pytest.raises(CorruptFileError, match="cannot be understood"):
            open_checkpoint(path)
    sealed(path, good)
    verify(path)


def test_diff_tells_the_tensors_of_a_pack_apart_without_reading_it(path, tmp_path, capsys) -> None:
    other = {**ARRAYS, ("bias", "master"): ARRAYS["bias", "master"] + np.float32(0.5)}
    # One more name, so that everything after it stands elsewhere.
    new = save(tmp_path / "b", cut({**other, ("a", "master"): np.ones(3)}, 0, 1), step=1, state={})
    for chunk in new.rglob("c*.0"):
        chunk.rename(chunk.with_suffix(".hidden"))
    assert main(["diff", str(path), str(new)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a/master  only in the second",
        "bias/master  values",
        "7 arrays are the same, 2 differ",
    ]
    for chunk in new.rglob("*.hidden"):
        chunk.rename(chunk.with_suffix(".0"))
    found = compare(path, new, values=True)
    assert [(d.label, d.elements) for d in found.differences][1] == ("bias/master", 50)
    with apart():
        own = save(tmp_path / "c", cut(other, 0, 1), step=1, state={})
    for pair in ((path, own), (own, path)):
        assert [(d.label, d.elements) for d in compare(*pair).differences] == [("bias/master", 50)]


def test_a_pack_is_read_once_however_many_of_its_tensors_are_wanted(path, monkeypatch) -> None:
    reads, real = [], reader.read_chunks

    def counted(place, info, numbers):
        reads.extend((info.label, number) for number in numbers)
        return real(place, info, numbers)

    monkeypatch.setattr(reader, "read_chunks", counted)
    loaded = load(path.parent, blank(cut(ARRAYS, 0, 1)))
    assert sorted(reads) == [("large/master", 0), ("pack 00000", 0), ("pack 00001", 0)]
    stored = {info.label: info.chunk_bytes for info in open_checkpoint(path).manifest.arrays}
    assert loaded.bytes_read == sum(stored.values())
    assert loaded.bytes_wanted == sum(array.nbytes for array in ARRAYS.values())
    reads.clear()
    masters = load_file(export_safetensors(path, path.parent / "out"))
    assert sorted(reads) == [("large/master", 0), ("pack 00000", 0), ("pack 00001", 0)]
    assert masters["bias"].tobytes() == ARRAYS["bias", "master"].tobytes()
    reads.clear()
    part = ArrayShard("bias", "master", (50,), 10, 20, np.zeros(10, np.float32))
    loaded = load(path.parent, [part], allow_extra=["*"])
    assert reads == [("pack 00000", 0)]
    assert (loaded.bytes_read, loaded.bytes_wanted) == (stored["pack 00000"], 40)
    assert (part.data == ARRAYS["bias", "master"][10:20]).all()


@pytest.mark.parametrize("size", [2, 5])
def test_packs_over_several_files_are_the_same_from_any_ranks(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(pack, "PACK_BYTES", 1000)
    rng = np.random.default_rng(1)
    arrays = {(f"t{n}", "master"): rng.random(n % 60, np.float32) for n in range(100)}

    def program(comm):
        return save(tmp_path / "b", cut(arrays, comm.rank, size), step=1, state={}, comm=comm)

    one, many = save(tmp_path / "a", cut(arrays, 0, 1), step=1, state={}), run_ranks(size, program)
    files = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert len(files) > 4 + 2 * 10
    for file in files:
        assert (one / file).read_bytes() == (many[0] / file).read_bytes(), file

    def back(comm):
        into = blank(cut(arrays, comm.rank, size + 1))
        load(tmp_path / "b", into, comm=comm)
        return [shard.data.tobytes() for shard in into]

    for rank, parts in enumerate(run_ranks(size + 1, back)):
        assert parts == [shard.data.tobytes() for shard in cut(arrays, rank, size + 1)]


def test_another_program_finds_a_tensor_by_the_manifest_alone(path) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    for row in manifest["arrays"]:
        want = ARRAYS[row["name"], row["kind"]]
        if "pack" in row:
            data = (path / "packs" / f"{row['pack']:05}" / "c.0").read_bytes()
            begin = row["start"] * want.itemsize
            data = data[begin : begin + math.prod(row["shape"]) * want.itemsize]
            assert data == want.tobytes()
            assert sha256(data) == row["digest"]


def test_a_state_of_empty_tensors_alone_is_saved(tmp_path) -> None:
    arrays = {("a", "master"): np.zeros((0, 3), np.float32), ("b", "master"): np.zeros(0)}
    path = save(tmp_path, cut(arrays, 0, 1), step=1, state={})
    assert (verify(path).chunks, verify(path).arrays) == (0, 2)
    into = blank(cut(arrays, 0, 1))
    assert load(tmp_path, into).bytes_read == 0
    assert open_checkpoint(path).read("a").shape == (0, 3)
