"""The command line says what is there in plain lines, and its exit code says whether it is good."""

import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import moe_ckpt
import numpy as np
import pytest
from moe_ckpt import (
    RootLockedError,
    collect,
    compare,
    export_safetensors,
    files,
    open_checkpoint,
    problems,
    save,
    scan,
    verify,
)
from moe_ckpt.__main__ import main
from moe_ckpt.hf import entries
from moe_ckpt.progress import Bar
from moe_ckpt.testing import apart, cut
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

ARRAYS = {
    ("layers.0.w", "master"): np.linspace(-3, 3, 2048, dtype=np.float32).reshape(2, 1024),
    ("layers.0.w", "exp_avg"): np.zeros((2, 1024), np.float32),
    ("scale", "master"): np.array(1 / 3),
}


@pytest.fixture(autouse=True)
def own_arrays():
    with apart():
        yield


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
    for arguments in ([], ["inspect"], ["explode", "x"], ["diff", "x"], ["export", "x"]):
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


def said(capsys, *arguments):
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_says_what_the_lines_say(root, capsys) -> None:
    code, value = said(capsys, "inspect", root, "--tensors", "layers.*/exp*")
    assert (code, value["step"], value["bytes"], value["chunks"]) == (0, 2, 16392, 3)
    reader = open_checkpoint(root / "step-00000002")
    assert value["manifest_sha256"] == reader.manifest.sha256
    [array] = value["arrays"]
    assert (array["name"], array["kind"], array["shape"]) == ("layers.0.w", "exp_avg", [2, 1024])
    assert value["state"] == {"lr": 0.5}
    code, value = said(capsys, "ls", root)
    assert (code, [c["step"] for c in value["checkpoints"]]) == (0, [2, 1])
    code, value = said(capsys, "verify", root)
    assert (code, value["good"], value["problems"], value["chunks"]) == (0, True, [], 3)
    (root / "step-00000002/arrays/scale/master/c").unlink()
    code, value = said(capsys, "verify", root)
    assert (code, value["good"]) == (1, False)
    [problem] = value["problems"]
    assert (problem["class"], problem["tensor"], problem["chunk"]) == (
        "MissingChunkError",
        "scale",
        [],
    )
    assert problem["file"].endswith("arrays/scale/master/c")
    for arguments in (["inspect", root / "typo"], ["verify", root / "typo"]):
        code, value = said(capsys, *arguments)
        assert code == 2
        assert value["error"]["message"].endswith("does not exist")
    code, value = said(capsys, "inspect", root.parent)
    assert (code, value["error"]["class"]) == (1, "NotACheckpointError")


def test_a_fast_verify_finds_what_is_lost_cut_or_exchanged_and_not_what_is_changed(root) -> None:
    path = root / "step-00000002"
    chunk = path / "arrays/layers.0.w/master/c.0.0"
    good = chunk.read_bytes()
    for data, kind in (
        (good[:-1], "TruncatedChunkError"),
        ((path / "arrays/layers.0.w/exp_avg/c.0.0").read_bytes(), "SwappedChunkError"),
        (good[:-1] + bytes([good[-1] ^ 1]), "SwappedChunkError"),
    ):
        chunk.write_bytes(data)
        [problem] = problems(path, fast=True)
        assert type(problem).__name__ == kind
    chunk.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert not list(problems(path, fast=True))
    assert [type(p).__name__ for p in problems(path)] == ["CorruptChunkError"]
    chunk.write_bytes(good)
    counts = []
    verify(path, progress=lambda done, total: counts.append((done, total)))
    assert counts[-1][0] == counts[-1][1] == 2 * (8192 + 4) + 8 + 4
    assert len(counts) == 3


def changed(root, step, **arrays):
    new = {**ARRAYS, **{(name, "master"): array for name, array in arrays.items()}}
    return save(root, cut(new, 0, 1), step=step, state={"lr": 0.25, "more": {"x": 1}}, keep=None)


def test_diff_names_what_differs_and_by_how_much(root, capsys) -> None:
    assert main(["diff", str(root / "step-00000001"), str(root)]) == 0
    assert "3 arrays are the same, none differs" in capsys.readouterr().out
    w = ARRAYS["layers.0.w", "master"].copy()
    w[1, 7] += 0.5
    w[0, 0] = np.nan
    path = changed(root, 3, **{"layers.0.w": w, "scale": np.ones(2), "extra": np.ones(1)})
    assert main(["diff", str(root / "step-00000002"), str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "extra/master  only in the second",
        "layers.0.w/master  values",
        "scale/master  shape [] and [2]",
        "state.lr",
        "state.more",
        "1 arrays are the same, 3 differ",
    ]
    code, value = said(capsys, "diff", path, root / "step-00000002", "--values")
    assert (code, value["same"], value["equal"]) == (1, False, 1)
    difference = next(d for d in value["differences"] if d["label"].startswith("layers"))
    assert difference["elements"] == 2
    assert difference["largest"] == pytest.approx(0.5)
    assert difference["relative"] == pytest.approx(0.5 / abs(w[1, 7]))


def test_diff_reads_where_chunks_are_cut_otherwise(root, monkeypatch) -> None:
    monkeypatch.setattr("moe_ckpt.grid.UPPER_BYTES", 5000)
    same = save(root, cut(ARRAYS, 0, 1), step=3, state={"lr": 0.5})
    assert len(open_checkpoint(same).info("layers.0.w").array.grid) == 2
    assert compare(root / "step-00000002", same).same
    w = ARRAYS["layers.0.w", "master"].copy()
    w[1, 1] = 0
    found = compare(root / "step-00000002", changed(root, 4, **{"layers.0.w": w}))
    assert [(d.label, d.elements) for d in found.differences] == [("layers.0.w/master", 1)]


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_gc_deletes_what_is_asked_for_and_never_the_last_good_one(root, capsys) -> None:
    for step in (3, 4):
        save(root, cut(ARRAYS, 0, 1), step=step, state={}, keep=None)
    (root / ".step-00000005.tmp-0a").mkdir()
    (root / ".trash-0b").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "step-00000004/manifest.json").write_bytes(b"{}")
    (root / "step-7").mkdir()
    before = names(root)
    assert main(["gc", str(root), "--keep", "1", "--damaged", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "5 would be deleted" in text
    assert "step-00000004" in text
    assert "damaged: CorruptFileError" in text
    assert names(root) == before
    code, value = said(capsys, "gc", root)
    assert code == 0
    assert {os.path.basename(d["path"]): d["reason"] for d in value["deleted"]} == {
        ".step-00000005.tmp-0a": "unfinished",
        ".trash-0b": "unfinished",
    }
    assert main(["gc", str(root), "--keep", "1"]) == 0
    steps = [c.step for c in scan(root).valid]
    assert steps == [3]
    assert (root / "step-00000004").is_dir()
    assert main(["gc", str(root), "--damaged"]) == 0
    assert names(root) == [".lock", "LATEST", "notes.txt", "step-00000003", "step-7"]
    # The last one is damaged too: what is left of it may be all there is.
    (root / "step-00000003/state.json").unlink()
    assert not collect(root, damaged=True, keep=1).garbage
    assert (root / "step-00000003").is_dir()
    for arguments in (["--keep", "0"],):
        assert main(["gc", str(root), *arguments]) == 1
        assert "keep must be at least 1" in capsys.readouterr().err


def test_gc_leaves_checkpoints_of_a_later_format_and_runs_that_save(root, capsys) -> None:
    path = root / "step-00000001"
    data = (path / "manifest.json").read_bytes().replace(b"[\n  1,", b"[\n  2,")
    (path / "manifest.json").write_bytes(data)
    seal = subprocess.run(
        ["sha256sum", "manifest.json"], cwd=path, capture_output=True, check=True
    ).stdout
    (path / "manifest.sha256").write_bytes(seal)
    assert "FormatVersionError" in scan(root).skipped[0].reason
    assert not collect(root, damaged=True).garbage
    with files.locked(root, 9), pytest.raises(RootLockedError):
        collect(root, keep=1)
    with files.locked(root, 9):
        assert main(["gc", str(root)]) == 1
    assert "is being saved to by" in capsys.readouterr().err


def hf_folder(tmp_path):
    config = {
        "model_type": "mixtral", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2,
    }  # fmt: skip
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {e.source: rng.random(e.shape, np.float32) for e in entries(config)}
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def test_import_and_export_are_inverse(tmp_path, capsys) -> None:
    folder, tensors = hf_folder(tmp_path)
    assert main(["import", str(folder), str(tmp_path / "run"), "--step", "3", "--moments"]) == 0
    assert "step-00000003: 36 arrays" in capsys.readouterr().out
    out = tmp_path / "out"
    code, value = said(capsys, "export", tmp_path / "run", out, "--dtype", "float32")
    assert (code, value["dtype"]) == (0, "float32")
    got = load_file(out / "model.safetensors")
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in tensors.items()}
    assert main(["export", str(tmp_path / "run"), str(out)]) == 1
    assert "out exists already" in capsys.readouterr().err
    config = folder / "config.json"
    assert (
        main(["export", str(tmp_path / "run"), str(tmp_path / "b"), "--config", str(config)]) == 0
    )
    one = tmp_path / "one.safetensors"
    assert main(["export", str(tmp_path / "run"), str(one), "--format", "safetensors"]) == 0
    assert "layers.0.moe.gate_up" in load_file(one)
    assert main(["import", str(tmp_path), str(tmp_path / "run")]) == 1
    assert "has no config.json" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "typo"), str(tmp_path / "run")]) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_for_a_terminal_alone() -> None:
    for stream, shows in ((Terminal(), True), (io.StringIO(), False)):
        with Bar("verify", stream) as bar:
            bar(1 << 20, 4 << 20)
            time.sleep(0.11)
            bar(4 << 20, 4 << 20)
        text = stream.getvalue()
        assert ("verify [" in text, " 25% " in text, "100%" in text, text.endswith("\n")) == (
            (shows,) * 4
        )


BARE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "pickle_"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from moe_ckpt.__main__ import main
for command in (["inspect"], ["verify"], ["ls"]):
    assert main([*command, sys.argv[1]]) == 0
assert "torch" not in sys.modules
"""


def test_looking_and_verifying_need_no_torch(root) -> None:
    subprocess.run([sys.executable, "-c", BARE, str(root)], check=True, capture_output=True)


def test_inspect_takes_less_than_a_second(root) -> None:
    # Of the processor: on a shared machine the clock measures the neighbours.
    command = [sys.executable, "-m", "moe_ckpt", "inspect", str(root)]
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 1.0, times


def test_no_source_of_the_package_reads_or_writes_a_pickle() -> None:
    for path in Path(moe_ckpt.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for name in ("import pickle", "torch.load", "torch.save", "allow_pickle=True", "marshal"):
            assert name not in text, path
