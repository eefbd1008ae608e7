"""Gradients in full precision, summed over microbatches: what a pipeline writes into."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_parallel.deferral import Deferral, WeightGradient, attach_sink, detach_sink


class GradientTarget(Protocol):
    """Where a pipeline leaves gradients. ``Gradients`` and ``ShardedAdamW`` are such."""

    def attach_sinks(self) -> None:
        """Give every trained parameter a ``dw_sink`` that leads here."""
        ...

    def takes(self, parameter: Parameter) -> bool:
        """Return whether gradients of this parameter are wanted."""
        ...

    def put_off(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Collect weight gradients instead of computing them."""
        ...

    def overlapped(self) -> AbstractContextManager[None]:
        """Wrap the last backward of a step, whose finished gradients may be reduced at once."""
        ...

    def hold(self, parameters: Iterable[Parameter]) -> None:
        """Take note that only ``ready`` tells when these are complete: stages share them."""
        ...

    def abandon(self) -> None:
        """Drop the gradients of a step that some rank did not finish. Every rank calls this."""
        ...

    def accumulate(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Take over ``.grad`` of these parameters, or of all, and clear it."""
        ...

    def ready(self, parameters: Iterable[Parameter]) -> None:
        """Take note that the gradients of these parameters are complete for this step."""
        ...


class Gradients:
    """A float32 gradient (float64 for float64) for each parameter of one process.

    For use with an optimizer of your own. ``ShardedAdamW`` has its own buffers instead.

    Args:
        parameters: By name, each tensor under one. Those with ``requires_grad=False`` are left
            out. Sinks that an earlier target attached are taken off.
        on_ready: Called with the name and the gradient of each parameter when it is complete,
            once a step.

    Raises:
        ValueError: If one tensor has two names.

    Attributes:
        main_grads: The sums, by name. Zero where no gradient came.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        on_ready: Callable[[str, Tensor], None] | None = None,
    ):
        owners: dict[int, str] = {}
        for name, parameter in parameters.items():
            twin = owners.setdefault(id(parameter), name)
            if twin != name:
                raise ValueError(f"{twin!r} and {name!r} are one tensor: name it once")
            detach_sink(parameter)
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._frozen = {id(p) for p in parameters.values()} - self._names.keys()
        self.main_grads = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in self._parameters.items()
        }
        self._on_ready = on_ready
        self._complete: set[str] = set()
        self._deferral = Deferral()

    def attach_sinks(self) -> None:
        """Give every parameter a ``dw_sink``, for operators that know what to do with it."""
        for name, parameter in self._parameters.items():
            attach_sink(parameter, _Sink(self._deferral, self.main_grads[name]))

    def takes(self, parameter: Parameter) -> bool:
        """Return whether there is a sum for this parameter."""
        return id(parameter) in self._names

    def put_off(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Collect weight gradients instead of computing them."""
        return self._deferral.put_off()

    def overlapped(self) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to reduce gradients with."""
        return nullcontext()

    def hold(self, parameters: Iterable[Parameter]) -> None:
        """Do nothing: only ``ready`` tells what is complete anyway."""

    def accumulate(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Add ``.grad`` of these parameters, or of all, to the sums, and clear it."""
        for parameter in self._parameters.values() if parameters is None else parameters:
            name = self._names.get(id(parameter))
            if parameter.grad is None or id(parameter) in self._frozen:
                continue
            if name is None:
                refuse_stranger(parameter)
            else:
                self.main_grads[name].add_(parameter.grad)
                parameter.grad = None

    def ready(self, parameters: Iterable[Parameter]) -> None:
        """Take note that the gradients of these parameters are complete for this step."""
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                continue
            if name in self._complete:
                raise RuntimeError(
                    f"{name} was complete already in this step: call zero() between two steps"
                )
            self._complete.add(name)
            if self._on_ready is not None:
                self._on_ready(name, self.main_grads[name])

    def abandon(self) -> None:
        """Drop the gradients of a step that was not finished, those in ``.grad`` too."""
        self.zero()
        for parameter in self._parameters.values():
            parameter.grad = None

    def zero(self) -> None:
        """Begin the next step."""
        self._complete.clear()
        for main_grad in self.main_grads.values():
            main_grad.zero_()


def refuse_stranger(parameter: Parameter) -> None:
    """Raise for a parameter with a gradient that nobody would take."""
    raise RuntimeError(
        f"a parameter of shape {tuple(parameter.shape)} has a gradient but is not among those that "
        "this was made with: it was added or replaced since, as load_state_dict(assign=True) does"
    )


class _Sink:
    """Adds the weight gradients of one parameter to its sum, now or later."""

    def __init__(self, deferral: Deferral, main_grad: Tensor):
        self._deferral, self._main_grad = deferral, main_grad

    def __call__(self, run: WeightGradient) -> None:
        self._deferral.submit(lambda: run(self._main_grad, True))
