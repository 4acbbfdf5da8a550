"""Google Taskmaster dialogs (TM-1 to TM-4): people and assistants, with calls of tools where the release has them.

A call of a tool is something the model says, the tool's answer is input: each round of call and answer is a turn.
No times: turns arrive at 0 (see assembly.py). Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from manylora_lab.workloads.assembly import Dialog, Message
from manylora_lab.workloads.conversations import DialogTrace, LabelledDialog
from manylora_lab.workloads.text_file import BadLine, an_object, array, parsed_json, string

_KINDS = {"user": False, "api_response": False, "agent": True, "assistant": True, "agent_api_call": True}


def _dialog(record: Mapping[str, Any]) -> LabelledDialog:
    key = string(record, "conversationId" if "conversationId" in record else "conversation_id")
    if "utterances" in record:
        messages = [m for found in array(record, "utterances") for m in _utterance(an_object(found))]
    elif "context" in record:
        context = parsed_json(string(record, "context"), "context, a JSON array inside a text")
        generation = parsed_json(string(record, "generation"), "generation, a JSON object inside a text")
        messages = [
            _reward_message(an_object(m)) for m in (*array({"context": context}, "context"), generation)
        ]
    elif "turns" in record:
        messages = [_kind_and_text(found) for found in array(record, "turns")]
    else:
        raise BadLine("a dialog with utterances, context or turns", ", ".join(record))
    return Dialog(key, tuple(messages)), None


def _utterance(found: Mapping[str, Any]) -> Iterator[Message]:
    speaker = string(found, "speaker").lower()
    if speaker not in ("user", "assistant"):
        raise BadLine("speaker, user or assistant", speaker)
    said = Message(speaker == "assistant", string(found, "text"))
    calls = [*_apis(found), *_annotated_calls(found)]
    yield from [*calls, said] if said.ours else [said, *calls]


def _apis(found: Mapping[str, Any]) -> Iterator[Message]:
    """TM-3: name, args and response of each call."""
    for call in map(an_object, array(found, "apis") if found.get("apis") else ()):
        name = string(call, "name")
        yield Message(True, json.dumps({name: call.get("args")}, ensure_ascii=False))
        yield Message(False, json.dumps({name: call.get("response")}, ensure_ascii=False))


def _annotated_calls(found: Mapping[str, Any]) -> Iterator[Message]:
    """TM-4: api_call and request belong together, as do api_response and response."""
    for note in map(an_object, array(found, "annotations") if found.get("annotations") else ()):
        name = string(note, "name")
        if name in ("api_call", "request"):
            yield Message(True, string(note, "value"))
        elif name in ("api_response", "response"):
            yield Message(False, string(note, "value"))


def _reward_message(found: Mapping[str, Any]) -> Message:
    role = string(found, "role")
    if role not in ("user", "agent", "api"):
        raise BadLine("role, user, agent or api", role)
    for name in ("api", "response"):
        if name in found:
            return Message(role == "agent", json.dumps(found[name], ensure_ascii=False))
    return Message(role == "agent", string(found, "text"))


def _kind_and_text(found: Any) -> Message:
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(part, str) for part in found):
        raise BadLine("a turn, [kind, text]", found)
    kind, said = found
    if kind not in _KINDS:
        raise BadLine(f"a turn's kind, one of {', '.join(_KINDS)}", kind)
    return Message(_KINDS[kind], said)


TASKMASTER = DialogTrace(
    "taskmaster", "Taskmaster dialogs, CC BY 4.0: real text and calls of tools, no times", _dialog
)
"""A JSON array or one record a line, in any of the releases' shapes:

- TM-1 to TM-4 dialogs: ``utterances`` of ``speaker`` and ``text``. TM-3's ``apis`` (calls and responses) and
  TM-4's ``annotations`` come after a user's text and before an assistant's, which is our reading: the release does
  not state the order.
- TM-3 reward rows: ``context`` and ``generation``, JSON inside text. Many contexts are beginnings of others; each
  is a dialog of its own here, and they share their prefix.
- ``turns`` of [kind, text], kind one of user, agent, assistant, agent_api_call, api_response.

Key of a dialog: its conversation id."""
