"""Three ranks of which the last is killed in mid-step; the others print what they raise."""

import json
import multiprocessing as mp
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from moe_dispatch import PeerError, open_heap
from moe_dispatch.rowwise import RowwiseDispatcher
from moe_dispatch.testing import DispatchCase, plan_for


def rank_main(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    case = DispatchCase(2, 2, 4, (3, 2, 4), hot_experts=6, dtype="float32")
    plan = plan_for(case)
    heap = open_heap(plan.heap_bytes, dist.group.WORLD, device="cpu")
    dispatcher = RowwiseDispatcher(plan, heap, deadline=60.0, layer="blocks.7")
    sent = dispatcher.dispatch(case.tokens(rank), case.routing(rank))
    dispatcher.channel.deadline = 2.0
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dispatcher.combine(sent.x_RD, sent)
    except PeerError as error:
        said = {
            "rank": error.rank, "source": error.source, "phase": error.phase,
            "layer": error.layer, "seconds": time.monotonic() - start,
        }  # fmt: skip
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, store.port)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
