"""The command line says what is there in plain lines, and its exit code says whether it is good."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from moe_ckpt import export_safetensors, save
from moe_ckpt.__main__ import main
from moe_ckpt.testing import cut
from safetensors import safe_open
from safetensors.numpy import load_file

ARRAYS = {
    ("layers.0.w", "master"): np.linspace(-3, 3, 2048, dtype=np.float32).reshape(2, 1024),
    ("layers.0.w", "exp_avg"): np.zeros((2, 1024), np.float32),
    ("scale", "master"): np.array(1 / 3),
}


@pytest.fixture
def root(tmp_path):
    for step in (1, 2):
        save(tmp_path / "run", cut(ARRAYS, 0, 1), step=step, state={"lr": 0.5})
    return tmp_path / "run"


def test_inspect_shows_arrays_and_state_of_a_checkpoint_or_the_newest(root, capsys) -> None:
    assert main(["inspect", str(root / "step-00000001")]) == 0
    text = capsys.readouterr().out
    assert "step 1, written by moe-ckpt 1." in text
    assert "3 arrays, 3 chunks, 16 KiB" in text
    assert "layers.0.w/master   float32  2x1024  8 KiB" in text
    assert "scale/master        float64  scalar  8 bytes" in text
    assert 'state {"lr": 0.5}' in text
    assert main(["inspect", str(root)]) == 0
    assert "step 2, written by" in capsys.readouterr().out


def test_ls_lists_newest_first_and_is_bad_if_anything_is(root, capsys) -> None:
    assert main(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step-00000002", "step 2"],
        ["step-00000001", "step 1"],
    ]
    (root / ".step-00000003.tmp-0a").mkdir()
    (root / "step-00000001" / "manifest.json").write_text("{}")
    assert main(["ls", str(root)]) == 1
    text = capsys.readouterr().out
    assert "step-00000001  damaged: CorruptFileError" in text
    assert ".step-00000003.tmp-0a  unfinished" in text


def test_verify_names_each_bad_chunk(root, capsys) -> None:
    assert main(["verify", str(root)]) == 0
    assert "step-00000002: 3 arrays, 3 chunks, 16 KiB, all good" in capsys.readouterr().out
    (root / "step-00000002/arrays/scale/master/c").unlink()
    (root / "step-00000002/arrays/layers.0.w/master/c.0.0").write_bytes(b"")
    assert main(["verify", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("TruncatedChunkError: tensor layers.0.w/master, chunk (0, 0)")
    assert lines[1].startswith("MissingChunkError: tensor scale/master, chunk ()")
    assert lines[2].endswith("step-00000002: 2 problems")


@pytest.mark.parametrize("command", ["inspect", "ls", "verify"])
def test_a_bad_path_is_one_line(tmp_path, capsys, command) -> None:
    assert main([command, str(tmp_path / "typo")]) == 2
    error = capsys.readouterr().err
    assert error == f"moe-ckpt: {tmp_path / 'typo'} does not exist\n"
    (tmp_path / "file").write_text("")
    assert main([command, str(tmp_path / "file")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 1
    said = "".join(capsys.readouterr())
    assert str(tmp_path) in said
    assert "Traceback" not in said


def test_wrong_usage_ends_with_2() -> None:
    for arguments in ([], ["inspect"], ["explode", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "moe_ckpt", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "inspect" in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_holds_the_masters_rounded_to_nearest_even(root, tmp_path, dtype) -> None:
    out = export_safetensors(root / "step-00000002", tmp_path / "model.safetensors", dtype)
    with safe_open(out, "pt") as file:
        assert sorted(file.keys()) == ["layers.0.w", "scale"]
        assert file.metadata() == {"step": "2"}
        bits = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    for name, got in bits.items():
        want = ARRAYS[name, "master"].astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        np.testing.assert_array_equal(got, want.astype(np.float32))
    if dtype == "float32":
        np.testing.assert_array_equal(load_file(out)["scale"], np.float32(1 / 3))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


def test_export_refuses_another_dtype(root, tmp_path) -> None:
    with pytest.raises(ValueError, match="one of float32, bfloat16, it is 'int8'"):
        export_safetensors(root / "step-00000002", tmp_path / "x", "int8")
