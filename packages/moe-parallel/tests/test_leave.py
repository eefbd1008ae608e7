"""A program that leaves its groups has no thread of theirs when the interpreter ends."""

import subprocess
import sys

PROGRAM = """
from pathlib import Path
import torch, torch.distributed as dist, moe_parallel as moe

def threads():
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum("gloo" in name.read_text() for name in names)

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.new_group([0])]
    cycle.append(cycle)
    dist.all_reduce(torch.ones(1), group=cycle[0])
    print(threads())

moe.leave()  # without groups: nothing
main()
moe.leave()
print(threads(), dist.is_initialized())
"""


def test_no_thread_of_a_group_outlives_leave_though_a_cycle_held_the_group() -> None:
    said = subprocess.check_output(
        [sys.executable, "-c", PROGRAM], text=True, timeout=120, env={"GLOO_SOCKET_IFNAME": "lo"}
    )
    before, after, joined = said.split()
    assert int(before) > 0
    assert (after, joined) == ("0", "False")
