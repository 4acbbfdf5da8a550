"""What the record of ``make test-long`` says of tests that ran and of those that did not."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

from tools.long_tests import counts_of, not_run

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_one" name="x"/><testcase classname="tests.a.test_one" name="y"/>
<testcase classname="tests.a.test_one" name="z"><skipped/></testcase>
<testcase classname="tests.test_two" name="x"/>
</testsuite></testsuites>"""
LISTED = "tests/a/test_one.py: 3\ntests/test_two.py: 1\ntests/test_three.py: 12\n\nwarning: 1 in all\n"


def test_files_are_counted_and_what_no_run_has_is_named() -> None:
    passed, skipped = counts_of(ElementTree.parse(io.StringIO(REPORT)))
    assert passed == {"tests/a/test_one": 2, "tests/test_two": 1}
    assert skipped == {"tests/a/test_one": 1}
    runs = [{"files": dict(passed)}, {"files": {"tests/test_three": 12}}]
    assert not_run(LISTED, runs) == {"tests/a/test_one": 1}
    assert not_run(LISTED, runs[:1]) == {"tests/a/test_one": 1, "tests/test_three": 12}
