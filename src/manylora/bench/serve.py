"""``manylora bench serve``: replay a chat trace against an engine or a server, and report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.bench.http_target import HttpTarget
from manylora.bench.replay import ReplaySettings, TurnResult, check_fit, replay, show_on_stderr, warm_adapters
from manylora.bench.summary import Summary, as_rows, difference, summarize, table
from manylora.bench.targets import Target, open_engine
from manylora.config import ConfigError
from manylora.flags import build_settings
from manylora.workloads.chat import Turn, read_turns


@dataclasses.dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to replay against what. Either ``url``, or ``engine``: settings by flag name, ``model`` too."""

    trace_file: Path
    replay: ReplaySettings
    url: str | None = None
    api_key: str | None = None
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limit: int | None = None
    is_warm: bool = False
    """Request every adapter of the trace once before."""
    out: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One replay. ``engine``: how the target's own numbers grew meanwhile."""

    summary: Summary
    engine: dict[str, float]
    results: list[TurnResult]


def run(settings: BenchSettings) -> int:
    """Measure, print the table, write the file; 1 where a turn failed. Raises ConfigError."""
    if (settings.url is None) == ("model" not in settings.engine):
        raise ConfigError("name either --url, a running server, or --model, for an engine in this process")
    if settings.url is not None and settings.engine:
        name = next(iter(settings.engine)).replace("_", "-")
        raise ConfigError(f"--{name} is for an engine in this process; the server at --url has its own")
    if settings.out is not None and not settings.out.parent.is_dir():
        raise ConfigError(f"--out {settings.out}: there is no such folder")
    turns = read_turns(settings.trace_file, settings.limit)
    try:
        report = asyncio.run(_run(settings, turns))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(table(report["summary"]))
    if settings.out is not None:
        try:
            settings.out.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {settings.out}: {error.strerror}") from error
    return 1 if report["summary"]["failed"] else 0


async def _run(settings: BenchSettings, turns: Sequence[Turn]) -> dict[str, Any]:
    target: Target
    if settings.url is not None:
        target = await HttpTarget.connect(settings.url, settings.api_key)
    else:
        target = open_engine(build_settings(settings.engine)[0])
    try:
        found = await measure(target, turns, settings.replay, settings.is_warm)
    finally:
        await target.close()
    return {
        "target": target.description,
        "settings": {
            "trace_file": settings.trace_file.name, "limit": settings.limit, "warm_adapters": settings.is_warm,
            "rate_scale": settings.replay.rate_scale, "seed": settings.replay.seed,
            "vocab_size": settings.replay.vocab_size, **settings.engine,
        },
        "summary": found.summary,
        "engine": found.engine,
        "requests": as_rows(found.results),
    }  # fmt: skip


async def measure(
    target: Target,
    turns: Sequence[Turn],
    settings: ReplaySettings,
    is_warm: bool = False,
    extra_adapters: Sequence[str] = (),
) -> Measured:
    """Check, warm up, replay. ``extra_adapters`` are warmed as well. Raises ConfigError."""
    check_fit(target, turns, settings)
    if is_warm:
        names = {settings.name_of(adapter) for adapter in sorted({turn.adapter for turn in turns})}
        await warm_adapters(target, sorted(names.union(extra_adapters)), settings)
    before = await target.counters()
    results = await replay(target, turns, settings)
    after = await target.counters()
    return Measured(summarize(turns, results), difference(before, after), results)


def settings_from(values: Mapping[str, Any], engine: Mapping[str, Any]) -> BenchSettings:
    """From the command line's values, texts or None; raises ConfigError."""

    def number(name: str, kind: type, default: Any) -> Any:
        text = values.get(name)
        try:
            return default if text is None else kind(text)
        except ValueError:
            word = "a whole number" if kind is int else "a number"
            raise ConfigError(f"--{name.replace('_', '-')} must be {word}, got {text!r}") from None

    replayed = ReplaySettings(
        rate_scale=number("rate_scale", float, 1.0),
        seed=number("seed", int, 0),
        vocab_size=number("vocab_size", int, 1000),
        adapter_name=values.get("adapter_name") or "adapter-{}",
        show=show_on_stderr if values.get("progress") else None,
    )
    return BenchSettings(
        trace_file=Path(values["trace_file"]),
        replay=replayed,
        url=values.get("url"),
        api_key=values.get("api_key"),
        engine=engine,
        limit=number("limit", int, None),
        is_warm=bool(values.get("warm_adapters")),
        out=Path(values["out"]) if values.get("out") else None,
    )
