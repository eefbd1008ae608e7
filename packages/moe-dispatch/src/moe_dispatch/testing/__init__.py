"""Laws that every dispatcher obeys, and cases to try them on. Needs ``moe-dispatch[testing]``.

On each rank ``travel`` takes one case through a dispatcher, forward and backward. In the test
``check_dispatcher`` compares what all ranks brought home with a plain computation::

    def program(group, case):
        return travel(MyDispatcher(case.num_experts, group), case)

    @given(case=dispatch_cases(max_world_size=4))
    def test_my_dispatcher(case):
        check_dispatcher(lambda case: run_on_ranks(program, case.world_size, case), case)

``run_on_ranks`` is yours: processes, threads or a cluster, as long as it returns the results in
the order of the ranks.
"""

from moe_dispatch.testing.case import DispatchCase
from moe_dispatch.testing.laws import check_dispatcher, check_trips
from moe_dispatch.testing.rowwise import plan_for, poison, travel_on_threads
from moe_dispatch.testing.strategies import dispatch_cases
from moe_dispatch.testing.threads import run_on_threads
from moe_dispatch.testing.trip import Trip, gain_experts, travel

__all__ = [
    "DispatchCase",
    "Trip",
    "check_dispatcher",
    "check_trips",
    "dispatch_cases",
    "gain_experts",
    "plan_for",
    "poison",
    "run_on_threads",
    "travel",
    "travel_on_threads",
]
