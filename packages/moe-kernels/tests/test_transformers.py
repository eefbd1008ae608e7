"""The experts of transformers on these kernels, beside transformers' own eager ones.

Bounds are relative to the largest value of a tensor. Both sum in another order: float64 1e-10,
float32 1e-4 after two layers and their backward. bfloat16 keeps 8 bits: experts alone stay within
4e-2 of eager in float64. A model in bfloat16 is held beside eager in bfloat16, which rounds as much
again, to 1e-1, because gradients that sum over all tokens cancel; and on one layer, as the router
of a second one may choose other experts after a rounding.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels.testing import randn, routings, seeds
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from moe_kernels.integrations.transformers import register
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

BOUND = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}
MODEL_BOUND = {**BOUND, torch.bfloat16: 1e-1}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}
TINY = {
    "hidden_size": 32, "vocab_size": 60, "num_attention_heads": 2, "num_key_value_heads": 2,
    "initializer_range": 0.2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
    "n_shared_experts": 1,
}  # fmt: skip
FAMILIES = {
    "olmoe": lambda **sizes: OlmoeConfig(**TINY, intermediate_size=16, num_experts=8, **sizes),
    "qwen3_moe": lambda **sizes: Qwen3MoeConfig(
        **TINY, moe_intermediate_size=16, intermediate_size=32, num_experts=8, head_dim=16, **sizes
    ),
    "mixtral": lambda **sizes: MixtralConfig(
        **TINY, intermediate_size=16, num_local_experts=8, **sizes
    ),
    "deepseek_v3": lambda **sizes: DeepseekV3Config(
        **TINY, **LATENT, moe_intermediate_size=16, intermediate_size=32, n_routed_experts=8,
        **sizes,
    ),
    "gpt_oss": lambda **sizes: GptOssConfig(
        **TINY, intermediate_size=16, num_local_experts=8, head_dim=16, **sizes
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


@use_experts_implementation(is_transposed=True)
class TransposedExperts(torch.nn.Module):
    """Experts like Aria's, which older versions of transformers do not hand to others."""

    def __init__(self, config) -> None:
        super().__init__()
        D, F, E = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.num_experts = E
        self.gate_up_proj = torch.nn.Parameter(torch.empty(E, D, 2 * F))
        self.down_proj = torch.nn.Parameter(torch.empty(E, F, D))
        self.act_fn = torch.nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y_TD = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            gate_TF, up_TF = (hidden_states @ self.gate_up_proj[e]).chunk(2, dim=1)
            weight_T1 = (top_k_weights * (top_k_index == e)).sum(dim=1, keepdim=True)
            y_TD = y_TD + weight_T1 * ((self.act_fn(gate_TF) * up_TF) @ self.down_proj[e])
        return y_TD


def experts_of(kind: str, D: int, F: int, E: int, seed: int) -> torch.nn.Module:
    """Return the experts of one layout, in float64, with weights and biases of unit scale."""
    made = {
        "gate first": lambda: OlmoeExperts(
            OlmoeConfig(hidden_size=D, intermediate_size=F, num_experts=E, **HEADS)
        ),
        "transposed": lambda: TransposedExperts(
            MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, **HEADS)
        ),
        "interleaved with biases": lambda: GptOssExperts(
            GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, **HEADS)
        ),
        "no gate": lambda: NemotronHExperts(
            NemotronHConfig(hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, **HEADS)
        ),
    }
    experts = made[kind]().double()
    for index, parameter in enumerate(experts.parameters()):
        values = randn(*parameter.shape, seed=seed + index, dtype=torch.float64)
        columns = 1 if parameter.ndim == 2 else parameter.shape[1 if kind in TRANSPOSED else 2]
        parameter.data = values / columns**0.5
    return experts


TRANSPOSED = ("transposed", "interleaved with biases")
LAYOUTS = ("gate first", "transposed", "interleaved with biases", "no gate")


def run(experts, implementation, x_TD, expert_TK, weight_TK, dy_TD):
    """Return the output and the gradients of tokens, routing weights and every parameter."""
    experts.config._experts_implementation = implementation
    leaves = [t.detach().clone().requires_grad_() for t in (x_TD, weight_TK)]
    y_TD = experts(leaves[0], expert_TK, leaves[1])
    leaves = [*leaves, *experts.parameters()]
    if y_TD.requires_grad:  # eager's of no tokens does not
        grads = torch.autograd.grad(y_TD, leaves, dy_TD)
    else:
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    names = ("y", "dx", "dweight", *(name for name, _ in experts.named_parameters()))
    return dict(zip(names, (y_TD.detach(), *grads), strict=True))


def assert_near(got: dict, want: dict, bound: float, least: float = 1e-3) -> None:
    """Compare by name, relative to the largest value or to ``least`` if that is more."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name]
        assert g.dtype == w.dtype, name
        assert g.shape == w.shape, name
        if w.numel():
            error, scale = (g - w).abs().max().item(), w.abs().max().item()
            assert error <= bound * max(scale, least), f"{name}: error {error:.3g} of {scale:.3g}"


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 6).flatmap(lambda E: st.tuples(st.just(E), routings(E))),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from(list(BOUND)),
    seeds,
)
def test_experts_of_every_layout_give_the_values_and_gradients_of_eager(
    kind, case, shape, dtype, seed
) -> None:
    (E, expert_TK), (D, F) = case, shape
    (T, K), masked_TK = expert_TK.shape, expert_TK < 0
    experts = experts_of(kind, D, F, E, seed).to(dtype)
    x_TD, weight_TK, dy_TD = (
        randn(*size, seed=seed + 10 + index, dtype=dtype)
        for index, size in enumerate(((T, D), (T, K), (T, D)))
    )
    # In transformers the number of experts marks a route of another rank, and has weight zero.
    sentinel_TK = expert_TK.masked_fill(masked_TK, E).long()
    got = run(experts, "moe_kernels", x_TD, sentinel_TK, weight_TK, dy_TD)
    assert all(value.dtype == dtype for value in got.values())

    plain_TK = expert_TK.masked_fill(masked_TK, 0).long()
    masked_weight_TK = weight_TK.double().masked_fill(masked_TK, 0.0)
    args = (x_TD.double(), plain_TK, masked_weight_TK, dy_TD.double())
    want = run(experts.double(), "eager", *args)
    want["dweight"] = want["dweight"].masked_fill(masked_TK, 0.0)
    wide = {name: value.double() for name, value in got.items()}
    assert_near(wide, want, BOUND[dtype], least=1.0)  # unit scale, of which a sum may cancel
    unused = sorted(set(range(E)) - set(expert_TK.unique().tolist()))
    for name, _ in experts.named_parameters():
        assert (got[name][unused] == 0).all(), f"{name}: experts {unused} have no rows"


def model_of(family: str, dtype: torch.dtype, layers: int, top_k: int, seed: int):
    torch.manual_seed(seed)
    config = FAMILIES[family](num_hidden_layers=layers, num_experts_per_tok=top_k)
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def step(model, implementation: str, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits and every gradient of a training step."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(tokens_BS, labels=tokens_BS)
    output.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **grads}


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_has_the_logits_and_gradients_of_eager(family, dtype, top_k) -> None:
    layers = 1 if dtype == torch.bfloat16 else 2
    model = model_of(family, dtype, layers, top_k, seed=top_k)
    tokens_BS = tokens_of(seed=top_k)
    got = step(model, "moe_kernels", tokens_BS)
    want = step(model, "eager", tokens_BS)
    assert_near(got, want, MODEL_BOUND[dtype])
    experts = [name for name in got if ".experts." in name]
    assert len(experts) == layers * (4 if family == "gpt_oss" else 2)
    assert all(got[name].abs().max() > 0 for name in experts)


class Operators(TorchDispatchMode):
    """Counts calls of ``moe_kernels`` operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_kernels":
            self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_every_way_to_choose_the_implementation_runs_our_operator_in_every_layer(tmp_path) -> None:
    tokens_BS = tokens_of(seed=0)
    first = model_of("olmoe", torch.float32, layers=2, top_k=2, seed=0)
    first.save_pretrained(tmp_path)
    first.set_experts_implementation("moe_kernels")
    want_BSV = first(tokens_BS).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moe_kernels")
    built = AutoModelForCausalLM.from_config(first.config, experts_implementation="moe_kernels")
    built.load_state_dict(first.state_dict())
    for model in (first, loaded, built):
        with Operators() as operators:
            logits_BSV = model(tokens_BS).logits
        assert operators.calls.count("moe_kernels::expert_mlp") == 2
        assert torch.equal(logits_BSV, want_BSV)
    first.set_experts_implementation("eager")
    with Operators() as operators:
        first(tokens_BS)
    assert operators.calls == []


@pytest.mark.parametrize("kind", LAYOUTS)
def test_compiled_without_a_break_experts_give_the_same_values(kind) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    experts = experts_of(kind, 16, 16, 5, seed=0)
    experts.config._experts_implementation = "moe_kernels"
    compiled = torch.compile(experts, fullgraph=True, backend=counter)
    for seed in range(5):
        x_TD = randn(20, 16, seed=seed, dtype=torch.float64).requires_grad_()
        weight_TK = randn(20, 2, seed=seed + 1, dtype=torch.float64).requires_grad_()
        expert_TK = randn(20, 6, seed=seed + 2).topk(2).indices  # some are 5: of another rank
        leaves = [x_TD, weight_TK, *experts.parameters()]
        values = []
        for run_experts in (experts, compiled):
            y_TD = run_experts(x_TD, expert_TK, weight_TK)
            grads = torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))
            values.append(dict(enumerate((y_TD.detach(), *grads))))
        assert_near(values[1], values[0], 1e-12)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_whole_model_compiled_without_a_break_gives_the_logits_of_eager(family) -> None:
    torch._dynamo.reset()
    model = model_of(family, torch.float32, layers=2, top_k=2, seed=3).eval()
    tokens_BS = tokens_of(seed=3)
    model.set_experts_implementation("eager")
    want_BSV = model(tokens_BS).logits
    model.set_experts_implementation("moe_kernels")
    got_BSV = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens_BS).logits
    assert_near({"logits": got_BSV}, {"logits": want_BSV}, BOUND[torch.float32])
    torch._dynamo.reset()


def test_recomputing_activations_changes_no_bit_of_a_gradient() -> None:
    model = model_of("qwen3_moe", torch.float32, layers=2, top_k=2, seed=4)
    tokens_BS = tokens_of(seed=4)
    want = step(model, "moe_kernels", tokens_BS)
    # Its name changed between the versions of transformers that are served.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    got = step(model, "moe_kernels", tokens_BS)
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize(("D", "F"), [(64, 16), (16, 64)])
def test_experts_keep_the_preactivation_and_the_routing_for_backward_and_no_more(D, F) -> None:
    T, K, E = 50, 3, 8
    experts = experts_of("gate first", D, F, E, seed=0).float()
    x_TD, expert_TK = randn(T, D, seed=1).requires_grad_(), randn(T, E, seed=2).topk(K).indices
    weight_TK = randn(T, K, seed=3).requires_grad_()
    given = {t.untyped_storage().data_ptr() for t in (x_TD, weight_TK, *experts.parameters())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    experts.config._experts_implementation = "moe_kernels"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        experts(x_TD, expert_TK, weight_TK)
    size = sum(storage.nbytes() for at, storage in kept.items() if at not in given)
    preactivation, routing = 4 * T * K * 2 * F, 4 * (2 * T * K + E + 1)
    assert preactivation <= size <= preactivation + routing


def test_autocast_computes_in_its_dtype_and_returns_that_of_the_tokens() -> None:
    experts = experts_of("gate first", 16, 16, 4, seed=0).float()
    x_TD, dy_TD = randn(30, 16, seed=1), randn(30, 16, seed=2)
    weight_TK, expert_TK = randn(30, 2, seed=3), randn(30, 4, seed=4).topk(2).indices
    args = (x_TD, expert_TK, weight_TK, dy_TD)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (run(experts, name, *args) for name in ("moe_kernels", "eager"))
    assert_near(got, want, BOUND[torch.bfloat16])
    half = experts.bfloat16()
    rounded = run(half, "moe_kernels", x_TD.bfloat16(), expert_TK, weight_TK, dy_TD.bfloat16())
    assert torch.equal(got["y"], rounded["y"].float())


def test_tokens_wider_than_the_weights_are_rounded_to_them() -> None:
    experts = experts_of("gate first", 16, 16, 4, seed=0).bfloat16()
    x_TD, dy_TD = randn(30, 16, seed=1), randn(30, 16, seed=2)
    weight_TK, expert_TK = randn(30, 2, seed=3), randn(30, 4, seed=4).topk(2).indices
    got = run(experts, "moe_kernels", x_TD, expert_TK, weight_TK, dy_TD)
    want = run(experts, "moe_kernels", x_TD.bfloat16(), expert_TK, weight_TK, dy_TD.bfloat16())
    assert got["y"].dtype == torch.float32
    assert torch.equal(got["y"], want["y"].float())


@use_experts_implementation(is_concatenated=False)
class AlternatingExperts(torch.nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.ones(2, 4, 4))
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 8, 4))
        self.act_fn = torch.nn.SiLU()

    def forward(self) -> None:
        """Nothing calls it: only its layout matters."""


class OwnGate(MixtralExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.chunk(2, dim=-1)[0]


def changed(experts: torch.nn.Module, **attributes) -> torch.nn.Module:
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


MIXTRAL = {"hidden_size": 4, "intermediate_size": 4, "num_local_experts": 2, **HEADS}
REFUSED = {
    "an activation": (
        lambda: MixtralExperts(MixtralConfig(**MIXTRAL, hidden_act="gelu")),
        "MixtralExperts of mixtral: its activation is GELUActivation",
    ),
    "an activation without gate": (
        lambda: changed(experts_of("no gate", 4, 4, 2, 0), act_fn=torch.nn.SiLU()),
        "NemotronHExperts of nemotron_h: its activation is SiLU, without a gate",
    ),
    "a gate of its own": (
        lambda: OwnGate(MixtralConfig(**MIXTRAL)),
        "OwnGate of mixtral: it combines gate and up in a way of its own",
    ),
    "an interleaved layout": (
        lambda: AlternatingExperts(MixtralConfig(**MIXTRAL)),
        "AlternatingExperts of mixtral: its gate and up rows alternate",
    ),
    "another slope": (
        lambda: changed(experts_of("interleaved with biases", 4, 4, 2, 0), alpha=1.5),
        "GptOssExperts of gpt_oss: it has alpha=1.5 and limit=7.0",
    ),
    "a norm behind each expert": (
        lambda: changed(MixtralExperts(MixtralConfig(**MIXTRAL)), has_post_expert_norm=True),
        "MixtralExperts of mixtral: it normalizes each expert's output",
    ),
}


def call(experts: torch.nn.Module, T: int = 3, D: int = 4, K: int = 1) -> torch.Tensor:
    experts.config._experts_implementation = "moe_kernels"
    return experts(torch.ones(T, D), torch.zeros(T, K, dtype=torch.long), torch.ones(T, K))


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_experts_that_cannot_be_computed_are_refused_by_name_at_the_first_call(
    make, message
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call(make())
    assert "It computes silu(gate) * up" in str(error.value)


def test_arguments_that_do_not_fit_are_refused_with_the_name_of_the_model() -> None:
    experts = MixtralExperts(MixtralConfig(**MIXTRAL))
    torch.nn.init.ones_(experts.gate_up_proj)
    torch.nn.init.ones_(experts.down_proj)
    with pytest.raises(ValueError, match=r"MixtralExperts of mixtral: D differs: x_TD has 5"):
        call(experts, D=5)
    experts.config._experts_implementation = "moe_kernels"
    with pytest.raises(ValueError, match=r"mixtral: expert_TK must hold -1 .* got 3\.\.3"):
        experts(torch.ones(1, 4), torch.tensor([[3]]), torch.ones(1, 1))
    experts.down_proj.requires_grad_(False)
    experts.down_proj.data = experts.down_proj.data.to(torch.int8)
    with pytest.raises(TypeError, match=r"mixtral with down_proj in torch\.int8"):
        call(experts)


def test_registering_again_is_allowed_and_taking_a_name_is_not() -> None:
    register()
    before = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    for name in ("eager", "grouped_mm"):
        with pytest.raises(ValueError, match=f"name '{name}' is that of another"):
            register(name)
    assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is before


def test_a_transformers_that_takes_no_outside_names_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("moe_kernels.integrations.transformers.version", lambda _: "5.6.2")
    with pytest.raises(ImportError, match=r"transformers 5\.6\.2 takes no .* needs 5\.7 or newer"):
        register()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_a_training_step_has_the_logits_and_gradients_of_eager(family, dtype) -> None:
    model = model_of(family, dtype, layers=1, top_k=3, seed=5).cuda()
    tokens_BS = tokens_of(seed=5).cuda()
    want = step(model, "eager", tokens_BS)
    got = step(model, "moe_kernels", tokens_BS)
    assert_near(got, want, MODEL_BOUND[dtype])
    again = step(model, "moe_kernels", tokens_BS)
    experts = [name for name in got if ".experts." in name]
    assert all(torch.equal(got[name], again[name]) for name in experts)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYOUTS)
def test_on_a_gpu_compiled_experts_give_the_same_bits(kind) -> None:
    torch._dynamo.reset()
    experts = experts_of(kind, 64, 32, 8, seed=0).bfloat16().cuda()
    experts.config._experts_implementation = "moe_kernels"
    x_TD, dy_TD = (randn(100, 64, seed=seed, dtype=torch.bfloat16).cuda() for seed in (1, 2))
    weight_TK = randn(100, 3, seed=3, dtype=torch.bfloat16).cuda()
    expert_TK = randn(100, 9, seed=4).topk(3).indices.cuda()  # some are 8: of another rank
    args = ("moe_kernels", x_TD, expert_TK, weight_TK, dy_TD)
    want = run(experts, *args)
    experts.compile(fullgraph=True)
    got = run(experts, *args)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    torch._dynamo.reset()
