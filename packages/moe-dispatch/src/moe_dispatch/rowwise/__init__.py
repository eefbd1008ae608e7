"""The row-wise exchange over symmetric memory.

Read ``protocol.py`` (who waits for whom), ``agree/kernel.py`` and ``carry/kernel.py`` (how),
``slots.py`` (places), ``channel.py`` (what runs the steps), ``launch.py`` (each step),
``functions.py`` (the exchanges) and ``dispatcher.py`` (the same with gradients).
"""

from moe_dispatch.plan import Memory, RowPlan
from moe_dispatch.rowwise.channel import Channel
from moe_dispatch.rowwise.dispatcher import RowwiseDispatcher
from moe_dispatch.rowwise.functions import (
    bring_gradients,
    bring_results,
    meet,
    release,
    send_gradients,
    send_tokens,
)
from moe_dispatch.rowwise.slots import Arrived, Slots
from moe_dispatch.rowwise.warm import warm_up

__all__ = [
    "Arrived",
    "Channel",
    "Memory",
    "RowPlan",
    "RowwiseDispatcher",
    "Slots",
    "bring_gradients",
    "bring_results",
    "meet",
    "release",
    "send_gradients",
    "send_tokens",
    "warm_up",
]
