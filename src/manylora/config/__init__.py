"""Collects the settings in sections, for users and for the policy. A section checks its values when it is
created."""
