"""Weights in MXFP8, in both layouts, made once an optimizer step and owned by whoever asks.

A weight is needed twice: along D for ``x @ w.T`` and along the other axis for the gradient of
``x``. The two round differently, as their blocks differ; neither is made from the other.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_kernels.mxfp8 import MXTensor, Recipe, Rounding, quantize, quantize_both
from moe_kernels.mxfp8.check import check_recipe


class MXWeight(NamedTuple):
    """One weight ``[..., F, D]`` in MXFP8. A snapshot: nothing keeps it up to date.

    Attributes:
        rows: Scales along D, for the product.
        columns: The transpose ``[..., D, F]``, scales along F, for the gradient of the rows; None
            where no gradient will be asked for.
        recipe: Which blocks share a scale.
        rounding: How a scale was rounded. What is made beside it, as rows, is rounded alike.
    """

    rows: MXTensor
    columns: MXTensor | None
    recipe: Recipe
    rounding: Rounding


def quantize_weight(
    w: Tensor, *, recipe: Recipe, rounding: Rounding = "rceil", columns: bool = True
) -> MXWeight:
    """Round a weight to MXFP8, in one read for both layouts.

    Args:
        w: ``[F, D]`` or ``[E, F, D]``: bfloat16, float16 or float32; F and D multiples of 32.
        recipe: Which blocks share a scale.
        rounding: How a scale is rounded.
        columns: Whether the layout for the gradient is wanted too.

    Returns:
        The snapshot; later changes of ``w`` do not reach it.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> weight = quantize_weight(torch.ones(2, 64, 32), recipe="mx128")
        >>> weight.rows.data_ND.shape, weight.columns.data_ND.shape
        (torch.Size([2, 64, 32]), torch.Size([2, 32, 64]))
    """
    w = w.detach()
    if not columns:
        rows = quantize(w, recipe=recipe, rounding=rounding)
        return MXWeight(rows, None, recipe, rounding)
    return MXWeight(*quantize_both(w, recipe=recipe, rounding=rounding), recipe, rounding)


class StaleWeightError(RuntimeError):
    """Quantised weights are not those of the weights beside them."""


class StepHooks(Protocol):
    """An optimizer that calls back after each step, as those of ``torch.optim`` do."""

    def register_step_post_hook(self, hook: Callable[..., None]) -> object:
        """Call ``hook`` after every step."""
        ...


class WeightCache:
    """Owns the MXFP8 bytes of one layer's weights from one change of the weights to the next.

    Torch does not record every write to a tensor. Not to ``w.data`` or through ``data_ptr()``, not
    to a flat buffer that ``w.data`` was pointed at, as sharded optimizers and collectives write,
    and not the steps of its own ``AdamW(fused=True)``. So a cache quantises in every ``get`` until
    somebody promises to say when weights change: ``hold`` is that promise, kept by ``invalidate``
    after each change, and ``watch`` lets an optimizer keep it. What torch does record (operations
    in place, ``load_state_dict``, another tensor, another address) is quantised anew in any case.
    ``verify`` compares the bytes, for tests and for doubt.

    Quantised weights are new memory each time, so a backward that still runs keeps its own. A CUDA
    graph keeps their addresses: one that was captured over held weights has to be captured anew
    after ``invalidate``.

    Examples:
        >>> cache, w = WeightCache(recipe="mx128"), torch.ones(32, 32)
        >>> cache.hold()
        >>> first = cache.get(w)[0]
        >>> cache.get(w)[0] is first
        True
        >>> cache.invalidate()
        >>> cache.get(w)[0] is first
        False
    """

    def __init__(
        self, *, recipe: Recipe, rounding: Rounding = "rceil", columns: bool = True
    ) -> None:
        """Hold nothing yet.

        Args:
            recipe: Which blocks share a scale.
            rounding: How a scale is rounded.
            columns: Whether the layout for the gradient is wanted too.

        Raises:
            ValueError: If the recipe or the rounding is unknown.
        """
        check_recipe(recipe, rounding)
        self.recipe, self.rounding, self.columns = recipe, rounding, columns
        self._is_held = False
        self._weights: tuple[MXWeight, ...] = ()
        # Aliases keep the memory: a freed weight's address could come back as another's.
        self._made_from: tuple[tuple[Tensor, int], ...] = ()

    def get(self, *weights: Tensor) -> tuple[MXWeight, ...]:
        """Return the weights in MXFP8, made now unless those held are of these weights.

        Args:
            weights: The same ones each time, in the same order.

        Returns:
            One snapshot each.
        """
        if self._is_fresh(weights):
            return self._weights
        made = tuple(
            quantize_weight(w, recipe=self.recipe, rounding=self.rounding, columns=self.columns)
            for w in weights
        )
        if self._is_held:
            self._weights = made
            self._made_from = tuple((w.detach(), _version(w)) for w in weights)
        return made

    def hold(self) -> None:
        """Promise, once, to call ``invalidate`` after changes of the weights: ``get`` reuses."""
        self._is_held = True

    def invalidate(self) -> None:
        """Forget what is held: the weights have changed, or will before the next ``get``."""
        self._weights, self._made_from = (), ()

    def watch(self, optimizer: StepHooks) -> None:
        """Hold, and invalidate after every step of the optimizer that changes the weights."""
        optimizer.register_step_post_hook(lambda *_: self.invalidate())
        self.hold()

    def verify(self, *weights: Tensor) -> None:
        """Compare what ``get`` would return with the weights, byte by byte. The host waits.

        Raises:
            StaleWeightError: If they differ: somebody wrote where torch does not see it.
        """
        for index, (have, w) in enumerate(zip(self.get(*weights), weights, strict=True)):
            want = quantize_weight(
                w, recipe=self.recipe, rounding=self.rounding, columns=self.columns
            )
            pairs = zip(_tensors(have), _tensors(want), strict=True)
            if not all(_same_bytes(a, b) for a, b in pairs):
                raise StaleWeightError(
                    f"weight {index} of {len(weights)}, shape {tuple(w.shape)}, has changed since "
                    "it was quantised, in a way that torch does not record; call invalidate() "
                    "after such a write"
                )

    def _is_fresh(self, weights: tuple[Tensor, ...]) -> bool:
        if not weights or len(weights) != len(self._made_from):
            return False
        return all(
            version == _version(w) and version >= 0 and _is_alias(alias, w)
            for w, (alias, version) in zip(weights, self._made_from, strict=True)
        )


def _version(w: Tensor) -> int:
    return -1 if w.is_inference() else w._version  # inference tensors do not count


def _is_alias(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )


def _tensors(weight: MXWeight) -> list[Tensor]:
    return [*weight.rows, *(weight.columns or ())]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
