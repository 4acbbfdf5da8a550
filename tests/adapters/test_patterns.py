"""Regular expressions of adapters: what ``re`` finds, in a time and memory that none of them can stretch."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.adapters import loraconfig
from manylora.adapters.loraconfig import Patterns, first_matches
from manylora.protocol.executor import AdapterError

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NAMES = tuple(f"model.layers.{layer}.{module}" for layer in range(32) for module in MODULES)
ENDS = r"(.*\.)?({})$"
HOSTILE = (
    "(?:.|.)?" * 30 + "Z",
    "(.*)*x",
    r"(\w+)+$",
    "((a{1,50}){1,50}){1,50}",
    "(?:(?=.)){4000000000}x",
    "(" * 900 + ")" * 900,
    "(?i)" + "[\0-\uffff]" * 4000,
    "(?=(?:.*)*x)",
    r"(?P<a>.*)*(?P=a)x",
)


def first(expressions: list[str], names: tuple[str, ...] = NAMES, form: str = ENDS) -> list[int | None]:
    method = "match" if form == ENDS else "fullmatch"
    (answer,) = first_matches((Patterns("x", tuple(expressions), method, form),), names)
    return [found and found[0] for found in answer]


@pytest.mark.parametrize(
    "expression",
    [
        r".*\b(?:q_proj|v_proj)",
        r"^(?!.*(?:mlp|vision_tower)).*(?:q_proj|v_proj).*",
        r"(?i).*\.(Q_PROJ|V_PROJ)",
        r".*layers\.(\d)\1\..*",
        r"(?>.*\.)up_proj",
        r".*+x",
        "[[:alpha:]]|.*{e<=1}",  # what other engines read as more than re does
    ],
)
def test_expressions_match_as_re_does(expression: str) -> None:
    expected = [0 if re.fullmatch(expression, name) else None for name in NAMES]
    assert first([expression], form="{}") == expected


texts = st.text(st.sampled_from("ab_.()|*?[]^\\b"), max_size=6)


@given(keys=st.lists(texts, unique=True, max_size=4))
@settings(max_examples=40, deadline=None)
def test_of_several_the_first_counts_and_all_must_be_expressions(keys: list[str]) -> None:
    names = ("a", "a.b", "b_.a", "aab")
    try:
        compiled = [re.compile(ENDS.format(key)) for key in keys]
    except re.error:
        with pytest.raises(AdapterError, match=r"x: the regular expression .* cannot be used"):
            first(keys, names)
        return
    expected = [
        next((number for number, each in enumerate(compiled) if each.match(name)), None) for name in names
    ]
    assert first(keys, names) == expected


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda expression: expression[:20])
def test_hostile_expressions_end(expression: str) -> None:
    """With an answer or a refusal, within the limits of the process."""
    try:
        assert set(first([expression])) <= {None, 0}
    except AdapterError as error:
        assert re.search("cannot be used|too much time or memory", str(error))  # noqa: PT017


def test_a_process_that_gets_no_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loraconfig, "_MOST_WALL_S", 0.001)
    with pytest.raises(AdapterError, match="too much time or memory"):
        first([r"\w+unseen"])


def test_sets_of_expressions_have_bounds() -> None:
    for keys in (
        [f"a{n}" for n in range(loraconfig.MOST_PATTERNS + 1)],
        ["a" * loraconfig.MOST_CHARACTERS, "b"],
    ):
        with pytest.raises(AdapterError, match="more than"):
            first(keys)


def test_thousands_of_adapters_with_few_configurations_cost_few_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise AssertionError("a process is started")

    assert first([r"v_p\w+"]) == first(["v_proj"])
    monkeypatch.setattr(subprocess, "run", fail)
    assert first([r"v_p\w+"]) == first(["v_proj"])
    assert first(["k_proj"]).count(0) == 32, "a plain name needs none"


def test_a_pattern_for_each_module_of_a_large_model_is_served() -> None:
    """As PEFT writes them where ranks were found while training (EVA, AdaLoRA)."""
    every = [f"model.layers.{layer}.{module}" for layer in range(126) for module in MODULES]
    assert first(every, tuple(every)) == list(range(len(every)))
