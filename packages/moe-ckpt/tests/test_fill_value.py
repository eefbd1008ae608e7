"""Zarr has a value for chunks that do not exist. None of ours is ever replaced by it unnoticed."""

import numpy as np
import pytest
import tensorstore as ts
from moe_ckpt import open_checkpoint, save, verify
from moe_ckpt.testing import apart, cut


def test_a_lost_chunk_is_nan_to_a_reader_that_knows_no_manifest(tmp_path) -> None:
    with apart():
        arrays = {("w", "master"): np.ones((4, 3), np.float32)}
        path = save(tmp_path, cut(arrays, 0, 1), step=0, state={})
    [chunk] = (path / "arrays" / "w" / "master").glob("c.*")
    chunk.unlink()
    kvstore = {"driver": "file", "path": f"{chunk.parent}/"}
    got = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result().read().result()
    assert np.isnan(got).all()


@pytest.mark.parametrize("below", [0, 1 << 18])
def test_a_chunk_of_nothing_but_fill_values_is_there(tmp_path, below) -> None:
    arrays = {("n", "master"): np.full(5, np.nan, np.float32), ("z", "master"): np.zeros(5)}
    with apart(below):
        path = save(tmp_path, cut(arrays, 0, 1), step=0, state={})
    assert verify(path).chunks == 2
    for (name, kind), want in arrays.items():
        assert open_checkpoint(path).read(name, kind).tobytes() == want.tobytes()
