"""Where a tensor is cut into chunks: a function of its shape alone, never of who holds it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

LOWER_BYTES = 4 << 20
UPPER_BYTES = 16 << 20


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Choose the shape of the chunks of a tensor.

    Chunks are runs of the tensor in C order: leading axes are cut to length 1, one axis is cut
    into parts, the axes after it are whole. With three axes or more the leading one counts
    experts. It is cut first and finest: the smallest number of experts that divides all of them
    and makes a chunk of 4 MiB (or, if that is above 16 MiB, does not divide them). Every other
    axis is cut into the fewest equal parts of at most 16 MiB. So a tensor below 4 MiB, or a
    matrix below 16 MiB, is one chunk.

    Args:
        shape: Of the whole tensor.
        itemsize: Bytes of one element.

    Returns:
        As many lengths as ``shape`` has, each at least 1.

    Examples:
        >>> chunk_shape((64, 2048, 1024), 4)  # 8 MiB an expert
        (1, 2048, 1024)
        >>> chunk_shape((64, 512, 256), 4)  # 0.5 MiB an expert
        (8, 512, 256)
        >>> chunk_shape((32000, 1024), 4)  # 125 MiB, in 8 parts
        (4000, 1024)
        >>> chunk_shape((), 8), chunk_shape((0, 3), 4)
        ((), (1, 3))
    """
    chunk = [max(1, length) for length in shape]
    for axis, length in enumerate(chunk):
        inner = itemsize * math.prod(chunk[axis + 1 :])
        if axis == 0 and len(chunk) > 2:
            chunk[0] = _experts(length, inner)
        elif length * inner > UPPER_BYTES:
            most = max(1, UPPER_BYTES // inner)
            chunk[axis] = math.ceil(length / math.ceil(length / most))
        if chunk[axis] > 1:
            break
    return tuple(chunk)


def _experts(count: int, inner: int) -> int:
    enough = math.ceil(LOWER_BYTES / inner)
    if enough >= count:
        return count
    divisor = next(c for c in range(enough, count + 1) if count % c == 0)
    return divisor if divisor * inner <= UPPER_BYTES else enough


@dataclass(frozen=True)
class Grid:
    """The chunks of one tensor, numbered in C order, as runs of its flat elements.

    Attributes:
        shape: Of the whole tensor.
        chunk: Shape of a chunk, see ``chunk_shape``.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.chunk) or min(self.chunk, default=1) < 1:
            raise ValueError(f"chunk {self.chunk} does not fit shape {self.shape}")
        cut = next((a for a, length in enumerate(self.chunk) if length > 1), len(self.chunk))
        if any(self.chunk[a] < self.shape[a] for a in range(cut + 1, len(self.shape))):
            raise ValueError(f"chunk {self.chunk} is not one run of the elements of {self.shape}")

    @cached_property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def chunk_size(self) -> int:
        """Number of elements of a chunk on disk, where the last one of an axis is padded."""
        return math.prod(self.chunk)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def index(self, number: int) -> tuple[int, ...]:
        """Return where a chunk is, counted in chunks along each axis."""
        index = []
        for count in reversed(self.counts):
            number, at = divmod(number, count)
            index.append(at)
        return tuple(reversed(index))

    def number(self, index: tuple[int, ...]) -> int:
        """Return which chunk is at ``index``, the inverse of ``index``."""
        number = 0
        for at, count in zip(index, self.counts, strict=True):
            number = number * count + at
        return number

    def box(self, number: int) -> tuple[slice, ...]:
        """Return the part of the tensor that a chunk holds."""
        axes = zip(self.index(number), self.chunk, self.shape, strict=True)
        return tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in axes)

    def run(self, number: int) -> tuple[int, int]:
        """Return the flat elements of a chunk as a half-open interval.

        Examples:
            >>> [Grid((5, 3), (2, 3)).run(number) for number in range(3)]
            [(0, 6), (6, 12), (12, 15)]
        """
        start, length = 0, 1
        for part, n in zip(self.box(number), self.shape, strict=True):
            start = start * n + part.start
            length *= part.stop - part.start
        return start, start + length

    def overlapping(self, start: int, stop: int) -> Iterator[int]:
        """Yield the chunks that hold any of the flat elements from ``start`` to ``stop``."""
        if start >= stop:
            return
        number = self._holding(start)
        while number < len(self) and self.run(number)[0] < stop:
            yield number
            number += 1

    def _holding(self, element: int) -> int:
        index, stride = [], self.size
        for n, c in zip(self.shape, self.chunk, strict=True):
            stride //= n
            at, element = divmod(element, stride)
            index.append(at // c)
        return self.number(tuple(index))
