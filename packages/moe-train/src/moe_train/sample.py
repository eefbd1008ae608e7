"""Text from the model, to look at."""

import torch
from torch import Tensor

from moe_train.data.tokenizer import Tokenizer
from moe_train.trained import ModelHolder

PROMPT = b"def "


@torch.no_grad()
def generate(
    holder: ModelHolder,
    length: int,
    tokenizer: Tokenizer,
    *,
    prompt: bytes = PROMPT,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Continue a prompt by up to ``length`` tokens.

    All ranks make the same draws, as each may hold experts that the others need. A collective
    call. Each token costs a forward pass over those before it, at most a sequence of them.

    Args:
        holder: Holds the model.
        length: Tokens to generate. Fewer come where the model's scores are not finite.
        tokenizer: Between text and tokens.
        prompt: UTF-8 to continue, at least one token.
        temperature: Divides the logits; lower is more cautious, 0 takes the likeliest token.
        top_k: Draw among so many likeliest only; 0 for all.
        top_p: Draw among the fewest that have this probability together; 1 for all.
        seed: Of the draws.

    Returns:
        Prompt and continuation.
    """
    generator = torch.Generator().manual_seed(seed)
    text = tokenizer.encode([prompt])[0].tolist() or [0]
    for _ in range(length):
        window = text[-holder.config.data.sequence_length :]
        inputs_BS = torch.tensor([window], device=holder.device)
        logits_BSV, _ = holder.model(inputs_BS, holder.bias_LE)
        logits_V = logits_BSV[0, -1].double().cpu()
        if not logits_V.isfinite().all():
            break
        text.append(draw(logits_V, temperature, top_k, top_p, generator))
    return tokenizer.decode(text)


def draw(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Draw one token from float64 logits on the CPU.

    Examples:
        >>> logits_V = torch.tensor([0.0, 3.0, 2.0], dtype=torch.float64)
        >>> draw(logits_V, 0.0, 0, 1.0, torch.Generator())
        1
        >>> {draw(logits_V, 1.0, 2, 1.0, torch.Generator().manual_seed(i)) for i in range(50)}
        {1, 2}
    """
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    p_V = (logits_V / temperature).softmax(-1)
    if top_p < 1:
        sorted_V, order_V = p_V.sort(descending=True, stable=True)
        # One stays if those before it have less than top_p together, so the first always does.
        before_V = sorted_V.cumsum(-1) - sorted_V
        p_V = torch.zeros_like(p_V).scatter(0, order_V, sorted_V * (before_V < top_p))
    return int(torch.multinomial(p_V, 1, generator=generator))
