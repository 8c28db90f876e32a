"""The tokenizer of a checkpoint, and text that is decoded as its tokens come."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from page4.kernels.errors import InputError

_INCOMPLETE = "\ufffd"  # what the bytes of a character decode to before the last one is there


def load_tokenizer(folder: Path) -> Tokenizer:
    """The `tokenizer.json` of a checkpoint.

    Raises:
        InputError: No tokenizer there, or an unreadable one.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder} holds no tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise InputError(f"{file} is not a tokenizer: {error}") from error


class TextStream:
    """Tokens to text, piece by piece; a character whose bytes are not all there waits for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = ""

    def add(self, tokens: list[int]) -> str:
        """The text that new tokens complete."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        return self._say(text.rstrip(_INCOMPLETE))

    def end(self) -> str:
        """What is left, incomplete or not."""
        return self._say(self._tokenizer.decode(self._tokens))

    def _say(self, text: str) -> str:
        new = text[len(self._said) :]
        self._said += new
        return new
