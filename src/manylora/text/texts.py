"""Reads the text side of a base model and of its adapters: chat templates, tokens that end a text, and added
tokens.

Each adapter may have its own. Reads adapters' folders; does not know how an adapter came to be served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.text import tokenizer as files
from manylora.text.tokenizer import MissingTokenizer, Tokenizer, TokenizerError
from manylora.types import AdapterCard, AdapterId, InvalidRequest, SamplingParams

GENERATION_CONFIG = "generation_config.json"

_DEFAULTS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_DEFAULTS["max_new_tokens"] = "max_tokens"
"""The settings of generation_config.json that become defaults of requests, with the names of SamplingParams. They
are vLLM's; ``do_sample`` is not among them."""

_MIB = 2**20
TEXT_FILES = {
    "tokenizer.json": 64 * _MIB, "tokenizer_config.json": 4 * _MIB, "special_tokens_map.json": _MIB,
    "added_tokens.json": 4 * _MIB, "chat_template.jinja": _MIB, GENERATION_CONFIG: _MIB,
}  # fmt: skip
"""The files of an adapter's folder that are read, and how large each may be."""

_MOST_KEPT = 4096
_MOST_TOKENIZERS = 16
_WITHOUT_EFFECT = ("chat_template", "model_max_length", "padding_side", "truncation_side")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of a model. ``tokenizer``: None where only token ids can be served. ``eos_ids``: tokens
    that end a text, beside those that the engine knows. ``defaults``: SamplingParams for requests that do not
    set them."""

    tokenizer: Tokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def template(self) -> str | None:
        """The chat template; None where the tokenizer or its default template is missing."""
        return None if self.tokenizer is None else self.tokenizer.chat_templates.get("default")


def read_base(
    folder: Path, template: str | None = None, has_defaults: bool = True, tokenizer_folder: Path | None = None
) -> ModelText:
    """Read a base model's text side. ``template``: a chat template in place of the folder's.
    ``tokenizer_folder``: where the tokenizer is, if not in ``folder``. Raises TokenizerError."""
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
    """Read the end tokens and the defaults of a folder's generation_config.json. Raises TokenizerError."""
    written = files.read_json(folder / GENERATION_CONFIG)
    found = written.get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    defaults = {name: written[key] for key, name in _DEFAULTS.items() if written.get(key) is not None}
    try:
        params = SamplingParams(stop_token_ids=ends, **defaults)
    except InvalidRequest as error:
        raise TokenizerError(f"{folder / GENERATION_CONFIG}: {error}") from error
    return tuple(token for token in params.stop_token_ids if token >= 0), defaults  # -1 stands for none


@dataclasses.dataclass(eq=False)
class Texts:
    """The text sides of a base and of its adapters. Thread-safe.

    ``folder``: the base's folder; ``tokenizer_folder``: its tokenizer's, if another. ``templates``: chat
    templates by the name of the adapter that uses them. ``has_defaults``: whether generation_config.json sets
    the defaults of requests.
    """

    base: ModelText
    folder: Path | None = None
    templates: Mapping[str, str] | None = None
    has_defaults: bool = True
    tokenizer_folder: Path | None = None

    def __post_init__(self) -> None:
        self.tokenizer_folder = self.tokenizer_folder or self.folder
        self._of: dict[AdapterId, ModelText] = {}
        self._lock = threading.Lock()
        self._tokenizers: dict[bytes, tuple[Tokenizer, tuple[str, ...]]] = {}

    async def of(self, card: AdapterCard | None) -> ModelText:
        """Return the text side of a served adapter, or of the base (None). Raises InvalidRequest where the
        adapter's files have become unusable since it was loaded."""
        if card is None:
            return self.base
        found = self._of.get(card.id)
        if found is None:
            try:
                found = await asyncio.to_thread(self.read, Path(card.path), card.name)
            except TokenizerError as error:
                raise InvalidRequest(f"adapter {card.name!r} cannot be used: {error}", "model") from error
            if len(self._of) >= _MOST_KEPT:
                del self._of[next(iter(self._of))]
            self._of[card.id] = found
        return found

    def read(self, folder: Path, name: str = "") -> ModelText:
        """Read an adapter's folder; whatever it lacks comes from the base. Raises TokenizerError, which says
        how a tokenizer contradicts the base's, and never reveals the folder's path."""
        try:
            return self._read(folder, name)
        except TokenizerError as error:
            raise TokenizerError(str(error).replace(str(folder), folder.name)) from error

    def _read(self, folder: Path, name: str) -> ModelText:
        template, base = (self.templates or {}).get(name), self.base
        held = [file for file in TEXT_FILES if (folder / file).is_file()]
        if not folder.is_dir():
            _log.warning("adapter %r: no folder %s here: its text is the base's", name, folder)
        if not held and template is None:
            return base
        with files.files_fault(folder):
            for file in held:
                if (folder / file).stat().st_size > TEXT_FILES[file]:
                    raise TokenizerError(f"{file} is larger than {TEXT_FILES[file]} bytes")
            eos_ids, defaults = read_generation(folder)
            config = files.special_config(folder)
            tokenizer, warnings = self._tokenizer_of(folder, config)
            if tokenizer is not None:
                own = files.chat_templates_of(folder, config) if template is None else {"default": template}
                tokenizer = tokenizer.described(files.special_tokens_of(config), own)
                eos_ids += tokenizer.eos_ids
        defaults = {**base.defaults, **defaults} if self.has_defaults else {}
        return ModelText(tokenizer, tuple(dict.fromkeys((*base.eos_ids, *eos_ids))), defaults, warnings)

    def _tokenizer_of(
        self, folder: Path, config: Mapping[str, Any]
    ) -> tuple[Tokenizer | None, tuple[str, ...]]:
        """Return the base's tokenizer, unless the folder's differs, and warnings. Equal files are compared
        with the base's once."""
        if self.folder is None or not (folder / "tokenizer.json").is_file():
            return self.base.tokenizer, ()
        key = _identity(folder, config)
        with self._lock:
            if key == self._base_identity:
                return self.base.tokenizer, ()
            found = self._tokenizers.get(key)
            if found is None:
                found = self._compared(Tokenizer.from_folder(folder, self.tokenizer_folder))
                if len(self._tokenizers) >= _MOST_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
                self._tokenizers[key] = found
            return found

    @functools.cached_property
    def _base_identity(self) -> bytes:
        assert self.tokenizer_folder is not None
        return _identity(self.tokenizer_folder, files.special_config(self.tokenizer_folder))

    def _compared(self, own: Tokenizer) -> tuple[Tokenizer, tuple[str, ...]]:
        base = self.base.tokenizer
        if base is None:
            return own, ()
        if reason := _contradiction(own, base):
            raise TokenizerError(f"its tokenizer is not the base model's: {reason}")
        shaping = [(each.pipeline["post_processor"], each.pipeline["added_tokens"]) for each in (own, base)]
        if own.vocabulary == base.vocabulary and _effective(shaping[0]) == _effective(shaping[1]):
            return base, ()  # both give the same ids for every text
        assert self.folder is not None
        rows = files.read_json(self.folder / "config.json").get("vocab_size", own.vocab_size)
        known = {*base.vocabulary, own.special_tokens.get("pad_token")}
        lacking = [token for token, row in own.vocabulary.items() if row >= rows and token not in known]
        such = min(lacking, default="")
        warning = f"the model has no row for {len(lacking)} of its tokens, such as {such!r}"
        # The base's decoder is used: an adapter may add tokens, but not change how tokens become text.
        return own.decoding_like(base), (warning,) if lacking else ()


def _identity(folder: Path, config: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal for folders with equal tokenizers."""
    shaping = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    state = hashlib.blake2b(json.dumps(shaping, sort_keys=True).encode())
    for name in ("tokenizer.json", "added_tokens.json"):
        if (folder / name).is_file():
            state.update(hashlib.blake2b((folder / name).read_bytes()).digest())
    return state.digest()


# Settings that do not change ids: offsets, and the handling of pieces of text for which there is no token.
_NOT_IDS = ("trim_offsets", "unk_token", "fuse_unk", "dropout")


def _contradiction(own: Tokenizer, base: Tokenizer) -> str | None:
    """Describe how the ids of an adapter's tokenizer differ from those of its base's. Returns None where it
    only adds tokens or lacks added tokens. Pad tokens do not count."""
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


def _effective(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _effective(v) for k, v in value.items() if k not in _NOT_IDS and v not in ("", None)}
    return [_effective(item) for item in value] if isinstance(value, list | tuple) else value
