"""Golden vectors: reference, interpreter and GPU give the bytes of exact arithmetic."""

from contextlib import nullcontext
from importlib.metadata import version
from importlib.resources import files

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels import MXTensor, dequantize, quantize, quantize_both, quantize_columns
from moe_kernels.backend import interpreted
from moe_kernels.testing import mx_vectors
from moe_kernels.testing.mx_exact import quantize_exactly, round_to_e4m3, scale_exponent

CUDA = torch.cuda.is_available()
overflows = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, interpreting
DEVICES = [
    pytest.param("cpu", False, id="reference"),
    pytest.param("cpu", True, id="interpreter", marks=pytest.mark.skipif(CUDA, reason="compiled")),
    pytest.param("cuda", False, id="gpu", marks=pytest.mark.gpu),
]
# The interpreter of Triton 3.6 forgets the sign of a zero when it decodes a float8.
FORGETS = not CUDA and version("triton").startswith("3.6.")
floats = st.floats(width=32, allow_subnormal=True)


@overflows
@pytest.mark.parametrize(("device", "interpret"), DEVICES)
def test_every_vector_comes_out_bit_by_bit(device, interpret) -> None:
    with interpreted() if interpret else nullcontext():
        assert mx_vectors.failures(quantize, device) == []
        found = mx_vectors.decoding_failures(dequantize, device)
    if interpret and FORGETS:
        found = [line for line in found if not line.endswith("is 0.0, not -0.0")]
    assert found == []


@pytest.mark.parametrize(("device", "interpret"), DEVICES)
@pytest.mark.parametrize("recipe", mx_vectors.RECIPES)
@pytest.mark.parametrize("rounding", mx_vectors.ROUNDINGS)
def test_columns_and_both_come_out_as_rows_do(device, interpret, recipe, rounding) -> None:
    vectors = [vector for vector in mx_vectors.read()[0] if len(vector.x) == 128]
    assert len(vectors) > 15
    x_ND = torch.zeros(32, 128, device=device)
    x_ND[: len(vectors)] = torch.tensor([vector.x for vector in vectors])
    how = {"recipe": recipe, "rounding": rounding}
    with interpreted() if interpret else nullcontext():
        found = {
            "columns": quantize_columns(x_ND.mT.contiguous(), **how),
            "rows of both": quantize_both(x_ND, **how)[0],
            "columns of both": quantize_both(x_ND.mT.contiguous(), **how)[1],
        }
    for name, got in found.items():
        for n, vector in enumerate(vectors):
            data, scale = vector.want[recipe, rounding]
            assert bytes(got.data_ND[n].view(torch.uint8).tolist()) == data, (name, vector.name)
            assert bytes(got.scale_NB[n].tolist()) == scale, (name, vector.name)


def test_the_file_is_what_exact_arithmetic_says() -> None:
    text = (files("moe_kernels.testing") / "mx_vectors.json").read_text()
    assert text == mx_vectors.write()


@given(
    st.lists(floats, min_size=32, max_size=32), st.sampled_from(["mx32", "mxrow"]),
    st.sampled_from(["rceil", "floor"]),
)  # fmt: skip
def test_any_row_comes_out_as_exact_arithmetic_says(row, recipe, rounding) -> None:
    got = quantize(torch.tensor(row, dtype=torch.float32), recipe=recipe, rounding=rounding)
    data, scale = quantize_exactly(row, recipe, rounding)
    assert bytes(got.data_ND.view(torch.uint8).tolist()) == data
    assert bytes(got.scale_NB.tolist()) == scale


def test_exact_arithmetic_knows_the_corners_of_the_specification() -> None:
    assert [round_to_e4m3(2**-10), round_to_e4m3(3 * 2**-10), round_to_e4m3(464)] == [0, 2, 0x7E]
    assert [scale_exponent(448, "rceil"), scale_exponent(449, "rceil")] == [0, 1]
    assert [scale_exponent(511, "floor"), scale_exponent(512, "floor")] == [0, 1]


def wrong(x_D: torch.Tensor, **how) -> MXTensor:
    """Round as ``quantize``, but lose the sign of zeros and saturate infinities."""
    return quantize((x_D + 0.0).clamp(-3e38, 3e38), **how)


@overflows
def test_the_runner_names_what_differs_and_fails(capsys) -> None:
    assert any("infinities" in line for line in mx_vectors.failures(wrong))
    assert any("zeros of both signs" in line for line in mx_vectors.failures(wrong))
    assert mx_vectors.main([]) == int(FORGETS)
    assert "reference: all bytes are right" in capsys.readouterr().out
    assert mx_vectors.main(["--run", "moe_kernels:quantize"]) == 0
    assert mx_vectors.main(["--run", f"{__name__}:wrong"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_runner_writes_the_file_anew(tmp_path) -> None:
    assert mx_vectors.main(["--write", str(tmp_path / "vectors.json")]) == 0
    assert (tmp_path / "vectors.json").read_text() == mx_vectors.write()
