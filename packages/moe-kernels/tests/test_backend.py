import os
import subprocess
import sys
import textwrap

import torch
from moe_kernels import backend

WITHOUT_TRITON = """
    import logging, sys
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "triton":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Blocker())
    import torch
    import moe_kernels
    import moe_kernels as again

    assert moe_kernels.backend() == ("reference", "triton is not installed")
    x = torch.ones(3, 2, requires_grad=True)
    w = torch.ones(1, 4, 2, requires_grad=True)
    y = moe_kernels.grouped_mm(x, w, torch.tensor([0, 2], dtype=torch.int32))
    y.sum().backward()
    assert y.tolist() == [[2] * 4, [2] * 4, [0] * 4]
    assert w.grad.tolist() == [[[2, 2]] * 4]
    assert "triton" not in sys.modules
"""

LAZILY = """
    import sys
    import torch
    before = set(sys.modules)
    import moe_kernels
    new = set(sys.modules) - before
    assert "moe_kernels.gemm.op" in new
    assert "moe_kernels.gemm.kernel" not in new
    assert not {name for name in new if name.partition(".")[0] in ("triton", "hypothesis", "numpy")}
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def test_without_triton_the_import_says_so_once_and_the_reference_runs() -> None:
    done = run(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "moe_kernels" in line]
    assert said == [
        "WARNING moe_kernels: triton is not installed: moe_kernels runs its plain torch reference "
        "on every device"
    ]


def test_the_import_loads_no_kernel_and_says_nothing() -> None:
    done = run(LAZILY)
    assert done.returncode == 0, done.stderr
    assert "moe_kernels" not in done.stderr


def test_the_backend_gives_its_reason() -> None:
    name, reason = backend()
    if torch.cuda.is_available():
        assert name == "triton"
        assert torch.cuda.get_device_name() in reason
    else:
        assert (name, reason) == ("reference", "torch sees no CUDA device")
