"""The scaled grouped product as a torch operator, and the choice of what computes it."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.mxfp8 import MXTensor
from moe_kernels.mxgemm.check import check_shared
from moe_kernels.mxgemm.reference import scaled_grouped_mm_reference
from moe_kernels.operator import not_differentiable, operator
from moe_kernels.routing.tiles import Tiles, tile_rows

FLOAT8 = (torch.float8_e4m3fn,)


def tiles_of(
    x: MXTensor, offsets_E1: Tensor, num_rows: int, num_experts: int, recipe: str
) -> Tiles | None:
    """List the tiles that every product of a layer shares; None where no kernel runs."""
    if not runs_kernel(x.data_ND, FLOAT8):
        return None
    from moe_kernels.config import choose_scaled  # noqa: PLC0415 - of interest to kernels alone

    block_n = choose_scaled(recipe, x.data_ND, num_rows, num_experts).block_n
    return tile_rows(offsets_E1, num_rows, block_n)


def gather_rows(x: MXTensor, slot_of_row_N: Tensor, top_k: int) -> MXTensor:
    """Copy each row's token, bit by bit; rows of no route are copies of the first."""
    token_N = slot_of_row_N.clamp(min=0).div(top_k, rounding_mode="floor")
    data = x.data_ND.view(torch.uint8).index_select(0, token_N).view(x.data_ND.dtype)
    return MXTensor(data, x.scale_NB.index_select(0, token_N))


def multiply(
    x: MXTensor,
    w: MXTensor,
    offsets_E1: Tensor,
    recipe: str,
    out_dtype: torch.dtype,
    *,
    tiles: Tiles | None = None,
    slot_of_row_N: Tensor | None = None,
    top_k: int = 0,
) -> Tensor:
    """Multiply rows, or those of tokens if ``top_k`` is not 0, by whatever this device has."""
    if not x.data_ND.is_cuda:
        check_shared("x", x, recipe)
        check_shared("w", w, recipe)
    kernel = runs_kernel(x.data_ND, FLOAT8)
    native = False
    if kernel:
        from moe_kernels.config import has_block_scales  # noqa: PLC0415

        native = has_block_scales(x.data_ND)
    if kernel and not native:
        from moe_kernels.mxgemm.kernel import scaled_mm_triton  # noqa: PLC0415 - triton is optional

        return scaled_mm_triton(
            x, w, offsets_E1, recipe, out_dtype,
            tiles=tiles, slot_of_row_N=slot_of_row_N, top_k=top_k,
        )  # fmt: skip
    if slot_of_row_N is not None:
        x = gather_rows(x, slot_of_row_N, top_k)
    if native:
        from moe_kernels.mxgemm.native_kernel import native_mm_triton  # noqa: PLC0415

        return native_mm_triton(x, w, offsets_E1, recipe, out_dtype, tiles=tiles)
    return scaled_grouped_mm_reference(x, w, offsets_E1, out_dtype)


@operator("scaled_grouped_mm")
def scaled_grouped_mm(
    x_ND: Tensor,
    x_scale_NB: Tensor,
    w_EFD: Tensor,
    w_scale_EFB: Tensor,
    offsets_E1: Tensor,
    recipe: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run the Triton kernel on CUDA and the reference elsewhere."""
    x, w = MXTensor(x_ND, x_scale_NB), MXTensor(w_EFD, w_scale_EFB)
    return multiply(x, w, offsets_E1, recipe, out_dtype)


@torch.library.register_fake("moe_kernels::scaled_grouped_mm")
def _(x_ND, x_scale_NB, w_EFD, w_scale_EFB, offsets_E1, recipe, out_dtype):
    del x_scale_NB, w_scale_EFB, offsets_E1, recipe
    return x_ND.new_empty(x_ND.shape[0], w_EFD.shape[1], dtype=out_dtype)


not_differentiable(
    "scaled_grouped_mm", "float8 values have no gradient; expert_mlp, grouped_mlp and mx_linear "
    "take a recipe and carry the gradient past the rounding",
)  # fmt: skip
