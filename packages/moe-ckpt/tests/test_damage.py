"""Whatever byte changes, whatever file is lost or exchanged, it is named."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from moe_ckpt import (
    CheckpointNotFound,
    CorruptChunkError,
    CorruptFileError,
    DamageError,
    DtypeMismatchError,
    ExtraTensorError,
    FormatVersionError,
    MissingChunkError,
    MissingTensorError,
    NotACheckpointError,
    ShapeMismatchError,
    SwappedChunkError,
    TruncatedChunkError,
    find_latest,
    load,
    open_checkpoint,
    problems,
    save,
    verify,
)
from moe_ckpt.manifest import sha256
from moe_ckpt.testing import apart, blank, cut

ARRAYS = {
    ("experts.w_down", "master"): np.arange(4 * 1024 * 1024, dtype=np.float32).reshape(4, 1024, -1),
    ("norm", "exp_avg"): np.zeros(3),
    ("empty", "master"): np.zeros((0, 2), np.float32),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    with apart():
        for step in (1, 2):
            save(root, cut(ARRAYS, 0, 1), step=step, state={"lr": 0.5})
    return root


@pytest.fixture
def root(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "root"))


def read(root: Path, step: int | None = None):
    into = blank(cut(ARRAYS, 0, 1))
    loaded = load(root, into, step=step)
    for got, want in zip(into, cut(ARRAYS, 0, 1), strict=True):
        assert got.data.tobytes() == want.data.tobytes()
    return loaded


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data)


FILES = [
    "manifest.json",
    "manifest.sha256",
    "state.json",
    "checksums.bin",
    "arrays/experts.w_down/master/zarr.json",
    "arrays/experts.w_down/master/c.1.0.0",
    "arrays/norm/exp_avg/zarr.json",
    "arrays/norm/exp_avg/c.0",
    "arrays/empty/master/zarr.json",
]


def test_the_list_of_files_is_complete(sound) -> None:
    path = sound / "step-00000002"
    chunks = [f"arrays/experts.w_down/master/c.{n}.0.0" for n in range(4)]
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {*FILES, *chunks}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.37, 0.999])
def test_a_flipped_bit_is_named_and_the_older_checkpoint_is_used(root, name, place) -> None:
    file = root / "step-00000002" / name
    flip(file, int(place * file.stat().st_size))
    kind = CorruptChunkError if "/c." in name else CorruptFileError
    with pytest.raises(kind) as caught:
        verify(file.parents[len(Path(name).parts) - 1])
    # A seal that was hit is told as the manifest that it no longer fits.
    assert re.sub("sha256$", "json", str(file)) in str(caught.value)
    with pytest.raises(kind):
        read(root, step=2)
    loaded = read(root)
    assert loaded.step == 1
    assert [skipped.path.name for skipped in loaded.skipped if "step" in skipped.path.name] == [
        "step-00000002"
    ]
    assert kind.__name__ in str(loaded.skipped)


@pytest.mark.parametrize("name", FILES)
def test_a_lost_file_is_named(root, name) -> None:
    file = root / "step-00000002" / name
    file.unlink()
    kind = {"manifest.json": NotACheckpointError}.get(
        name, MissingChunkError if "/c." in name else CorruptFileError
    )
    with pytest.raises(kind, match=Path(name).name):
        verify(root / "step-00000002")
    with pytest.raises(kind, match=Path(name).name):
        read(root, step=2)
    assert read(root).step == 1


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (4 << 20) + 3, (4 << 20) + 20])
def test_a_chunk_of_the_wrong_length_is_named(root, length) -> None:
    file = root / "step-00000002" / "arrays/experts.w_down/master/c.2.0.0"
    data = file.read_bytes()
    file.write_bytes((data + bytes(16))[:length])
    with pytest.raises(TruncatedChunkError, match=rf"chunk \(2, 0, 0\): {file} has {length} bytes"):
        read(root, step=2)
    with pytest.raises(TruncatedChunkError):
        verify(root / "step-00000002")


def test_swapped_chunks_are_sound_in_themselves_and_still_named(root) -> None:
    folder = root / "step-00000002" / "arrays/experts.w_down/master"
    (folder / "c.1.0.0").rename(folder / "x")
    (folder / "c.3.0.0").rename(folder / "c.1.0.0")
    (folder / "x").rename(folder / "c.3.0.0")
    with pytest.raises(SwappedChunkError, match=r"is that of chunk \(3, 0, 0\)") as caught:
        read(root, step=2)
    assert caught.value.details["tensor"] == "experts.w_down"
    assert caught.value.details["chunk"] == [1, 0, 0]
    found = list(problems(root / "step-00000002"))
    assert [type(problem) for problem in found] == [SwappedChunkError] * 2


def test_every_bad_chunk_is_reported_and_no_good_one(root) -> None:
    folder = root / "step-00000002" / "arrays/experts.w_down/master"
    flip(folder / "c.0.0.0", 100)
    (folder / "c.2.0.0").unlink()
    (folder / "stray").write_text("")
    found = list(problems(root / "step-00000002"))
    assert [(type(p), p.details.get("chunk")) for p in found] == [
        (CorruptChunkError, [0, 0, 0]),
        (MissingChunkError, [2, 0, 0]),
        (CorruptFileError, None),
    ]
    assert not list(problems(root / "step-00000001"))


def test_if_every_checkpoint_is_damaged_the_newest_damage_is_raised(root, caplog) -> None:
    flip(root / "step-00000002" / "arrays/norm/exp_avg/c.0", 3)
    flip(root / "step-00000001" / "state.json", 3)
    with pytest.raises(CorruptChunkError, match="norm/exp_avg") as caught:
        read(root)
    assert "step-00000001" in "".join(caught.value.__notes__)
    flip(root / "step-00000002" / "manifest.json", 3)
    with pytest.raises(CorruptFileError, match="step-00000002"):
        read(root)
    assert find_latest(root) is None
    assert "step-00000002" in caplog.text


def test_a_damaged_hint_is_reported_and_does_no_harm(root) -> None:
    for text in (b"", b"{", b"[1]", b'{"step": 3, "manifest_sha256": "00"}', b"\xff\xfe"):
        (root / "LATEST").write_bytes(text)
        loaded = read(root)
        assert loaded.step == 2
        assert [skipped.path.name for skipped in loaded.skipped] == ["LATEST"]
    hint = {
        "step": 2,
        "manifest_sha256": sha256((root / "step-00000002/manifest.json").read_bytes()),
    }
    (root / "LATEST").write_text(json.dumps(hint))
    assert read(root).skipped == ()


def test_a_newest_checkpoint_that_was_lost_is_reported(root) -> None:
    shutil.rmtree(root / "step-00000002")
    loaded = read(root)
    assert loaded.step == 1
    assert "names step 2" in loaded.skipped[0].reason


def test_a_format_of_the_future_is_refused_by_version(root) -> None:
    path = root / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["version"] = [2, 0]
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_text(f"{sha256(data)}  manifest.json\n")
    with pytest.raises(FormatVersionError, match=r"version \[2, 0\], this release reads .* 1\.x"):
        open_checkpoint(path)
    assert read(root).step == 1


def test_a_directory_under_the_name_of_another_step_is_damaged(root) -> None:
    (root / "step-00000002").rename(root / "step-00000008")
    with pytest.raises(CorruptFileError, match="holds step 2"):
        read(root, step=8)
    assert read(root).step == 1


def test_there_is_no_checkpoint_and_the_error_says_what_there_is(root, tmp_path) -> None:
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        load(tmp_path / "typo", [])
    assert find_latest(tmp_path / "typo") is None
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointNotFound, match="it holds none"):
        load(tmp_path / "new", [])
    (tmp_path / "new" / ".step-00000001.tmp-0a").mkdir()
    with pytest.raises(CheckpointNotFound, match="it holds none, and 1 unfinished"):
        load(tmp_path / "new", [])
    assert find_latest(tmp_path / "new") is None
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 7 in .* steps 1, 2"):
        read(root, step=7)
    with pytest.raises(NotACheckpointError, match="holds checkpoints but is not one"):
        open_checkpoint(root)


def test_what_does_not_fit_the_caller_is_named_and_nothing_is_written(root) -> None:
    def attempt(arrays, error, match, **options):
        into = blank(cut(arrays, 0, 1))
        with pytest.raises(error, match=match):
            load(root, into, **options)
        assert all((shard.data == -123.25).all() for shard in into)

    def renamed(key, to, value=None):
        return {to if k == key else k: v if k != key or value is None else value
                for k, v in ARRAYS.items()}  # fmt: skip

    norm = ("norm", "exp_avg")
    attempt(
        renamed(norm, ("nrom", "exp_avg")), MissingTensorError, "no nrom/exp_avg.*mean norm/exp_avg"
    )
    fewer = {k: v for k, v in ARRAYS.items() if k != norm}
    attempt(fewer, ExtraTensorError, "holds norm/exp_avg, which no shard asks for")
    attempt(renamed(norm, norm, np.zeros(4)), ShapeMismatchError, r"\(3,\) in .* and \(4,\) here")
    attempt(
        renamed(norm, norm, np.zeros(3, np.float32)), DtypeMismatchError, "is float64 .*float32"
    )
    into = blank(cut(fewer, 0, 1))
    assert load(root, into, allow_extra=["norm/*"]).step == 2
    with pytest.raises(MissingTensorError, match="no norm/master; it has exp_avg of it"):
        open_checkpoint(root / "step-00000002").read("norm")


def test_damage_is_one_class_to_catch() -> None:
    kinds = (CorruptChunkError, MissingChunkError, SwappedChunkError, TruncatedChunkError)
    assert all(issubclass(kind, DamageError) for kind in (*kinds, CorruptFileError))
    assert not issubclass(ShapeMismatchError, DamageError)


SMALL = {(name, kind): np.arange(size, dtype=np.float32) + ord(name) for name, size in (
    ("a", 5), ("b", 40), ("c", 1), ("d", 0)) for kind in ("master", "exp_avg")}  # fmt: skip


@pytest.fixture(scope="module", params=[0, 100, 1 << 18], ids=["apart", "both", "packed"])
def small(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("small")
    with apart(request.param):
        return save(root, cut(SMALL, 0, 1), step=1, state={"x": [1.5, "y"]})


def is_detected(path: Path) -> bool:
    """Tell whether both a check of every byte and a load refuse a checkpoint."""
    into = blank(cut(SMALL, 0, 1))
    with pytest.raises((DamageError, NotACheckpointError)):
        verify(path)
    with pytest.raises((DamageError, NotACheckpointError)):
        load(path.parent, into, step=1)
    with pytest.raises((DamageError, CheckpointNotFound, NotACheckpointError)):
        load(path.parent, into)
    return True


def test_none_of_200_flipped_bits_passes(small, tmp_path) -> None:
    path = Path(shutil.copytree(small.parent, tmp_path / "run")) / small.name
    found = sorted(file for file in path.rglob("*") if file.is_file())
    # An array has its metadata and one chunk, or none where all is empty; all packed, one array.
    assert len(found) in (4 + 2 * 8 - 2, 4 + 2 * 2 + 2, 4 + 2)
    rng = np.random.default_rng(int(np.random.SeedSequence().entropy % 2**32))
    bits = np.cumsum([8 * file.stat().st_size for file in found])
    flips = [(file, int(rng.integers(8 * file.stat().st_size))) for file in found]
    while len(flips) < 200:  # one in each file, the others by length
        at = int(rng.integers(bits[-1]))
        which = int(np.searchsorted(bits, at, "right"))
        flips.append((found[which], at - int(bits[which - 1] if which else 0)))
    for file, bit in flips:
        data = bytearray(file.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        good = file.read_bytes()
        file.write_bytes(data)
        assert is_detected(path), (file, bit)
        file.write_bytes(good)
    verify(path)


def test_every_file_that_is_lost_cut_or_lengthened_is_detected(small, tmp_path) -> None:
    path = Path(shutil.copytree(small.parent, tmp_path / "run")) / small.name
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        good = file.read_bytes()
        file.unlink()
        assert is_detected(path), file
        for data in (b"", good[:-1], good[: len(good) // 2], good + b"\0"):
            file.write_bytes(data)
            assert is_detected(path), file
        file.write_bytes(good)
    verify(path)


def test_every_exchange_of_two_files_is_detected(small, tmp_path) -> None:
    path = Path(shutil.copytree(small.parent, tmp_path / "run")) / small.name
    found = sorted(file for file in path.rglob("*") if file.is_file())
    exchanged = 0
    for at, first in enumerate(found):
        for second in found[at + 1 :]:
            one, two = first.read_bytes(), second.read_bytes()
            if one == two:  # equal values, equal chunks
                continue
            first.write_bytes(two)
            second.write_bytes(one)
            assert is_detected(path), (first, second)
            first.write_bytes(one)
            second.write_bytes(two)
            exchanged += 1
    assert exchanged > 10
