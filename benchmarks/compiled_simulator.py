"""A copy of the package, its policy and simulator compiled by mypyc: the same decisions in about half the time.

    python benchmarks/compiled_simulator.py DIR
    PYTHONPATH=DIR manylora reproduce fastlibra-table --store DIR/cells.jsonl --out DIR

For runs of hours. Needs the test extra and a C compiler, and takes a few minutes. The sources stay as they are; a
store of cells notices if the copy decides otherwise (``code_of`` in ``manylora.reproduce.fastlibra_table_store``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "manylora"
SIMULATOR = ("analytical", "costs", "device", "limits", "loop", "replay")
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
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True)
    policy = sorted(path for path in (copy / "policy").glob("*.py") if path.stem != "__init__")
    modules = [copy / "protocol.py", *policy, *(copy / "sim" / f"{name}.py" for name in SIMULATOR)]
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


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder.resolve()
    compile_into(folder)
    print(f"PYTHONPATH={folder} manylora ... runs the compiled copy")


if __name__ == "__main__":
    main()
