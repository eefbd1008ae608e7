"""What can be saved is seen without a copy; what cannot is refused by name, without torch."""

import array
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt import ShardError, StateError, load, save
from moe_ckpt.manifest import state_bytes
from moe_ckpt.shard import view_of
from moe_ckpt.testing import ArrayShard
from moe_ckpt.torch_adapter import as_numpy, communicator


def shard(data, n=4, name="w", kind="master", start=0, stop=None, shape=None):
    stop = start + n if stop is None else stop
    return ArrayShard(name, kind, (n,) if shape is None else shape, start, stop, data)


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, moe_ckpt, moe_ckpt.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_a_torch_tensor_is_saved_from_and_loaded_into_its_own_memory(tmp_path, dtype, grad) -> None:
    whole = torch.arange(12, dtype=dtype, requires_grad=grad)
    part = whole.detach()[4:8].requires_grad_(grad)  # a view of live state
    save(tmp_path, [shard(part)], step=1, state={})
    want = whole.detach().clone()
    with torch.no_grad():
        part.zero_()
    load(tmp_path, [shard(part)])
    torch.testing.assert_close(whole.detach(), want, rtol=0, atol=0)
    as_numpy(part)[0] = 77
    assert whole[4] == 77
    assert view_of(shard(part)).data.ctypes.data == part.data_ptr()


def test_any_object_that_shows_its_memory_will_do(tmp_path) -> None:
    buffer = array.array("f", [1, 2, 3, 4])
    save(tmp_path, [shard(buffer)], step=1, state={})
    into = array.array("f", [0] * 4)
    load(tmp_path, [shard(into)])
    assert into == buffer


class Copies:
    def __array__(self, dtype=None, copy=None):
        return np.zeros(4, np.float32)


read_only = np.zeros(4, np.float32)
read_only.flags.writeable = False


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (shard(torch.zeros(4, device="meta")), "w/master: data is on device meta, copy it to host"),
        (shard(torch.zeros(8)[::2]), "w/master: data has stride 8 bytes, it must be contiguous"),
        (shard(np.zeros(8, np.float32)[::-2]), "w/master: data has stride -8 bytes"),
        (shard(torch.zeros(4, dtype=torch.bfloat16)), "w/master: data cannot be seen as a numpy"),
        (shard(np.zeros(4, np.int32)), "data is int32, a checkpoint holds float32 or float64"),
        (shard(np.zeros(4, ">f4")), "data is >f4, a checkpoint holds"),
        (shard([0.0] * 4), "w/master: list shows a copy of its memory, not a view"),
        (shard(Copies()), "w/master: Copies shows a copy of its memory, not a view"),
        (shard(np.zeros((2, 2), np.float32)), r"data has shape (2, 2), the interval [0, 4) needs"),
        (shard(np.zeros(3, np.float32)), r"data has shape (3,), the interval [0, 4) needs (4,)"),
        (shard(np.zeros(4, np.float32), start=1), "the interval [1, 5) is not inside the 4 elem"),
        (shard(np.zeros(4, np.float32), name="../x"), "the tensor name '../x' cannot be the name"),
        (shard(np.zeros(4, np.float32), name="a" * 201), "use 1 to 200 letters"),
        (shard(np.zeros(4, np.float32), kind=".."), "the kind '..' cannot be the name of a direct"),
        (shard(read_only), "w/master: data is read-only, nothing can be loaded into it"),
    ],
)
def test_what_cannot_be_loaded_into_is_refused_by_name(tmp_path, bad, message) -> None:
    with pytest.raises(ShardError) as caught:
        load(tmp_path, [bad])
    assert message in str(caught.value)


def test_a_tensor_elsewhere_or_of_another_kind_is_refused_by_the_adapter() -> None:
    with pytest.raises(ShardError, match="on device meta"):
        as_numpy(torch.zeros(1, device="meta"))
    with pytest.raises(ShardError, match=r"torch\.bfloat16"):
        as_numpy(torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(ShardError, match=r"strides \(2,\)"):
        as_numpy(torch.zeros(4)[::2])


def test_without_process_groups_a_process_is_alone() -> None:
    comm = communicator()
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_gather(b"x") == comm.exchange([b"x"]) == [b"x"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_a_state_comes_back_as_it_went_in(state) -> None:
    assert json.loads(state_bytes(state)) == state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0.5, {"b": math.nan}]}, r"state\.a\[1\]\.b is nan, which JSON cannot hold"),
        ({"a": np.float32(1)}, r"state\.a is a float32, which JSON cannot hold"),
        ({"a": {1: 2}}, r"state\.a: key 1 is a int, JSON needs str"),
        ([1], "state must be a mapping, it is a list"),
    ],
)
def test_a_state_that_would_change_is_refused(tmp_path, state, message) -> None:
    with pytest.raises(StateError, match=message):
        save(tmp_path, [], step=1, state=state)
    assert not list(tmp_path.iterdir())
