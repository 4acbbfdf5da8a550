"""What a folder says of the text of a model, or of an adapter: tokenizer, ends, and defaults of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.text.tokenizer import MissingTokenizer, Tokenizer, TokenizerError, read_json
from manylora.types import InvalidRequest, SamplingParams

GENERATION_CONFIG = "generation_config.json"

_DEFAULTS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_DEFAULTS["max_new_tokens"] = "max_tokens"
"""The settings of generation_config.json that requests take over, as of vLLM: ``do_sample`` is not among them."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of a model. ``tokenizer``: None where only token ids can be served. ``eos_ids``: ends beside
    those that the engine knows. ``defaults``: of SamplingParams, for requests that do not say."""

    tokenizer: Tokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def template(self) -> str | None:
        """The chat template."""
        return None if self.tokenizer is None else self.tokenizer.chat_templates.get("default")


def read_base(
    folder: Path, template: str | None = None, has_defaults: bool = True, tokenizer_folder: Path | None = None
) -> ModelText:
    """Read a base model's text side. ``template``: a chat template in place of the folder's. ``tokenizer_folder``:
    where the tokenizer is, if not in ``folder``. Raises TokenizerError."""
    defaults = read_generation(folder)[1] if has_defaults else {}
    try:
        tokenizer = Tokenizer.from_folder(tokenizer_folder or folder)
    except MissingTokenizer as error:
        if tokenizer_folder not in (None, folder):
            raise
        return ModelText(None, (), defaults, (str(error),))
    if template is not None:
        tokenizer = tokenizer.described({}, {"default": template})
    return ModelText(tokenizer, tokenizer.eos_ids, defaults)


def read_generation(folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Ends and defaults of a folder's generation_config.json. Raises TokenizerError."""
    written = read_json(folder / GENERATION_CONFIG)
    found = written.get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    defaults = {name: written[key] for key, name in _DEFAULTS.items() if written.get(key) is not None}
    try:
        params = SamplingParams(stop_token_ids=ends, **defaults)
    except InvalidRequest as error:
        raise TokenizerError(f"{folder / GENERATION_CONFIG}: {error}") from error
    return tuple(token for token in params.stop_token_ids if token >= 0), defaults  # -1 stands for none
