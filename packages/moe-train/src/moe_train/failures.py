"""Which errors are for people, and which are faults of the program that need a traceback."""

from typing import NamedTuple

from moe_ckpt import CheckpointError
from moe_parallel import MeshError, MismatchError
from torch.distributed import DistError

from moe_train.corpus import CorpusError
from moe_train.errors import RunError
from moe_train.ranks import rank_info

_REFUSED = (CorpusError, MeshError)
_ALIKE = (*_REFUSED, CheckpointError, MismatchError)


class Kind(NamedTuple):
    """What to do with an error.

    Attributes:
        said: The error to tell in one line, or None for one that is a fault of the program.
        refused: Whether it came before any work.
        alike: Whether every rank meets it, so that one should tell.
    """

    said: BaseException | None
    refused: bool = False
    alike: bool = False


def kind_of(error: Exception) -> Kind:
    """Say what to do with an error of a command."""
    if isinstance(error, (*_ALIKE, OSError)):
        return Kind(error, isinstance(error, _REFUSED), isinstance(error, _ALIKE))
    # A rank that fails cuts its connections, and the others fail at their next collective.
    if isinstance(error, RuntimeError) and rank_info().world_size > 1 and _is_broken(error):
        first = str(error).splitlines()[0]
        return Kind(RunError(f"stopped, as another rank failed ({first})"))
    return Kind(None)


def _is_broken(error: RuntimeError) -> bool:
    return isinstance(error, DistError) or "gloo" in str(error)
