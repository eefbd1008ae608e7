"""Draw dispatches, with the skews that break dispatchers."""

from hypothesis import strategies as st

from moe_dispatch.testing.case import DispatchCase

ALL_DTYPES = ("float64", "float32", "bfloat16")


@st.composite
def dispatch_cases(
    draw: st.DrawFn,
    max_world_size: int,
    min_world_size: int = 1,
    max_tokens: int = 9,
    dtypes: tuple[str, ...] = ALL_DTYPES,
) -> DispatchCase:
    """Draw a dispatch: the structure is drawn, the values come from one seed.

    Ranks without tokens, uneven numbers of tokens, experts without rows, all rows for one
    expert, masked routes and tokens with nothing but masked routes are all common.

    Args:
        draw: Given by Hypothesis.
        max_world_size: The most ranks.
        min_world_size: The fewest ranks.
        max_tokens: The most tokens of a rank.
        dtypes: The dtypes of tokens to choose from.
    """
    world_size = draw(st.integers(min_world_size, max_world_size))
    experts_per_rank = draw(st.integers(1, 3))
    num_experts = world_size * experts_per_rank
    top_k = draw(st.integers(1, num_experts))
    tokens = st.one_of(st.just(0), st.integers(0, max_tokens))
    return DispatchCase(
        experts_per_rank=experts_per_rank,
        top_k=top_k,
        dim=draw(st.integers(1, 5)),
        tokens_W=tuple(draw(st.lists(tokens, min_size=world_size, max_size=world_size))),
        hot_experts=draw(st.one_of(st.just(top_k), st.integers(top_k, num_experts))),
        masked=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        seed=draw(st.integers(0, 2**16 - 1)),
        dtype=draw(st.sampled_from(dtypes)),
    )
