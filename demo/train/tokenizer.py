"""Train the byte-level BPE tokenizer and save it with its chat template.

Run `python -m demo.train.tokenizer`.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo.train.data import DOMAINS, load_documents, split_documents
from demo.train.recipe import MODEL, Recipe, load_recipe

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def training_texts(recipe: Recipe) -> list[str]:
    """Texts of the two training splits, each once; the other splits must stay unseen."""
    texts: dict[str, None] = {}
    for domain in DOMAINS:
        splits = split_documents(load_documents(domain), recipe.shares[domain], recipe.seed)
        for document in splits["base"] + splits["adapter"]:
            texts.update(dict.fromkeys(document.texts))
    return list(texts)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, none needs an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A completion prompt starts with bos; chats get theirs from the template.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer."""
    return PreTrainedTokenizerFast.from_pretrained(MODEL)


def main() -> None:
    """Train and save."""
    recipe = load_recipe()
    tokenizer = train_tokenizer(training_texts(recipe), recipe.tokenizer["vocab_size"])
    tokenizer.model_max_length = recipe.architecture["max_position_embeddings"]
    tokenizer.save_pretrained(MODEL)
    print(f"{len(tokenizer)} tokens saved")


if __name__ == "__main__":
    main()
