"""The catalogue of workloads by name: FastLibra's scenarios, S-LoRA's settings, made-up ones, and files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.chat import TRACES
from manylora_lab.workloads.formats import FORMATS, WorkloadOptions, read_file
from manylora_lab.workloads.scenarios import RANKS, SCENARIOS, scenario
from manylora_lab.workloads.stream import Stream
from manylora_lab.workloads.synthetic import Synthetic, synthetic
from manylora_lab.workloads.terms import split_terms, suggestion


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    rate: float
    num_adapters: int
    duration_s: float


_SCENARIO_LOAD = _Load(1.6, 100, 1800.0)
"""The one setting that FastLibra §6.5 states."""
_SYNTHETIC_LOAD = _Load(2.0, 200, 300.0)

_S_LORA = {
    "s-lora-s1": (Synthetic(ranks="8"), _SYNTHETIC_LOAD),
    "s-lora-s2": (Synthetic(ranks="cycle(64,32,16,8)"), _Load(10.0, 200, 300.0)),
    "s-lora-s4": (Synthetic(ranks="cycle(64,32,16)"), _Load(6.0, 400, 300.0)),
}
"""Ranks and loads from the published benchmarks/exp_suite.py (suites a10g, a100-80-S2, a100-80-S4)."""

_CHATS = {f"chat-{rate}": TRACES / f"chat_{rate}rps.jsonl.gz" for rate in (5, 10, 20)}

_ABOUT = {
    "chatbot": "FastLibra's chatbot: ShareGPT conversations, arrivals of Azure's chat service",
    "translation": "FastLibra's translation: NTREX sentences, an adapter a language pair, Azure Functions calls",
    "agent": "FastLibra's personal agent: Taskmaster dialogs with tools, Azure Functions calls",
    "s-lora-s1": "S-LoRA's synthetic workload, setting S1: rank 8",
    "s-lora-s2": "S-LoRA's setting S2: ranks 64, 32, 16, 8",
    "s-lora-s4": "S-LoRA's setting S4: ranks 64, 32, 16",
    "chat-5": "multi-turn chat at 5 requests a second",
    "chat-10": "the same at 10",
    "chat-20": "the same at 20",
    "synthetic": "made up: synthetic:arrivals=gamma(2),popularity=zipf(1),prompt=uniform(8,512),output=128",
}


def catalogue() -> dict[str, str]:
    """Each name, and what it is in a line."""
    return dict(_ABOUT)


def named(
    text: str,
    *,
    rate: float | None = None,
    num_adapters: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    popularity: str | None = None,
    ranks: str | None = None,
    file_format: str | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The workload ``text``: a name of the catalogue, ``synthetic:...`` or the path of a file of ``file_format``.

    ``rate``: requests a second; ``duration_s``: seconds. What is None is the name's own. ``skip_bad_lines``: leave
    out what is malformed in a file. Raises ConfigError.
    """
    options = WorkloadOptions(rate, num_adapters, duration_s, seed, popularity, ranks, skip_bad_lines)
    if file_format is not None:
        return read_file(Path(text), file_format, options)
    head, _, rest = text.partition(":")
    if head == "synthetic":
        return _synthetic(_parts(rest), _SYNTHETIC_LOAD, options, text)
    if text in SCENARIOS:
        return _scenario(text, options)
    if text in _S_LORA:
        return _synthetic(*_S_LORA[text], options, text)
    if text in _CHATS:
        return read_file(_CHATS[text], "chat", options)
    if text and os.path.exists(text):  # Path's raises for names that are too long
        raise ConfigError(f"{text} is a file: name its format, one of {', '.join(FORMATS)}")
    raise ConfigError(
        f"there is no workload and no file {text!r}; names are {', '.join(_ABOUT)}{suggestion(text, _ABOUT)}"
    )


def _load(load: _Load, options: WorkloadOptions) -> _Load:
    return _Load(
        load.rate if options.rate is None else options.rate,
        load.num_adapters if options.num_adapters is None else options.num_adapters,
        load.duration_s if options.duration_s is None else options.duration_s,
    )


def _scenario(name: str, options: WorkloadOptions) -> Stream:
    load = _load(_SCENARIO_LOAD, options)
    return scenario(
        name,
        load.rate,
        load.num_adapters,
        load.duration_s,
        options.seed,
        popularity=options.popularity,
        ranks=options.ranks or RANKS,
    )


def _synthetic(parts: Synthetic, load: _Load, options: WorkloadOptions, name: str) -> Stream:
    parts = dataclasses.replace(
        parts, popularity=options.popularity or parts.popularity, ranks=options.ranks or parts.ranks
    )
    load = _load(load, options)
    return synthetic(
        parts,
        rate=load.rate,
        num_adapters=load.num_adapters,
        duration_s=load.duration_s,
        seed=options.seed,
        name=name.partition(":")[0],
    )


def _parts(text: str) -> Synthetic:
    """Parses 'arrivals=gamma(2),prompt=uniform(8,512)'."""
    known = [field.name for field in dataclasses.fields(Synthetic)]
    found: dict[str, str] = {}
    for term in split_terms(text) if text else []:
        key, equals, value = (part.strip() for part in term.partition("="))
        if key not in known or not equals or not value:
            raise ConfigError(
                f"{term!r} is no part of a synthetic workload; write {'=, '.join(known)}={suggestion(key, known)}"
            )
        if key in found:
            raise ConfigError(f"a synthetic workload has one {key}, not two")
        found[key] = value
    return Synthetic(**found)
