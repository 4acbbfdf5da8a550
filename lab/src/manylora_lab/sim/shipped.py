"""Profiles that come with the laboratory."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora_lab.pricing.profile import Profile, load_profile, profile_of


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = resources.files("manylora_lab.sim") / "profiles"
    names = [file.name for file in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def find_profile(name: str) -> Profile:
    """A profile by the name of a shipped one or by the path of a file; raises ConfigError."""
    if name in shipped_profiles():
        return profile_of((resources.files("manylora_lab.sim") / "profiles" / f"{name}.json").read_bytes())
    if not Path(name).is_file():
        raise ConfigError(f"profile {name!r} is neither a file nor one of {', '.join(shipped_profiles())}")
    return load_profile(Path(name))
