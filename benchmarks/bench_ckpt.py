"""Time checkpoints beside torch.save, safetensors and torch's distributed checkpoint.

Every run is a process of its own: write from memory to durable files, then, after the pages of the
files have left memory, read into memory that is there already. Contenders take turns, and a number
is the median of its runs. Peers that do not sync by themselves are made to. Counted are seconds,
seconds of processor time, and the peak of resident memory above what it was before.

``--gpu`` times an asynchronous save of the state of a billion parameters (master and two moments,
12 GB) from one GPU: how long the call takes, how much longer the GPU is kept from its next work,
and the bare copy of the same bytes to the same kind of memory.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from common import machine, write
from moe_ckpt import AsyncSaver, load, save
from moe_ckpt.manifest import producers
from moe_ckpt.testing import ArrayShard
from moe_ckpt.torch_adapter import PinnedArena
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
SMALL_TENSORS = 10_000


def large_state(nbytes: int) -> State:
    """Return tensors of 64 MiB, 8 experts each, and what is left over."""
    each = 8 * 2048 * 1024
    count = max(1, nbytes // (4 * each))
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{n}.moe.down": torch.randn(8, 2048, 1024, generator=generator)
        for n in range(count)
    }


def small_state(count: int) -> State:
    """Return many tensors of 256 bytes to 8 KiB."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(64, 2049, (count,), generator=generator).tolist()
    return {f"t{n:05}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}


def shards(state: State) -> list[ArrayShard]:
    return [
        ArrayShard(name, "master", tuple(t.shape), 0, t.numel(), t.detach().view(-1))
        for name, t in state.items()
    ]


def synced(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "x.pt")
    synced(folder)


def read_torch(state: State, folder: Path) -> None:
    found = torch.load(folder / "x.pt", weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(found[name])


def write_safetensors(state: State, folder: Path) -> None:
    save_file(state, folder / "x.safetensors")
    synced(folder)


def read_safetensors(state: State, folder: Path) -> None:
    found = load_file(folder / "x.safetensors")
    for name, tensor in state.items():
        tensor.copy_(found[name])


def write_dcp(state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def read_dcp(state: State, folder: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def write_ours(state: State, folder: Path) -> None:
    save(folder, shards(state), step=0, state={})


def read_ours(state: State, folder: Path) -> None:
    load(folder, shards(state))


def write_async(state: State, folder: Path) -> None:
    with AsyncSaver(folder) as saver:
        saver.save(shards(state), step=0, state={})


CONTENDERS: dict[str, tuple[Callable, Callable]] = {
    "moe-ckpt": (write_ours, read_ours),
    "moe-ckpt, asynchronous": (write_async, read_ours),
    "torch DCP": (write_dcp, read_dcp),
    "torch.save": (write_torch, read_torch),
    "safetensors": (write_safetensors, read_safetensors),
}


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def measured(work: Callable[[], None]) -> dict[str, float]:
    """Do something and return what it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, used = status("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    work()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - used.ru_utime + after.ru_stime - used.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "extra_mib": (status("VmHWM") - before) / 2**20}


def evict(folder: Path) -> None:
    """Drop the pages of the files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def child(name: str, what: str, folder: Path, nbytes: int) -> None:
    """Write and read once, and print what it took as JSON."""
    state = small_state(nbytes) if what == "small" else large_state(nbytes)
    total = sum(tensor.nbytes for tensor in state.values())
    writer, reader = CONTENDERS[name]
    wrote = measured(lambda: writer(state, folder))
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    want = {name: tensor.clone() for name, tensor in list(state.items())[:3]}
    for tensor in state.values():
        tensor.zero_()
    evict(folder)
    read = measured(lambda: reader(state, folder))
    assert all(torch.equal(state[name], tensor) for name, tensor in want.items())
    print(json.dumps({"bytes": total, "disk": disk, "write": wrote, "read": read}))


def compare(what: str, amount: int, repeat: int, place: Path) -> list[dict]:
    """Let the contenders take turns and return the median of each."""
    runs: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for _ in range(repeat):
        for name in CONTENDERS:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                os.sync()  # what came before is not paid for here
                command = [sys.executable, __file__, "--child", name, what, folder, str(amount)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for name, mine in runs.items():
        row = {"contender": name, "what": what, "bytes": mine[0]["bytes"], "disk": mine[0]["disk"]}
        for half in ("write", "read"):
            for key in ("seconds", "cpu_s", "extra_mib"):
                row[f"{half}_{key}"] = statistics.median(run[half][key] for run in mine)
            row[f"{half}_all_seconds"] = [round(run[half]["seconds"], 3) for run in mine]
        rows.append(row)
        print(
            f"{what:6} {name:24} "
            f"write {row['write_seconds']:7.2f} s  cpu {row['write_cpu_s']:6.2f} s"
            f"  +{row['write_extra_mib']:6.0f} MiB | read {row['read_seconds']:7.2f} s"
            f"  cpu {row['read_cpu_s']:6.2f} s  +{row['read_extra_mib']:6.0f} MiB",
            flush=True,
        )
    return rows


def gpu_copy(source: list[torch.Tensor], repeat: int) -> float:
    """Return seconds of the bare copy to page-locked memory, the median."""
    arena = PinnedArena()
    total = sum(tensor.nbytes for tensor in source)
    arena.reserve(total)
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        begin, at = time.perf_counter(), 0
        for tensor in source:
            target = arena._memory[at : at + tensor.nbytes].view(tensor.dtype)
            target.copy_(tensor, non_blocking=True)
            at += tensor.nbytes
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    arena.close()
    return statistics.median(times[1:])


def gpu(parameters: int, repeat: int, place: Path) -> list[dict]:
    """Time asynchronous saves from the GPU beside the bare copy."""
    each = 1 << 24
    count = max(1, parameters // each)
    state = {
        (f"layers.{n}.w", kind): torch.randn(each, device="cuda")
        for n in range(count)
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    held = [ArrayShard(*key, (16, each // 16), 0, each, t) for key, t in state.items()]
    total = sum(tensor.nbytes for tensor in state.values())
    copy = gpu_copy(list(state.values()), repeat)
    probe = torch.zeros(1, device="cuda")
    calls, blocked, whole = [], [], []
    with (
        tempfile.TemporaryDirectory(dir=place) as folder,
        AsyncSaver(folder, buffer=PinnedArena(), keep=1) as saver,
    ):
        saver.buffer.reserve(total + 64 * len(held))
        for step in range(repeat + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            saver.save(held, step=step, state={})
            calls.append(time.perf_counter() - begin)
            probe.add_(1)  # the next work of the stream
            torch.cuda.synchronize()
            blocked.append(time.perf_counter() - begin)
            saver.wait()
            whole.append(time.perf_counter() - begin)
    row = {
        "what": "asynchronous save from a GPU",
        "bytes": total,
        "copy_seconds": copy,
        "copy_gb_s": total / copy / 1e9,
        "call_seconds": statistics.median(calls[1:]),
        "stream_seconds": statistics.median(blocked[1:]),
        "stream_of_copy": statistics.median(blocked[1:]) / copy,
        "save_seconds": statistics.median(whole[1:]),
    }
    print(
        f"{total / 1e9:.1f} GB: copy {copy:.3f} s ({row['copy_gb_s']:.1f} GB/s), call "
        f"{row['call_seconds']:.4f} s, stream busy {row['stream_seconds']:.3f} s "
        f"({row['stream_of_copy']:.2f} of the copy; the bound is 1.25), durable after "
        f"{row['save_seconds']:.1f} s"
    )
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small, once")
    parser.add_argument("--gpu", action="store_true", help="only the save from a GPU")
    parser.add_argument("--gb", type=float, default=4.0, help="of the large tensors, default: 4")
    parser.add_argument("--parameters", type=int, default=1_000_000_000, help="with --gpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--place", type=Path, default=None, help="folder to write in")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, what, folder, amount = options.child
        child(name, what, Path(folder), int(amount))
        return
    place = options.place or Path(tempfile.gettempdir())
    where = machine()
    del where["triton"]
    where |= {"safetensors": safetensors.__version__, **producers()}
    where |= {"place": str(place), "processors": str(os.cpu_count())}
    where["load"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    where["free_disk_gb"] = f"{shutil.disk_usage(place).free / 1e9:.0f}"
    print(json.dumps(where))
    if options.smoke:
        options.gb, options.repeat, options.parameters = 0.07, 1, 1 << 25
    if options.gpu:
        rows = gpu(options.parameters, options.repeat, place)
    else:
        count = 50 if options.smoke else SMALL_TENSORS
        rows = compare("large", int(options.gb * 1e9), options.repeat, place)
        rows += compare("small", count, options.repeat, place)
    write(rows, where, options.json)


if __name__ == "__main__":
    main()
