"""Text from the model, to look at."""

import torch

from moe_train.trainer import Trainer

PROMPT = b"def "


@torch.no_grad()
def generate(trainer: Trainer, length: int, *, temperature: float = 0.7, seed: int = 0) -> bytes:
    """Continue ``PROMPT`` by ``length`` bytes.

    All ranks make the same draws, as each may hold experts that the others need. A collective
    call.

    Args:
        trainer: Holds the model.
        length: Bytes to generate.
        temperature: Divides the logits; lower is more cautious.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(PROMPT)
    for _ in range(length):
        window = text[-trainer.config.data.sequence_length :]
        inputs_BS = torch.tensor([window], device=trainer.device)
        logits_BSV, _ = trainer.model(inputs_BS, trainer.bias_LE)
        p_V = (logits_BSV[0, -1].double().cpu() / temperature).softmax(-1)
        if not p_V.isfinite().all():
            break
        text.append(int(torch.multinomial(p_V, 1, generator=generator)))
    return bytes(text)
