"""Whether an adapter's tokenizer agrees with its base's: what counts is which ids a text gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.text.tokenizer import Tokenizer

# What ids do not depend on: offsets, and what becomes of a text's pieces that no token stands for.
_WITHOUT_EFFECT = ("trim_offsets", "unk_token", "fuse_unk", "dropout")


def contradiction(own: Tokenizer, base: Tokenizer) -> str | None:
    """What an adapter's tokenizer gives other ids than its base's by; None where it only adds tokens, or lacks
    added ones. Pad tokens do not count."""
    pads = {tokenizer.special_tokens.get("pad_token") for tokenizer in (own, base)}
    ours, theirs = own.vocabulary, base.vocabulary
    tokens = {token_id: token for token, token_id in theirs.items()}
    for token, token_id in ours.items():
        if token in pads or tokens.get(token_id, token) in pads | {token}:
            continue
        if token in theirs:
            return f"token {token!r} has id {token_id}, in the base's {theirs[token]}"
        return f"id {token_id} is token {token!r}, in the base's {tokens[token_id]!r}"
    pipeline, original = own.pipeline, base.pipeline
    added = {token["content"] for token in original["added_tokens"]}
    if lacking := next((token for token in theirs if token not in ours and token not in added), None):
        return f"token {lacking!r} is missing"
    for part in ("normalizer", "pre_tokenizer"):
        if _effective(pipeline[part]) != _effective(original[part]):
            return f"its {part.replace('_', '-')} is another one"
    model, other = _effective(pipeline["model"]), _effective(original["model"])
    for name in {**other, **model}:
        # The vocabulary of a model with scores is a list; ids have been compared.
        is_compared = name == "vocab" and isinstance(model.get(name), Mapping)
        if not is_compared and model.get(name) != other.get(name):
            return f"its {name} differ{'' if name.endswith('s') else 's'}"
    return None


def is_same(own: Tokenizer, base: Tokenizer) -> bool:
    """Whether two tokenizers that do not contradict each other do the same with every text."""
    pipeline, original = own.pipeline, base.pipeline
    return own.vocabulary == base.vocabulary and all(
        _effective(pipeline[part]) == _effective(original[part]) for part in ("post_processor", "added_tokens")
    )


def _effective(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _effective(v) for k, v in value.items() if k not in _WITHOUT_EFFECT and v not in ("", None)}
    return [_effective(item) for item in value] if isinstance(value, list) else value
