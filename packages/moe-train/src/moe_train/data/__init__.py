"""Which tokens a step sees. The whole state is one number: how many sequences were seen before."""

from moe_train.data.batch import IGNORED, Batch
from moe_train.data.order import rank_share, visiting_order
from moe_train.data.sequences import Sequences, SequenceSource
from moe_train.data.tokens import Tokens

__all__ = [
    "IGNORED",
    "Batch",
    "SequenceSource",
    "Sequences",
    "Tokens",
    "rank_share",
    "visiting_order",
]
