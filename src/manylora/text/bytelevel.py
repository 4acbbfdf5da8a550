"""The alphabet of byte-level BPE: each of the 256 bytes as one printable character (GPT-2's choice)."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTE_OF_CHAR = _alphabet()
