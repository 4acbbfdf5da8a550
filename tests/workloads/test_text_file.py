"""Files read by line: positions, gzip, what is refused in every format alike."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.workloads.text_file import TextFile, decimal, string, whole

from manylora.config.declaring import ConfigError


def number(row: Mapping[str, Any]) -> int:
    return whole(row, "n", 1)


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_lines_are_numbered_as_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"n": 1}\r\n\n  \n{"n": 2}\n\n{"n": "x"}\n{"n": 4}')
    with pytest.raises(
        ConfigError, match=r"file, line 6: expected n, a whole number from 1 to 1000000000, found 'x'$"
    ):
        list(TextFile(path).records(number))
    file = TextFile(path, skip_bad_lines=True)
    assert list(file.records(number)) == [1, 2, 4]
    assert file.skipped == 1
    assert file.notes == ("file: 1 malformed lines left out",)


def test_an_array_over_many_lines(tmp_path: Path) -> None:
    path = written(tmp_path, '\n[\n {"n": 1},\n {"n":\n 0},\n 7,\n {"n": 3}\n]\n')
    with pytest.raises(
        ConfigError, match="line 4: expected n, a whole number from 1 to 1000000000, found '0'"
    ):
        list(TextFile(path).records(number))
    file = TextFile(path, skip_bad_lines=True)
    assert list(file.records(number)) == [1, 3]
    assert file.skipped == 2


@pytest.mark.parametrize(
    ("content", "line", "expected", "left"),
    [
        ('[{"n": 1},\n{"n": 2}, {"n": ', 2, "a whole JSON object in the array", [1, 2]),
        ('[{"n": 1}\n{"n": 2}]', 2, "a comma or the array's end", [1]),
        ('[{"n": 1},\n{"n": 2}', 2, "a comma or the array's end, found ''", [1, 2]),
        ('[{"n": 1},\n{n: 2}]', 2, "a whole JSON object in the array, found '{n: 2}]'", [1]),
        ('[{"n": 1}]\n\n[{"n": 2}]', 3, "nothing after the array, found '[{\"n\": 2}]'", [1]),
    ],
)
def test_a_broken_array(tmp_path: Path, content: str, line: int, expected: str, left: list[int]) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        list(TextFile(path).records(number))
    assert f"line {line}: expected {expected}" in str(caught.value)
    file = TextFile(path, skip_bad_lines=True)
    assert list(file.records(number)) == left
    assert file.skipped == 1


def test_gzip_and_gzip_cut_short(tmp_path: Path) -> None:
    content = "".join(json.dumps({"n": n}) + "\n" for n in range(1, 5001))
    packed = gzip.compress(content.encode())
    assert list(TextFile(written(tmp_path, packed)).records(number)) == list(range(1, 5001))
    path = written(tmp_path, packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="expected gzip data to the end of the file"):
        list(TextFile(path).records(number))
    file = TextFile(path, skip_bad_lines=True)
    left = list(file.records(number))
    assert left == list(range(1, len(left) + 1))
    assert file.skipped >= 1


def test_tables(tmp_path: Path) -> None:
    path = written(tmp_path, 'n,"who, whom"\n1,"a, b"\n2\n3,"c\n4,d\n')
    with pytest.raises(ConfigError, match=r"line 3: expected 2 columns, found '1: 2'"):
        list(TextFile(path).rows(("n",), number))
    file = TextFile(path, skip_bad_lines=True)
    rows = file.rows(("n", "who, whom"), lambda row: (number(row), string(row, "who, whom")))
    assert list(rows) == [(1, "a, b"), (4, "d")]
    assert file.skipped == 2
    for skip in (False, True):  # without its header a table says nothing
        with pytest.raises(
            ConfigError, match=r'file, line 1: expected a header with m, found .n,"who, whom".'
        ):
            list(TextFile(path, skip).rows(("m",), number))
    for content in ('n,"who\n1,2\n', "n\r,m\n1,2\n"):
        with pytest.raises(ConfigError, match="line 1: expected a header with n, m"):
            list(TextFile(written(tmp_path, content)).rows(("n", "m"), number))
    with pytest.raises(ConfigError, match="line 2: expected cells, each quoted wholly or not at all"):
        list(TextFile(written(tmp_path, 'n,m\n1,"2\n')).rows(("n", "m"), number))
    with pytest.raises(ConfigError, match="expected a header with n, found an empty file"):
        list(TextFile(written(tmp_path, "")).rows(("n",), number))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: expected UTF-8 text"):
        list(TextFile(path).records(number))
    assert list(TextFile(path, skip_bad_lines=True).records(number)) == [1]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: No such file"):
        list(TextFile(tmp_path / "absent").records(number))
    with pytest.raises(ConfigError, match="Is a directory"):
        list(TextFile(tmp_path, skip_bad_lines=True).records(number))


@pytest.mark.parametrize(
    "found", ["1_0", "1.0", "", "0x1", True, 1.0, None, "９", [1], "0", "-3", 0, "9" * 5000]
)
def test_what_is_no_whole_number_from_one(found: object) -> None:
    with pytest.raises(ValueError, match="a whole number from 1"):
        whole({"n": found}, "n", 1)


@pytest.mark.parametrize(
    "found", ["1_0", "nan", "inf", "1e999", "1e300", "", "-1", True, None, float("nan"), "x"]
)
def test_what_is_no_number_from_zero(found: object) -> None:
    with pytest.raises(ValueError, match="a number from 0"):
        decimal({"n": found}, "n")


def test_numbers() -> None:
    assert whole({"n": " 12 "}, "n") == whole({"n": 12}, "n") == 12
    assert decimal({"n": "1e-3"}, "n") == 0.001
    with pytest.raises(ValueError, match="found nothing"):
        whole({}, "n")


def test_what_was_found_is_shown_short(tmp_path: Path) -> None:
    path = written(tmp_path, "{" + "x" * 5000 + "\n")
    with pytest.raises(ConfigError) as caught:
        list(TextFile(path).records(number))
    assert len(str(caught.value)) < len(str(path)) + 150


def test_members_of_one_object(tmp_path: Path) -> None:
    def member(name: str, value: Any) -> tuple[str, int]:
        return name, number({"n": value})

    path = written(tmp_path, '{\n "a": 1,\n "b": 0,\n "c": 3}\n')
    with pytest.raises(
        ConfigError, match="line 3: expected n, a whole number from 1 to 1000000000, found '0'"
    ):
        list(TextFile(path).members(member))
    assert list(TextFile(path, skip_bad_lines=True).members(member)) == [("a", 1), ("c", 3)]
    for content, line in (('{\n "a": 1,\n "b', 3), ("[1]", 1), ("{\n", 2)):
        path = written(tmp_path, content)
        with pytest.raises(ConfigError, match=f"line {line}: expected "):
            list(TextFile(path).members(member))
        file = TextFile(path, skip_bad_lines=True)
        assert list(file.members(member)) == []
        assert file.skipped == 1


def test_files_without_content_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file: expected JSON objects, found an empty file"):
        list(TextFile(written(tmp_path, "\n \n")).records(number))
    with pytest.raises(ConfigError, match="file: expected rows below the header, found none"):
        list(TextFile(written(tmp_path, "n\n")).rows(("n",), number))
