"""``moe-train import``: begin a run with a model that is kept as Hugging Face keeps it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_train.commands.options import read_options, say
from moe_train.commands.start import start
from moe_train.config import RunConfig
from moe_train.errors import RunError
from moe_train.hf_config import from_hf
from moe_train.hf_import import begin
from moe_train.load_config import Layer, from_dict, to_dict
from moe_train.ranks import RankInfo

OF_MODEL = (
    "model.", "routing.score", "routing.renormalize", "routing.scale", "routing.num_groups",
    "routing.top_groups",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions(RunConfig):
    """A run that begins with weights from elsewhere.

    Attributes:
        source: A folder with ``config.json`` and safetensors files.
    """

    source: Path


FLAGS = {"": ImportOptions}
EXAMPLES = (
    "moe-train import OLMoE-1B-7B --run-dir runs/olmoe --train.dtype bfloat16 --data.path shards",
    "moe-train run --config runs/olmoe/config.toml      # goes on from there",
)


def main(argv: list[str]) -> int:
    """Make the run's folder, with a checkpoint of step 0."""
    return start("import", argv, options_of(argv), _work)


def options_of(argv: list[str]) -> ImportOptions:
    """Return the settings of the run: those of the model from its ``config.json``.

    Raises:
        RunError: If the model is not one that the trainer has, or a flag would make another.
    """
    wanted: dict[str, Any] = {
        "prog": "moe-train import",
        "about": "Begin a run with a model that is kept as Hugging Face keeps it: its folder gets "
        "a checkpoint of step 0. What the model is comes from its config.json, everything else "
        "from the options of `moe-train run`.",
        "examples": EXAMPLES,
        "places": ("source",),
    }
    source = read_options(ImportOptions, argv, **wanted).config.source
    file = source / "config.json"
    try:
        hf = json.loads(file.read_bytes())
    except OSError as error:
        raise RunError(
            f"{source} is no model: cannot read config.json: {error.strerror}"
        ) from error
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}") from error
    tree = from_hf(hf)
    options, sources = read_options(ImportOptions, argv, **wanted, base=[Layer(str(file), tree)])
    biased = tree.get("routing", {}).get("bias", False)  # then the bias is a part of the model
    for key, where in sources.items():
        of_model = key.startswith(OF_MODEL) or (key == "routing.bias" and biased)
        if of_model and where not in ("default", str(file)):
            raise RunError(f"{key} is of the imported model and cannot be set by {where}")
    return options


def _work(options: ImportOptions, info: RankInfo) -> None:
    tree = to_dict(options)
    del tree["source"]
    config = from_dict(RunConfig, tree)
    parameters = begin(config, options.source, info)
    if info.rank == 0:
        say(f"{config.run_dir}: {parameters:,} parameters at step 0, from {options.source}")
        say(f"go on with: moe-train run --config {config.run_dir / 'config.toml'}")
