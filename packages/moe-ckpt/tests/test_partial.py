"""What is loaded under another name, or not at all, is what the caller's rules say and no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt import (
    ExtraTensorError,
    MissingTensorError,
    RankMismatchError,
    RenameError,
    ShapeMismatchError,
    load,
    save,
)
from moe_ckpt.rules import new_names
from moe_ckpt.testing import apart, blank, cut, run_ranks

ARRAYS = {
    (f"blocks.{at}.{name}", kind): np.full(
        (2, 3), 100 * at + 10 * len(name) + len(kind), np.float32
    )
    for at in range(3)
    for name in ("w", "bias")
    for kind in ("master", "exp_avg")
}
RENAME = [(r"blocks\.(\d+)\.(.*)", r"layers.\1.\2")]


@pytest.fixture
def root(tmp_path):
    with apart():
        save(tmp_path, cut(ARRAYS, 0, 1), step=3, state={})
    return tmp_path


def here(arrays, old="blocks", new="layers"):
    return {(name.replace(old, new), kind): array for (name, kind), array in arrays.items()}


def test_renamed_tensors_land_where_the_rules_say(root) -> None:
    shards = cut(here(ARRAYS), 0, 1)
    into = blank(shards)
    loaded = load(root, into, rename=RENAME)
    for got, want in zip(into, shards, strict=True):
        assert got.data.tobytes() == want.data.tobytes(), got.name
    assert set(loaded.renamed) == {(name, name.replace("blocks", "layers")) for name, _ in ARRAYS}
    assert (loaded.missing, loaded.unread) == ((), ())
    assert loaded.bytes_wanted == sum(array.nbytes for array in ARRAYS.values())


def test_names_can_be_exchanged_by_the_first_rule_that_matches(root) -> None:
    rules = [
        ("blocks.0.w", "blocks.1.w"),
        ("blocks.1.w", "blocks.0.w"),
        (r"blocks\.2\..*", r"\g<0>"),
    ]
    into = blank(cut(ARRAYS, 0, 1))
    load(root, into, rename=rules)
    values = {(shard.name, shard.kind): shard.data[0] for shard in into}
    assert values["blocks.0.w", "master"] == ARRAYS["blocks.1.w", "master"][0, 0]
    assert values["blocks.1.w", "exp_avg"] == ARRAYS["blocks.0.w", "exp_avg"][0, 0]
    assert values["blocks.2.w", "master"] == ARRAYS["blocks.2.w", "master"][0, 0]


@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), unique=True, min_size=1), st.data())
def test_a_rule_changes_the_names_it_matches_whole_and_no_other(names, data) -> None:
    pattern = data.draw(st.sampled_from(names))
    assert new_names(names, [(pattern, "new")]) == {
        name: "new" if name == pattern else name for name in names
    }


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        ([("block.0.w", "x")], r"'block\.0\.w' is the first to match none of the 6 names"),
        ([("blocks", "layers")], "has to match all of a name"),
        ([(r"blocks\.\d\.w", "w")], r"both blocks\.0\.w and blocks\.1\.w would be called w"),
        ([("blocks.0.w", "blocks.1.w")], "would be called blocks.1.w"),
        ([("blocks.(", "x")], "is not a regular expression"),
        ([(r"blocks\.0\.w", r"\1")], "does not fit"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_before_anything_is_read(
    root, rename, match
) -> None:
    into = blank(cut(ARRAYS, 0, 1))
    with pytest.raises(RenameError, match=match):
        load(root, into, rename=rename)
    assert all((shard.data == -123.25).all() for shard in into)


def test_what_may_be_missing_stays_as_it_is_and_is_told(root, caplog) -> None:
    more = {**ARRAYS, ("head", "master"): np.zeros(4, np.float32)}
    into = blank(cut(more, 0, 1))
    with pytest.raises(MissingTensorError, match="no head/master"):
        load(root, into)
    with pytest.raises(MissingTensorError, match="no head/master"):
        load(root, into, allow_missing=["head", "*/exp_avg"])
    assert all((shard.data == -123.25).all() for shard in into)
    loaded = load(root, into, allow_missing=["head/*"])
    assert loaded.missing == ("head/master",)
    assert "left as they are: head/master" in caplog.text
    for shard in into:
        want = -123.25 if shard.name == "head" else ARRAYS[shard.name, shard.kind][0, 0]
        assert (shard.data == want).all()
    assert loaded.bytes_wanted == sum(array.nbytes for array in ARRAYS.values())


def test_what_may_stay_unread_is_not_read_and_is_told(root) -> None:
    masters = {key: array for key, array in ARRAYS.items() if key[1] == "master"}
    into = blank(cut(masters, 0, 1))
    loaded = load(root, into, allow_extra=["*/exp_avg"])
    assert loaded.unread == tuple(f"{n}/{k}" for n, k in sorted(ARRAYS) if k == "exp_avg")
    assert loaded.bytes_read == len(masters) * (2 * 3 * 4 + 4)
    assert all((s.data == masters[s.name, s.kind][0, 0]).all() for s in into)


def test_errors_name_a_tensor_by_both_of_its_names(root) -> None:
    shards = blank(cut(here(ARRAYS), 0, 1))
    with pytest.raises(
        ExtraTensorError, match=r"layers\.0\.bias/exp_avg \(there blocks\.0\.bias\)"
    ):
        load(root, shards[4:], rename=RENAME)
    wrong = {key: np.zeros((3, 2), np.float32) for key in here(ARRAYS)}
    with pytest.raises(ShapeMismatchError, match=r"\(there blocks\.0\.w\) has shape \(2, 3\)"):
        load(root, blank(cut(wrong, 0, 1)), rename=RENAME)
    with pytest.raises(MissingTensorError, match=r"no layers\.9\.w/master; did you mean layers"):
        load(root, blank(cut(here(ARRAYS, "blocks.0", "layers.9"), 0, 1)), rename=RENAME)


def test_ranks_that_ask_for_different_rules_are_refused_together(root) -> None:
    def program(comm):
        rename = RENAME if comm.rank else []
        try:
            load(root, blank(cut(ARRAYS, comm.rank, 2)), comm=comm, rename=rename)
        except RankMismatchError as error:
            return str(error)
        return None

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith("rules is [[], [], []] on rank 0 and [[['blocks")


def test_bytes_are_counted_where_a_shard_is_a_part_of_a_chunk(tmp_path) -> None:
    arrays = {("w", "master"): np.arange(1000, dtype=np.float32)}
    save(tmp_path, cut(arrays, 0, 1), step=0, state={})

    def program(comm):
        loaded = load(tmp_path, blank(cut(arrays, comm.rank, 4)), comm=comm)
        return loaded.bytes_read, loaded.bytes_wanted

    assert run_ranks(4, program) == [(4004, 1000)] * 4
