"""Small tokenizer folders, written as transformers 4 or 5 would write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "One coffee, please: a large latte with oat milk. Anything else? No, thank you!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "これは小さな試験です。 Ναι, ασφαλώς. Привет, мир! 🙂🙃",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # 3",
]
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
    "+ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_level(with_bos: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen; with or without a post-processor that adds bos."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    if with_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
        )
    return made


def metaspace() -> tokenizers.Tokenizer:
    """Sentencepiece-like BPE with byte fallback, as in Llama 2 and Mistral."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*special, *byte_tokens], limit_alphabet=80, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    content = json.loads(made.to_str())
    # The byte pieces are plain vocabulary in real files; only the first three are special.
    content["added_tokens"] = content["added_tokens"][:3]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def word_pieces() -> tokenizers.Tokenizer:
    """As of BERT: a space before each token that does not go on with a word."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.WordPiece()
    return made


def suffixed() -> tokenizers.Tokenizer:
    """As of CLIP: the end of a word is part of its last token."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[UNK]"], end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.BPEDecoder("</w>")
    return made


def with_decoder(made: tokenizers.Tokenizer, decoder: Any) -> tokenizers.Tokenizer:
    """The same vocabulary, put together otherwise."""
    made.decoder = decoder
    return made


DECODERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "strip": metaspace,
    "byte-level": lambda: byte_level(False),
    "word-pieces": word_pieces,
    "metaspace": lambda: with_decoder(metaspace(), decoders.Metaspace()),
    "suffix": suffixed,
    "ctc": lambda: with_decoder(word_pieces(), decoders.CTC("[SEP]", "the")),
    "fused": lambda: with_decoder(
        metaspace(), decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 2, 0)])
    ),
}
"""One for each kind of decoder whose text of a token depends on its neighbours, or on the text's beginning."""


def write_folder(folder: Path, made: tokenizers.Tokenizer, config: dict[str, Any], **files: Any) -> Path:
    """A model folder's tokenizer files; ``files`` maps a file's stem to its JSON or, as .jinja, its text."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def layout_5(folder: Path, with_bos: bool = True) -> Path:
    """As transformers 5 writes it."""
    config = {
        "backend": "tokenizers",
        **NAMES,
        "extra_special_tokens": SPECIAL[3:],
        "tokenizer_class": "TokenizersBackend",
    }
    return write_folder(folder, byte_level(with_bos), config, chat_template=TEMPLATE)


def layout_4(folder: Path, with_bos: bool = True) -> Path:
    """As transformers 4 writes it: templates inline, tokens as objects, a token that only the config adds."""
    made = byte_level(with_bos)

    def entry(content: str, special: bool = True) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": not special, "rstrip": False, "single_word": False}
        return {"content": content, "special": special, **flags}

    decoder = {str(i): entry(content) for i, content in enumerate(SPECIAL)}
    size = made.get_vocab_size()
    decoder[str(size)] = entry("<|late|>")
    decoder[str(size + 1)] = entry("<tool_call>", special=False)
    config = {
        "added_tokens_decoder": decoder,
        "add_bos_token": False,
        "bos_token": {"__type": "AddedToken", **entry("<|bos|>")},
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|user|>", "<|late|>"],
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "tools"},
        ],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special_map = {"bos_token": entry("<|bos|>"), "eos_token": "<|eos|>"}
    return write_folder(folder, made, config, special_tokens_map=special_map)


def layout_old(folder: Path) -> Path:
    """Before added_tokens_decoder: names in special_tokens_map.json alone."""
    special_map = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "rstrip": False,
                   "normalized": False, "single_word": False}, "unk_token": "<unk>"}  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    return write_folder(folder, metaspace(), config, special_tokens_map=special_map)


def layout_llama(folder: Path, model_type: str | None = None, **config: Any) -> Path:
    """As of Llama 2: transformers 5 builds normalizer, pre-tokenizer and decoder itself."""
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return write_folder(folder, metaspace(), {"tokenizer_class": "LlamaTokenizer", **config})


def layout_code_llama(folder: Path, **config: Any) -> Path:
    """Code Llama's, without its tokens for filling in."""
    without = dict.fromkeys(f"{name}_token" for name in ("prefix", "middle", "suffix", "eot", "fill"))
    return layout_llama(folder, "llama", tokenizer_class="CodeLlamaTokenizer", **without, **config)


def layout_late(folder: Path, *, decoder: bool) -> Path:
    """What the files beside tokenizer.json say of a token that is plain there, and of others that are not."""
    late = byte_level(with_bos=False)
    late.add_tokens([tokenizers.AddedToken("<|late|>", normalized=True)])
    size = late.get_vocab_size()
    entry = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    user = {"content": "<|user|>", **entry, "special": False}
    entries = {str(size - 1): {"content": "<|late|>", **entry}, "3": user}
    if decoder:
        return write_folder(folder, late, {"added_tokens_decoder": entries, "unk_token": "<|user|>"})
    added = {"<tool_call>": size + 1, "<|late|>": size - 1, "<|new|>": size}
    return write_folder(folder, late, {"eos_token": "<|late|>", "sep_token": "<|new|>"}, added_tokens=added)
