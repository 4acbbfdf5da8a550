"""Documents as token ids, with a mark on every token whose prediction counts.

In a plain text every token counts. In a chat only the assistant's turns do, with the
end-of-turn token that stops generation: nobody asks the model to write the user's part.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from demo.train.data import Document

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the same length of labels."""

    ids: list[int]
    labels: list[int]


def encode(tokenizer: PreTrainedTokenizerFast, document: Document, *, all_count: bool) -> Encoded:
    """Encode one document; `all_count` makes the user's turns count as well."""
    bos, eos = int(tokenizer.bos_token_id), int(tokenizer.eos_token_id)
    ids, labels = [bos], [IGNORED]
    for role, text in document.turns:
        tokens = [*tokenizer.encode(text, add_special_tokens=False), eos]
        counts = all_count or role != "user"
        if document.is_chat:
            ids.append(int(tokenizer.convert_tokens_to_ids(f"<|{role}|>")))
            labels.append(ids[-1] if all_count else IGNORED)
        ids += tokens
        labels += tokens if counts else [IGNORED] * len(tokens)
    return Encoded(ids, labels)


def pad(batch: list[Encoded], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-pad a batch. Causal attention keeps padding out of every counted token's sight."""
    width = max(len(item.ids) for item in batch)
    ids = [item.ids + [pad_id] * (width - len(item.ids)) for item in batch]
    labels = [item.labels + [IGNORED] * (width - len(item.labels)) for item in batch]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def batches_by_length(items: list[Encoded], tokens_per_batch: int) -> list[list[Encoded]]:
    """Batches of similar length that pad little and hold at most `tokens_per_batch` tokens."""
    batches: list[list[Encoded]] = []
    for item in sorted(items, key=lambda item: len(item.ids)):
        if batches and len(item.ids) * (len(batches[-1]) + 1) <= tokens_per_batch:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
