"""Every record says where it comes from: command, commit, machine, versions, seed and other load."""

from __future__ import annotations

import json
import re

from manylora_lab.bench.provenance import ROOT

FOLDER = ROOT / "docs" / "results"
FIELDS = {"command", "commit", "machine", "versions", "seed", "others"}


def test_every_record_has_whole_entries() -> None:
    found = {path: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    stores = {path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz")}
    assert stores == {path.name.split(".")[0] for path in found if path.name.endswith(".provenance.json")}
    for path, record in found.items():
        assert record.get("provenance"), path.name
        for entry in record["provenance"]:
            assert FIELDS <= set(entry) <= FIELDS | {"part", "completed"}, path.name
            assert re.match(r"(manylora|python -m [\w.]+|python [\w/]+\.py) ?", entry["command"]), path.name
            assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"]), path.name
            assert entry["machine"]["cpu"], path.name
            assert entry["seed"] not in (None, ""), path.name
            assert "/home" not in entry["command"], path.name
