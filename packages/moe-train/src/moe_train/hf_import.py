"""The beginning of a run whose weights come from elsewhere."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from moe_ckpt import CheckpointReader, import_hf, open_checkpoint
from moe_parallel import Mesh, Shard

from moe_train.checkpoints import Checkpoints
from moe_train.config import RunConfig
from moe_train.errors import RunError
from moe_train.load_config import to_toml
from moe_train.prepare import prepare
from moe_train.ranks import RankInfo, join, pick_device
from moe_train.trainer import Trainer

_OF_WEIGHTS = ("master", "ema")


def begin(config: RunConfig, source: Path, info: RankInfo) -> int:
    """Save step 0 of a run, with the weights of a Hugging Face folder.

    The run's own way of saving is used, so nothing tells the checkpoint from one that it wrote
    itself. While it is made, the weights lie in the run's folder a second time, as float32.

    Returns:
        Number of parameters.

    Raises:
        RunError: If the folder already holds a run.
        LayoutError: If a tensor is missing, unknown, or of another shape than config.json says.
    """
    prepared = prepare(config, info.world_size)
    if prepared.state is not None:
        raise RunError(f"{config.run_dir} already holds a run; set run_dir to another folder")
    device, folder = pick_device(config, info), prepared.folder
    partial = folder.root / ".import"
    with folder.locked() if info.rank == 0 else nullcontext():
        join(info, device)
        mesh = Mesh.create(prepared.plan)
        trainer = Trainer(config, mesh, device, prepared.data.train, prepared.data.validation)
        checkpoints = Checkpoints(folder, trainer, prepared.data)
        try:
            if info.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                import_hf(source, partial)
            checkpoints.comm.barrier()
            reader = open_checkpoint(partial / "step-00000000")
            for shard in trainer.shards():
                _fill(shard, reader)
            trainer.loaded(steps_done=0, samples_seen=0, step_count=0)
            checkpoints.save(target=0, seconds=0.0, tokens=0)
            checkpoints.settle()
            checkpoints.comm.barrier()
        finally:
            if info.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        if info.rank == 0:
            folder.write_text("config.toml", to_toml(config))
    return sum(reader.info(n).size for n in reader.names if "master" in reader.kinds(n))


def _fill(shard: Shard, reader: CheckpointReader) -> None:
    """Copy what is imported into a shard; moments and what is not imported stay as they began."""
    kind = "master" if shard.kind in _OF_WEIGHTS else shard.kind
    if shard.name not in reader.names or kind not in reader.kinds(shard.name):
        if shard.kind in _OF_WEIGHTS:
            raise RunError(f"{shard.name} of the model of its config.json is not in the source")
        return
    info = reader.info(shard.name, kind)
    if tuple(info.shape) != tuple(shard.global_shape):
        raise RunError(
            f"{shard.name} has shape {info.shape} in the source and {shard.global_shape} in "
            "the model of its config.json"
        )
    values = np.empty(shard.flat_stop - shard.flat_start, info.dtype)
    reader.read_into(info, [(shard.flat_start, shard.flat_stop, values)])
    shard.data.copy_(torch.from_numpy(values).view(shard.data.shape))
