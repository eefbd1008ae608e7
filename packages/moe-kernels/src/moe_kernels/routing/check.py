"""Argument checks of routing."""

import torch
from torch import Tensor

ROUTER_DTYPES = (torch.float32, torch.float64)
ID_DTYPES = (torch.int32, torch.int64)
MOST_ROWS = 2**31 - 1  # rows and slots are int32
TILE_EXPERTS = 2**12 - 1
TILE_BLOCKS = 2**19


def check_router_dtype(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` unless the tensor is float32 or float64.

    In bfloat16 many scores are equal, and the choice between equals is no choice of the model.
    """
    if tensor.dtype not in ROUTER_DTYPES:
        raise TypeError(
            f"{name} must be float32 or float64, got {tensor.dtype}: a router never runs in "
            "half precision, cast its input up"
        )


def check_device(name: str, tensor: Tensor, of_name: str, of: Tensor) -> None:
    """Raise unless both tensors are on one device: a kernel would read another one's addresses."""
    if tensor.device != of.device:
        raise ValueError(f"device differs: {name} is on {tensor.device}, {of_name} on {of.device}")


def check_mask(mask_T: Tensor | None, num_tokens: int, of_name: str, of: Tensor) -> None:
    """Raise unless the mask is None or one bool for each token, beside what it masks."""
    if mask_T is None:
        return
    check_device("mask_T", mask_T, of_name, of)
    if mask_T.dtype != torch.bool:
        raise TypeError(f"mask_T must be bool (True: a real token), got {mask_T.dtype}")
    if mask_T.shape != (num_tokens,):
        raise ValueError(f"T differs: mask_T has shape {tuple(mask_T.shape)}, T is {num_tokens}")


def check_logits(logits_TE: Tensor, mask_T: Tensor | None) -> None:
    """Raise unless the logits are a float32 or float64 matrix that the mask fits."""
    if logits_TE.ndim != 2:
        raise ValueError(f"logits_TE must have 2 axes, got shape {tuple(logits_TE.shape)}")
    if logits_TE.shape[1] < 1:
        raise ValueError(f"E must be at least 1, got logits_TE of shape {tuple(logits_TE.shape)}")
    check_router_dtype("logits_TE", logits_TE)
    check_mask(mask_T, logits_TE.shape[0], "logits_TE", logits_TE)


def check_route(
    logits_TE: Tensor,
    top_k: int,
    score: str,
    bias_E: Tensor | None,
    num_groups: int,
    top_groups: int,
    mask_T: Tensor | None,
) -> None:
    """Raise unless the arguments of ``route`` fit together."""
    check_logits(logits_TE, mask_T)
    E = logits_TE.shape[1]
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k must be in 1..E: got top_k={top_k} for E={E} experts")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if bias_E is not None:
        check_router_dtype("bias_E", bias_E)
        check_device("bias_E", bias_E, "logits_TE", logits_TE)
        if bias_E.shape != (E,):
            raise ValueError(f"E differs: bias_E has shape {tuple(bias_E.shape)}, E is {E}")
    if num_groups < 1 or E % num_groups:
        raise ValueError(f"num_groups must divide E: got num_groups={num_groups} for E={E}")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"top_groups must be in 1..num_groups: got top_groups={top_groups} for "
            f"num_groups={num_groups}"
        )
    if top_k > top_groups * (E // num_groups):
        raise ValueError(
            f"top_k must not pass the experts of the chosen groups: got top_k={top_k} for "
            f"{top_groups} groups of {E // num_groups}"
        )


def check_ids(expert_TK: Tensor, num_experts: int) -> None:
    """Raise unless the ids are an integer matrix and, where the host can read it, in range.

    On a GPU reading would make the host wait, so there only metadata is checked.
    """
    if expert_TK.ndim != 2:
        raise ValueError(f"expert_TK must have 2 axes, got shape {tuple(expert_TK.shape)}")
    if expert_TK.dtype not in ID_DTYPES:
        raise TypeError(f"expert_TK must be int32 or int64, got {expert_TK.dtype}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if torch.compiler.is_compiling():  # a bound on the number of tokens would become a guard
        return
    if expert_TK.numel() > MOST_ROWS:
        raise ValueError(f"expert_TK must hold fewer than 2**31 ids, got {expert_TK.numel()}")
    readable = type(expert_TK) is Tensor and expert_TK.device.type == "cpu"
    if readable and expert_TK.numel():
        low, high = (int(bound) for bound in torch.aminmax(expert_TK))
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"expert_TK must hold -1 (masked) or 0..{num_experts - 1}, got {low}..{high}"
            )


def check_balance(
    score_TE: Tensor,
    expert_TK: Tensor,
    tokens_per_sequence: int | None,
    mask_T: Tensor | None,
    load_E: Tensor | None,
) -> None:
    """Raise unless the arguments of a balance loss fit together."""
    check_router_dtype("score_TE", score_TE)
    if score_TE.ndim != 2:
        raise ValueError(f"score_TE must have 2 axes, got shape {tuple(score_TE.shape)}")
    T, E = score_TE.shape
    check_ids(expert_TK, E)
    check_device("expert_TK", expert_TK, "score_TE", score_TE)
    check_mask(mask_T, T, "score_TE", score_TE)
    if expert_TK.shape[0] != T:
        raise ValueError(f"T differs: score_TE has {T} rows, expert_TK has {expert_TK.shape[0]}")
    length = T if tokens_per_sequence is None else tokens_per_sequence
    if (length < 1 or T % length) and not T == length == 0:
        raise ValueError(f"tokens_per_sequence must divide T: got {length} for T={T}")
    if load_E is None:
        return
    check_router_dtype("load_E", load_E)
    check_device("load_E", load_E, "score_TE", score_TE)
    if load_E.shape != (E,):
        raise ValueError(f"E differs: load_E has shape {tuple(load_E.shape)}, E is {E}")


def check_given(logits_TE: Tensor, expert_TK: Tensor, score: str, mask_T: Tensor | None) -> None:
    """Raise unless the arguments of ``route_to`` fit together."""
    check_logits(logits_TE, mask_T)
    T, E = logits_TE.shape
    check_ids(expert_TK, E)
    check_device("expert_TK", expert_TK, "logits_TE", logits_TE)
    if expert_TK.shape[0] != T:
        raise ValueError(f"T differs: logits_TE has {T} rows, expert_TK has {expert_TK.shape[0]}")
    if not 1 <= expert_TK.shape[1] <= E:
        raise ValueError(f"K must be in 1..E: expert_TK has {expert_TK.shape[1]} columns, E is {E}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")


def check_offsets(offsets_E1: Tensor) -> None:
    """Raise unless the offsets are an int32 vector for at least one expert."""
    if offsets_E1.ndim != 1 or offsets_E1.shape[0] < 2:
        raise ValueError(
            "offsets_E1 must have 1 axis and one entry more than there are experts, "
            f"got shape {tuple(offsets_E1.shape)}"
        )
    if offsets_E1.dtype != torch.int32:
        raise TypeError(f"offsets_E1 must be int32, got {offsets_E1.dtype}")


def check_tiles(num_experts: int, num_rows: int, block_n: int) -> None:
    """Raise unless an entry of a tile map can hold every expert and every block."""
    if block_n < 1:
        raise ValueError(f"block_n must be at least 1, got {block_n}")
    if num_experts > TILE_EXPERTS:
        raise ValueError(f"a tile map holds at most {TILE_EXPERTS} experts, got {num_experts}")
    if not 0 <= num_rows <= TILE_BLOCKS * block_n:
        raise ValueError(
            f"a tile map holds at most 2**19 blocks of an expert: got num_rows={num_rows} for "
            f"block_n={block_n}"
        )
