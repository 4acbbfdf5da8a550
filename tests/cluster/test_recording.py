"""Journals and traces that cannot be written end the first process of a place, not one that takes its place."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from manylora.cluster.recording import open_of_router, without_what_fails
from manylora.config.declaring import ConfigError
from manylora.config.routing import RouterConfig
from manylora.config.sections import EngineSettings, ModelSettings


def settings_of(journal: Path, trace: Path) -> EngineSettings:
    settings = EngineSettings(ModelSettings("model"), journal=str(journal))
    return dataclasses.replace(settings, cache=dataclasses.replace(settings.cache, trace=str(trace)))


def test_a_replica_goes_on_without_what_it_cannot_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings_of(tmp_path / "journal", tmp_path / "nowhere" / "trace")
    with caplog.at_level(logging.WARNING):
        found = without_what_fails(given)
    assert (found.journal, found.cache.trace) == (given.journal, None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the replica keeps no trace: cannot write the trace {given.cache.trace}: ")
    assert without_what_fails(EngineSettings(ModelSettings("model"))) == EngineSettings(
        ModelSettings("model")
    )


def test_only_the_first_router_ends_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = settings_of(tmp_path / "nowhere" / "journal", tmp_path / "trace")
    with pytest.raises(ConfigError, match="cannot write the journal"):
        open_of_router(given, RouterConfig(), 1)
    with caplog.at_level(logging.WARNING):
        journal, trace = open_of_router(given, RouterConfig(), 2)
    assert journal is None
    assert trace is not None
    trace.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the router keeps no journal"
    ]
