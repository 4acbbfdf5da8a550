"""A model folder's tokenizer: text to token ids, token ids to text, its special tokens and chat templates.

Reads what transformers 4 and 5 write (tokenizer.json, tokenizer_config.json, special_tokens_map.json,
chat_template.jinja). Encoding is tokenizer.json's own: as in transformers 5, ``add_bos_token`` in the
config does not override the post-processor that tokenizer.json brings.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from manylora.text.bytelevel import BYTE_OF_CHAR
from manylora.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer

NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """The folder's tokenizer cannot be used; the message says why."""


class MissingTokenizer(TokenizerError):
    """The folder has no tokenizer.json, so only token ids can be served."""


class Tokenizer:
    """A loaded tokenizer. Its methods do not mutate it and may be called from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder; raises MissingTokenizer or TokenizerError."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise MissingTokenizer(f"{folder} has no tokenizer.json: only token ids can be served")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _special_config(folder)
        special_tokens = {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name)}
        _add_missing_tokens(backend, config, special_tokens)
        return cls(backend, special_tokens, _chat_templates(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer knows, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than this (byte-level pieces count bytes: never fewer)."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as transformers' AutoTokenizer gives them."""
        # Unlike ``encode``, a batch lets other threads run meanwhile; the fast one computes no offsets.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one sample."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped)

    def is_special(self, token_id: int) -> bool:
        """Whether it is one of those that ``skip_special_tokens`` leaves out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for: perhaps a part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._piece_bytes(self._backend.id_to_token(token_id))
        return found

    def _piece_bytes(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        if self._is_byte_level:
            # As the ByteLevel decoder does: a piece with any character outside its alphabet is plain text.
            try:
                return bytes([BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                return piece.encode()
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content


def _special_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json wins where the config predates added_tokens_decoder."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config.update(_read_json(folder / "special_tokens_map.json"))
    return config


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token is written as a string, or as an object with its content."""
    return token if isinstance(token, str) else str(token["content"])


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that only the config names join the vocabulary; those with a name are never plain text."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    in_order = sorted(entries.items(), key=lambda item: int(item[0]))
    backend.add_tokens([_added_token(entry) for _, entry in in_order if entry["content"] not in known])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    names = dict.fromkeys([*special_tokens.values(), *(_content(token) for token in extra)])
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in names if name not in known]
    )


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over the config's, and a single one is called ``default``."""
    inline = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, Mapping):
        templates.update(inline)
    elif isinstance(inline, list):
        templates.update({entry["name"]: entry["template"] for entry in inline})
    files = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        files["default"] = main.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file.read_text(encoding="utf-8")
    return files or templates
