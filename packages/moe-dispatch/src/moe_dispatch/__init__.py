"""Row-wise expert-parallel dispatch and combine.

Data flows in one direction::

    x_TD, routing -> dispatch -> x_RD, offsets_e1 -> (your experts) -> y_RD -> combine -> y_TD

``make_dispatcher`` gives an object that follows the ``Dispatcher`` protocol: ``LocalDispatcher``
for one rank, ``AllToAllDispatcher`` for the ranks of a process group, and with a ``RowPlan``
``moe_dispatch.rowwise.RowwiseDispatcher``, which writes rows straight into the memory of other
ranks. All give the same values. ``moe_dispatch.rowwise`` is imported by itself, as it needs Triton.

Shapes are written as a suffix of the name:

====  ==================================================================
T     tokens of this rank
K     experts chosen for each token
N     routed rows of this rank: T * K places, in the order of their experts
R     rows this rank receives for its own experts
E     experts of all ranks
e     experts held by this rank: e = E / W (e1: one entry more)
D     model dimension
W     ranks of the expert-parallel group
====  ==================================================================
"""

from moe_dispatch.all_to_all import AllToAllDispatcher
from moe_dispatch.dispatcher import Dispatched, Dispatcher
from moe_dispatch.experts import apply_experts
from moe_dispatch.factory import make_dispatcher
from moe_dispatch.failure import PeerError
from moe_dispatch.heaps import SymmetricHeap, open_heap
from moe_dispatch.local import LocalDispatcher
from moe_dispatch.plan import Memory, RowPlan

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "Memory",
    "PeerError",
    "RowPlan",
    "SymmetricHeap",
    "apply_experts",
    "make_dispatcher",
    "open_heap",
]
