"""Mean next-token cross-entropy, the one measure used for stopping and for reporting."""

import torch
from torch import nn

from demo.train.encoding import IGNORED, Encoded, batches_by_length, pad

TOKENS_PER_BATCH = 4096


@torch.inference_mode()
def mean_loss(model: nn.Module, items: list[Encoded], pad_id: int) -> float:
    """Cross-entropy in nats, averaged over all counted tokens of `items`."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in batches_by_length(items, TOKENS_PER_BATCH):
        tensors = pad(batch, pad_id)
        logits = model(input_ids=tensors["input_ids"], use_cache=False).logits[:, :-1]
        labels = tensors["labels"][:, 1:]
        wanted = labels != IGNORED
        total += float(nn.functional.cross_entropy(logits[wanted], labels[wanted], reduction="sum"))
        count += int(wanted.sum())
    model.train(was_training)
    return total / count


def cap_tokens(items: list[Encoded], limit: int) -> list[Encoded]:
    """The first documents that fit in `limit` tokens, for quick checks."""
    kept: list[Encoded] = []
    used = 0
    for item in items:
        used += len(item.ids)
        if kept and used > limit:
            break
        kept.append(item)
    return kept
