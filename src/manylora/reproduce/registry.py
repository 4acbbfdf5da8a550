"""The experiments by name: paper and number. Each is imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib

from manylora.config import ConfigError
from manylora.reproduce.experiment import Experiment

TITLES: dict[str, str] = {
    "fastlibra-fig11": "TTFT, TPOT and peak rate of the cache policies, by scenario, model and number of adapters",
}
"""In the order of the papers. ``a-fig1`` is in ``a_fig1.py``."""


def experiment(name: str) -> Experiment:
    """Raises ConfigError for a name that there is not, with the nearest ones."""
    if name not in TITLES:
        near = difflib.get_close_matches(name, TITLES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; manylora reproduce --list names them"
        raise ConfigError(f"there is no experiment {name!r}{hint}")
    module = importlib.import_module(f"manylora.reproduce.{name.replace('-', '_')}")
    found = module.EXPERIMENT
    assert isinstance(found, Experiment)
    assert (found.name, found.title) == (name, TITLES[name])
    return found
