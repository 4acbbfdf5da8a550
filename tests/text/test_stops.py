"""Stop strings are found whatever the pieces, and nothing of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.text.stops import StopChecker, StopStrings

SHORT = st.text(alphabet="ab", min_size=1, max_size=5)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string whose end comes first, the longest of several; by brute force."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="abc", max_size=6), max_size=8),
    stops=st.lists(SHORT, min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_pieces_give_the_same_text(parts: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(StopStrings(stops, include))
    shown = ""
    for part in parts:
        shown += checker.feed(part)
    shown += checker.finish()
    text, found = expected("".join(parts), stops, include)
    assert (shown, checker.found) == (text, found)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab", max_size=20), stop=SHORT)
def test_holds_back_no_more_than_could_become_a_stop_string(text: str, stop: str) -> None:
    checker = StopChecker(StopStrings([stop]))
    shown = "".join(checker.feed(char) for char in text)
    if checker.found is None:
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert all(not stop.startswith(text[i:]) for i in range(len(shown)))


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one ###")])
def test_include_in_output(include: bool, text: str) -> None:
    checker = StopChecker(StopStrings(["###"], include))
    shown = "".join(map(checker.feed, ["one #", "#", "# two"]))
    assert (shown, checker.found, checker.finish()) == (text, "###", "")
