"""Recomputation: keep the inputs of a part of the forward, and compute the rest again.

What is saved is memory; the price is the time of the part, once more. Three ways to cut:

- ``recompute(block, x)``: the whole block. Kept: x.
- ``recompute(norm, x, then=projection)``: what is cheap, before what is dear. ``norm`` is computed
  again; ``projection`` is not, and what it would save of norm's output is not kept either.
- ``recompute(gate_up_and_activation, rows, then=down)``: an expert MLP up to its inputs.

Whatever must not be decided twice, such as which experts a token goes to, goes through
``replayed``; whatever must not be counted twice asks ``recomputing``.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_parallel.recomputation.region import RecomputeError, Region, current_region

__all__ = ["RecomputeError", "recompute", "recomputing", "replayed"]

T = TypeVar("T")


def recompute(
    part: Callable[..., Any], *args: Any, then: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    """Call ``part`` without keeping what it saves for backward; backward computes it again.

    The results and gradients are those of ``part(*args, **kwargs)``, to the bit: random numbers
    and autocast are as they were, values from ``replayed`` are given again. ``part`` runs once
    more per backward at most, and no further than the last tensor that backward needs.

    Of the arguments only tensors and the tensors in tuples, lists and dicts are detached and kept;
    ``part`` may use parameters freely. Inside a part that is being recomputed, ``recompute`` is a
    plain call: the outermost part decides. Without gradients it is one, too.

    Args:
        part: Any function or module whose saved tensors depend on its arguments alone.
        args: Its arguments.
        then: Called with what ``part`` returns (a tuple as several arguments), and not computed
            again. Where it saves outputs of ``part``, these are not kept but computed again.
        kwargs: More arguments of ``part``.

    Returns:
        What ``part`` returns, or what ``then`` returns if it is given.

    Raises:
        RecomputeError: In backward, if ``part`` saves other tensors the second time, or if an
            input, a parameter that it saves, or a replayed value was changed in place meanwhile.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> def part(x):
        ...     print("again" if recomputing() else "first")
        ...     return x.exp()
        >>> y = recompute(part, x, then=torch.sin)
        first
        >>> y.sum().backward()
        again
    """
    if not torch.is_grad_enabled() or current_region() is not None:
        outputs = part(*args, **kwargs)
        if then is None:
            return outputs
        return then(*outputs) if isinstance(outputs, tuple) else then(outputs)
    region = Region(part, args, kwargs)
    outputs = region.run(args, kwargs)
    return outputs if then is None else region.consume(then, outputs)


def replayed(compute: Callable[[], T]) -> T:
    """Return what ``compute`` returns, which inside a recomputed part it is asked for only once.

    The second run of the part gets the values of the first. What autograd saves in ``compute`` is
    kept. A router, say, decides once::

        weight_TK, expert_TK = replayed(lambda: route(logits_TE, top_k))

    Args:
        compute: A function without arguments. It may return tensors in tuples, lists and dicts.

    Examples:
        >>> def part(x):
        ...     chosen = replayed(lambda: x.argmax())
        ...     return x[chosen] ** 2
        >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> recompute(part, x).backward()
        >>> x.grad
        tensor([0., 6.])
    """
    region = current_region()
    return compute() if region is None else region.remember(compute)


def recomputing() -> bool:
    """Return whether a part is being computed again, so that nothing is to be counted.

    Examples:
        >>> recomputing()
        False
    """
    region = current_region()
    return region is not None and region.again
