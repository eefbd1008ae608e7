"""Train torch's own transformer, which knows nothing of this package, on any number of ranks.

    python train_dense.py                                        # one rank
    torchrun --standalone --nproc-per-node 4 train_dense.py      # a pipeline of two, twice

The same loss either way: a zero-bubble pipeline, gradients reduced during backward, optimizer
state divided among replicas, and one line that computes each layer again instead of keeping it.
"""

import os
import sys

import moe_parallel as moe
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH, STEPS = 17, 32, 4, 12, 16, 20


class Stage(nn.Module):
    """Some of the layers; the embedding before the first, the head after the last."""

    def __init__(self, layers, embedding=None, head=None):
        super().__init__()
        self.layers, self.embedding, self.head = nn.ModuleList(layers), embedding, head

    def forward(self, x, sequence):
        x = x if self.embedding is None else self.embedding(sequence[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            x = moe.recompute(layer, x, src_mask=mask, is_causal=True)
        if self.head is None:
            return x
        losses = F.cross_entropy(self.head(x).mT, sequence[:, 1:], reduction="sum")
        return losses / (BATCH * LENGTH)  # tokens of the whole batch, on all ranks


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    mesh = moe.Mesh.create(moe.plan_mesh(world, pp=1 if world == 1 else 2))
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(LAYERS)
    ]
    plan = moe.make_schedule("zbv", mesh.plan.pp, num_micro=4)
    each, last = LAYERS // plan.num_stages, plan.num_stages - 1
    stages = {
        s: Stage(layers[s * each :][:each], None if s else embedding, head if s == last else None)
        for s in plan.stages_of(mesh.pp_rank)
    }
    named = [(f"{s}.{n}", p) for s in stages for n, p in stages[s].named_parameters()]
    specs = [moe.ParamSpec(n, p, is_expert=False, weight_decay=p.ndim > 1) for n, p in named]
    optimizer = moe.ShardedAdamW(specs, mesh, moe.AdamWConfig(lr=1e-2), 1, bucket_elements=4096)
    optimizer.overlap([layer for stage in stages.values() for layer in stage.layers])
    moe.split_linears(nn.ModuleList(stages.values()))
    pipeline = moe.Pipeline(stages, mesh, optimizer, schedule="zbv")
    for step in range(STEPS):  # to predict: the next number of a sequence that counts up
        sequences = (torch.randint(VOCABULARY, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
        outcome = pipeline.step(sequences.chunk(mesh.plan.dp)[mesh.dp_rank].split(2))
        optimizer.step()
        loss = sum(outcome.losses.values(), torch.zeros(()))
        if world > 1:
            dist.all_reduce(loss)
        if mesh.rank == 0 and step in (0, STEPS - 1):
            sys.stdout.write(f"step {step} loss {loss:.5f}\n")


if __name__ == "__main__":
    main()
    moe.leave()
