"""Tools to test what is saved and loaded in parallel: shards, ranks as threads, faults."""

from moe_ckpt.testing.faults import Died, Faults
from moe_ckpt.testing.packs import apart
from moe_ckpt.testing.ranks import ThreadCommunicator, run_ranks
from moe_ckpt.testing.shards import ArrayShard, blank, cut

__all__ = [
    "ArrayShard",
    "Died",
    "Faults",
    "ThreadCommunicator",
    "apart",
    "blank",
    "cut",
    "run_ranks",
]
