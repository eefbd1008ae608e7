"""What every dispatcher does, whatever carries the rows."""

from dataclasses import dataclass
from typing import Protocol

from moe_kernels import Routing
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dispatched:
    """The rows for the experts of this rank, and what ``combine`` needs to undo the journey.

    Attributes:
        x_RD: The rows, in the order (expert, source rank, token, k), in the dtype of ``x_TD``.
            There can be more rows than ``offsets_e1[-1]``, so that the host need not know how
            many came. Rows past it are zeros, and what the experts make of them is ignored.
        offsets_e1: int32 ``[e + 1]``. Rows ``offsets_e1[i]`` up to ``offsets_e1[i + 1]`` belong
            to local expert i. Starts with 0.
        weight_TK: The routing weights of this rank's own tokens, as they came in.
        plan: The rest, of the type that the dispatcher wants: its ``combine`` takes no other.
        weight_R: The routing weight of each row of ``x_RD``, for experts that apply it
            themselves; None from dispatchers that do not send it. Differentiable.
        kept_TK: bool, False for routes that are masked or were dropped; None from dispatchers
            that drop nothing.
    """

    x_RD: Tensor
    offsets_e1: Tensor
    weight_TK: Tensor
    plan: object
    weight_R: Tensor | None = None
    kept_TK: Tensor | None = None


class Dispatcher(Protocol):
    """Brings every routed row to the rank of its expert, and the results back.

    What holds for every implementation:

    * A masked route (expert -1) travels nowhere, adds nothing and gets the gradient zero.
    * The order of rows is (expert, source rank, token, k): the same input gives the same bits.
    * Weights are applied once, at the rank that owns the token, in float32 (float64 if rows or
      weights are), and the K results of a token are summed in the order of k.
    * Gradients flow to ``x_TD``, summed in the order of k too, and to ``weight_TK``.
    * If the experts give a row the same bits wherever it lies, then ``y_TD`` and the gradient of
      ``x_TD`` have the bits of one rank that holds all experts. The gradient of a weight is a
      sum over D by ``torch.sum``, whose order can depend on T: it agrees to within
      ``D * eps * sum(abs(dy * y))``, eps being that of the dtype of the sum. A dispatcher that sums
      the results of one rank for a token before they travel (``RowPlan.dedup``) rounds once more.
    * Nothing is kept between calls: all that ``combine`` needs is in ``Dispatched``.

    Every rank of the group calls ``dispatch`` and ``combine`` the same number of times in the
    same order, with zero tokens if it has none, and runs backward through its ``y_TD`` if any
    rank does. ``check_dispatcher`` in ``moe_dispatch.testing`` tests these laws.
    """

    @property
    def num_experts(self) -> int:
        """E, the experts of all ranks."""
        ...

    @property
    def local_experts(self) -> range:
        """The ids of the experts that this rank holds, in the order of ``offsets_e1``."""
        ...

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Send each token to its experts, one row for each route that is not masked.

        Args:
            x_TD: Tokens of this rank. T may be zero and differ between ranks; D and the dtype
                are the same on all.
            routing: ``expert_TK`` int32 with ids in ``range(num_experts)`` or -1;
                ``weight_TK`` float32 or float64.
        """
        ...

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the results home and sum them over k, weighted.

        Args:
            y_RD: What the experts made of ``dispatched.x_RD``, row for row: same shape, same
                dtype.
            dispatched: The result of ``dispatch`` of this dispatcher.

        Returns:
            ``y_TD`` in the dtype of ``y_RD``. Zero for a token whose routes are all masked.
        """
        ...
