"""What a rank holds of a tensor, and how to see its memory as numpy without a copy."""

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moe_ckpt.errors import ShardError

DTYPES = ("float32", "float64")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")


class Shard(Protocol):
    """A run of the flat elements of a global tensor.

    Attributes:
        name: Of the tensor in the whole model, such as ``layers.3.experts.w_down``. It knows no
            rank: layers and experts are counted globally.
        kind: Which of its values, such as ``master``, ``exp_avg`` or ``exp_avg_sq``.
        global_shape: Shape of the whole tensor.
        flat_start: First element held here, in C order of the whole tensor.
        flat_stop: One past the last.
        data: The elements, 1-D, contiguous, float32 or float64, in host memory: a numpy array, or
            anything that shows its memory as one without a copy, such as a torch CPU tensor.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def flat_start(self) -> int: ...
    @property
    def flat_stop(self) -> int: ...
    @property
    def data(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class View:
    """A checked shard.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        shape: Of the whole tensor.
        start: First flat element.
        stop: One past the last.
        data: 1-D numpy array of ``stop - start`` elements on the memory of the shard.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: np.ndarray

    def describe(self) -> list[Any]:
        """Return all but the data as JSON."""
        return [self.name, self.kind, list(self.shape), self.data.dtype.name, self.start, self.stop]


def check_name(text: str, what: str) -> None:
    """Raise unless ``text`` can be one directory on any file system.

    Raises:
        ShardError: If it is empty, too long, hidden, or has a character beyond letters, digits,
            ``_``, ``-`` and ``.``.
    """
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        rule = "1 to 200 letters, digits, '_', '-' and '.', not starting with '.'"
        raise ShardError(f"{what} {text!r} cannot be the name of a directory: use {rule}")


def view_of(shard: Shard, *, writable: bool = False) -> View:
    """Check a shard and return a view of its memory.

    Args:
        shard: Of the caller.
        writable: Whether values will be written into it.

    Raises:
        ShardError: If anything about the shard cannot be saved or loaded.
    """
    check_name(shard.name, "the tensor name")
    check_name(shard.kind, "the kind")
    label = f"{shard.name}/{shard.kind}"
    shape = tuple(int(n) for n in shard.global_shape)
    start, stop, size = int(shard.flat_start), int(shard.flat_stop), math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= size:
        raise ShardError(
            f"{label}: the interval [{start}, {stop}) is not inside the {size} elements of "
            f"shape {shape}"
        )
    data = _memory(label, shard.data)
    if data.shape != (stop - start,):
        raise ShardError(
            f"{label}: data has shape {data.shape}, the interval [{start}, {stop}) needs "
            f"({stop - start},)"
        )
    if data.dtype.name not in DTYPES or not data.dtype.isnative:
        raise ShardError(f"{label}: data is {data.dtype}, a checkpoint holds {' or '.join(DTYPES)}")
    if not data.flags.c_contiguous:
        raise ShardError(f"{label}: data has stride {data.strides[0]} bytes, it must be contiguous")
    if writable and not data.flags.writeable:
        raise ShardError(f"{label}: data is read-only, nothing can be loaded into it")
    return View(shard.name, shard.kind, shape, start, stop, data)


def _memory(label: str, data: Any) -> np.ndarray:
    if isinstance(data, np.ndarray):
        return data
    device = getattr(getattr(data, "device", None), "type", "cpu")
    if device != "cpu":
        raise ShardError(f"{label}: data is on device {data.device}, copy it to host memory first")
    if hasattr(data, "detach"):  # torch shows no memory of a tensor that requires grad
        data = data.detach()
    try:
        show = data.numpy if hasattr(data, "numpy") else lambda: np.asarray(data)
        first, second = show(), show()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShardError(f"{label}: data cannot be seen as a numpy array: {error}") from error
    # Two views of one memory begin at one address; two copies, both alive, cannot.
    where = [array.__array_interface__["data"][0] for array in (first, second)]
    if first.size and where[0] != where[1]:
        raise ShardError(f"{label}: {type(data).__name__} shows a copy of its memory, not a view")
    return first
