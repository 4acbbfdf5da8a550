"""Whether the text side of an adapter's folder agrees with the base model's. No torch here."""

from __future__ import annotations

import functools
from pathlib import Path

from manylora.protocol import AdapterError
from manylora.text.texts import TEXT_FILES, Texts, read_base
from manylora.text.tokenizer import TokenizerError


def text_files(folder: Path) -> list[Path]:
    """Those files of a folder that say something of text."""
    return [folder / name for name in TEXT_FILES if (folder / name).is_file()]


class TextCheck:
    """The base's folder and its tokenizer's, which is loaded when an adapter first brings files of its own."""

    def __init__(self, model: Path, tokenizer: Path) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @functools.cached_property
    def _texts(self) -> Texts:
        base = read_base(self.model, tokenizer_folder=self.tokenizer)
        return Texts(base, self.model, tokenizer_folder=self.tokenizer)

    def warnings(self, folder: Path) -> tuple[str, ...]:
        """What there is to say of the folder's files. Raises AdapterError where they contradict the base's."""
        if not text_files(folder):
            return ()
        try:
            return self._texts.read(folder).warnings
        except TokenizerError as error:
            raise AdapterError(str(error)) from error
