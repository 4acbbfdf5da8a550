"""Conversations with chat models: ShareGPT and LMSYS JSON, and the lengths of ShareGPT requests as CSV.

Only the Arena's have times; the others' turns arrive at 0 (see assembly.py). Sources and licences:
docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from manylora_lab.workloads.assembly import (
    NO_TIMES,
    Dialog,
    Message,
    TextPieces,
    dialog_requests,
    requests_of_dialogs,
)
from manylora_lab.workloads.rows import Number, Positive, RowType
from manylora_lab.workloads.stream import Stream, in_order
from manylora_lab.workloads.text_file import TextFile
from manylora_lab.workloads.traces import WHOLE, ReadOptions

LabelledDialog = tuple[Dialog, str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class DialogTrace:
    """A format with a dialog a record and no times. ``about`` the data, for a stream's notes.

    ``dialog``: that of a record, and its label, which ``ReadOptions.only`` is compared with; raises BadLine.
    """

    name: str
    about: str
    dialog: Callable[[Mapping[str, Any]], LabelledDialog]

    def load(self, path: Path | str, options: ReadOptions = WHOLE) -> Stream:
        """The first ``options.limit`` dialogs, one a line or in one array. Raises ConfigError."""
        file = TextFile(path, options.skip_bad_lines)
        found = file.records(self.dialog)
        kept = (dialog for dialog, label in found if options.only in (None, label))
        pieces = TextPieces(options.encode)
        requests, unanswered = requests_of_dialogs(
            itertools.islice(kept, options.limit), options.adapters, pieces
        )
        notes = [self.about, *file.notes, *pieces.notes, NO_TIMES]
        if unanswered:
            notes.append(f"{unanswered} dialogs without an answer left out")
        return in_order(self.name, requests, options.adapters.ranks, notes)


class _ShareGptMessage(msgspec.Struct, frozen=True):
    role: Literal["gpt", "chatgpt", "bing", "bard", "assistant", "human", "user", "system"] = msgspec.field(
        name="from"
    )
    text: str = msgspec.field(name="value")


class _ShareGptRecord(msgspec.Struct, frozen=True):
    conversations: list[_ShareGptMessage]
    id: str


class _LmsysMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant", "user", "system"]
    text: str = msgspec.field(name="content")


class _LmsysRecord(msgspec.Struct, frozen=True):
    conversation: list[_LmsysMessage]
    model: str
    language: str


class _ArenaRecord(msgspec.Struct, frozen=True):
    model_a: str
    conversation_a: list[_LmsysMessage]
    model_b: str
    conversation_b: list[_LmsysMessage]
    tstamp: Number
    language: str

    def dialogs(self) -> tuple[Dialog, Dialog]:
        return _dialog(self.model_a, self.conversation_a), _dialog(self.model_b, self.conversation_b)


def _dialog(key: str, messages: Sequence[_ShareGptMessage | _LmsysMessage]) -> Dialog:
    theirs = ("human", "user", "system")
    return Dialog(key, tuple(Message(message.role not in theirs, message.text) for message in messages))


_SHAREGPT_RECORD, _LMSYS_RECORD = RowType(_ShareGptRecord), RowType(_LmsysRecord)


def _sharegpt(record: Mapping[str, Any]) -> LabelledDialog:
    found = _SHAREGPT_RECORD(record)
    return _dialog(found.id, found.conversations), None


def _lmsys(record: Mapping[str, Any]) -> LabelledDialog:
    found = _LMSYS_RECORD(record)
    return _dialog(found.model, found.conversation), found.language


SHAREGPT = DialogTrace(
    "sharegpt",
    "ShareGPT conversations (licence of the conversations themselves unclear): real text, no times",
    _sharegpt,
)
"""``[{"id", "conversations": [{"from", "value"}]}]``. Key of a conversation: its id."""

LMSYS = DialogTrace(
    "lmsys",
    "LMSYS conversations (licence agreement of the data set): real text and models, times not used",
    _lmsys,
)
"""LMSYS-Chat-1M: ``{"conversation_id", "model", "conversation": [{"role", "content"}], "language"}``; its label is
the language, as "English". Key of a conversation: its model, which S-LoRA (section 7) and FastLibra (section 6.2)
take for the adapter."""


def load_arena(path: Path | str, options: ReadOptions = WHOLE) -> Stream:
    """LMSYS-33k, the Chatbot Arena's conversations, as JSON: FastLibra's chatbot (section 6.2).

    The first ``options.limit`` rows of ``{"model_a", "model_b", "conversation_a", "conversation_b", "language",
    "tstamp"}``, one a line or in one array (it is published as Parquet: export it). A row's label is its language.
    It is two conversations, one with each model, that begin at its ``tstamp`` (seconds, from the earliest row's);
    a later turn follows the reply before it at once. Key of a conversation: its model. Raises ConfigError for a
    malformed record.
    """
    file = TextFile(path, options.skip_bad_lines)
    rows = (row for row in file.records(RowType(_ArenaRecord)) if options.only in (None, row.language))
    started = sorted(itertools.islice(rows, options.limit), key=lambda row: row.tstamp)
    begun = [(row.tstamp - started[0].tstamp, dialog) for row in started for dialog in row.dialogs()]
    pieces = TextPieces(options.encode)
    requests = [
        dataclasses.replace(request, arrival_s=began_s)
        for number, (began_s, dialog) in enumerate(begun)
        for request in dialog_requests(number, dialog, options.adapters, pieces)
    ]
    about = "LMSYS-33k (licence of the data set; texts not to be passed on): real text, models and times"
    return in_order("lmsys-33k", requests, options.adapters.ranks, (about, *file.notes, *pieces.notes))


class LengthPair(NamedTuple):
    """A request's lengths in tokens."""

    input_tokens: int
    output_tokens: int


class _LengthsRow(msgspec.Struct, frozen=True):
    num_prefill_tokens: Positive
    num_decode_tokens: Positive


@dataclasses.dataclass(frozen=True)
class RequestLengths:
    """Lengths of requests, in the file's order, and what a stream's notes should say of them."""

    pairs: tuple[LengthPair, ...]
    notes: tuple[str, ...]


def read_lengths(path: Path | str, options: ReadOptions = WHOLE) -> RequestLengths:
    """The first ``options.limit`` rows of Sarathi-Serve's ShareGPT: num_prefill_tokens, num_decode_tokens.

    Draw from them at random: the file is no sequence of arrivals. Raises ConfigError for a malformed line.
    """
    file = TextFile(path, options.skip_bad_lines)
    row_type = RowType(_LengthsRow)
    rows = file.rows(row_type.columns, row_type)
    pairs = tuple(
        LengthPair(row.num_prefill_tokens, row.num_decode_tokens)
        for row in itertools.islice(rows, options.limit)
    )
    return RequestLengths(
        pairs, ("ShareGPT lengths (Llama-2 tokens, by Sarathi-Serve), Apache-2.0", *file.notes)
    )
