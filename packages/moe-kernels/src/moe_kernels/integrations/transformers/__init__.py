"""The experts of Hugging Face transformers, computed by these kernels.

``register`` adds an experts implementation named ``"moe_kernels"`` to transformers, beside its own
``"eager"`` and ``"grouped_mm"``. A model is then switched to it like to any other.
"""

from importlib.metadata import version

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_kernels.integrations.transformers.forward import experts_forward

__all__ = ["register"]

# Earlier ones have the interface and refuse every name but their own.
OLDEST = (5, 7)


def register(name: str = "moe_kernels") -> None:
    """Add our experts implementation to transformers under a name. Doing it again changes nothing.

    Served are the experts that transformers itself can hand to another implementation, with
    ``silu(gate) * up`` (OLMoE, Qwen3-MoE, Mixtral, DeepSeek-V3 and others), ``relu(up)**2``
    without a gate, or the clamped SwiGLU of gpt-oss. Others raise at their first call.

    Args:
        name: What ``experts_implementation`` is to say.

    Raises:
        ImportError: If transformers is older than 5.7.
        ValueError: If the name belongs to another implementation.

    Examples:
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> register()
        >>> config = OlmoeConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_experts=4, vocab_size=50,
        ...     num_experts_per_tok=2, bos_token_id=0, eos_token_id=1, pad_token_id=2)
        >>> model = OlmoeForCausalLM(config)
        >>> model.set_experts_implementation("moe_kernels")
        >>> model.config._experts_implementation
        'moe_kernels'
    """
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"transformers {found} takes no experts implementation from outside; that needs "
            f"{oldest} or newer"
        )
    taken = name == "eager" or name in ALL_EXPERTS_FUNCTIONS
    if taken and ALL_EXPERTS_FUNCTIONS.get(name) is not experts_forward:
        raise ValueError(f"name {name!r} is that of another experts implementation of transformers")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
