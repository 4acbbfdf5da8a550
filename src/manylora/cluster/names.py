"""What files of one process of a cluster are called."""

from __future__ import annotations


def journal_name(path: str, role: str, epoch: int) -> str:
    """Where a router or a replica keeps what the user asked for at ``path``: a router's first life has no epoch in
    its name."""
    if role == "router":
        return f"{path}.router" if epoch == 1 else f"{path}.router.e{epoch}"
    return f"{path}.{role}.e{epoch}"
