"""What ``manylora_lab.benchmarks.compiled_simulator`` rewrites before it compiles: the protocol's records."""

import dataclasses
import inspect
import types

import pytest
from manylora_lab.benchmarks.compiled_simulator import PACKAGES, RECORDS, _plain_records

from manylora import protocol
from manylora.protocol import commands, events


def rewritten_copy(name: str) -> types.ModuleType:
    copy = types.ModuleType(f"manylora.{name}_copy")
    exec(_plain_records((PACKAGES[0] / "protocol" / f"{name}.py").read_text()), copy.__dict__)
    return copy


@pytest.mark.parametrize("module", [commands, events])
def test_rewritten_records_take_and_keep_the_same_fields(module: types.ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    assert name in RECORDS
    copy = rewritten_copy(name)
    known = inspect.getmembers(module, dataclasses.is_dataclass)
    records = [kind for _, kind in known if kind.__module__ == module.__name__]
    assert protocol.RunStep in records or protocol.StepDone in records
    for kind in [*records, *([protocol.Emit] if module is commands else ())]:
        rewritten = getattr(copy, kind.__name__)
        asked = inspect.signature(kind).parameters.values()
        assert [(p.name, p.default) for p in inspect.signature(rewritten).parameters.values()] == [
            (p.name, p.default) for p in asked
        ]
        values = {p.name: object() for p in asked}
        assert vars(rewritten(**values)) == values


def test_rewritten_makers_give_rows_to_unpack_and_tokens_with_names() -> None:
    copy = rewritten_copy("commands")
    assert copy.step_row((7, 16, 1, 1, ((1, 5),))) == (7, 16, 1, 1, ((1, 5),))
    assert vars(copy.emit(("name", 0, 3, 99, (7, 0)))) == protocol.Emit("name", 0, 3, 99, (7, 0))._asdict()
