"""ServeGen's clients: real rates and condensed lengths; published histograms as synthetic rows, real schema."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from manylora_lab.workloads import servegen
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.servegen import Clients, Lengths

from manylora.config.declaring import ConfigError
from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

RATES, SIZES = "servegen_m-large_client_rates.csv", "servegen_m-large_client_lengths.jsonl"
TRACE = "servegen_deepseek-r1/chunk-0-trace.csv"


def condensed() -> Clients:
    return servegen.read_condensed(SAMPLES / RATES, SAMPLES / SIZES)


def histograms(**by_time: tuple[str, str]) -> str:
    times = {name.removeprefix("at_"): found for name, found in by_time.items()}
    return json.dumps({t: {"input_tokens": i, "output_tokens": o} for t, (i, o) in times.items()}, indent=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder: two clients, of which one has lengths."""
    shutil.copy(SAMPLES / TRACE, tmp_path)
    shutil.copy(SAMPLES / TRACE, tmp_path / "chunk-11-trace.csv")
    (tmp_path / "chunk-11-dataset.json").write_text(
        histograms(
            at_0=("{10: 0.25, 30: 0.75}", "{5: 1.0}"), at_3000=("{7: 1}", "{8: 1}"), at_3600=("{}", "{}")
        )
    )
    return tmp_path


def test_the_published_folder(folder: Path) -> None:
    found = servegen.read_folder(folder)
    assert [client.name for client in found.clients] == ["0", "11"]
    client = found.clients[1]
    assert [window.start_s for window in client.windows[:3]] == [2400, 3000, 3600]
    assert client.windows[0].rate_rps == 0.085
    # A Gamma distribution's published shape is 1/cv^2.
    assert client.windows[0].shape == pytest.approx(0.02232167101916883)
    assert [(w.pattern, w.shape) for w in client.windows if w.pattern == "Weibull"] == [
        ("Weibull", 1.1167491378227001)
    ]
    assert [begins for begins, _, _ in client.lengths] == [0, 3000]
    assert found.clients[0].lengths == ()


def test_requests_are_as_many_as_the_rates_say(folder: Path) -> None:
    stream = servegen.generate(servegen.read_folder(folder), seed=1, start_s=2400, duration_s=1200)
    # By hand: 0.085 and 0.39 a second over 600 s are 51 and 234, from each of two clients.
    assert Counter(int(request.arrival_s // 600) for request in stream.requests) == {0: 102, 1: 468}
    assert all(0 <= request.arrival_s < 1200 for request in stream.requests)
    assert any("285 of 570 requests are of clients without lengths" in note for note in stream.notes)


def test_lengths_are_those_of_the_time(folder: Path) -> None:
    stream = servegen.generate(servegen.read_folder(folder), seed=1, start_s=2400, duration_s=1200)
    early = Counter((r.new_tokens, r.output_tokens) for r in stream.requests if r.arrival_s < 600)
    late = Counter((r.new_tokens, r.output_tokens) for r in stream.requests if r.arrival_s >= 600)
    assert set(early) == {(10, 5), (30, 5)}
    assert 60 < early[30, 5] < 92  # 76.5 of 102 expected
    assert set(late) == {(7, 8)}


def test_burstiness_is_the_windows() -> None:
    window = servegen.Window(0.0, 5.0, "Gamma", 1 / 3.0**2)
    client = servegen.Client("bursty", (window,), ((0.0, Lengths((9.0, 9.0)), Lengths((9.0, 9.0))),))
    smooth = servegen.Client("smooth", (servegen.Window(0.0, 5.0, "Weibull", 4.0),), client.lengths)
    found = []
    for one in (client, smooth):
        stream = servegen.generate(Clients((one,), ()), seed=3, duration_s=600)
        times = [request.arrival_s for request in stream.requests]
        assert len(times) == 3000
        gaps = [after - before for before, after in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        found.append(math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean)
    # The cv of a Weibull distribution of shape 4: sqrt(G(1.5) / G(1.25)^2 - 1), 0.2805.
    assert found == [pytest.approx(3.0, rel=0.15), pytest.approx(0.2805, rel=0.05)]


def test_condensed_clients() -> None:
    found = condensed()
    assert [client.name for client in found.clients] == ["0", "2", "15"]
    assert [bool(client.lengths) for client in found.clients] == [True, True, False]
    stream = servegen.generate(
        found, seed=1, start_s=0, duration_s=600, adapters=Adapters.named(("0", "15"), (8, 16))
    )
    # By hand: 0.37 a second are 222; 1.3317, rounded from 799 in 600 s, is 799 or 800.
    by_adapter = Counter(request.adapter for request in stream.requests)
    assert by_adapter[1] == 222
    assert by_adapter[0] in (799, 800)
    quantiles = json.loads((SAMPLES / SIZES).read_text().splitlines()[0])["input_tokens"]["q"]
    lengths = sorted(request.new_tokens for request in stream.requests if request.adapter == 0)
    assert quantiles[0] <= lengths[0]
    assert lengths[-1] <= quantiles[-1]
    assert lengths[len(lengths) // 2] == pytest.approx(quantiles[50], rel=0.02)


def test_what_is_drawn_depends_on_seed_client_and_window() -> None:
    def drawn(seed: int = 1, **cut: float) -> list[tuple[float, int, int]]:
        stream = servegen.generate(
            condensed(), seed=seed, adapters=Adapters.named(("15",), (8,)), **{"duration_s": 3000.0, **cut}
        )
        return [
            (round(r.arrival_s + cut.get("start_s", 0), 6), r.new_tokens, r.output_tokens)
            for r in stream.requests
            if r.adapter == 0
        ]

    assert drawn() == drawn() != drawn(seed=2)
    assert drawn(start_s=900.0, duration_s=600.0) == [one for one in drawn() if 900 <= one[0] < 1500]


def test_scaled_rates() -> None:
    half = servegen.generate(condensed(), seed=1, duration_s=12000, rate_scale=0.5)
    whole = servegen.generate(condensed(), seed=1, duration_s=12000)
    assert len(half.requests) == pytest.approx(len(whole.requests) / 2, abs=15)
    for scale in (0.0, math.inf, math.nan, -1.0):
        with pytest.raises(ConfigError, match="above 0"):
            servegen.generate(condensed(), seed=1, duration_s=600, rate_scale=scale)


def test_inverse_distributions() -> None:
    quantiles = Lengths((10.0, 20.0, 40.0))
    assert [quantiles.at(p) for p in (0, 0.25, 0.5, 0.75, 0.999999)] == [10, 15, 20, 30, 40]
    steps = Lengths((0.0, 10.0, 30.0), (0.25, 0.5, 1.0))
    assert [steps.at(p) for p in (0, 0.2, 0.3, 0.5, 0.51, 0.999999)] == [1, 1, 10, 10, 30, 30]


def test_nobody_to_draw_from(folder: Path) -> None:
    (folder / "chunk-11-dataset.json").unlink()
    with pytest.raises(ConfigError, match="no client has lengths"):
        servegen.generate(servegen.read_folder(folder), seed=1, duration_s=6000)
    with pytest.raises(ConfigError, match="servegen has no requests"):
        servegen.generate(condensed(), seed=1, start_s=1e7, duration_s=600)
    with pytest.raises(ConfigError, match="expected files chunk-N-trace"):
        servegen.read_folder(folder / "chunk-0-trace.csv")


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("2400,0.085,6.69,Gamma,0.02", "6 columns", "5: 2400"),
        ("2400,-1,6.69,Gamma,0.02,73", "rate_rps, a number from 0", "'-1'"),
        ("2400,1e9,6.69,Gamma,0.02,73", "rate_rps, requests a second up to 100000", "'1e9'"),
        ("2400,0.085,6.69,Pareto,0.02,73", "pattern, Gamma or Weibull", "'Pareto'"),
        ("2400,0.085,0,Gamma,0.02,73", "cv from 0.0001 to 10000, being Gamma", "'0'"),
        ("2400,0.085,1e-200,Gamma,0.02,73", "cv from 0.0001", "'1e-200'"),
        ("2400,0.085,1e12,Gamma,0.02,73", "cv from 0.0001", "'1e12'"),
        ("2400,0.085,1,Weibull,1e-300,73", "p0 from 0.01 to 10000, being Weibull", "'1e-300'"),
        ("1e308,0.085,1,Gamma,0.02,73", "t_s, a number from 0 to 1e+15", "'1e308'"),
    ],
)
def test_bad_trace_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, TRACE, 5, line)
    left = refuses(lambda skip: servegen.read_folder(tmp_path, skip_bad_lines=skip), path, 5, expected, found)
    assert left.clients[0].windows[0].start_s == 3000


@pytest.mark.parametrize("text", ['{"0": ' + "9" * 5000 + "}", "[1]", '{"\u00e9": {}}', '{"\\u0061": {}}'])
def test_files_that_hold_no_histograms(folder: Path, text: str) -> None:
    path = folder / "chunk-11-dataset.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1: expected") as caught:
        servegen.read_folder(folder)
    assert "\n" not in str(caught.value)
    assert (
        f"{path.name}: 1 malformed lines left out" in servegen.read_folder(folder, skip_bad_lines=True).notes
    )


@pytest.mark.parametrize(
    ("inputs", "expected", "found"),
    [
        ("{10: 0.5, ", "input_tokens, a text of {tokens: probability, ...}", "{10: 0.5,"),
        ("{10: -1}", "input_tokens, a text of", "-1"),
        ("{[]: 1}", "input_tokens, a text of", "{[]: 1}"),
        ("{10: 1e999}", "input_tokens, a text of", "10: inf"),
        (f"{{{10**400}: 1}}", "input_tokens, a text of", "1000000"),
        ("__import__('os')", "input_tokens, a text of", "__import__"),
    ],
)
def test_bad_histograms(folder: Path, inputs: str, expected: str, found: str) -> None:
    path = folder / "chunk-11-dataset.json"
    path.write_text(histograms(at_0=("{1: 1}", "{1: 1}"), at_3000=(inputs, "{1: 1}")))
    left = refuses(lambda skip: servegen.read_folder(folder, skip_bad_lines=skip), path, 6, expected, found)
    assert [begins for begins, _, _ in left.clients[1].lengths] == [0]


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        (
            '{"client": 2, "input_tokens": {"q": [5, 4]}, "output_tokens": {"q": [1, 2]}}',
            "never fall",
            "[5, 4]",
        ),
        ('{"client": 2, "input_tokens": {"q": [5]}, "output_tokens": {"q": [1, 2]}}', "two or more", "[5]"),
        (
            '{"client": 2, "input_tokens": {"q": [5, NaN]}, "output_tokens": {"q": [1, 2]}}',
            "q of input_tokens",
            "[5, nan]",
        ),
        (
            '{"client": 2, "input_tokens": {"q": [5, 1e300]}, "output_tokens": {"q": [1, 2]}}',
            "q of input_tokens",
            "[5, 1e+300]",
        ),
        ('{"client": 2, "input_tokens": [5, 6], "output_tokens": {"q": [1, 2]}}', "a JSON object", "[5, 6]"),
        ('{"input_tokens": {}}', "client, a whole number", "nothing"),
    ],
)
def test_bad_quantiles(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, SIZES, 2, line)
    left = refuses(
        lambda skip: servegen.read_condensed(SAMPLES / RATES, path, skip_bad_lines=skip),
        path,
        2,
        expected,
        found,
    )
    assert [bool(client.lengths) for client in left.clients] == [True, False, False]


def test_gzip(tmp_path: Path) -> None:
    found = servegen.read_condensed(zipped(tmp_path, RATES), zipped(tmp_path, SIZES))
    assert found == condensed()
    (tmp_path / "folder").mkdir()
    zipped(tmp_path / "folder", TRACE)
    assert servegen.read_folder(tmp_path / "folder").clients[0].windows[0].rate_rps == 0.085
