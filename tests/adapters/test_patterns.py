"""Regular expressions of adapters: what ``re`` finds, in a time that none of them can stretch."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.adapters import patterns
from manylora.adapters.patterns import NamePatterns
from manylora.protocol import AdapterError

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NAMES = [f"model.layers.{layer}.{module}" for layer in range(32) for module in MODULES]
HOSTILE = (
    "(?:.|.)?" * 30 + "Z",
    ".?" * 22,
    "(.*)*x",
    "(a|a)*x",
    "(?:a|a)" * 30,
    ".*.*.*.*.*.*x",
    ".*" * 900 + "x",
    r"(\w+)+$",
    "(?:(?:(?:.?){9}){9}){9}x",
    "((a{1,50}){1,50}){1,50}",
    "a{4000000000}",
    "(?:){4000000000}",
    "(" * 900 + ")" * 900,
)
LIMIT_S = 30.0
"""Ten times what they take."""

characters = st.sampled_from("ab1_.")
atoms = st.sampled_from(
    ["a", "b", "1", "_", ".", r"\.", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", "[a-b1]", r"[\d_]",
     r"[^\w]", "[]a]", "", r"\x61"]
)  # fmt: skip
repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}", "{1,2}?"])


def composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("{}{})".format, st.sampled_from(["(", "(?:"]), inner)
    return (
        group
        | st.builds("{}{}".format, group, repeats)
        | st.builds("{}|{}".format, inner, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("^{}".format, inner)
        | st.builds("{}$".format, inner)
    )


repeated = st.builds("{}{}".format, atoms.filter(bool), repeats)
expressions = st.recursive(
    atoms | repeated | st.sampled_from(["^", "$", r"\A", r"\Z"]), composed, max_leaves=6
)
names = st.text(characters, max_size=7)


@given(expression=expressions, name=names)
@settings(max_examples=600, deadline=None)
def test_one_expression_matches_as_re_does(expression: str, name: str) -> None:
    whole = NamePatterns({expression: True}, "x").get(name, False)
    assert whole == (re.fullmatch(expression, name) is not None)
    end = NamePatterns({expression: True}, "x", ends=True).get(name, False)
    assert end == (re.match(rf"(.*\.)?({expression})$", name) is not None)


@given(keys=st.lists(expressions, unique=True, max_size=4), tried=st.lists(names, max_size=8))
@settings(max_examples=300, deadline=None)
def test_of_several_the_first_counts(keys: list[str], tried: list[str]) -> None:
    found = NamePatterns({key: key for key in keys}, "x", ends=True)
    for name in tried:
        first = next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None)
        assert found.get(name, None) == first


@pytest.mark.filterwarnings("ignore::FutureWarning")
@given(text=st.text(st.sampled_from("ab.()[]{}|*+?^$\\,-12"), max_size=12), name=names)
@settings(max_examples=1500, deadline=None)
def test_what_is_no_expression_is_refused_as_by_re(text: str, name: str) -> None:
    try:
        expected = re.fullmatch(text, name) is not None
    except (re.error, OverflowError):
        with pytest.raises(AdapterError, match="is not a regular expression"):
            NamePatterns({text: True}, "x")
        return
    try:
        found = NamePatterns({text: True}, "x").get(name, False)
    except AdapterError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert found == expected
    assert not refusal or "is not supported" in refusal


@pytest.mark.parametrize("name", ["layers.1.ünï", "ﬁ", "٣", "a\u00a0b", "²", "ǅ"])
def test_classes_know_unicode_as_re_does(name: str) -> None:
    for expression in (r"\w*", r"\W*", r"\d*", r"\D*", r"\s*", r"\S*", r"[\w.]*", "[^a-z]*", "[à-ÿ]*"):
        expected = re.fullmatch(expression, name) is not None
        assert NamePatterns({expression: True}, "x").get(name, False) == expected


@given(expression=expressions, count=st.integers(1, 60), tail=st.sampled_from(["", "Z"]))
@settings(max_examples=200, deadline=None)
def test_no_expression_takes_long(expression: str, count: int, tail: str) -> None:
    within_limit({f"(?:{expression})" * count + tail: 1})


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda expression: expression[:20])
def test_hostile_expressions_take_no_longer(expression: str) -> None:
    within_limit({expression: 1})


def test_neither_do_many() -> None:
    within_limit({".*" * 900 + str(number): 1 for number in range(70)})
    within_limit({"a" * 900 + str(number): 1 for number in range(140)})
    within_limit({f"a{number}": 1 for number in range(4000)})
    with pytest.raises(AdapterError, match="more than"):
        NamePatterns({f"a{number}": 1 for number in range(patterns.MOST_PATTERNS + 1)}, "x")
    with pytest.raises(AdapterError, match="more than"):
        NamePatterns({"a" * 1900 + str(number): 1 for number in range(70)}, "x")


def within_limit(values: dict[str, int]) -> None:
    """Compiled, and matched with every module of a model, or refused."""
    began_s = time.monotonic()
    with contextlib.suppress(AdapterError):
        found = NamePatterns(values, "x", ends=True)
        for name in NAMES:
            found.get(name, None)
    assert time.monotonic() - began_s < LIMIT_S


def test_a_pattern_for_each_module_of_a_large_model_is_served() -> None:
    """As PEFT writes them where ranks were found while training (EVA, AdaLoRA)."""
    every = {f"model.layers.{layer}.{module}": layer for layer in range(126) for module in MODULES}
    found = NamePatterns(every, "rank_pattern", ends=True)
    assert [found.get(name, None) for name in every] == list(every.values())
