"""Which sizes a kernel runs with: a table that ships, and no tuning while training.

The table is ``configs/<architecture>.toml``, one section an operation, dtype and regime of rows, so
a choice can be read, and is the same in every run. ``benchmarks/tune.py`` writes such a file;
``use_configs`` takes it instead of the shipped one.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

OPERATIONS = ("forward", "dgrad", "wgrad", "gate_up")
SHARING = ("forward", "dgrad", "gate_up")  # one list of tiles serves them all
DTYPES = ("half", "single")
SCALED = {"mx32": 32, "mx128": 128, "mxrow": 0}  # recipes of MXFP8: D values of a scale; 0: all
ROWS = ("few", "many")
MOST_WARPS = 32  # of a block
FEW_ROWS = 96  # rows an expert has on average, below which tiles are low
FLOAT8_CAPABILITY = (8, 9)
ARCHITECTURES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}

_chosen: dict[str, "Table"] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What a kernel's program computes, and how.

    Attributes:
        block_n: Rows of a tile; for ``wgrad`` the rows summed at a time.
        block_f: Columns of the output; for ``gate_up`` of each half.
        block_d: Depth of the product summed at a time; for ``wgrad`` columns of the output.
        num_warps: Warps of 32 threads.
        num_stages: Loads in flight.
        programs_per_sm: Programs that share a multiprocessor.
        super_n: Neighbouring tiles that go through all columns together.
        halves: Store a tile of a product in two halves, which takes half the shared memory.
    """

    block_n: int
    block_f: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    super_n: int = 8
    halves: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "halves":
                continue
            power = field.name not in ("num_stages", "programs_per_sm", "super_n")
            if type(value) is not int or value < 1 or (power and value & (value - 1)):
                kind = "a power of two" if power else "an integer"
                raise ValueError(f"{field.name} must be {kind}, 1 or more, got {value!r}")
        if self.num_warps > MOST_WARPS:
            raise ValueError(f"num_warps must be at most {MOST_WARPS}, got {self.num_warps}")
        if min(self.block_n, self.block_f, self.block_d) < 16:
            raise ValueError(
                f"blocks must be 16 or more, what tensor cores multiply, got block_n={self.block_n}"
                f", block_f={self.block_f}, block_d={self.block_d}"
            )
        if type(self.halves) is not bool:
            raise ValueError(f"halves must be true or false, got {self.halves!r}")

    @property
    def launch(self) -> dict[str, int]:
        """What Triton's launcher asks for."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


INTERPRETER = Config(block_n=32, block_f=32, block_d=32, num_warps=4, num_stages=1)
Table = Mapping[str, Config]


def read_configs(text: str) -> dict[str, Config]:
    """Read a table: sections ``[operation.dtype.rows]``, each with the fields of ``Config``.

    Products of MXFP8 are sections ``[scaled.recipe.rows]``. A table without them is that of a GPU
    that has no float8 products.

    Raises:
        ValueError: If a section is missing, unknown, or does not make a ``Config``.
    """
    want = {f"{op}.{dtype}.{rows}" for op in OPERATIONS for dtype in DTYPES for rows in ROWS}
    table = {}
    for name, values in _sections(tomllib.loads(text)):
        try:
            table[name] = Config(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"[{name}]: {error}") from error
    if any(name.startswith("scaled.") for name in table):
        want |= {f"scaled.{recipe}.{rows}" for recipe in SCALED for rows in ROWS}
    if table.keys() != want:
        missing, unknown = sorted(want - table.keys()), sorted(table.keys() - want)
        raise ValueError(f"sections missing: {missing}, sections unknown: {unknown}")
    for dtype in DTYPES:
        for rows in ROWS:
            heights = {op: table[f"{op}.{dtype}.{rows}"].block_n for op in SHARING}
            if len(set(heights.values())) > 1:
                raise ValueError(
                    f"{dtype}.{rows}: operations of one layer share their tiles of rows, so "
                    f"block_n must be the same, got {heights}"
                )
    for name, config in table.items():
        depth = SCALED.get(name.split(".")[1], 0)
        if depth and config.block_d % depth:
            raise ValueError(
                f"[{name}]: block_d must be a multiple of the {depth} values that share a scale, "
                f"got {config.block_d}"
            )
    return table


def _sections(tree: dict) -> Iterator[tuple[str, dict]]:
    """Yield the sections three levels down, by their dotted names."""
    for operation, by_dtype in tree.items():
        for dtype, by_rows in by_dtype.items() if isinstance(by_dtype, dict) else ():
            for rows, values in by_rows.items() if isinstance(by_rows, dict) else ():
                if isinstance(values, dict):
                    yield f"{operation}.{dtype}.{rows}", values


def write_configs(table: Table, header: str) -> str:
    """Write a table as ``read_configs`` reads it, with a comment above."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for name, config in table.items():
        lines += [
            "",
            f"[{name}]",
            *(f"{key} = {str(value).lower()}" for key, value in asdict(config).items()),
        ]
    return "\n".join(lines) + "\n"


def use_configs(architecture: str, path: str | Path) -> None:
    """Take the sizes for an architecture from a file instead of the shipped table.

    Args:
        architecture: One of ``ARCHITECTURES``, as ``"sm_90"``.
        path: A file as ``benchmarks/tune.py`` writes it.

    Raises:
        ValueError: If the architecture is unknown or the file is not a whole table.
        OSError: If the file cannot be read.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}"
        )
    _chosen[architecture] = read_configs(Path(path).read_text())
    configs_of.cache_clear()


@cache
def configs_of(architecture: str) -> Table:
    """Return the table of an architecture."""
    if architecture in _chosen:
        return _chosen[architecture]
    return read_configs((files("moe_kernels") / "configs" / f"{architecture}.toml").read_text())


@cache
def architecture_of(capability: tuple[int, int]) -> str:
    """Return the architecture whose table serves a GPU of this compute capability.

    GPUs of one generation differ most in shared memory: those of 8.6 and 8.9 have as little as
    12.0 (99 KiB a block), so they share its table. An unknown GPU gets the nearest lower table.
    """
    if capability[0] == 8 and capability != (8, 0):
        return "sm_120"
    lower = [name for name, known in ARCHITECTURES.items() if known <= capability]
    if not lower:
        raise RuntimeError(
            f"moe_kernels needs a GPU of compute capability 8.0 or more, got "
            f"{capability[0]}.{capability[1]}"
        )
    if all(known[0] != capability[0] for known in ARCHITECTURES.values()):
        logging.getLogger("moe_kernels").warning(
            "no configurations for compute capability %d.%d: those of %s are used",
            *capability, lower[-1],
        )  # fmt: skip
    return lower[-1]


def choose(operation: str, x: Tensor, num_rows: int, num_experts: int) -> Config:
    """Return the sizes for an operation on ``num_rows`` rows like ``x`` of ``num_experts`` experts.

    A CPU tensor, which Triton's interpreter takes, gets small ones.
    """
    if not x.is_cuda:
        return INTERPRETER
    capability = torch.cuda.get_device_capability(x.device)
    dtype = "single" if x.element_size() == 4 else "half"
    rows = "few" if num_rows < FEW_ROWS * num_experts else "many"
    return configs_of(architecture_of(capability))[f"{operation}.{dtype}.{rows}"]


def choose_scaled(recipe: str, x: Tensor, num_rows: int, num_experts: int) -> Config:
    """Return the sizes for a product of MXFP8 rows; as ``choose``, a CPU tensor gets small ones.

    Raises:
        RuntimeError: If the GPU has no float8 products.
    """
    if not x.is_cuda:
        depth = SCALED[recipe] or INTERPRETER.block_d
        return replace(INTERPRETER, block_d=depth)
    capability = torch.cuda.get_device_capability(x.device)
    if capability < FLOAT8_CAPABILITY:
        raise RuntimeError(
            f"recipe {recipe!r} needs float8 products, which GPUs have from compute capability "
            f"8.9 on; {torch.cuda.get_device_name(x.device)} has "
            f"{capability[0]}.{capability[1]}"
        )
    rows = "few" if num_rows < FEW_ROWS * num_experts else "many"
    return configs_of(architecture_of(capability))[f"scaled.{recipe}.{rows}"]


def has_block_scales(x: Tensor) -> bool:
    """Tell whether the tensor cores of the device take a scale for each 32 values."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 10


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(device: torch.device, config: Config) -> int:
    """Return how many programs fill the device; the interpreter runs four, one after the other."""
    return _multiprocessors(device) * config.programs_per_sm if device.type == "cuda" else 4
