"""``manylora bench serve`` and ``bench offline``: replay a workload against an engine or a server, and report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora.flags import build_settings
from manylora_lab.bench.http_client import allow_many_connections
from manylora_lab.bench.http_target import HttpTarget
from manylora_lab.bench.picture import check_plot, check_writable, draw
from manylora_lab.bench.processes import processes_for, replay_apart
from manylora_lab.bench.provenance import Provenance
from manylora_lab.bench.replay import Halt, ReplaySettings, RequestResult, check_fit, replay, warm_adapters
from manylora_lab.bench.summary import (
    Objective,
    Summary,
    as_rows,
    difference,
    merging,
    summarize,
    table,
    warnings,
)
from manylora_lab.bench.targets import EngineTarget, Target
from manylora_lab.bench.vllm_names import offline_fields, serve_fields
from manylora_lab.workloads.stream import Stream, prompt_tokens

INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure on what. Either ``url``, or ``engine``: settings by flag name, ``model`` too."""

    replay: ReplaySettings
    url: str | None = None
    api_key: str | None = None
    client_processes: int | None = None
    """That send requests to the server at ``url``; None: as many as the workload needs."""
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_warm: bool = False
    """Request every adapter of the workload once before."""
    skip_too_long: bool = False
    """Leave out turns that the target's longest request cannot hold, and those after them."""
    objective: Objective | None = None
    is_offline: bool = False
    """Ask for throughput rather than times."""
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The report's notes: where the workload came from."""
    out: Path | None = None
    plot: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredReplay:
    """One replay. ``engine``: how the target's own numbers grew meanwhile; ``error``: why it ended early."""

    summary: Summary
    engine: dict[str, float]
    results: list[RequestResult]
    error: str | None = None


def check(settings: BenchSettings) -> None:
    """What can be known before anything is loaded; raises ConfigError."""
    if settings.is_offline and "model" not in settings.engine:
        raise ConfigError("name --model, for an engine in this process")
    if (settings.url is None) == ("model" not in settings.engine):
        raise ConfigError("name either --url, a running server, or --model, for an engine in this process")
    if settings.url is not None and settings.engine:
        name = next(iter(settings.engine)).replace("_", "-")
        raise ConfigError(f"--{name} is for an engine in this process; the server at --url has its own")
    if settings.url is None and settings.client_processes is not None:
        raise ConfigError("--client-processes send requests to a server at --url")
    if settings.client_processes is not None and settings.client_processes < 0:
        raise ConfigError(f"--client-processes must be at least 0, got {settings.client_processes}")
    if settings.url is None and settings.replay.kind != "tokens":
        kind = settings.replay.kind
        raise ConfigError(
            f"--prompts {kind} is for a server at --url; an engine in this process takes tokens"
        )
    if settings.out is not None:
        check_writable(settings.out)
    if settings.plot is not None:
        check_plot(settings.plot)


def run(settings: BenchSettings, stream: Stream) -> int:
    """Measure, write the files, print the table.

    The exit code: 1 where a request failed or the target was lost, 130 where it was interrupted; whatever came
    until then is reported and marked. Raises ConfigError.
    """
    check(settings)
    # Before there is an event loop, which would hold back an interrupt until all is loaded.
    loaded = None if settings.url is not None else _load(settings)
    recording = Provenance(settings.replay.seed)
    report, results = asyncio.run(_run(settings, stream, loaded))
    report["provenance"] = recording.provenance()
    try:
        if settings.out is not None:
            settings.out.write_text(json.dumps(report, indent=1) + "\n")
        if settings.plot is not None:
            draw(results, f"{stream.name}: {len(results):,} requests", settings.plot)
    except OSError as error:
        raise ConfigError(f"cannot write {settings.out}: {error.strerror}") from error
    finally:  # neither lost with the other: a disk may be full, and the table's reader may be gone
        for line in report["warnings"]:
            print(f"warning: {line}", file=sys.stderr)
        if report["error"] is not None:
            print(f"not complete: {report['error']}", file=sys.stderr)
        print(table(report["summary"]), flush=True)
    if report["error"] == INTERRUPTED:
        return 130
    return 1 if report["summary"]["failed"] or report["error"] is not None else 0


def _load(settings: BenchSettings) -> Callable[[], EngineTarget]:
    """What makes the target, once there is an event loop."""
    from manylora.main import build_driver  # brings torch

    engine, _ = build_settings(settings.engine)
    driver = build_driver(engine)
    return lambda: EngineTarget(driver, engine.model.name)


async def _run(
    settings: BenchSettings, stream: Stream, loaded: Callable[[], EngineTarget] | None
) -> tuple[dict[str, Any], list[RequestResult]]:
    target = loaded() if loaded is not None else await _connect(settings, stream)
    try:
        if settings.skip_too_long:
            stream = fitting(stream, target.max_model_len)
        halt = Halt()
        with _interrupting(halt):
            found = await measure(
                target,
                stream,
                settings.replay,
                settings.is_warm,
                objective=settings.objective,
                client_processes=settings.client_processes,
                halt=halt,
            )
    finally:
        await target.close()
    return _report(settings, stream, target, found), found.results


async def _connect(settings: BenchSettings, stream: Stream) -> HttpTarget:
    assert settings.url is not None
    allow_many_connections()
    needs_ids = any(request.turn > 0 for request in stream.requests)
    return await HttpTarget.connect(settings.url, settings.api_key, needs_ids, settings.replay.kind)


def _report(settings: BenchSettings, stream: Stream, target: Target, found: MeasuredReplay) -> dict[str, Any]:
    """The names of ``vllm bench`` first, then ours."""
    model = target.description.get("model")
    fields = serve_fields(found.summary, found.results, None if model is None else str(model))
    if settings.is_offline:
        fields |= offline_fields(found.summary)
    if settings.url is None:
        fields["backend"] = fields["endpoint_type"] = "manylora"
    elif settings.replay.kind == "chat":
        fields["backend"] = fields["endpoint_type"] = "openai-chat"
    return fields | {
        "is_complete": found.error is None,
        "error": found.error,
        "warnings": [] if settings.is_offline else warnings(found.summary),
        "target": target.description,
        "workload": {"name": stream.name, "notes": list(stream.notes), **settings.notes},
        "settings": {
            "warm_adapters": settings.is_warm,
            "seed": settings.replay.seed,
            "vocab_size": settings.replay.vocab_size,
            "prompts": settings.replay.kind,
            "goodput": None if settings.objective is None else dataclasses.asdict(settings.objective),
            **settings.engine,
        },
        "summary": found.summary,
        "engine": found.engine,
        "requests": as_rows(found.results),
    }


async def measure(
    target: Target,
    stream: Stream,
    settings: ReplaySettings,
    is_warm: bool = False,
    extra_adapters: Sequence[str] = (),
    *,
    objective: Objective | None = None,
    client_processes: int | None = None,
    halt: Halt | None = None,
) -> MeasuredReplay:
    """Check, warm up, replay. ``extra_adapters`` are warmed as well. Raises ConfigError.

    ``client_processes``: that send requests to a server; 0: this one. None: as many as the stream needs.
    """
    check_fit(target, stream, settings)
    if is_warm:
        named = {request.adapter for request in stream.requests}
        names = {settings.name_of(adapter) for adapter in named if adapter is not None}
        await warm_adapters(target, sorted(names.union(extra_adapters)), settings)
    before = await target.counters()
    if isinstance(target, HttpTarget) and client_processes != 0:
        count = client_processes or processes_for(stream)
        done = await replay_apart(target.access, stream, settings, count, halt)
    else:
        done = await replay(target, stream, settings, halt)
    after = await target.counters() if done.error is None else {}
    grown = difference(before, after)
    summary = {**summarize(stream, done.results, objective), "merging": merging(grown)}
    return MeasuredReplay(summary, grown, done.results, done.error)


def fitting(stream: Stream, most_tokens: int | None) -> Stream:
    """The stream without turns of more tokens, reply included, and what follows them; raises ConfigError."""
    if most_tokens is None:
        return stream
    ended: set[int] = set()
    kept = []
    for length, request in zip(prompt_tokens(stream.requests), stream.requests):
        if length + request.output_tokens > most_tokens:
            ended.add(request.conversation)
        if request.conversation not in ended:
            kept.append(request)
    skipped = len(stream.requests) - len(kept)
    if not kept:
        raise ConfigError(f"no request of {stream.name} has at most {most_tokens} tokens")
    if not skipped:
        return stream
    note = f"{skipped} of {len(stream.requests)} requests left out: over {most_tokens} tokens, or after such"
    return dataclasses.replace(stream, requests=tuple(kept), notes=(*stream.notes, note))


@contextlib.contextmanager
def _interrupting(halt: Halt) -> Iterator[None]:
    """The first Ctrl-C halts the replay, what it has is kept; a second one ends the program."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        halt.call(INTERRUPTED)

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (NotImplementedError, RuntimeError, ValueError):  # not on Windows, and not on another thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
