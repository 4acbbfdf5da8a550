"""Azure Functions traces: real rows of both years."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from manylora_lab.workloads import azure_functions
from manylora_lab.workloads.traces import ReadOptions

from manylora.config.declaring import ConfigError
from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

DAY = "azure_functions_2019.csv"
INVOCATIONS = "azure_functions_2021.csv"


def counts() -> dict[str, list[int]]:
    rows = list(csv.reader((SAMPLES / DAY).open()))[1:]
    return {row[0]: [int(cell) for cell in row[1:]] for row in rows}


def test_2019_keeps_the_count_of_every_minute() -> None:
    found = azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1))
    expected = counts()
    assert found.duration_s == 30 * 60
    assert set(found.arrivals_s) == {function for function, row in expected.items() if any(row)}
    for function, times in found.arrivals_s.items():
        assert list(times) == sorted(times)
        minutes = Counter(int(time // 60) for time in times)
        assert [minutes[minute] for minute in range(30)] == expected[function]
    # By hand: 42, 41, 30, 30 and 18 calls in the half hour; the two of 30 as they stand in the file.
    busiest = list(found.arrivals_s)[:5]
    assert busiest == ["074d7db5790c", "fc53564e7d03", "01f46a0e1600", "359b4c07c143", "083a6af60313"]


def test_2019_arrivals_lie_anywhere_in_their_minute() -> None:
    found = azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1))
    places = [time % 60 for times in found.arrivals_s.values() for time in times]
    assert len(set(places)) == len(places) > 180
    assert 27 < sum(places) / len(places) < 33


def test_2019_draws_by_seed_and_function() -> None:
    def load(seed: int, busiest: int | None = None) -> dict[str, tuple[float, ...]]:
        return dict(azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=seed), busiest).arrivals_s)

    assert load(1) == load(1) != load(2)
    assert load(1, busiest=3) == dict(list(load(1).items())[:3])


def test_2019_the_published_columns(tmp_path: Path) -> None:
    # Synthetic rows, real schema; a function that two triggers call has two rows.
    path = tmp_path / "invocations_per_function_md.anon.d01.csv"
    path.write_text(
        "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,1,0\no,a,g,timer,0,3\no,a,f,queue,2,2\n"
    )
    found = azure_functions.load_2019(path, ReadOptions(seed=0))
    assert {function: len(times) for function, times in found.arrivals_s.items()} == {"f": 5, "g": 3}


def test_merged_and_busiest() -> None:
    found = azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1))
    two = found.busiest(2)
    merged = two.merged()
    assert merged == sorted(merged)
    assert Counter(index for _, index in merged) == {0: 42, 1: 41}
    with pytest.raises(ConfigError, match="functions, 1000 are asked for"):
        found.busiest(1000)


@pytest.mark.parametrize(
    ("cells", "expected", "found"),
    [
        (["f", *["1"] * 29], "31 columns", "30: f"),
        (["f", *["1"] * 29, "1.5"], "a count of invocations in minute 30", "'1.5'"),
        (["f", "-1", *["1"] * 29], "a count of invocations in minute 1", "'-1'"),
        (["f", *["1"] * 29, "1000001"], "a count of invocations in minute 30, up to 1000000", "'1000001'"),
        (["", *["1"] * 30], "a function's id", "nothing"),
    ],
)
def test_2019_bad_lines(tmp_path: Path, cells: list[str], expected: str, found: str) -> None:
    path = with_line(tmp_path, DAY, 9, ",".join(cells))
    left = refuses(
        lambda skip: azure_functions.load_2019(path, ReadOptions(seed=1, skip_bad_lines=skip)),
        path,
        9,
        expected,
        found,
    )
    assert "074d7db5790c" not in left.arrivals_s  # whose line it was


def test_2019_minutes_with_a_gap(tmp_path: Path) -> None:
    path = with_line(
        tmp_path, DAY, 1, (SAMPLES / DAY).read_text().splitlines()[0].replace(",17,", ",seventeen,")
    )
    with pytest.raises(ConfigError, match="minutes 1, 2, 3"):
        azure_functions.load_2019(path, ReadOptions(seed=1))


def test_2021_arrival_is_end_minus_duration() -> None:
    found = azure_functions.load_2021(SAMPLES / INVOCATIONS)
    # By hand: the first began at 5160.142570018768 - 0.134, the third at 5241.567729949951 - 42.356.
    times = {function.split("/")[0][:6]: times for function, times in found.arrivals_s.items()}
    assert times["734272"] == (0.0,)
    assert times["7fa05b"][0] == pytest.approx(5199.211729949951 - 5160.008570018768)
    assert times["c8c43e"][0] == pytest.approx(51.502778923035)
    assert len(found.arrivals_s) == 6
    assert found.duration_s == pytest.approx(5220.1072909832 - 0.093 - 5160.008570018768)


def test_2021_functions_are_named_with_their_app(tmp_path: Path) -> None:
    # Synthetic rows, real schema: one func id in two apps.
    path = tmp_path / "trace.txt"
    path.write_text("app,func,end_timestamp,duration\na,f,3.0,1.0\nb,f,2.5,0.5\na,f,1.5,1.25\nb,g,9,0\n")
    found = azure_functions.load_2021(path)
    assert found.arrivals_s == {"a/f": (0.0, 1.75), "b/f": (1.75,), "b/g": (8.75,)}
    assert found.merged() == [(0.0, 0), (1.75, 0), (1.75, 1), (8.75, 2)]
    assert list(found.busiest(1).arrivals_s) == ["a/f"]


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("a,f,5", "4 columns", "3: a,f,5"),
        ("a,f,soon,1", "end_timestamp, a number from 0", "'soon'"),
        ("a,f,5,-1", "duration, a number from 0", "'-1'"),
    ],
)
def test_2021_bad_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, INVOCATIONS, 4, line)
    left = refuses(
        lambda skip: azure_functions.load_2021(path, ReadOptions(skip_bad_lines=skip)),
        path,
        4,
        expected,
        found,
    )
    assert len(left.arrivals_s) == 5


def test_gzip(tmp_path: Path) -> None:
    day = azure_functions.load_2019(zipped(tmp_path, DAY), ReadOptions(seed=1))
    assert day.arrivals_s == azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1)).arrivals_s
    invocations = azure_functions.load_2021(zipped(tmp_path, INVOCATIONS))
    assert invocations.arrivals_s == azure_functions.load_2021(SAMPLES / INVOCATIONS).arrivals_s


def test_nothing_called(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("function,1\nf,0\n")
    with pytest.raises(ConfigError, match="no invocation"):
        azure_functions.load_2019(path, ReadOptions(seed=0))
    path.write_text("app,func,end_timestamp,duration\n")
    with pytest.raises(ConfigError, match="expected rows below the header"):
        azure_functions.load_2021(path)


def test_only_arrivals_that_are_needed_are_made() -> None:
    whole = azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1), 5)
    for few in (
        azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1, limit=10), 5),
        azure_functions.load_2019(SAMPLES / DAY, ReadOptions(seed=1, duration_s=150.0), 5),
    ):
        assert list(few.arrivals_s) == list(whole.arrivals_s)  # the busiest of the whole day
        made = few.merged()
        assert 10 <= len(made) < len(whole.merged())
        assert made == whole.merged()[: len(made)]
    assert few.duration_s == 180
