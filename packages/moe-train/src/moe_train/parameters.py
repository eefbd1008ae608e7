"""How the optimizer treats each parameter of the model."""

from typing import Literal

from moe_parallel import ParamSpec
from torch.nn import Parameter

from moe_train.config import OptimizerConfig
from moe_train.model import Transformer

_EXPERT_MATRICES = (".moe.gate_up", ".moe.down")
_ROUTER = ".moe.router"
_ENDS = ("embedding", "head")


def param_specs(model: Transformer, config: OptimizerConfig | None = None) -> list[ParamSpec]:
    """Say of each parameter whether experts divide it, whether it decays, its rule and its rate.

    Matrices decay; vectors do not, and neither does the router, whose scale sets how decided it is.

    Args:
        model: Whose parameters.
        config: Chooses rule and rates; None takes the defaults.
    """
    config = config or OptimizerConfig()
    return [
        ParamSpec(
            name,
            parameter,
            is_expert=name.endswith(_EXPERT_MATRICES),
            weight_decay=parameter.ndim > 1 and not name.endswith(_ROUTER),
            rule=_rule(name, parameter, config),
            lr_scale=_rate(name, config),
        )
        for name, parameter in model.named_parameters()
    ]


def _rule(name: str, parameter: Parameter, config: OptimizerConfig) -> Literal["adamw", "muon"]:
    inside = parameter.ndim > 1 and name not in _ENDS and not name.endswith(_ROUTER)
    return "muon" if config.rule == "muon" and inside else "adamw"


def _rate(name: str, config: OptimizerConfig) -> float:
    if name.endswith(_EXPERT_MATRICES):
        return config.expert_lr
    if name.endswith(_ROUTER):
        return config.router_lr
    return config.embedding_lr if name in _ENDS else 1.0
