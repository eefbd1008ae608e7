import functools

from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import Mesh, MismatchError, check_same, plan_mesh

create_mesh = functools.cache(Mesh.create)


def compare(group, values, pp, among):
    mesh = create_mesh(plan_mesh(len(values), pp=pp), group=group)
    try:
        check_same(values[mesh.rank], "the digest", mesh, among=among)
    except MismatchError as error:
        return str(error)
    return None


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4))
def test_every_rank_raises_exactly_if_two_values_differ(pool, values) -> None:
    messages = pool.run(compare, len(values), values, 1, "world")
    assert len(set(messages)) == 1
    assert (messages[0] is not None) == (len(set(values)) > 1)
    if messages[0] is not None:
        for value in set(values):
            ranks = [str(rank) for rank, held in enumerate(values) if held == value]
            assert f"{value!r} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" in messages[0]


def test_the_message_names_values_and_ranks(pool) -> None:
    (message, *_) = pool.run(compare, 4, ["a1", "b2", "a1", "a1"], 1, "world")
    assert message == (
        "the digest differs between ranks:\n  - 'a1' on ranks 0, 2, 3\n  - 'b2' on rank 1"
    )


def test_stages_may_differ_from_each_other_but_not_within(pool) -> None:
    assert pool.run(compare, 4, ["a", "a", "b", "b"], 2, "stage") == [None] * 4
    within = pool.run(compare, 4, ["a", "a", "b", "c"], 2, "stage")
    assert within[:2] == [None, None]
    assert within[2] == within[3]
    assert within[2] == "the digest differs between ranks:\n  - 'b' on rank 2\n  - 'c' on rank 3"
