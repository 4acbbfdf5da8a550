"""A copy of the package, its policy and simulator compiled by mypyc: the same decisions in half the time or less.

    python -m manylora_lab.benchmarks.compiled_simulator DIR
    PYTHONPATH=DIR manylora reproduce fastlibra-table --store DIR/cells.jsonl --out DIR

For runs of hours. Needs the test extra and a C compiler, and takes a few minutes. The sources stay as they are; in
the copy, events and commands are made without the interpreter (``_plain_records``). A store of cells notices if
the copy decides otherwise (``code_of`` in ``manylora_lab.reproduce.fastlibra_table_store``).
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from manylora_lab.bench.provenance import ROOT

PACKAGES = (ROOT / "src" / "manylora", ROOT / "lab" / "src" / "manylora_lab")
RECORDS = ("events", "commands")
"""Of the protocol: what is made anew at every step."""
PRICING = ("costs", "fit")
SIMULATOR = ("analytical", "device", "limits", "loop", "replay")
SETUP = """
from mypyc.build import mypycify
from setuptools import setup

OPTIONS = ["--follow-imports=silent", "--ignore-missing-imports", "--python-version={version}"]
setup(
    name="compiled", packages=[], package_dir={{"": {root!r}}},
    ext_modules=mypycify([*OPTIONS, *{modules!r}], group_name="manylora_simulator"),
)
"""


def compile_into(folder: Path) -> None:
    """Raises CalledProcessError where a module does not compile."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(package, folder / package.name, ignore=ignored, dirs_exist_ok=True)
    core, lab = (folder / package.name for package in PACKAGES)
    protocol = [core / "protocol" / f"{name}.py" for name in RECORDS]
    for path in protocol:
        path.write_text(_plain_records(path.read_text()))
    policy = sorted(path for path in (core / "policy").rglob("*.py") if path.stem != "__init__")
    modules = [*protocol, core / "reports.py", *policy]
    modules += [core / "pricing" / f"{name}.py" for name in PRICING]
    modules += [lab / "sim" / f"{name}.py" for name in SIMULATOR]
    with tempfile.TemporaryDirectory() as build:
        script = Path(build) / "setup.py"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        script.write_text(
            SETUP.format(version=version, root=str(folder), modules=[str(path) for path in modules])
        )
        subprocess.run(
            [sys.executable, str(script), "build_ext", "--inplace"],
            cwd=build, env={**os.environ, "MYPYPATH": str(folder)}, check=True,
        )  # fmt: skip


def _plain_records(source: str) -> str:
    """The protocol with plain classes for its dataclasses and for Emit, and a plain tuple for a row of a step.

    A step makes dozens of them, and what ``dataclasses`` and ``NamedTuple`` generate stays interpreted. What is
    lost, equality and a text, only readers of journals ask for.
    """
    lines: list[str] = []
    fields: dict[str, list[ast.AnnAssign]] = {}
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        if isinstance(node, ast.ClassDef) and ("@dataclasses" in text or "(NamedTuple)" in text):
            fields[node.name] = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            lines += (_row_type if node.name == "StepRow" else _plain_class)(node.name, fields[node.name])
        elif text.startswith("emit ="):
            given = ", ".join(f"fields[{place}]" for place in range(len(fields["Emit"])))
            kinds = ", ".join(ast.unparse(field.annotation) for field in fields["Emit"])
            lines += [f"def emit(fields: tuple[{kinds}]) -> Emit:", f"    return Emit({given})"]
        elif text.startswith("step_row ="):
            lines += ["def step_row(fields: StepRow) -> StepRow:", "    return fields"]
        elif not text.startswith(("emit:", "step_row:")):
            lines.append(text)
    return "\n".join(lines) + "\n"


def _row_type(name: str, fields: list[ast.AnnAssign]) -> list[str]:
    return [f"{name} = tuple[{', '.join(ast.unparse(field.annotation) for field in fields)}]"]


def _plain_class(name: str, fields: list[ast.AnnAssign]) -> list[str]:
    if not fields:
        return [f"class {name}:", "    pass"]
    return [
        f"class {name}:",
        f"    def __init__(self, {', '.join(map(ast.unparse, fields))}) -> None:",
        *(f"        self.{ast.unparse(field.target)} = {ast.unparse(field.target)}" for field in fields),
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder.resolve()
    compile_into(folder)
    print(f"PYTHONPATH={folder} manylora ... runs the compiled copy")


if __name__ == "__main__":
    main()
