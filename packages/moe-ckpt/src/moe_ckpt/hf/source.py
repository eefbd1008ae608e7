"""A model as Hugging Face keeps it: a folder with config.json and one or many safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_ckpt.errors import LayoutError
from moe_ckpt.hf.tensor_file import TensorFile

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SCALE = "_scale_inv"


class Source:
    """A folder to read from.

    Args:
        folder: That holds the model.

    Attributes:
        config: Contents of ``config.json``.
        files: For each tensor the file it is in.

    Raises:
        LayoutError: If the folder is not such a model.
        CorruptFileError: If a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / CONFIG).is_file():
            raise LayoutError(f"{folder} has no {CONFIG}")
        self.config: dict[str, Any] = _json(folder / CONFIG)
        opened = {name: TensorFile(folder / name) for name in self._names()}
        self.files = {tensor: file for file in opened.values() for tensor in file.names}
        if (folder / INDEX).is_file():
            self._check_index(_json(folder / INDEX)["weight_map"])

    def _names(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            names = sorted(set(_json(self.folder / INDEX)["weight_map"].values()))
            if missing := [name for name in names if not (self.folder / name).is_file()]:
                raise LayoutError(f"{self.folder / INDEX} names {missing[0]}, which is not there")
            return names
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        pickled = (
            " Pickled weights (*.bin) are never read." if any(self.folder.glob("*.bin")) else ""
        )
        raise LayoutError(f"{self.folder} has neither {INDEX} nor {SINGLE}.{pickled}")

    def _check_index(self, places: Mapping[str, str]) -> None:
        for tensor, name in places.items():
            if tensor not in self.files or self.files[tensor].path.name != name:
                raise LayoutError(
                    f"{self.folder / INDEX} says that {tensor} is in {name}: it is not"
                )
        if extra := sorted(self.files.keys() - places.keys()):
            raise LayoutError(f"{self.files[extra[0]].path} holds {extra[0]}, not in its index")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.files[tensor].shape(tensor)

    def scales(self) -> set[str]:
        """Return the names of the tensors that scale blocks of 8-bit floats."""
        return {
            name for name in self.files if name.removesuffix(SCALE) in self.files.keys() - {name}
        }

    def read(self, tensor: str, start: int, stop: int) -> np.ndarray:
        """Return a run of the flat elements of a tensor as float32 (float64 stays float64).

        8-bit floats are multiplied by the scale of their block, as DeepSeek-V3 keeps them.
        """
        whole = self.files[tensor].tensor(tensor)
        wide = np.float64 if whole.dtype == np.float64 else np.float32
        if tensor + SCALE not in self.files:
            if whole.dtype.itemsize == 1:
                raise LayoutError(f"{tensor} is {whole.dtype} and has no {tensor + SCALE}")
            return whole.reshape(-1)[start:stop].astype(wide)
        scale = self.files[tensor + SCALE].tensor(tensor + SCALE).astype(np.float32)
        columns = whole.shape[1]
        first, last = start // columns, -(-stop // columns)
        rows, block = whole[first:last].astype(np.float32), self._block()
        factor = scale[np.arange(first, last) // block[0]][:, np.arange(columns) // block[1]]
        return (rows * factor).reshape(-1)[start - first * columns : stop - first * columns]

    def _block(self) -> tuple[int, int]:
        block = self.config.get("quantization_config", {}).get("weight_block_size")
        if block is None:
            raise LayoutError(
                f"{self.folder / CONFIG} has no quantization_config.weight_block_size"
            )
        return tuple(block)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise LayoutError(f"{path} is not JSON: {error}") from error
