"""ServeGen: rate, burstiness and lengths of each client of a production service, and requests drawn from them.

Real measurements in windows of 600 s (Xiang et al., NSDI 2026), no single requests. A client, a customer of the
service, stands for a tenant with an adapter. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.arrivals import check_load
from manylora_lab.workloads.assembly import Adapters, lone_request
from manylora_lab.workloads.stream import Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import (
    LARGEST_COUNT,
    BadLine,
    TextFile,
    an_object,
    array,
    decimal,
    string,
    whole,
)

WINDOW_S = 600.0
MOST_RPS = 10**5
_SPREADS = {"Gamma": ("cv", 1e-4, 1e4), "Weibull": ("p0", 0.01, 1e4)}
"""What shapes a pattern's gaps, and its bounds: beyond them drawing runs out of floating point."""
_RATES = ("t_s", "rate_rps", "cv", "pattern", "p0", "p1")


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """600 s of a client: its mean rate, and how the times between its requests are distributed."""

    start_s: float
    rate_rps: float
    pattern: str
    shape: float
    """The shape of the pattern; its scale follows from the rate."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, drawn from by its inverse.

    ``up_to``: the probability of each value and all before it. None: the values are quantiles at equal steps, and
    what lies between is interpolated.
    """

    values: tuple[float, ...]
    up_to: tuple[float, ...] | None = None

    def at(self, probability: float) -> int:
        """The count of at least 1 at a probability from 0 up to 1."""
        if self.up_to is not None:
            return max(1, round(self.values[bisect_left(self.up_to, probability * self.up_to[-1])]))
        place = probability * (len(self.values) - 1)
        below = min(int(place), len(self.values) - 2)
        low, high = self.values[below], self.values[below + 1]
        return max(1, round(low + (high - low) * (place - below)))


@dataclasses.dataclass(frozen=True)
class Client:
    """``lengths``: from a moment (seconds) on, of prompts and of replies, in order; empty where unknown."""

    name: str
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Lengths, Lengths], ...] = ()


@dataclasses.dataclass(frozen=True)
class Clients:
    """All clients of one model."""

    clients: tuple[Client, ...]
    notes: tuple[str, ...]


def read_folder(folder: Path | str, *, skip_bad_lines: bool = False) -> Clients:
    """A model's folder as published. N is the client's name; a client may lack lengths.

    ``chunk-N-trace.csv``: time, rate, cv, pattern and its two parameters, without a header;
    ``chunk-N-dataset.json``: by time, histograms as text. Raises ConfigError for a folder without traces and
    for a malformed line.
    """
    traces = sorted(Path(folder).glob("chunk-*-trace.csv*"), key=lambda path: _chunk(path))
    if not traces:
        raise ConfigError(f"{folder}: expected files chunk-N-trace.csv, found none")
    clients, notes = [], ["ServeGen clients, Apache-2.0: real rates, burstiness and lengths by client"]
    for path in traces:
        trace = TextFile(path, skip_bad_lines)
        windows = [w for w in trace.rows(_RATES, _window, header=False) if w is not None]
        notes += trace.notes
        lengths: list[tuple[float, Lengths, Lengths]] = []
        for sizes in sorted(Path(folder).glob(f"chunk-{_chunk(path)}-dataset.json*")):
            file = TextFile(sizes, skip_bad_lines)
            lengths += [found for found in file.members(_histograms) if found is not None]
            notes += file.notes
        lengths.sort(key=lambda found: found[0])
        clients.append(Client(str(_chunk(path)), tuple(windows), tuple(lengths)))
    return Clients(tuple(clients), tuple(notes))


def read_condensed(rates: Path | str, lengths: Path | str, *, skip_bad_lines: bool = False) -> Clients:
    """Two files for all clients of a model: ``client,t_s,rate_rps,cv,pattern,p0,p1`` and JSON lines of ``client``
    and, for ``input_tokens`` and ``output_tokens``, ``q``: quantiles at equal steps from 0 to 100 %.

    Raises ConfigError for a malformed line.
    """
    rate_file, length_file = TextFile(rates, skip_bad_lines), TextFile(lengths, skip_bad_lines)
    windows: dict[int, list[Window]] = {}
    for client, window in rate_file.rows(
        ("client", *_RATES), lambda row: (whole(row, "client"), _window(row))
    ):
        if window is not None:
            windows.setdefault(client, []).append(window)
    known = {client: found for client, found in length_file.records(_quantiles) if found}
    clients = [Client(str(c), tuple(windows[c]), known.get(c, ())) for c in sorted(windows)]
    note = "ServeGen clients (condensed: lengths averaged over time), Apache-2.0: real rates and lengths by client"
    return Clients(tuple(clients), (note, *rate_file.notes, *length_file.notes))


def mean_rate(clients: Clients, duration_s: float, start_s: float = 0.0) -> float:
    """Requests a second of all clients, in the mean of ``duration_s`` seconds from ``start_s``."""
    end_s = start_s + duration_s
    return (
        math.fsum(
            window.rate_rps * max(0.0, min(window.start_s + WINDOW_S, end_s) - max(window.start_s, start_s))
            for client in clients.clients
            for window in client.windows
        )
        / duration_s
    )


def generate(
    clients: Clients,
    *,
    seed: int,
    duration_s: float,
    start_s: float = 0.0,
    rate_scale: float = 1.0,
    adapters: Adapters | None = None,
) -> Stream:
    """Requests of ``duration_s`` seconds from ``start_s`` of the measurements, at ``rate_scale`` x their rates.

    In each window a client sends as many requests as its rate says (a fraction of one by chance); the times
    between them have the window's distribution, stretched to fill it, which keeps both rate and burstiness.
    Lengths are drawn from those of the client at that time, prompt and reply independently (the source has no
    joint ones); a client without lengths takes those of the next that has some, which the notes count. What
    is drawn depends on ``seed``, client and window, not on what else is asked for. Key of a request: the client's
    name. Raises ConfigError if no client has lengths or sends anything, or they send more than can be held.
    """
    adapters = adapters or Adapters()
    if not 0 < rate_scale < math.inf:
        raise ConfigError(f"rates can be scaled by numbers above 0, not by {rate_scale}")
    if rate := mean_rate(clients, duration_s, start_s) * rate_scale:
        check_load(rate, duration_s)
    found: list[tuple[float, Client, int, int]] = []
    borrowed = 0
    for index, client in enumerate(clients.clients):
        lengths = _lengths_of(clients.clients, index)
        before = len(found)
        for window in client.windows:
            if start_s - WINDOW_S < window.start_s < start_s + duration_s:
                draws = random.Random(f"{seed}/{client.name}/{window.start_s:g}")
                prompts, replies = _current(lengths, window.start_s)
                for arrival_s in _arrivals(window, rate_scale, draws):
                    sizes = prompts.at(draws.random()), replies.at(draws.random())
                    if start_s <= arrival_s < start_s + duration_s:
                        found.append((arrival_s - start_s, client, *sizes))
        borrowed += len(found) - before if not client.lengths else 0
    found.sort(key=lambda one: one[0])
    requests: list[StreamRequest] = [
        lone_request(arrival_s, number, prompt, reply, adapters.choose(client.name), "servegen")
        for number, (arrival_s, client, prompt, reply) in enumerate(found)
    ]
    notes = [
        *clients.notes,
        f"requests drawn from the clients' distributions, seed {seed}, rates x {rate_scale:g}",
    ]
    if borrowed:
        notes.append(
            f"{borrowed} of {len(found)} requests are of clients without lengths: another client's taken"
        )
    return in_order("servegen", requests, adapters.ranks, notes)


def _arrivals(window: Window, rate_scale: float, draws: random.Random) -> list[float]:
    """Gaps laid round a circle of 600 s, so that windows neither begin nor end with a burst of all clients."""
    count = math.floor(window.rate_rps * rate_scale * WINDOW_S + draws.random())
    if window.pattern == "Gamma":
        gaps = [draws.gammavariate(window.shape, 1.0) for _ in range(count)]
    else:
        gaps = [draws.weibullvariate(1.0, window.shape) for _ in range(count)]
    turn, stretch = draws.random() * WINDOW_S, WINDOW_S / (sum(gaps) or 1.0)
    # To the microsecond, so that machines whose logarithms differ in the last bit agree.
    places = (
        math.floor((turn + stretch * after) % WINDOW_S * 1e6) / 1e6 for after in itertools.accumulate(gaps)
    )
    return sorted(window.start_s + place for place in places)


def _lengths_of(clients: Sequence[Client], index: int) -> tuple[tuple[float, Lengths, Lengths], ...]:
    for client in (*clients[index:], *clients[:index]):
        if client.lengths:
            return client.lengths
    raise ConfigError("no client has lengths of input_tokens and output_tokens")


def _current(lengths: Sequence[tuple[float, Lengths, Lengths]], moment_s: float) -> tuple[Lengths, Lengths]:
    """The lengths that began last; before the first, the first."""
    begun = [found for found in lengths if found[0] <= moment_s]
    _, prompts, replies = begun[-1] if begun else lengths[0]
    return prompts, replies


def _window(row: Mapping[str, str]) -> Window | None:
    """None for a window without requests."""
    start_s, rate_rps, cv = decimal(row, "t_s"), decimal(row, "rate_rps"), decimal(row, "cv")
    pattern, first = string(row, "pattern"), decimal(row, "p0")
    decimal(row, "p1")
    if not rate_rps:
        return None
    if rate_rps > MOST_RPS:
        raise BadLine(f"rate_rps, requests a second up to {MOST_RPS}", row["rate_rps"])
    if pattern not in _SPREADS:
        raise BadLine(f"pattern, {' or '.join(_SPREADS)}", pattern)
    # A Gamma distribution's shape is 1/cv^2; the published one is that, a Weibull's follows from no formula.
    name, least, most = _SPREADS[pattern]
    if not least <= decimal(row, name) <= most:
        raise BadLine(f"{name} from {least:g} to {most:g}, being {pattern}", row[name])
    return Window(start_s, rate_rps, pattern, 1 / cv**2 if pattern == "Gamma" else first)


def _histograms(name: str, found: Any) -> tuple[float, Lengths, Lengths] | None:
    """None where the client said nothing."""
    start_s = decimal({"time": name}, "time")
    fields = an_object(found)
    sizes = [_histogram(fields, field) for field in ("input_tokens", "output_tokens")]
    if sizes[0] is None or sizes[1] is None:
        return None
    return start_s, sizes[0], sizes[1]


def _histogram(fields: Mapping[str, Any], field: str) -> Lengths | None:
    written = string(fields, field)
    expected = f"{field}, a text of {{tokens: probability, ...}}"
    try:
        shares = ast.literal_eval(written)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise BadLine(expected, written) from None
    if not isinstance(shares, dict):
        raise BadLine(expected, written)
    for tokens, share in shares.items():
        if not (_is_count(tokens) and type(tokens) is int and _is_count(share)):
            raise BadLine(expected, f"{tokens}: {share}")
    ordered = sorted(shares.items())
    up_to = tuple(itertools.accumulate(float(share) for _, share in ordered))
    return Lengths(tuple(float(tokens) for tokens, _ in ordered), up_to) if up_to and up_to[-1] > 0 else None


def _quantiles(record: Mapping[str, Any]) -> tuple[int, tuple[tuple[float, Lengths, Lengths], ...]]:
    client = whole(record, "client")
    if "input_tokens" not in record or "output_tokens" not in record:
        return client, ()
    sizes = []
    for field in ("input_tokens", "output_tokens"):
        values = array(an_object(record[field]), "q")
        if len(values) < 2 or not all(map(_is_count, values)) or values != sorted(values):
            raise BadLine(f"q of {field}, two or more numbers of tokens that never fall", values)
        sizes.append(Lengths(tuple(float(value) for value in values)))
    return client, ((0.0, sizes[0], sizes[1]),)


def _is_count(found: object) -> bool:
    """A number of tokens, or a weight."""
    return type(found) in (int, float) and 0 <= found <= LARGEST_COUNT  # type: ignore[operator]


def _chunk(path: Path) -> int:
    number = path.name.split("-")[1]
    if not number.isdecimal():
        raise ConfigError(f"{path}: expected a name such as chunk-7-trace.csv")
    return int(number)
