"""Models as Hugging Face keeps them: safetensors files, an index, ``config.json``."""

from moe_ckpt.hf.exporting import export_hf
from moe_ckpt.hf.importing import import_hf
from moe_ckpt.hf.layout import ARCHITECTURES, FAMILIES, Entry, entries

__all__ = ["ARCHITECTURES", "FAMILIES", "Entry", "entries", "export_hf", "import_hf"]
