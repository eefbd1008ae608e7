"""In an object store too: the old checkpoint or the new one, whatever request is the last."""

import json
import threading

import numpy as np
import pytest
import tensorstore as ts
from moe_ckpt import (
    AsyncSaver,
    CheckpointNotFound,
    CorruptChunkError,
    CorruptFileError,
    MissingChunkError,
    RankFailedError,
    RootLockedError,
    StepExistsError,
    SwappedChunkError,
    TruncatedChunkError,
    as_place,
    collect,
    compare,
    find_latest,
    lease,
    load,
    objects,
    open_checkpoint,
    problems,
    save,
    scan,
    verify,
)
from moe_ckpt.__main__ import main
from moe_ckpt.testing import Died, apart, blank, cut, run_ranks
from moe_ckpt.testing.stores import FaultyStore

SHAPES = {
    ("layers.0.w", "master"): (4, 3),
    ("layers.0.w", "exp_avg"): (4, 3),
    ("b", "master"): (5,),
}


@pytest.fixture(autouse=True)
def short_lease(monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    with apart():
        yield


def arrays_of(value: float):
    return {key: np.full(shape, value, np.float32) for key, shape in SHAPES.items()}


def put(root, step, value, size=1, **options):
    def program(comm):
        shards = cut(arrays_of(value), comm.rank, comm.size)
        options.setdefault("overwrite", True)
        return save(root, shards, step=step, state={"v": value}, comm=comm, **options)

    return run_ranks(size, program)[0]


def seen(root) -> dict[int, float]:
    values = {}
    for checkpoint in scan(root).valid:
        verify(checkpoint.path)
        shards = blank(cut(arrays_of(0), 0, 1))
        loaded = load(root, shards, step=checkpoint.step)
        [value] = {float(x) for shard in shards for x in shard.data}
        assert loaded.state == {"v": value}
        values[checkpoint.step] = value
    assert not [item for item in scan(root).skipped if item.path.name != "LATEST"]
    return values


def tidy(store: FaultyStore) -> bool:
    data = {checkpoint.path.name for checkpoint in scan(store.path()).valid}
    return all(
        key == "LATEST" or key.startswith("commits/") or key.split("/")[1] in data
        for key in store.contents()
    )


@pytest.mark.parametrize("below", [0, 30, 100])
def test_the_same_values_are_the_same_bytes_as_in_files(tmp_path, below) -> None:
    store = FaultyStore()
    with apart(below):
        place, path = put(store.path(), 7, 1.5, size=3), put(tmp_path, 7, 1.5)
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert sorted(item.relative_to(place) for item in place.rglob("*")) == names
    for name in names:
        assert (place / name).read_bytes() == (path / name).read_bytes(), name
    assert compare(place, path).same
    assert tidy(store)


def test_plain_tensorstore_reads_an_array_of_an_object_store() -> None:
    place = put("memory://plain", 7, 1.5)
    kvstore = {"driver": "memory", "path": f"plain/{place.key}/arrays/b/master/"}
    spec = {"driver": "zarr3", "kvstore": kvstore}
    array = ts.open(spec, open=True, context=objects._context()).result()
    assert array.read().result().tolist() == [1.5] * 5


@pytest.mark.parametrize(
    ("writers", "readers", "below"), [(1, 3, 0), (4, 1, 0), (3, 2, 0), (3, 2, 30), (2, 4, 100)]
)
def test_any_ranks_read_what_any_others_wrote(writers, readers, below) -> None:
    root, rng = FaultyStore().path(), np.random.default_rng(0)
    arrays = {key: rng.random(shape, np.float32) for key, shape in SHAPES.items()}
    arrays |= {("e", "master"): np.zeros((0, 3)), ("s", "master"): np.array(-0.0)}

    def write(comm):
        return save(root, cut(arrays, comm.rank, comm.size), step=1, state={}, comm=comm)

    def read(comm):
        shards = cut(arrays, comm.rank, comm.size)
        into = blank(shards)
        load(root, into, comm=comm)
        return [
            got.data.tobytes() == want.data.tobytes()
            for got, want in zip(into, shards, strict=True)
        ]

    with apart(below):
        run_ranks(writers, write)
    assert all(all(equal) for equal in run_ranks(readers, read))


SAVES = {
    "first": ({}, {"step": 2, "value": 20.0, "keep": None}),
    "next": ({1: 1.0, 2: 2.0}, {"step": 3, "value": 30.0, "keep": 2}),
    "only": ({2: 2.0}, {"step": 3, "value": 30.0, "keep": 1}),
    "again": ({1: 1.0, 2: 2.0}, {"step": 2, "value": 20.0, "keep": None}),
}


def prepared(before) -> FaultyStore:
    store = FaultyStore()
    for step, value in before.items():
        put(store.path(), step, value, keep=None)
    return store


@pytest.mark.parametrize(("size", "below"), [(1, 0), (4, 0), (4, 30)])
@pytest.mark.parametrize("which", SAVES)
def test_a_death_at_any_request_leaves_the_old_or_the_new(which, size, below) -> None:
    with apart(below):
        deaths(*SAVES[which], size)


def deaths(before, action, size) -> None:
    counted = prepared(before)
    begin = counted.count
    put(counted.path(), size=size, **action)
    new = {**before, action["step"]: action["value"]}
    after = dict(list(new.items())[-(action["keep"] or 9) :])
    assert seen(counted.path()) == after
    outcomes = set()
    for at in range(1, counted.count - begin + 1):
        sound = prepared(before).store
        dying = FaultyStore(at, dies=True, reaches=at % 2 == 0, store=sound)
        with pytest.raises((Died, RankFailedError)):
            put(dying.path(), size=size, **action)
        store = FaultyStore(store=sound)
        got = seen(store.path())
        assert got in (before, new, after), (at, got)
        outcomes.add(tuple(got.items()))
        if at % 5 == 0:  # the next save waits for the lease of the dead one, then cleans up
            put(store.path(), 9, 90.0, keep=None)
            assert seen(store.path()) == {**got, 9: 90.0}
            assert tidy(store), store.contents().keys()
    assert len(outcomes) >= 2


@pytest.mark.parametrize("reaches", [False, True])
@pytest.mark.parametrize("which", SAVES)
def test_a_failure_of_any_request_raises_and_shows_nothing_or_is_harmless(which, reaches) -> None:
    before, action = SAVES[which]
    counted = prepared(before)
    begin = counted.count
    put(counted.path(), **action)
    new = {**before, action["step"]: action["value"]}
    raised = 0
    for at in range(1, counted.count - begin + 1):
        sound = prepared(before).store
        failing = FaultyStore(at, reaches=reaches, store=sound)
        try:
            put(failing.path(), **action)
        except (RankFailedError, RootLockedError):
            raised += 1
            assert seen(failing.path()) == before, (at, failing.keys[at - 1])
        else:
            got = seen(failing.path())
            assert action["step"] in got, (at, failing.keys[at - 1])
            assert got.items() <= new.items()
        if at % 5 == 0:
            put(failing.path(), 9, 90.0, keep=None)
            assert tidy(failing), failing.contents().keys()
    assert raised > 10


def test_damage_is_named_by_tensor_chunk_and_object(capsys) -> None:
    store = FaultyStore()
    for step in (1, 2):
        place = put(store.path(), step, float(step), keep=None)
    chunk = place / "arrays/layers.0.w/master/c.0.0"
    good = chunk.read_bytes()
    other = (place / "arrays/layers.0.w/exp_avg/c.0.0").read_bytes()
    for data, kind, fast in (
        (good[:3] + b"\xff" + good[4:], CorruptChunkError, None),
        (good[:-1], TruncatedChunkError, TruncatedChunkError),
        (good + b"x", TruncatedChunkError, TruncatedChunkError),
        (b"", TruncatedChunkError, TruncatedChunkError),
        (None, MissingChunkError, MissingChunkError),
    ):
        store.store.write(chunk.key, data).result()
        found = list(problems(place))
        assert [type(problem) for problem in found] == [kind]
        assert found[0].details["chunk"] == [0, 0]
        assert found[0].details["file"] == str(chunk)
        assert [type(p) for p in problems(place, fast=True)] == ([fast] if fast else [])
        loaded = load(store.path(), blank(cut(arrays_of(0), 0, 1)))
        assert loaded.step == 1
        assert kind.__name__ in loaded.skipped[0].reason
    assert other == good  # equal values are equal chunks, and exchanging them changes nothing
    chunk.write_bytes(next(iter(scan(store.path()).valid[1:])).path.__truediv__(
        "arrays/layers.0.w/master/c.0.0").read_bytes())  # fmt: skip
    for fast in (False, True):
        assert [type(p) for p in problems(place, fast=fast)] == [SwappedChunkError]
    chunk.write_bytes(good)
    (place / "stray").write_bytes(b"")
    assert [type(p) for p in problems(place)] == [CorruptFileError]
    for name in ("manifest.json", "state.json", "checksums.bin", "arrays/b/master/zarr.json"):
        data = (place / name).read_bytes()
        (place / name).write_bytes(data[:-2] + b"!" + data[-1:])
        assert load(store.path(), blank(cut(arrays_of(0), 0, 1))).step == 1
        (place / name).write_bytes(data)


def test_a_damaged_commit_is_skipped_and_said(caplog) -> None:
    root = FaultyStore().path()
    for step in (1, 2):
        put(root, step, float(step), keep=None)
    commit = root / "commits" / "step-00000002"
    good = commit.read_bytes()
    first = json.loads((root / "commits" / "step-00000001").read_bytes())
    mixed = {**json.loads(good), "manifest_sha256": first["manifest_sha256"]}
    for data in (b"", b"{}", json.dumps(first).encode(), json.dumps(mixed).encode()):
        commit.write_bytes(data)
        found = find_latest(root)
        assert (found.step, found.path.name) == (1, first["data"])
        assert "CorruptFileError" in caplog.text
        caplog.clear()
    commit.write_bytes(good)
    assert find_latest(root).step == 2
    with pytest.raises(
        CheckpointNotFound, match=r"no checkpoint of step 7 in memory://: it holds steps 1, 2"
    ):
        load(root, [], step=7)
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        load(FaultyStore().path(), [])
    with pytest.raises(StepExistsError):
        put(root, 2, 5.0, overwrite=False)


def test_a_second_writer_is_refused_and_a_dead_one_is_waited_for(monkeypatch) -> None:
    root = FaultyStore().path()
    monkeypatch.setattr(lease, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    with lease.Lease(root, 41, "aa"):
        for _ in range(2):
            with pytest.raises(RootLockedError, match='"step": 41, "lease": "aa"'):
                put(root, 2, 2.0)
    assert not (root / ".lock").exists()
    # One that died while it held the lease: nobody renews it.
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    (root / ".lock").write_bytes(b'{"pid": 1}')
    put(root, 2, 2.0)
    assert seen(root) == {2: 2.0}
    assert not (root / ".lock").exists()


def test_two_that_want_a_dead_lease_do_not_both_get_it() -> None:
    root = FaultyStore().path()
    (root / ".lock").write_bytes(b"{}")
    start, got = threading.Barrier(4), []

    def want(nonce: str) -> None:
        start.wait()
        try:
            with lease.Lease(root, 1, nonce):
                got.append(nonce)
                start_of_end.wait(5)
        except RootLockedError:
            start_of_end.wait(5)

    start_of_end = threading.Barrier(4)
    threads = [threading.Thread(target=want, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_save_that_lost_its_lease_does_not_commit(monkeypatch) -> None:
    store = FaultyStore()
    put(store.path(), 1, 1.0)

    class Robbed(FaultyStore):
        def write(self, key, value, **options):
            if key.endswith("manifest.json"):  # while this process was stopped, another took over
                self.store.write(".lock", b'{"lease": "another"}').result()
            return super().write(key, value, **options)

    robbed = Robbed(store=store.store)
    with pytest.raises(RootLockedError, match='"lease": "another"'):
        put(robbed.path(), 2, 2.0)
    assert seen(store.path()) == {1: 1.0}
    assert (store.path() / ".lock").read_bytes() == b'{"lease": "another"}'


def test_gc_retention_and_background_saves_work_alike() -> None:
    store = FaultyStore()
    root = store.path()
    with AsyncSaver(root, keep=2) as saver:
        for step in range(1, 5):
            saver.save(cut(arrays_of(step), 0, 1), step=step, state={"v": float(step)})
    assert seen(root) == {3: 3.0, 4: 4.0}
    assert tidy(store)
    (root / "begun" / "step-00000009.00").write_bytes(b"")
    (root / "data" / "step-00000009.00" / "x").write_bytes(b"")
    found = collect(root, dry_run=True)
    assert [(g.path.name, g.reason) for g in found.garbage] == [("step-00000009.00", "unfinished")]
    collect(root, keep=1)
    assert seen(root) == {4: 4.0}
    assert tidy(store)
    put(root, 5, 5.0, keep=None)
    (find_latest(root).path / "manifest.json").write_bytes(b"{}")
    [broken] = collect(root, damaged=True).garbage
    assert "damaged" in broken.reason
    assert seen(root) == {4: 4.0}
    assert tidy(store)


def test_places_are_given_as_paths_urls_or_specs(tmp_path, capsys) -> None:
    assert as_place(str(tmp_path)) == tmp_path
    assert as_place(f"file://{tmp_path}") == tmp_path
    spec = {"driver": "s3", "bucket": "bkt", "path": "runs/one", "endpoint": "http://localhost:1"}
    assert str(as_place(spec)) == str(as_place(json.dumps(spec))) == "s3://bkt/runs/one/"
    assert str(as_place("gs://bkt/one/")) == "gs://bkt/one/"
    url = "memory://test_places"
    put(url, 3, 3.0)
    assert main(["ls", url]) == 0
    assert "step-00000003" in capsys.readouterr().out
    assert main(["verify", url]) == 0
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("good\n")[1])["step"] == 3
    assert main(["diff", url, url]) == 0
    assert main(["gc", url]) == 0
    assert main(["ls", "memory://nothing"]) == 2
    assert open_checkpoint(find_latest(url).path).read("b").tolist() == [3.0] * 5
