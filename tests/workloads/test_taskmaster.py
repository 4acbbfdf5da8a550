"""Taskmaster dialogs, on real ones of TM-1, TM-3 and TM-4."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.stream import StreamRequest, prompt_tokens
from manylora_lab.workloads.taskmaster import TASKMASTER
from manylora_lab.workloads.traces import ReadOptions

from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

TM1, TM3, TM4 = "taskmaster_tm1.json", "taskmaster_tm3_reward.json", "taskmaster_tm4.json"
TURNS = "taskmaster_tm3_turns.jsonl"


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def prompts(requests: tuple[StreamRequest, ...]) -> list[list[str]]:
    return [["".join(chr(t) for t in piece.tokens or ()) for piece in request.prompt] for request in requests]


def test_tm1_people_only() -> None:
    requests = TASKMASTER.load(SAMPLES / TM1, ReadOptions(encode=letters)).requests
    said = [u["text"] for u in json.loads((SAMPLES / TM1).read_text())[0]["utterances"]]
    assert prompts(requests) == [[text] for text in said[0::2]]
    assert [request.output_tokens for request in requests] == [len(text) for text in said[1::2]]
    assert requests[0].output_tokens == len("Ok, what area are you thinking about?") == 37
    assert prompt_tokens(requests)[-1] == sum(len(text) for text in said[:-1])


def test_tm3_rewarded_turns_share_their_beginning() -> None:
    stream = TASKMASTER.load(SAMPLES / TM3, ReadOptions(encode=letters, adapters=Adapters.in_turn((8, 8))))
    first, second = (
        [request for request in stream.requests if request.conversation == number] for number in (0, 1)
    )
    greeting = json.loads(json.loads((SAMPLES / TM3).read_text())[0]["context"])[0]["text"]
    call = '{"resolve_location": {"location": "San Francico"}}'
    answer = '{"resolve_location": {"location": ["San Francisco, California"]}}'
    assert prompts(tuple(second)) == [
        [greeting, "What movies are showing nearby"],
        ["San Francico"],
        [answer],
    ]
    assert [request.output_tokens for request in second] == [
        len("What is your location"),
        len(call),
        len('{"find_movies": {"location": "San Francico, California"}}'),
    ]
    assert [(r.prompt, r.output_tokens) for r in first] == [(r.prompt, r.output_tokens) for r in second[:2]]
    assert [request.adapter for request in stream.requests] == [0, 0, 1, 1, 1]


def test_tm3_turns_with_tools() -> None:
    dialogs = [json.loads(line) for line in (SAMPLES / TURNS).read_text().splitlines()]
    stream = TASKMASTER.load(SAMPLES / TURNS, ReadOptions(encode=letters))
    for number, dialog in enumerate(dialogs):
        its = tuple(request for request in stream.requests if request.conversation == number)
        # Every turn answers a run of input: as many as there are steps from input to the model's words.
        kinds = [kind in ("user", "api_response") for kind, text in dialog["turns"] if text]
        assert len(its) == sum(1 for a, b in itertools.pairwise(kinds) if a and not b)
        last = max(i for i, (kind, text) in enumerate(dialog["turns"]) if kind.startswith("agent") and text)
        spoken = sum(len(text) for _, text in dialog["turns"][: last + 1]) if its else 0
        assert sum(request.new_tokens + request.output_tokens for request in its) == spoken


def test_tm4_calls_come_after_the_users_words() -> None:
    requests = TASKMASTER.load(SAMPLES / TM4, ReadOptions(encode=letters)).requests
    notes = json.loads((SAMPLES / TM4).read_text())[0]["utterances"][0]["annotations"]
    values = [note["value"] for note in notes]
    assert prompts(requests)[:3] == [["one Chai Latte please"], values[2:4], values[6:8]]
    assert [request.output_tokens for request in requests] == [
        len("get_menu_items" + '{"query": "Chai Latte"}'),
        len("add_order_item" + '{"menu_item_id": "chai-latte-1928","quantity": "1"}'),
        len("is the order displayed correct and ready to send off to be made?"),
        len("finish_order" + '{"order_id": "28740"}'),
        len("ok, then you can pick up your drink over at the bar in a few minutes."),
    ]


def test_tm3_apis_come_before_the_assistants_words(tmp_path: Path) -> None:
    # Synthetic rows, real schema: the fields that TM-3's README names.
    api = {"name": "find_movies", "index": 1, "args": {"location": "Ely"}, "response": {"name.movie": "It"}}
    utterances = [
        {"index": 0, "speaker": "user", "text": "What is on?", "segments": []},
        {"index": 1, "speaker": "assistant", "text": "It.", "apis": [api], "segments": []},
    ]
    path = tmp_path / "data_00.json"
    path.write_text(
        json.dumps([{"conversation_id": "dlg-1", "vertical": "Movie Tickets", "utterances": utterances}])
    )
    requests = TASKMASTER.load(path, ReadOptions(encode=letters)).requests
    assert prompts(requests) == [["What is on?"], ['{"find_movies": {"name.movie": "It"}}']]
    assert [request.output_tokens for request in requests] == [len('{"find_movies": {"location": "Ely"}}'), 3]


def test_gzip_limit_and_estimates(tmp_path: Path) -> None:
    assert TASKMASTER.load(zipped(tmp_path, TM4)) == TASKMASTER.load(SAMPLES / TM4)
    assert {r.conversation for r in TASKMASTER.load(SAMPLES / TURNS, ReadOptions(limit=3)).requests} <= {
        0,
        1,
        2,
    }
    first = TASKMASTER.load(SAMPLES / TM1).requests[0]
    assert (first.new_tokens, first.output_tokens) == (12, 10)  # by hand: 48 and 37 characters


def dialog(**fields: Any) -> str:
    return json.dumps({"conversation_id": "dlg-x", **fields})


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ('{"conversation_id": "dlg-x", "turns": [["user"', "one JSON object a line", "dlg-x"),
        ('{"turns": []}', "conversation_id, a text", "nothing"),
        (dialog(vertical="Coffee"), "a dialog with utterances, context or turns", "vertical"),
        (dialog(turns=[["user"]]), "a turn, [kind, text]", "user"),
        (dialog(turns=[["nobody", "hello"]]), "a turn's kind, one of user", "'nobody'"),
        (dialog(utterances=[{"speaker": "USER"}]), "text, a text", "nothing"),
        (dialog(utterances=[{"speaker": "OTHER", "text": "x"}]), "speaker, user or assistant", "'other'"),
        (dialog(utterances=[{"speaker": "USER", "text": "x", "apis": 5}]), "apis, an array", "'5'"),
        (
            dialog(utterances=[{"speaker": "USER", "text": "x", "annotations": True}]),
            "annotations, an",
            "True",
        ),
        (dialog(utterances=["x"]), "a JSON object", "'x'"),
        (dialog(context="[{", generation="{}"), "context, a JSON array inside a text", "[{"),
        (dialog(context="{}", generation="{}"), "context, an array", "{}"),
        (dialog(context="[]"), "generation, a text", "nothing"),
        (dialog(context='[{"role": "me"}]', generation="{}"), "role, user, agent or api", "'me'"),
    ],
)
def test_bad_records(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, TURNS, 2, line)
    left = refuses(
        lambda skip: TASKMASTER.load(path, ReadOptions(skip_bad_lines=skip)), path, 2, expected, found
    )
    assert len({request.conversation for request in left.requests}) == 6  # and one that ends unanswered
