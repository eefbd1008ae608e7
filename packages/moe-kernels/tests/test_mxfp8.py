import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from moe_kernels import MXTensor, dequantize, quantize
from moe_kernels.mxfp8 import BLOCK, decode_scale
from moe_kernels.testing import randn, seeds

rules = st.sampled_from(["rceil", "floor"])
blocks = st.tuples(st.integers(1, 4), st.integers(1, 3), seeds, st.integers(-148, 120))


def drawn(block) -> torch.Tensor:
    rows, width, seed, exponent = block
    return torch.ldexp(
        randn(rows, width * BLOCK, seed=seed).double(), torch.tensor(exponent)
    ).float()


def exact_scale(x: MXTensor) -> torch.Tensor:
    return torch.exp2(x.scale_NB.double() - 127)[..., None]


def in_blocks(x_ND: torch.Tensor) -> torch.Tensor:
    return x_ND.double().unflatten(-1, (-1, BLOCK))


@given(blocks)
@example((1, 1, 0, -148))
def test_rceil_error_is_a_sixteenth_of_the_value_or_a_fraction_of_the_scale(block) -> None:
    x_ND = drawn(block)
    x = quantize(x_ND)
    scale_NB1 = exact_scale(x)
    value, error = in_blocks(x_ND).abs(), (in_blocks(dequantize(x)) - in_blocks(x_ND)).abs()
    assert (error <= torch.maximum(value / 16, scale_NB1 * 2.0**-10)).all()


@given(blocks)
def test_floor_saturates_by_less_than_an_eighth(block) -> None:
    x_ND = drawn(block)
    x = quantize(x_ND, rounding="floor")
    scale_NB1 = exact_scale(x)
    value, error = in_blocks(x_ND).abs(), (in_blocks(dequantize(x)) - in_blocks(x_ND)).abs()
    bound = torch.where(
        value > 448 * scale_NB1, value / 8, torch.maximum(value / 16, scale_NB1 / 1024)
    )
    assert (error <= bound).all()


@given(st.floats(min_value=2.0**-149, max_value=2.0**127, width=32), rules)
@example(448.0, "rceil")
@example(448.00003, "rceil")
@example(511.99997, "floor")
@example(2.0**-126, "rceil")
@example(2.0**-149, "floor")
def test_the_scale_is_that_of_exact_arithmetic(amax, rule) -> None:
    fraction, exponent = math.frexp(amax)
    want = exponent - 9 + (rule == "rceil" and fraction > 448 / 512)
    x_ND = torch.zeros(1, BLOCK)
    x_ND[0, 7] = -amax
    assert quantize(x_ND, rounding=rule).scale_NB.item() == max(want, -127) + 127


@given(blocks, rules)
def test_quantizing_what_was_dequantized_changes_nothing(block, rule) -> None:
    once = dequantize(quantize(drawn(block), rounding=rule))
    assert torch.equal(dequantize(quantize(once, rounding=rule)), once)


@given(rules)
def test_a_block_of_zeros_is_exact_and_its_scale_finite(rule) -> None:
    x_ND = randn(4, 3 * BLOCK, seed=0)
    x_ND[1] = 0
    x_ND[2, BLOCK : 2 * BLOCK] = -0.0
    x = quantize(x_ND, rounding=rule)
    assert (x.scale_NB < 255).all()
    back_ND = dequantize(x)
    assert (back_ND[1] == 0).all()
    assert (back_ND[2, BLOCK : 2 * BLOCK] == 0).all()
    assert back_ND[2, BLOCK : 2 * BLOCK].signbit().all()
    assert torch.equal(
        quantize(torch.zeros(64, 64), rounding=rule).data_ND.float(), torch.zeros(64, 64)
    )


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_what_is_not_finite_becomes_nan_and_leaves_its_block_alone(special, rule) -> None:
    clean_ND = randn(2, 2 * BLOCK, seed=0)
    clean_ND[0, 5] = 0
    dirty_ND = clean_ND.clone()
    dirty_ND[0, 5] = special
    clean, dirty = quantize(clean_ND, rounding=rule), quantize(dirty_ND, rounding=rule)
    assert torch.equal(clean.scale_NB, dirty.scale_NB)
    hit_ND = torch.zeros_like(clean_ND, dtype=torch.bool)
    hit_ND[0, 5] = True
    assert torch.equal(dirty.data_ND.float().isnan(), hit_ND)
    assert torch.equal(dequantize(dirty)[~hit_ND], dequantize(clean)[~hit_ND])
    whole = quantize(torch.full((1, BLOCK), special), rounding=rule)
    assert whole.scale_NB.item() < 255
    assert dequantize(whole).isnan().all()


def test_every_scale_code_decodes_to_its_power_of_two() -> None:
    scale = decode_scale(torch.arange(256, dtype=torch.uint8))
    assert scale[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert scale[255].isnan()


@pytest.mark.parametrize("code", [0, 1, 254, 255])
def test_blocks_with_extreme_codes_dequantize_exactly(code) -> None:
    data = torch.tensor([1.0, -1.5, 0.0, 0.5] * 8)[None].to(torch.float8_e4m3fn)
    back = dequantize(MXTensor(data, torch.tensor([[code]], dtype=torch.uint8)))
    if code == 255:
        assert back.isnan().all()
    else:
        assert back.double().tolist() == (data.double() * 2.0 ** (code - 127)).tolist()


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_blocks_below_the_smallest_normal_float_take_code_zero(rule) -> None:
    values = torch.tensor([2.0**-127, -(2.0**-130), 2.0**-136, 2.0**-149] * 8)[None]
    x = quantize(values, rounding=rule)
    assert x.scale_NB.tolist() == [[0]]
    # e4m3 holds multiples of 2**-9: 2**-136 is its smallest, 2**-149 rounds to zero.
    assert dequantize(x)[0, :4].tolist() == [2.0**-127, -(2.0**-130), 2.0**-136, 0.0]


@given(st.sampled_from([torch.bfloat16, torch.float16]), seeds, rules)
def test_half_precision_is_quantized_as_its_float32_value(dtype, seed, rule) -> None:
    x_ND = randn(2, BLOCK, seed=seed, dtype=dtype)
    got, want = quantize(x_ND, rounding=rule), quantize(x_ND.float(), rounding=rule)
    assert torch.equal(got.scale_NB, want.scale_NB)
    assert torch.equal(got.data_ND.view(torch.uint8), want.data_ND.view(torch.uint8))


def test_errors_name_the_value_and_the_rule() -> None:
    with pytest.raises(ValueError, match=r"multiple of 32, got shape \(1, 33\)"):
        quantize(torch.zeros(1, 33))
    with pytest.raises(ValueError, match="'rceil' or 'floor', got 'ceil'"):
        quantize(torch.zeros(1, 32), rounding="ceil")  # pyrefly: ignore
    with pytest.raises(TypeError, match=r"got torch.float64"):
        quantize(torch.zeros(1, 32).double())
    data_ND = torch.zeros(2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"got shapes \(2, 1\) and \(2, 64\)"):
        dequantize(MXTensor(data_ND, torch.zeros(2, 1, dtype=torch.uint8)))
    with pytest.raises(TypeError, match=r"got torch.float32 and torch.uint8"):
        dequantize(MXTensor(torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.uint8)))
    with pytest.raises(TypeError, match=r"dtype must be bfloat16, .*, got torch\.int8"):
        dequantize(MXTensor(data_ND, torch.zeros(2, 2, dtype=torch.uint8)), dtype=torch.int8)
