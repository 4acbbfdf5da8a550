"""Cases of which `make test` takes a part, spread over all; `make test-long` takes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[tuple[Any, ...]], one_in: int) -> list[Any]:
    """The cases as parameters; all but one in so many are marked ``long``."""
    return [
        pytest.param(*case, marks=[pytest.mark.long] if number % one_in else [])
        for number, case in enumerate(cases)
    ]
