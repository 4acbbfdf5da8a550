"""Certificates for links, made by the commands that docs/cluster.md gives."""

from __future__ import annotations

import subprocess
from pathlib import Path

from manylora.config.cluster import TLS_OPTIONS, TlsFiles

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def commands() -> tuple[str, str]:
    """What makes the authority, and what makes a machine's certificate; both in the folder that has them all."""
    section = PAGE.read_text().split("### Encrypted links")[1].split("\n## ")[0].replace("\\\n", " ")
    authority, machine = (line.strip() for line in section.splitlines() if line.startswith("    openssl"))
    return authority, machine


def run(folder: Path, command: str) -> None:
    subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True)


def authority(folder: Path) -> Path:
    """A folder for certificates of one authority."""
    folder.mkdir()
    run(folder, commands()[0])
    return folder


def certificate(folder: Path, address: str = "127.0.0.1") -> TlsFiles:
    """Of a machine at this address."""
    run(folder, commands()[1].replace("10.0.0.1", address).replace("link.", f"{address}."))
    return TlsFiles(str(folder / f"{address}.crt"), str(folder / f"{address}.key"), str(folder / "ca.crt"))


def expired(folder: Path) -> TlsFiles:
    """One whose time is over."""
    found = certificate(folder)
    name = "-subj /CN=old -addext subjectAltName=IP:127.0.0.1"
    run(folder, f"openssl req -new -key 127.0.0.1.key {name} -out old.csr")
    signed = "-CA ca.crt -CAkey ca.key -copy_extensions copy"
    run(folder, f"openssl x509 -req -in old.csr {signed} -days -1 -out old.crt")
    return found._replace(cert=str(folder / "old.crt"))


def options(files: TlsFiles) -> list[str]:
    """As flags."""
    return [word for pair in zip(TLS_OPTIONS, files, strict=True) for word in pair]
