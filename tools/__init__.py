"""Tools of the repository itself; nothing here is part of the package."""
