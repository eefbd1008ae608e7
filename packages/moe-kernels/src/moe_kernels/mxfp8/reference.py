"""MXFP8 in plain torch, after the OCP Microscaling Formats specification 1.0.

A block of 32 values along the last axis has one scale, a power of two stored as its biased
exponent (``e8m0``), and each value is its float8 (``e4m3``) quotient by the scale.
"""

import torch
from torch import Tensor

from moe_kernels.mlp.swiglu import swiglu, swiglu_grad
from moe_kernels.mxfp8.format import BLOCK, CHUNK, MXTensor, SwigluGradMX

E4M3_MAX = 448.0  # 1.75 * 2**8
E4M3_MAX_EXPONENT = 8
E8M0_BIAS = 127
E8M0_NAN = 255


def quantize_reference(
    x_ND: Tensor, recipe: str, rounding: str, group_B: Tensor | None = None, num_groups: int = 1
) -> MXTensor:
    """Round along the last axis.

    Args:
        x_ND: Half precision or float32, any number of axes.
        recipe: Which blocks of a row share a scale.
        rounding: How a scale is rounded.
        group_B: int64 group of each block, for ``"mxrow"``: then it is the blocks of a row and a
            group that share.
        num_groups: How many groups there are.
    """
    blocks = (x_ND.shape[-1] // BLOCK, BLOCK)
    x_NB32 = x_ND.float().contiguous().unflatten(-1, blocks)
    finite_NB32 = x_NB32.isfinite()
    amax_NB = x_NB32.abs().masked_fill(~finite_NB32, 0.0).amax(-1)
    amax_NB = _shared(amax_NB, recipe, group_B, num_groups)
    mantissa_NB, exponent_NB = torch.frexp(amax_NB)  # amax = mantissa * 2**exponent, in [1/2, 1)
    exponent_NB = exponent_NB - 1 - E4M3_MAX_EXPONENT
    if rounding == "rceil":
        exponent_NB = exponent_NB + (mantissa_NB * 2 > E4M3_MAX / 2**E4M3_MAX_EXPONENT)
    code_NB = (exponent_NB + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    code_NB = code_NB.masked_fill(amax_NB == 0, E8M0_BIAS).to(torch.uint8)
    # Dividing by a power of two is exact; multiplying by its inverse is not, near the ends.
    data_NB32 = (x_NB32 / decode_scale(code_NB)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    data_NB32 = data_NB32.masked_fill(~finite_NB32, torch.nan)
    return MXTensor(data_NB32.flatten(-2).to(torch.float8_e4m3fn), code_NB)


def _shared(amax_NB: Tensor, recipe: str, group_B: Tensor | None, num_groups: int) -> Tensor:
    """Let each block have the largest value of all blocks that share its scale."""
    B = amax_NB.shape[-1]
    if recipe == "mx32" or not B:
        return amax_NB
    if recipe == "mxrow" and group_B is not None:
        most_NE = amax_NB.new_zeros(*amax_NB.shape[:-1], num_groups)
        most_NE = most_NE.scatter_reduce(-1, group_B.expand_as(amax_NB), amax_NB, "amax")
        return most_NE.index_select(-1, group_B)
    size = B if recipe == "mxrow" else CHUNK // BLOCK
    runs = torch.nn.functional.pad(amax_NB, (0, -B % size)).unflatten(-1, (-1, size))
    return runs.amax(-1, keepdim=True).expand_as(runs).flatten(-2)[..., :B]


def quantize_columns_reference(
    x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> MXTensor:
    """Transpose, then round along the last axis; every group of rows is padded by zeros first."""
    if offsets_E1 is None:
        return quantize_reference(x_ND.mT, recipe, rounding)
    E, N = offsets_E1.shape[0] - 1, x_ND.shape[0]
    P = CHUNK * (N // CHUNK + E)
    start_E1 = column_offsets_reference(offsets_E1).long()
    place_P = torch.arange(P, device=x_ND.device)
    group_P = torch.searchsorted(start_E1[1:], place_P, right=True)
    inside_P = group_P.clamp(max=E - 1)
    row_P = offsets_E1.long()[inside_P] + place_P - start_E1[inside_P]
    live_P = (group_P < E) & (row_P < offsets_E1[1:][inside_P])
    x_ND = torch.nn.functional.pad(x_ND, (0, 0, 0, 1))  # the spare row is zero
    x_PD = x_ND.index_select(0, row_P.where(live_P, row_P.new_full((), N)))
    return quantize_reference(x_PD.mT, recipe, rounding, group_P[::BLOCK], E + 1)


def column_offsets_reference(offsets_E1: Tensor) -> Tensor:
    """Return where each group begins among columns padded to multiples of 128; int32."""
    padded_E = (offsets_E1.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor") * CHUNK
    return torch.nn.functional.pad(padded_E.cumsum(0), (1, 0)).int()


def live_rows(x_ND: Tensor, offsets_E1: Tensor | None) -> Tensor:
    """Return ``x_ND`` with zeros past the last offset."""
    if offsets_E1 is None:
        return x_ND
    row_N = torch.arange(x_ND.shape[0], device=x_ND.device)
    return x_ND.masked_fill((row_N >= offsets_E1[-1])[:, None], 0.0)


def quantize_swiglu_reference(
    h_NG: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> MXTensor:
    """Round ``silu(gate) * up``, which is float32."""
    return quantize_reference(swiglu(live_rows(h_NG, offsets_E1)), recipe, rounding)


def quantize_routed_reference(
    x_TD: Tensor, slot_of_row_N: Tensor, weight_TK: Tensor, recipe: str, rounding: str
) -> MXTensor:
    """Round each row's token times its weight, which is float32; zeros for rows of no route."""
    rows_ND = x_TD.new_zeros(slot_of_row_N.shape[0], x_TD.shape[1], dtype=torch.float32)
    if x_TD.shape[0] and weight_TK.shape[1]:
        slot_N = slot_of_row_N.clamp(min=0)
        token_N = slot_N.div(weight_TK.shape[1], rounding_mode="floor")
        rows_ND = x_TD.index_select(0, token_N).float()
        rows_ND = rows_ND * weight_TK.reshape(-1).index_select(0, slot_N)[:, None]
        rows_ND = rows_ND.masked_fill((slot_of_row_N < 0)[:, None], 0.0)
    return quantize_reference(rows_ND, recipe, rounding)


def quantize_dswiglu_reference(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None,
    slot_of_row_N: Tensor | None,
    recipe: str,
    rounding: str,
) -> SwigluGradMX:
    """Differentiate in float32; round and quantize what comes out."""
    dtype, weight_N = h_NG.dtype, None
    if weight_TK is not None and slot_of_row_N is not None:
        flat_S = torch.nn.functional.pad(weight_TK.reshape(-1), (0, 1))  # -1 reads the 0 at the end
        weight_N = flat_S[slot_of_row_N.long()]
    dact_NF, h_NG = live_rows(dact_NF, offsets_E1), live_rows(h_NG, offsets_E1)
    dh_NG, act_NF, dweight_N = swiglu_grad(h_NG, dact_NF.float().clone(), weight_N)
    dh = quantize_reference(dh_NG, recipe, rounding)
    return SwigluGradMX(dh, dh_NG.to(dtype), act_NF.to(dtype), dweight_N)


def dequantize_reference(data_ND: Tensor, scale_NB: Tensor) -> Tensor:
    """Multiply each value by its scale."""
    blocks = (data_ND.shape[-1] // BLOCK, BLOCK)
    x_NB32 = data_ND.float().contiguous().unflatten(-1, blocks) * decode_scale(scale_NB)[..., None]
    return x_NB32.flatten(-2)


def decode_scale(code: Tensor) -> Tensor:
    """Return ``2**(code - 127)`` as float32, built from its bits; 255 gives NaN.

    Code 0 is 2**-127, which float32 holds only as a subnormal: an exponent shift makes 0 of it.
    """
    bits = code.to(torch.int32) << 23
    bits = bits.masked_fill(code == 0, 1 << 22).masked_fill(code == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)
