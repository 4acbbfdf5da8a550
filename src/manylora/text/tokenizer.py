"""Loads a model folder's tokenizer: text to token ids, token ids to text, its special tokens and chat
templates.

Reads the files that transformers 4 and 5 write (tokenizer.json, tokenizer_config.json,
special_tokens_map.json, chat_template.jinja), and interprets them as transformers 5 does. Encoding follows
tokenizer.json, except for the parts that a LlamaTokenizer builds by itself: ``add_bos_token`` in the config
does not override the post-processor.
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
    """An error for a folder with an unusable tokenizer; the message says why."""


class MissingTokenizer(TokenizerError):
    """An error for a folder without tokenizer.json, for which only token ids can be served."""


class Tokenizer:
    """A loaded tokenizer. All methods but ``decoding_like`` leave it unchanged and may be called from several
    threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        """The tokens that ``skip_special_tokens`` leaves out."""
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path, model: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder, or of an adapter's folder; ``model`` is then the folder of
        its base. Raises MissingTokenizer where there is no tokenizer.json, and TokenizerError where the files
        cannot be used."""
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
        """Return this tokenizer with another's decoder. The backend is shared, so this object decodes
        differently, too."""
        self._backend.decoder = other._backend.decoder
        return Tokenizer(self._backend, self.special_tokens, self.chat_templates)

    def described(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> Tokenizer:
        """Return a tokenizer with these special tokens and templates in addition; it shares all else with
        this one."""
        other = copy.copy(self)
        other.special_tokens = {**self.special_tokens, **special_tokens}
        other.chat_templates = {**self.chat_templates, **chat_templates}
        return other

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the tokenizer knows, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The id of the token that ends a text; empty where there is no such token."""
        found = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if found is None else (found,)

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def pipeline(self) -> dict[str, Any]:
        """The whole tokenizer, as a newly written tokenizer.json would hold it."""
        written: dict[str, Any] = json.loads(self._backend.to_str())
        return written

    @functools.cached_property
    def longest_token_chars(self) -> int:
        """An upper bound of the characters that one token stands for (byte-level pieces count bytes, which
        are never fewer)."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, as transformers' AutoTokenizer gives them."""
        # Unlike ``encode``, a batch call releases the interpreter's lock; the fast variant computes no offsets.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that the tokenizer does not know are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return a new incremental decoder for one sample, whose text follows the prompt's."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self.token_bytes, skipped, prompt)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped, prompt)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that one token stands for, which may be a part of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, with U+FFFD for partial characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            # Like the ByteLevel decoder: a piece with any character outside the alphabet is plain text.
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
        """One token of letters, if there is any. It is put before other tokens, since many decoders treat the
        beginning of a text differently."""
        ids = range(self.vocab_size)
        return next(([token] for token in ids if self.decode([token]).strip().isalpha()), [])


@contextlib.contextmanager
def files_fault(folder: Path) -> Iterator[None]:
    """Raise whatever goes wrong inside as a TokenizerError, because the files that are read there are at
    fault."""
    try:
        yield
    except TokenizerError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise TokenizerError(f"the tokenizer's files in {folder} cannot be used: {error!r}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, empty where there is no such file. Raises TokenizerError."""
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
    """Read tokenizer_config.json; special_tokens_map.json overrides a config that is older than
    added_tokens_decoder."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config.update(read_json(folder / "special_tokens_map.json"))
    return config


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have names, by name."""
    return {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name)}


def _content(token: str | Mapping[str, Any]) -> str:
    """Return a special token's text. A token is written as a string, or as an object with its content."""
    return token if isinstance(token, str) else str(token["content"])


def _llama_class(
    config: Mapping[str, Any], model: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> str | None:
    """Return which Llama tokenizer AutoTokenizer would use, if any. For some model types it uses another
    class."""
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class")).removesuffix("Fast")
    has_class_of_its_own = model.get("model_type") in ("mistral", "qwen2")
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    is_like_llama = isinstance(backend.model, models.BPE) and not is_byte_level
    is_one = name in ("LlamaTokenizer", "CodeLlamaTokenizer") and is_like_llama and not has_class_of_its_own
    return name if is_one else None


def _build_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any], is_code: bool) -> None:
    """Replace the parts of tokenizer.json that a LlamaTokenizer, or a CodeLlamaTokenizer, builds by
    itself."""
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
    """Add the tokens named in the files beside tokenizer.json to the vocabulary, or change their flags there.
    Tokens with a name become special, so they are never plain text."""
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
            number: tokenizers.AddedToken(text, normalized=text not in names, special=text in names)
            for text, number in read_json(folder / "added_tokens.json").items()
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
    """Return the templates by name. chat_template.jinja overrides the config's; a single template is called
    ``default``."""
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
    """Return the alphabet of byte-level BPE: a printable character for each of the 256 bytes (GPT-2's
    choice)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # ! to ~, ¡ to ¬, ® to ÿ
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_CHAR = _alphabet()
