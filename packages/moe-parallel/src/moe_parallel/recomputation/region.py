"""A part of the forward whose saved tensors are computed again when backward asks for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

# The region that runs now, in the forward or again. A context variable, as autograd runs the
# backward of a GPU, and so the second time, in a thread of its own.
_current: ContextVar["Region | None"] = ContextVar("current", default=None)
# The region whose consumer runs now.
_consuming: ContextVar["Region | None"] = ContextVar("consuming", default=None)


# That of the CPU, and of each CUDA device by number.
_RandomState = tuple[Tensor, dict[int, Tensor]]


class RecomputeError(RuntimeError):
    """A part did something else the second time."""


class _Form(NamedTuple):
    """What a saved tensor looked like in the first run.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        address: Where its memory began. A parameter is at the same place in the second run.
        version: How often it had been written to in place.
    """

    shape: torch.Size
    dtype: torch.dtype
    address: int
    version: int


class _Guarded(NamedTuple):
    """A tensor that is kept, and how often it had been written to in place until then."""

    tensor: Tensor
    version: int


class _OutputPlace(NamedTuple):
    """Where in an output a tensor that the consumer saved lies."""

    region: "Region"
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _EndOfRecomputation(BaseException):
    """Everything that backward needs is there. Not an Exception, so that no part catches it."""


class Region:
    """One call of a part, and what it takes to run it again.

    Autograd's graph is that of the first run. Instead of each tensor that the graph saves it
    keeps a number; when the first of them is asked for, the part runs once more with the same
    inputs, random numbers and replayed values, and the tensors that it saves then, in the same
    order, take the place of the numbers.
    """

    def __init__(self, part: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._part = part
        self._inputs = tree_map(_keep, (args, kwargs))
        self._forms: list[_Form] = []
        self._values: dict[int, Tensor] = {}
        self._outputs: list[Tensor] | None = None
        self._storages: dict[int, tuple[int, int]] = {}
        self._num_places = 0
        self._replay: list[Any] = []
        self._position: int | None = None  # in the replay; None in the first run
        devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._cuda = sorted(d.index for d in devices if d.type == "cuda" and d.index is not None)
        self._random = _random_state(self._cuda)
        kinds = ("cpu", "cuda") if self._cuda else ("cpu",)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]

    @property
    def again(self) -> bool:
        """Whether this is the second run."""
        return self._position is not None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the part for the first time, on the inputs that the region was made with."""
        with _set(_current, self), saved_tensors_hooks(self._number, self._value):
            return self._part(*args, **kwargs)

    def consume(self, consumer: Callable[..., Any], outputs: Any) -> Any:
        """Run what uses the outputs; of these it keeps their place instead of the values."""
        for index, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, Tensor) and output.numel():
                found = index, _version(output)
                self._storages.setdefault(output.untyped_storage().data_ptr(), found)
        with _set(_consuming, self), saved_tensors_hooks(self.place_of, value_at):
            result = consumer(*outputs) if isinstance(outputs, tuple) else consumer(outputs)
        self._storages.clear()  # the memory will be used for something else
        return result

    def place_of(self, tensor: Tensor) -> Any:
        """Return the place of a tensor in the outputs, or the tensor itself if it is elsewhere.

        What the consumer has written to in place is not what the part computes, so it is kept.
        """
        index, version = self._storages.get(tensor.untyped_storage().data_ptr(), (None, 0))
        if index is None or not tensor.numel() or version != _version(tensor):
            return _Guarded(tensor, _version(tensor))
        self._num_places += 1
        offset = int(tensor.storage_offset())
        return _OutputPlace(self, index, tensor.size(), tensor.stride(), offset)

    def output_at(self, place: _OutputPlace) -> Tensor:
        """Return the tensor at a place in the outputs, computing them if they are not there."""
        if self._outputs is None:
            self._run_again(whole=True)
        outputs = self._outputs
        assert outputs is not None
        self._num_places -= 1
        if self._num_places <= 0:  # below 0: a second backward
            self._outputs = None
        return outputs[place.index].as_strided(place.size, place.stride, place.offset)

    def remember(self, compute: Callable[[], Any]) -> Any:
        """Compute and keep a value in the first run, return it in the second."""
        if self._position is None:
            # What autograd saves in here is kept, so that nothing of it need be computed again.
            with saved_tensors_hooks(lambda tensor: _Guarded(tensor, _version(tensor)), value_at):
                value = compute()
            # What follows draws the numbers that it drew, though compute will draw none.
            self._replay.append((tree_map(_keep_alone, value), _random_state(self._cuda)))
            return value
        if self._position == len(self._replay):
            raise RecomputeError(
                f"{_name(self._part)} asked for more than the {len(self._replay)} values that "
                "its first run left to replay"
            )
        value, random_state = self._replay[self._position]
        self._position += 1
        _set_random_state(random_state)
        return tree_map(partial(_unkeep, f"a value that {_name(self._part)} replays"), value)

    def _number(self, tensor: Tensor) -> int:
        address = tensor.untyped_storage().data_ptr()
        self._forms.append(_Form(tensor.shape, tensor.dtype, address, _version(tensor)))
        return len(self._forms) - 1

    def _value(self, number: int) -> Tensor:
        if number not in self._values:
            self._run_again(whole=False)
        # Each is asked for once, and held no longer. A second backward runs the part again.
        return self._values.pop(number)

    def _run_again(self, *, whole: bool) -> None:
        values: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            self._check(len(values), tensor)
            values.append(tensor.detach())
            if not whole and len(values) == len(self._forms):
                raise _EndOfRecomputation

        with self._as_before(), saved_tensors_hooks(collect, _refuse):
            what = f"an input of {_name(self._part)}"
            args, kwargs = tree_map(partial(_unkeep, what), self._inputs)
            outputs = None
            with suppress(_EndOfRecomputation):
                outputs = self._part(*args, **kwargs)
        if len(values) != len(self._forms):
            raise RecomputeError(
                f"{_name(self._part)} saved {len(values)} tensors when computed again, "
                f"{len(self._forms)} before: {_HINT}"
            )
        self._values = dict(enumerate(values))
        if whole:
            self._outputs = [_detached(output) for output in tree_leaves(outputs)]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore gradient mode, random numbers, autocast and replayed values of the first run."""
        self._position = 0
        with torch.enable_grad(), torch.random.fork_rng(devices=self._cuda), _set(_current, self):
            _set_random_state(self._random)
            with _autocasts(self._autocast):
                try:
                    yield
                finally:
                    self._position = None

    def _check(self, number: int, tensor: Tensor) -> None:
        if number >= len(self._forms):
            raise RecomputeError(
                f"{_name(self._part)} saved more tensors when computed again than the "
                f"{len(self._forms)} before: {_HINT}"
            )
        before = self._forms[number]
        if (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise RecomputeError(
                f"saved tensor {number} of {_name(self._part)} was "
                f"{tuple(before.shape)} {before.dtype}, computed again it is "
                f"{tuple(tensor.shape)} {tensor.dtype}: {_HINT}"
            )
        if tensor.untyped_storage().data_ptr() == before.address:
            what = f"saved tensor {number} of {_name(self._part)}, {tuple(tensor.shape)},"
            _check_version(what, tensor, before.version)


_HINT = "a choice that may come out otherwise belongs in replayed()"


def current_region() -> Region | None:
    """Return the region that runs now, if any."""
    return _current.get()


def value_at(place: Any) -> Tensor:
    """Return the tensor that ``place_of`` was given."""
    if isinstance(place, _OutputPlace):
        return place.region.output_at(place)
    _check_version("a tensor that is kept for backward", place.tensor, place.version)
    return place.tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check_version(what: str, tensor: Tensor, version: int) -> None:
    """Do what autograd does for the tensors that it keeps without hooks."""
    if _version(tensor) != version:
        raise RecomputeError(
            f"{what} was changed in place before it was computed again: it is at version "
            f"{_version(tensor)}, expected version {version}. Write the change out of place"
        )


def _random_state(devices: list[int]) -> _RandomState:
    return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices}


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    for device, cuda_state in state[1].items():
        torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _autocasts(states: list[tuple[str, torch.dtype, bool]]) -> Iterator[None]:
    (kind, dtype, enabled), *rest = states
    with (
        torch.autocast(kind, dtype=dtype, enabled=enabled),
        _autocasts(rest) if rest else nullcontext(),
    ):
        yield


def _detached(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


class _Leaf:
    """A tensor that is kept, hidden from the functions that look into tuples.

    Attributes:
        kept: The tensor with its version, or its place in the outputs of the region before.
        requires_grad: Whether it needs a gradient.
    """

    def __init__(self, kept: "_Guarded | _OutputPlace", *, requires_grad: bool):
        self.kept, self.requires_grad = kept, requires_grad


def _keep(value: Any) -> Any:
    outer = _consuming.get()
    if outer is None or not isinstance(value, Tensor):
        return _keep_alone(value)
    return _Leaf(outer.place_of(value.detach()), requires_grad=value.requires_grad)


def _keep_alone(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kept = _Guarded(value.detach(), _version(value))
    return _Leaf(kept, requires_grad=value.requires_grad)


def _unkeep(what: str, value: Any) -> Any:
    if not isinstance(value, _Leaf):
        return value
    if isinstance(value.kept, _Guarded):
        _check_version(what, *value.kept)
    return value_at(value.kept).detach().requires_grad_(value.requires_grad)


def _refuse(_: Any) -> Tensor:
    raise RecomputeError("backward went through a part that was being computed again")


def _name(part: Callable[..., Any]) -> str:
    return getattr(part, "__qualname__", type(part).__name__)
