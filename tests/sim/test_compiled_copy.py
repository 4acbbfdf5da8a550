"""What ``benchmarks.compiled_simulator`` rewrites before it compiles: the protocol's records."""

import dataclasses
import inspect
import types

from benchmarks.compiled_simulator import PACKAGE, _plain_records
from manylora import protocol


def test_rewritten_records_take_and_keep_the_same_fields() -> None:
    copy = types.ModuleType("manylora.protocol_copy")
    exec(_plain_records((PACKAGE / "protocol.py").read_text()), copy.__dict__)
    known = inspect.getmembers(protocol, dataclasses.is_dataclass)
    records = [kind for _, kind in known if kind.__module__ == protocol.__name__]
    assert protocol.RunStep in records
    for kind in [*records, protocol.Emit]:
        rewritten = getattr(copy, kind.__name__)
        asked = inspect.signature(kind).parameters.values()
        assert [(p.name, p.default) for p in inspect.signature(rewritten).parameters.values()] == [
            (p.name, p.default) for p in asked
        ]
        values = {p.name: object() for p in asked}
        assert vars(rewritten(**values)) == values


def test_rewritten_makers_give_rows_to_unpack_and_tokens_with_names() -> None:
    copy = types.ModuleType("manylora.protocol_copy")
    exec(_plain_records((PACKAGE / "protocol.py").read_text()), copy.__dict__)
    assert copy.step_row((7, 16, 1, 1, ((1, 5),))) == (7, 16, 1, 1, ((1, 5),))
    assert vars(copy.emit(("name", 0, 3, 99, (7, 0)))) == protocol.Emit("name", 0, 3, 99, (7, 0))._asdict()
