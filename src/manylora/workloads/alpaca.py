"""Alpaca: instructions with an input and an answer, JSON ``[{"instruction", "input", "output"}]`` or one a line.

No times: requests arrive at 0 (see assembly.py). Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.workloads.assembly import NO_TIMES, Adapters, TextPieces
from manylora.workloads.stream import Encode, Stream, StreamRequest, in_order
from manylora.workloads.text_file import BadLine, TextFile, string


def load(
    path: Path | str,
    *,
    encode: Encode | None = None,
    adapters: Adapters | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The first ``limit`` instructions, each a request: the instruction, its input if any, the answer's length.

    No template is put around them. Records whose answer is empty are left out and counted in the notes. Key of a
    request: its number in the file, from 0. Raises ConfigError for a malformed record.
    """
    file = TextFile(path, skip_bad_lines)
    adapters = adapters or Adapters()
    pieces = TextPieces(encode)
    requests = []
    empty = 0
    for number, (prompt_text, answer) in enumerate(itertools.islice(file.records(_record), limit)):
        prompt, output_tokens = pieces.pieces(prompt_text), pieces.length(answer)
        if not prompt or not output_tokens:
            empty += 1
            continue
        requests.append(StreamRequest(0.0, adapters.choose(str(number)), number, 0, prompt, output_tokens))
    notes = ["Alpaca instructions, CC BY-NC 4.0 (no commercial use): real text, no times"]
    if empty:
        notes.append(f"{empty} records without an answer left out")
    return in_order("alpaca", requests, adapters.ranks, (*notes, *file.notes, *pieces.notes, NO_TIMES))


def _record(record: Mapping[str, Any]) -> tuple[str, str]:
    instruction = string(record, "instruction")
    if not instruction.strip():
        raise BadLine("instruction, a text that is not empty", instruction)
    given = string(record, "input")
    return f"{instruction}\n\n{given}" if given.strip() else instruction, string(record, "output")
