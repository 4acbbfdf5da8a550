"""The demo's texts as documents, and their split by document.

Four splits, none of which shares a document with another:

    base        the base model trains on it
    adapter     the domain's adapter trains on it
    validation  decides when training stops; never trained on
    held_out    reported losses; never trained on, and no script's decision reads it
"""

import csv
import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from demo.train.recipe import DEMO, Shares

Split = Literal["base", "adapter", "validation", "held_out"]
SplitDocuments = dict[Split, list["Document"]]
SPLITS: tuple[Split, ...] = get_args(Split)

LANGUAGES = {
    "german": "deu",
    "french": "fra",
    "spanish": "spa",
    "finnish": "fin",
    "turkish": "tur",
    "russian": "rus",
    "greek": "ell",
    "japanese": "jpn",
}
DIALOGS = {"film-tickets": "film_tickets", "coffee": "coffee"}
DOMAINS = ("english", "shakespeare", *DIALOGS, *LANGUAGES)

SENTENCES_PER_ARTICLE = 10
PASSAGE_CHARACTERS = 900
PASSAGES_PER_SCENE = 4


@dataclass(frozen=True)
class Document:
    """A plain text (one turn of role `text`) or a chat (turns of roles `user`, `assistant`).

    Documents of one `group` lie next to each other in their source and are never split apart,
    so a held-out text is not the next sentence of a trained one.
    """

    group: int
    turns: tuple[tuple[str, str], ...]

    @property
    def is_chat(self) -> bool:
        """Whether the document goes through the chat template."""
        return self.turns[0][0] != "text"

    @property
    def texts(self) -> tuple[str, ...]:
        """What is written in it, without roles."""
        return tuple(text for _, text in self.turns)


def load_documents(domain: str) -> list[Document]:
    """All documents of a domain, in the order of their source."""
    if domain == "shakespeare":
        return _passages()
    if domain in DIALOGS:
        return _dialogs(DIALOGS[domain])
    rows = _sentences()
    if domain == "english":
        return [Document(i // SENTENCES_PER_ARTICLE, (("text", row["eng"]),)) for i, row in rows]
    code = LANGUAGES[domain]
    return [
        Document(i // SENTENCES_PER_ARTICLE, (("user", row["eng"]), ("assistant", row[code])))
        for i, row in rows
    ]


def split_documents(documents: list[Document], shares: Shares, seed: int) -> SplitDocuments:
    """Deal whole groups to the splits.

    The order depends on the seed and the number of groups alone, and `held_out` and `validation`
    are dealt first: a sentence held out in one language is held out in all of them.
    """
    by_group: dict[int, list[Document]] = {}
    for document in documents:
        by_group.setdefault(document.group, []).append(document)
    groups = sorted(by_group)
    random.Random(seed).shuffle(groups)
    count = len(groups)
    first = round(count * shares.held_out)
    second = first + round(count * shares.validation)
    third = second + round(count * shares.base)
    dealt: dict[Split, list[int]] = {
        "held_out": groups[:first],
        "validation": groups[first:second],
        "base": groups[second:third],
        "adapter": groups[third:],
    }
    return {split: [d for g in dealt[split] for d in by_group[g]] for split in SPLITS}


def base_view(domain: str, document: Document) -> Document:
    """How the base sees a document: foreign text plain, without the English it translates.

    Replying in a language is thus left to that language's adapter.
    """
    if domain not in LANGUAGES:
        return document
    return Document(document.group, (("text", document.turns[-1][1]),))


def adapter_view(domain: str, document: Document) -> Document | None:
    """How an adapter sees a document: always as a chat, None if it makes none.

    A passage of Shakespeare becomes a dialogue: the assistant answers each speech with the next,
    without the speakers' names.
    """
    if domain != "shakespeare":
        return document
    speeches = [speech.partition(":\n")[2] for speech in document.texts[0].split("\n\n")]
    speeches = speeches[: len(speeches) // 2 * 2]
    if not speeches or not all(speeches):
        return None
    roles = ("user", "assistant") * (len(speeches) // 2)
    return Document(document.group, tuple(zip(roles, speeches, strict=True)))


def _passages() -> list[Document]:
    """Shakespeare's plays as runs of whole speeches."""
    with gzip.open(DEMO / "data/shakespeare/input.txt.gz", "rt", encoding="utf-8") as file:
        speeches = file.read().strip().split("\n\n")
    passages = [""]
    for speech in speeches:
        if len(passages[-1]) + len(speech) > PASSAGE_CHARACTERS and passages[-1]:
            passages.append("")
        passages[-1] += ("\n\n" if passages[-1] else "") + speech
    scenes = ((i // PASSAGES_PER_SCENE, text) for i, text in enumerate(passages))
    return [Document(scene, (("text", text),)) for scene, text in scenes]


def _dialogs(name: str) -> list[Document]:
    """A Taskmaster release. Dialogs of one opening form a group.

    TM-3 holds several continuations of one conversation, under different ids.
    """
    path = DEMO / f"data/taskmaster/{name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        dialogs = [json.loads(line)["turns"] for line in file]
    groups: dict[str, int] = {}
    return [
        Document(
            groups.setdefault(opening(turns[0][1]), len(groups)),
            tuple((role, text) for role, text in turns),
        )
        for turns in dialogs
    ]


def opening(text: str) -> str:
    """A user's first words, without case, punctuation and spacing."""
    return "".join(filter(str.isalnum, text.casefold()))


def _sentences() -> Iterable[tuple[int, dict[str, str]]]:
    """NTREX's aligned sentences, one column a language."""
    path = DEMO / "data/ntrex128/sentences.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
