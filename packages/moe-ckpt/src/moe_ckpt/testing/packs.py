"""Choose whether small tensors share arrays, for tests of either way."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from moe_ckpt import pack


@contextmanager
def apart(below: int = 0) -> Iterator[None]:
    """Give tensors arrays of their own, however small, between ``with`` and its end.

    Args:
        below: Only tensors of fewer bytes stand in packs.
    """
    with mock.patch.object(pack, "PACKED_BYTES", below):
        yield
