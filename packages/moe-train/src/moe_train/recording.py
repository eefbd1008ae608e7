"""The experts of every token of every step, in a file: to write, and to route by again.

A recording is a folder of two files. ``experts.json`` says how many steps B sequences of S tokens,
L layers and K experts of E it holds, and from which step on; ``experts.bin`` holds the ids, int16
``[steps, B, L, S, K]``, -1 where a token was not routed. A sequence has its place in the batch of
all ranks, so a recording of one layout replays in any other.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_train.config import RunConfig
from moe_train.errors import RunError

_MOST_EXPERTS = 2**15 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the numbers of a recording mean.

    Attributes:
        first_step: Step, from 0, of the first ids.
        batch_size: B, sequences of a step.
        num_layers: L.
        sequence_length: S.
        top_k: K.
        num_experts: E.
    """

    first_step: int
    batch_size: int
    num_layers: int
    sequence_length: int
    top_k: int
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, L, S, K."""
        return self.batch_size, self.num_layers, self.sequence_length, self.top_k

    @property
    def step_bytes(self) -> int:
        return 2 * int(np.prod(self.shape))


def header_of(config: RunConfig, num_layers: int, first_step: int) -> Header:
    """Return the header of a recording of a run."""
    return Header(
        first_step=first_step,
        batch_size=config.train.batch_size,
        num_layers=num_layers,
        sequence_length=config.data.sequence_length,
        top_k=config.model.top_k,
        num_experts=config.model.num_experts,
    )


class Recorder:
    """Writes the choices of one rank into its part of the recording.

    A run that goes on writes on in the same recording; steps done again are written again.

    Args:
        folder: The recording; all ranks of a machine, or of a shared file system, write into it.
        header: What is recorded. The first step is that of an earlier recording if there is one.

    Raises:
        RunError: If the folder holds a recording of another shape, or of later steps.
    """

    def __init__(self, folder: Path, header: Header):
        if header.num_experts > _MOST_EXPERTS:
            raise RunError(
                f"log.record_experts holds at most {_MOST_EXPERTS} experts, the model has "
                f"{header.num_experts}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "experts.json"
        if path.exists():
            there = _read_header(folder)
            _check_same(there, header, f"log.record_experts {folder}")
            if there.first_step > header.first_step:
                raise RunError(
                    f"log.record_experts {folder} begins at step {there.first_step}, this run at "
                    f"{header.first_step}; name another folder"
                )
            header = there
        else:
            partial = folder / f".experts.json.{os.getpid()}"
            partial.write_text(json.dumps(asdict(header)) + "\n", encoding="utf-8")
            partial.replace(path)
        self.header = header
        flags = os.O_RDWR | os.O_CREAT
        self._file = os.open(folder / "experts.bin", flags, 0o644)

    def write(self, step: int, first: int, expert_LBSK: Tensor) -> None:
        """Write what the sequences from ``first`` on chose. Waits for the device.

        Args:
            step: Counted from 0.
            first: Place of the first sequence in the batch of all ranks.
            expert_LBSK: int, ids or -1.
        """
        ids = expert_LBSK.transpose(0, 1).to(torch.int16).cpu().contiguous().numpy()
        per_sequence = self.header.step_bytes // self.header.batch_size
        start = (step - self.header.first_step) * self.header.step_bytes + first * per_sequence
        content, written = ids.tobytes(), 0
        while written < len(content):
            written += os.pwrite(self._file, content[written:], start + written)

    def close(self) -> None:
        os.close(self._file)


class Recording:
    """A recording to replay.

    Args:
        folder: What ``Recorder`` wrote.
        header: What the run needs.

    Raises:
        RunError: If there is no recording, or one of another shape.
    """

    def __init__(self, folder: Path, header: Header):
        self.header, self.folder = _read_header(folder), folder
        _check_same(self.header, header, f"routing.replay {folder}")
        size = (folder / "experts.bin").stat().st_size
        self.num_steps = size // self.header.step_bytes
        self._ids: NDArray[np.int16] = np.memmap(
            folder / "experts.bin", np.int16, "r", shape=(self.num_steps, *self.header.shape)
        )

    def check(self, first: int, last: int) -> None:
        """Raise unless steps ``first`` up to, not including, ``last`` were recorded.

        Raises:
            RunError: Naming both.
        """
        start, stop = self.header.first_step, self.header.first_step + self.num_steps
        if first < start or last > stop:
            raise RunError(
                f"routing.replay {self.folder} holds steps {start} to {stop - 1}, and steps "
                f"{first} to {last - 1} are to be replayed; train.steps says how many"
            )

    def read(self, step: int, first: int, count: int, device: torch.device) -> Tensor:
        """Return int32 ``expert_LBSK`` of ``count`` sequences from place ``first`` on.

        Raises:
            RunError: If what is there are no ids, such as a hole that a lost rank has left.
        """
        ids = np.array(self._ids[step - self.header.first_step, first : first + count])
        twice = (ids[..., :1] == ids[..., 1:2]) & (ids[..., :1] >= 0)  # holes are zeros
        if ids.min() < -1 or ids.max() >= self.header.num_experts or twice.any():
            raise RunError(
                f"{self.folder}/experts.bin is damaged: at step {step} it has other numbers than "
                f"different experts of {self.header.num_experts}"
            )
        return torch.from_numpy(ids).to(device).transpose(0, 1).int()


def _read_header(folder: Path) -> Header:
    try:
        fields = json.loads((folder / "experts.json").read_text(encoding="utf-8"))
        return Header(**fields)
    except FileNotFoundError as error:
        raise RunError(f"{folder} holds no recording of experts: no experts.json") from error
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder}/experts.json is no header of a recording: {error}") from error


def _check_same(there: Header, here: Header, what: str) -> None:
    names = ("batch_size", "num_layers", "sequence_length", "top_k", "num_experts")
    other = [
        f"{name} {getattr(there, name)}, here {getattr(here, name)}"
        for name in names
        if getattr(there, name) != getattr(here, name)
    ]
    if other:
        raise RunError(f"{what} is of another run: it has {'; '.join(other)}")
