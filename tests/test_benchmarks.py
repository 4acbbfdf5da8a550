"""Benchmarks are run by hand, seldom, and often where a machine is paid for: they must at least start."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from manylora_lab import benchmarks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_a_benchmark_finds_what_it_uses(name: str) -> None:
    assert importlib.import_module(f"manylora_lab.benchmarks.{name}").__doc__
