"""Which experts of transformers the kernels compute, told from how a module describes itself."""

from typing import Any, NamedTuple, NoReturn, Protocol

from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moe_kernels.mlp.unfused import ALPHA, LIMIT

SERVED = (
    "silu(gate) * up, relu(up)**2 without a gate, and the clamped SwiGLU of gpt-oss with "
    f"alpha={ALPHA} and limit={LIMIT}"
)


class Experts(Protocol):
    """What a class has that transformers lets other implementations compute.

    Its weights are ``gate_up_proj`` or ``up_proj``, and ``down_proj``: all experts in one tensor.

    Attributes:
        config: The model's.
        down_proj: ``[E, D, F]``; ``[E, F, D]`` if transposed.
        down_proj_bias: ``[E, D]``; there only if ``has_bias``.
        is_transposed: Whether the weights are those of ``x @ w``; otherwise of ``x @ w.T``.
        is_concatenated: Whether the gate's rows come before those of the up projection.
        has_gate: Whether there is a gate.
        has_bias: Whether both projections have a bias.
    """

    config: Any
    down_proj: Tensor
    down_proj_bias: Tensor
    is_transposed: bool
    is_concatenated: bool
    has_gate: bool
    has_bias: bool

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor: ...


class Plan(NamedTuple):
    """How to hand a module's experts to ``expert_mlp``.

    Attributes:
        activation: Its name there.
        up: Name of the parameter of the first projection; its bias has the same and ``_bias``.
        interleaved: Whether the rows of gate and up alternate; otherwise the gate's come first.
    """

    activation: str
    up: str
    interleaved: bool


def name_of(module: Experts) -> str:
    """Return a module's class and model, for messages."""
    model = getattr(module.config, "model_type", "") or type(module.config).__name__
    return f"{type(module).__name__} of {model}"


def plan_experts(module: Experts) -> Plan:
    """Say how to compute a module's experts.

    The function that combines gate and up defines both activation and layout, so it is looked at
    itself: a class with a function of its own is refused, whatever its configuration says.

    Args:
        module: Instance of a class that has transformers' ``use_experts_implementation``.

    Raises:
        ValueError: If the kernels do not compute what the module computes.
    """
    if getattr(module, "has_post_expert_norm", False):
        _refuse(module, "it normalizes each expert's output before weighting")
    act_fn = getattr(module, "act_fn", None)  # a gate of its own may need none
    if not module.has_gate:
        if not isinstance(act_fn, ReLUSquaredActivation):
            _refuse(module, f"its activation is {type(act_fn).__name__}, without a gate")
        return Plan("relu2", "up_proj", interleaved=False)
    gate = type(module)._apply_gate
    if gate is GptOssExperts._apply_gate:
        alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
        if (alpha, limit) != (ALPHA, LIMIT):
            _refuse(module, f"it has alpha={alpha} and limit={limit}")
        return Plan("clamped_swiglu", "gate_up_proj", interleaved=True)
    if gate is not _default_apply_gate:
        _refuse(module, "it combines gate and up in a way of its own")
    if not module.is_concatenated:
        _refuse(module, "its gate and up rows alternate, and its activation takes them in halves")
    if not isinstance(act_fn, SiLUActivation | nn.SiLU):
        _refuse(module, f"its activation is {type(act_fn).__name__}")
    return Plan("swiglu", "gate_up_proj", interleaved=False)


def _refuse(module: Experts, reason: str) -> NoReturn:
    raise ValueError(
        f"moe_kernels does not compute {name_of(module)}: {reason}. It computes {SERVED}. Choose "
        "another experts_implementation"
    )
