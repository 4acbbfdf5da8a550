"""Alpaca: instructions with an input and an answer, JSON ``[{"instruction", "input", "output"}]`` or one a line.

No times: requests arrive at 0 (see assembly.py). Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec

from manylora_lab.workloads.assembly import NO_TIMES, TextPieces
from manylora_lab.workloads.rows import RowType
from manylora_lab.workloads.stream import Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import BadLine, TextFile
from manylora_lab.workloads.traces import WHOLE, ReadOptions


class _Record(msgspec.Struct, frozen=True):
    instruction: str
    input: str
    output: str

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise BadLine("instruction, a text that is not empty", self.instruction)

    @property
    def prompt(self) -> str:
        return f"{self.instruction}\n\n{self.input}" if self.input.strip() else self.instruction


def load(path: Path | str, options: ReadOptions = WHOLE) -> Stream:
    """The first ``options.limit`` records, each a request: instruction and input if any, and the answer's length.

    No template is put around them. Records whose answer is empty are left out and counted in the notes. Key of a
    request: its number in the file, from 0. Raises ConfigError for a malformed record.
    """
    file = TextFile(path, options.skip_bad_lines)
    pieces = TextPieces(options.encode)
    requests = []
    empty = 0
    records = itertools.islice(file.records(RowType(_Record)), options.limit)
    for number, record in enumerate(records):
        prompt, output_tokens = pieces.pieces(record.prompt), pieces.length(record.output)
        if not prompt or not output_tokens:
            empty += 1
            continue
        adapter = options.adapters.choose(str(number))
        requests.append(StreamRequest(0.0, adapter, number, 0, prompt, output_tokens))
    notes = ["Alpaca instructions, CC BY-NC 4.0 (no commercial use): real text, no times"]
    if empty:
        notes.append(f"{empty} records without an answer left out")
    return in_order(
        "alpaca", requests, options.adapters.ranks, (*notes, *file.notes, *pieces.notes, NO_TIMES)
    )
