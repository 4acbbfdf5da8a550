"""A model folder's tokenizer: text to token ids, token ids to text, its special tokens and chat templates.

Reads what transformers 4 and 5 write (tokenizer.json, tokenizer_config.json, special_tokens_map.json,
chat_template.jinja), and means what transformers 5 means by it. Encoding is tokenizer.json's own, but for what a
LlamaTokenizer does by itself: ``add_bos_token`` in the config does not override the post-processor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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
    def from_folder(cls, path: str | Path, model: Path | None = None) -> Tokenizer:
        """The tokenizer of a model folder, or of an adapter's, whose base is in the folder ``model``; raises
        MissingTokenizer or TokenizerError."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise MissingTokenizer(f"{folder} has no tokenizer.json: only token ids can be served")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the tokenizers library raises bare Exception, and panics
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        with files_fault(folder):
            config = special_config(folder)
            if name := _llama_class(config, read_json((model or folder) / "config.json"), backend):
                _build_llama(backend, config, is_code=name.startswith("Code"))
                config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
            special_tokens = special_tokens_of(config)
            _add_tokens(backend, folder, config, special_tokens)
            return cls(backend, special_tokens, chat_templates_of(folder, config))

    def decoding_like(self, other: Tokenizer) -> Tokenizer:
        """The same tokenizer with another's way from tokens to text."""
        self._backend.decoder = other._backend.decoder
        return Tokenizer(self._backend, self.special_tokens, self.chat_templates)

    def described(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> Tokenizer:
        """The same tokenizer with other names and templates; the two share all else."""
        other = copy.copy(self)
        other.special_tokens = {**self.special_tokens, **special_tokens}
        other.chat_templates = {**self.chat_templates, **chat_templates}
        return other

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer knows, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The id of the token that ends a text; none where there is no such token."""
        found = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if found is None else (found,)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokens, added ones included, with their ids."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def pipeline(self) -> dict[str, Any]:
        """All that there is of the tokenizer, as a newly written tokenizer.json would have it."""
        written: dict[str, Any] = json.loads(self._backend.to_str())
        return written

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

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder for one sample, whose text follows the prompt's."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self.token_bytes, skipped, prompt)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped, prompt)

    def is_special(self, token_id: int) -> bool:
        """Tell whether ``skip_special_tokens`` leaves it out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for: perhaps a part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Give the text that a token adds, as far as that can be said of it alone."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            # As the ByteLevel decoder does: a piece with any character outside its alphabet is plain text.
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                return piece.encode()
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        before = self._word
        return self.decode([*before, token_id], False)[len(self.decode(before, False)) :].encode()

    @functools.cached_property
    def _word(self) -> list[int]:
        """A token of letters, if there is one: many decoders do something else at the beginning of a text."""
        ids = range(self.vocab_size)
        return next(([token] for token in ids if self.decode([token]).strip().isalpha()), [])


@contextlib.contextmanager
def files_fault(folder: Path) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the files that are read there: a TokenizerError."""
    try:
        yield
    except TokenizerError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise TokenizerError(f"the tokenizer's files in {folder} cannot be used: {error!r}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; nothing where there is no such file. Raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content


def special_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json wins where the config predates added_tokens_decoder."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config.update(read_json(folder / "special_tokens_map.json"))
    return config


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have names, by name."""
    return {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name)}


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token is written as a string, or as an object with its content."""
    return token if isinstance(token, str) else str(token["content"])


def _llama_class(
    config: Mapping[str, Any], model: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> str | None:
    """Which Llama tokenizer AutoTokenizer makes of it, if any: for some types of model it takes another."""
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class")).removesuffix("Fast")
    has_class_of_its_own = model.get("model_type") in ("mistral", "qwen2")
    is_like_llama = isinstance(backend.model, models.BPE) and not isinstance(
        backend.decoder, decoders.ByteLevel
    )
    is_one = name in ("LlamaTokenizer", "CodeLlamaTokenizer") and is_like_llama and not has_class_of_its_own
    return name if is_one else None


def _build_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any], is_code: bool) -> None:
    """What a LlamaTokenizer, or a CodeLlamaTokenizer, does instead of what its tokenizer.json says."""
    has_prefix, is_legacy = config.get("add_prefix_space") is not False, config.get("legacy") and not is_code
    scheme = "never" if not has_prefix else "always" if is_legacy else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    stripped = [decoders.Strip(" ", 1, 0)] if has_prefix or is_code else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    backend.decoder = decoders.Sequence(steps)
    backend.model.unk_token, backend.model.fuse_unk, backend.model.byte_fallback = None, True, True


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that the files beside tokenizer.json name join the vocabulary, or change what it says of them; those
    with a name are never plain text."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    names = dict.fromkeys([*special_tokens.values(), *(_content(token) for token in extra)])
    own = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" in config:
        written = config["added_tokens_decoder"].items()
        entries = {int(token_id): _added_token(entry) for token_id, entry in written}
    else:
        entries = {
            token_id: tokenizers.AddedToken(
                content, normalized=content not in names, special=content in names
            )
            for content, token_id in read_json(folder / "added_tokens.json").items()
        } | own
    known = set(map(repr, own.values()))
    backend.add_tokens([entry for _, entry in sorted(entries.items()) if repr(entry) not in known])
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name) or tokenizers.AddedToken(name, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def chat_templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; chat_template.jinja wins over the config's, and a single one is called ``default``."""
    inline = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, Mapping):
        templates.update(inline)
    elif isinstance(inline, list):
        templates.update({entry["name"]: entry["template"] for entry in inline})
    file = folder / "chat_template.jinja"
    return {"default": file.read_text(encoding="utf-8")} if file.is_file() else templates


def _alphabet() -> dict[str, int]:
    """Give the alphabet of byte-level BPE: each of the 256 bytes as one printable character (GPT-2's choice)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_CHAR = _alphabet()
