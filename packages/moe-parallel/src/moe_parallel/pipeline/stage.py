"""What a stage of the model takes and gives."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

# What travels between stages: one tensor, or several.
Activations = Tensor | tuple[Tensor, ...]


class StageResult(NamedTuple):
    """What a stage returns, if it is more than the activations for the next one.

    Attributes:
        output: For the next stage. The last stage may leave it None in training; in evaluation
            it is what the caller gets.
        loss: 0-dim, a term of the loss that this stage contributes: the main one on the last
            stage, auxiliary ones on any. Terms of all stages and microbatches are summed, so
            each is to be divided by the global count of tokens already.
        metrics: Tensors to hand to the caller, detached.
    """

    output: Activations | None = None
    loss: Tensor | None = None
    metrics: Mapping[str, Tensor] = {}


class MalformedResultError(TypeError):
    """A stage returned something that cannot be passed on."""


def normalize(result: Any, *, last: bool, training: bool) -> StageResult:
    """Bring what a stage returned into one form, or say what is wrong with it."""
    if not isinstance(result, StageResult):
        is_loss = last and training
        result = StageResult(loss=result) if is_loss else StageResult(output=result)
    output, loss = result.output, result.loss
    if loss is not None and (not isinstance(loss, Tensor) or loss.ndim):
        raise MalformedResultError(f"a stage's loss must be a 0-dim tensor, got {_describe(loss)}")
    if last and training and loss is None:
        raise MalformedResultError("the last stage returned no loss")
    if output is None and not last:
        raise MalformedResultError("a stage that is not the last must return activations, got None")
    tensors = as_tuple(output)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise MalformedResultError(
            f"activations must be a tensor or a tuple of them, got {_describe(output)}"
        )
    return result


def as_tuple(activations: Any) -> tuple[Any, ...]:
    """Return activations as a tuple; None has no members."""
    if activations is None:
        return ()
    return activations if isinstance(activations, tuple) else (activations,)


def as_given(tensors: tuple[Tensor, ...]) -> Activations:
    """Return what a stage is called with: one tensor as itself, several as a tuple."""
    return tensors[0] if len(tensors) == 1 else tensors


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(member).__name__ for member in value) or 'nothing'}"
    return type(value).__name__
