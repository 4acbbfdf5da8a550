"""Conversations with chat models: ShareGPT and LMSYS JSON, and the lengths of ShareGPT requests as CSV.

Only the Arena's have times; the others' turns arrive at 0 (see assembly.py). Sources and licences:
docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manylora.workloads.assembly import (
    Adapters,
    Dialog,
    Message,
    TextPieces,
    dialog_requests,
    dialog_stream,
)
from manylora.workloads.stream import Encode, Stream, in_order
from manylora.workloads.text_file import BadLine, TextFile, an_object, array, decimal, string, whole

_SHAREGPT_OURS = {"gpt": True, "chatgpt": True, "bing": True, "bard": True, "assistant": True}
_SHAREGPT_THEIRS = {"human": False, "user": False, "system": False}
_SHAREGPT_ROLES = _SHAREGPT_OURS | _SHAREGPT_THEIRS
_LMSYS_ROLES = {"assistant": True, "user": False, "system": False}


class LengthPair(NamedTuple):
    """A request's lengths in tokens."""

    input_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class RequestLengths:
    """Lengths of requests, in the file's order, and what a stream's notes should say of them."""

    pairs: tuple[LengthPair, ...]
    notes: tuple[str, ...]


def load_sharegpt(
    path: Path | str,
    *,
    encode: Encode | None = None,
    adapters: Adapters | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The first ``limit`` conversations of ``[{"id", "conversations": [{"from", "value"}]}]``, or one a line.

    Key of a conversation: its id. Raises ConfigError for a malformed record.
    """
    file = TextFile(path, skip_bad_lines)
    dialogs = itertools.islice(file.records(_sharegpt), limit)
    source = "ShareGPT conversations (licence of the conversations themselves unclear): real text, no times"
    return dialog_stream(
        "sharegpt", dialogs, adapters or Adapters(), TextPieces(encode), lambda: (source, *file.notes)
    )


def load_lmsys(
    path: Path | str,
    *,
    encode: Encode | None = None,
    adapters: Adapters | None = None,
    language: str | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The first ``limit`` conversations of ``{"conversation_id", "model", "conversation": [{"role", "content"}],
    "language"}`` (LMSYS-Chat-1M), one a line or in one array; ``language``: only these, as "English".

    Key of a conversation: its model, which S-LoRA (section 7) and FastLibra (section 6.2) take for the adapter.
    Raises ConfigError for a malformed record.
    """
    file = TextFile(path, skip_bad_lines)
    found = file.records(_lmsys)
    kept = (dialog for dialog, spoken in found if language is None or spoken == language)
    source = "LMSYS conversations (licence agreement of the data set): real text and models, times not used"
    return dialog_stream(
        "lmsys",
        itertools.islice(kept, limit),
        adapters or Adapters(),
        TextPieces(encode),
        lambda: (source, *file.notes),
    )


def load_arena(
    path: Path | str,
    *,
    encode: Encode | None = None,
    adapters: Adapters | None = None,
    language: str | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """LMSYS-33k, the Chatbot Arena's conversations, as JSON: FastLibra's chatbot (section 6.2).

    The first ``limit`` rows of ``{"model_a", "model_b", "conversation_a", "conversation_b", "language",
    "tstamp"}``, one a line or in one array (it is published as Parquet: export it). A row is two conversations,
    one with each model, that begin at its ``tstamp`` (seconds, from the earliest row's); a later turn follows
    the reply before it at once. Key of a conversation: its model. Raises ConfigError for a malformed record.
    """
    file = TextFile(path, skip_bad_lines)
    rows = (row for row in file.records(_arena) if language is None or row[2] == language)
    started = sorted(itertools.islice(rows, limit), key=lambda row: row[0])
    dialogs = [(began_s, dialog) for began_s, pair, _ in started for dialog in pair]
    adapters, pieces = adapters or Adapters(), TextPieces(encode)
    requests = [
        dataclasses.replace(request, arrival_s=began_s - started[0][0])
        for number, (began_s, dialog) in enumerate(dialogs)
        for request in dialog_requests(number, dialog, adapters, pieces)
    ]
    source = "LMSYS-33k (licence of the data set; texts not to be passed on): real text, models and times"
    return in_order("lmsys-33k", requests, adapters.ranks, (source, *file.notes, *pieces.notes))


def read_lengths(
    path: Path | str, *, limit: int | None = None, skip_bad_lines: bool = False
) -> RequestLengths:
    """The first ``limit`` rows of num_prefill_tokens, num_decode_tokens (Sarathi-Serve's processed ShareGPT).

    Draw from them at random: the file is no sequence of arrivals. Raises ConfigError for a malformed line.
    """
    file = TextFile(path, skip_bad_lines)
    rows = file.rows(("num_prefill_tokens", "num_decode_tokens"), _lengths)
    pairs = tuple(itertools.islice(rows, limit))
    return RequestLengths(
        pairs, ("ShareGPT lengths (Llama-2 tokens, by Sarathi-Serve), Apache-2.0", *file.notes)
    )


def _sharegpt(record: Mapping[str, Any]) -> Dialog:
    messages = _messages(array(record, "conversations"), "from", "value", _SHAREGPT_ROLES)
    return Dialog(string(record, "id"), messages)


def _lmsys(record: Mapping[str, Any]) -> tuple[Dialog, str]:
    messages = _messages(array(record, "conversation"), "role", "content", _LMSYS_ROLES)
    return Dialog(string(record, "model"), messages), string(record, "language")


def _arena(record: Mapping[str, Any]) -> tuple[float, tuple[Dialog, Dialog], str]:
    one, other = (
        Dialog(
            string(record, f"model_{side}"),
            _messages(array(record, f"conversation_{side}"), "role", "content", _LMSYS_ROLES),
        )
        for side in "ab"
    )
    return decimal(record, "tstamp"), (one, other), string(record, "language")


def _messages(found: Any, role: str, content: str, roles: Mapping[str, bool]) -> tuple[Message, ...]:
    messages = []
    for message in map(an_object, found):
        speaker = string(message, role)
        if speaker not in roles:
            raise BadLine(f"{role}, one of {', '.join(roles)}", speaker)
        messages.append(Message(roles[speaker], string(message, content)))
    return tuple(messages)


def _lengths(row: Mapping[str, str]) -> LengthPair:
    return LengthPair(whole(row, "num_prefill_tokens", 1), whole(row, "num_decode_tokens", 1))
