"""A piece of optimizer state, in coordinates that know no ranks."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """One rank's piece of one global tensor.

    The global tensor is read as one line, in row-major order. Over all ranks of a mesh the
    pieces of a tensor cover that line exactly once, whatever the layout.

    Attributes:
        name: Name of the parameter, the same in every layout.
        kind: ``master`` (the parameter in full precision), ``exp_avg`` or ``exp_avg_sq`` (the
            moments of AdamW). Callers may add kinds of their own for state of their own.
        global_shape: Shape of the whole tensor; experts on the first axis.
        flat_start: First element of the piece.
        flat_stop: One past its last element.
        data: The elements, 1-D, float32 (float64 for float64 parameters): a view of live state,
            so that writing into it changes the optimizer.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    flat_start: int
    flat_stop: int
    data: Tensor
