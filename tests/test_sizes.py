"""How much code each room has: a mirror, not a gate. ``pytest -s tests/test_sizes.py`` shows it."""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"manylora": ROOT / "src" / "manylora", "manylora-lab": ROOT / "lab" / "src" / "manylora_lab"}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that hold more than comments and strings that stand alone, such as docstrings."""
    strings = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - strings)


def rooms(package: Path) -> collections.Counter[str]:
    """Code lines by room; a module at the top is a room of its own."""
    counts: collections.Counter[str] = collections.Counter()
    for path in package.rglob("*.py"):
        counts[path.relative_to(package).parts[0].removesuffix(".py")] += code_lines(path.read_text())
    return counts


def test_what_counts_as_code() -> None:
    source = (
        '"""A module.\n\nOf two lines."""\n\n# a comment\nx = (\n    1,  # one\n\n    "two",\n)\n"""Of x"""\n'
    )
    assert code_lines(source) == 4


def test_the_mirror() -> None:
    for name, package in PACKAGES.items():
        counts = rooms(package)
        assert counts.total() > 0
        print(f"\n{name}: {counts.total():,} lines of code")
        for room, count in counts.most_common():
            print(f"  {count:6,}  {room}")
