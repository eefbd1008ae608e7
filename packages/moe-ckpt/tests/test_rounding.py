"""Values are rounded once, and written as the safetensors library writes them."""

import ml_dtypes
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt.hf.tensor_file import TensorFile, write_tensors
from moe_ckpt.rounding import rounded
from safetensors.numpy import load_file, save_file

finite = st.floats(width=64, allow_nan=False)
near_ties = st.builds(
    lambda bits, tail: float(np.uint32(bits << 16 | 0x8000).view(np.float32)) * (1 + tail),
    st.integers(1, 0x7F7E),
    st.integers(-3, 3).map(lambda n: n * 2.0**-45),
)


@given(finite | near_ties | near_ties.map(lambda x: -x))
def test_a_value_is_rounded_once_to_the_nearest_even(value) -> None:
    got = rounded(np.array([value]), "bfloat16")[0]
    word = int(got.view(np.uint16))
    if np.isinf(got):  # at or beyond the middle between the largest and the next power of two
        assert abs(value) >= (2 - 2.0**-8) * 2.0**127
        return
    error = abs(float(got) - value)
    for neighbour in (word - 1, word + 1):
        other = float(np.uint16(neighbour & 0xFFFF).view(ml_dtypes.bfloat16))
        if np.isfinite(other) and (neighbour & 0x7FFF) != 0x7FFF:
            assert error < abs(other - value) or (error == abs(other - value) and word % 2 == 0)


@given(st.integers(0, 2**32 - 1))
def test_float32_is_rounded_as_torch_does(bits) -> None:
    values = np.array([bits], np.uint32).view(np.float32)
    want = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded(values, "bfloat16").astype(np.float32), want)


@given(
    st.dictionaries(
        st.text("abc.", min_size=1),
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16, np.float16]),
        ),
    )
)
def test_files_are_those_of_the_safetensors_library(tmp_path_factory, forms) -> None:
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    tensors = {name: rng.random(shape).astype(dtype) for name, (shape, dtype) in forms.items()}
    mine, theirs = folder / "mine", folder / "theirs"
    write_tensors(mine, {n: (a.dtype, a.shape) for n, a in tensors.items()}, tensors.items(), {})
    save_file(tensors, theirs)
    back, file = load_file(mine), TensorFile(theirs)
    assert back.keys() == tensors.keys() == set(file.names)
    for name, want in tensors.items():
        for got in (back[name], file.tensor(name), TensorFile(mine).tensor(name)):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.tobytes() == want.tobytes()
