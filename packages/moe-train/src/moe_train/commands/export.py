"""``moe-train export``: a trained model as Hugging Face keeps it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_ckpt import export_hf

from moe_train.commands.options import read_options, say, say_json
from moe_train.errors import RunError
from moe_train.hf_config import to_hf
from moe_train.trained import find_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What to export.

    Attributes:
        run: A run's folder, or one of its checkpoints.
        out: The folder to make.
        step: Of the checkpoint; the newest without it.
        dtype: Number format of the weights; each is rounded once.
        json: Print JSON.
    """

    run: Path
    out: Path
    step: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    json: bool = False


FLAGS = {"": ExportOptions}


def main(argv: list[str]) -> int:
    """Write the folder and print which family it is."""
    options = read_options(
        ExportOptions, argv, prog="moe-train export", places=("run", "out"),
        about="Write a trained model as Hugging Face keeps it: config.json and safetensors that "
        "transformers loads. The family follows from the model; what no family has is refused.",
        examples=(
            "moe-train export runs/main exported",
            "moe-train export runs/main exported --step 350 --dtype float32",
        ),
    ).config  # fmt: skip
    found = find_checkpoint(options.run, options.step)
    hf = to_hf(found.config())
    if options.out.exists():
        raise RunError(f"{options.out} exists already; name a new folder")
    # Selection biases that are not in use are kept, and other families have no place for them.
    skip = () if hf["model_type"] == "deepseek_v3" else ("*.moe.router_bias",)
    export_hf(found.reader.path, options.out, config=hf, dtype=options.dtype, skip=skip)
    if options.json:
        facts = {"out": str(options.out), "step": found.step, "model_type": hf["model_type"]}
        say_json({**facts, "dtype": options.dtype})
    else:
        say(f"{options.out}: step {found.step} as {hf['model_type']}, {options.dtype}")
    return 0
