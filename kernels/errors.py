"""The one exception that means "the input is wrong, not the program"."""

from __future__ import annotations


class InputError(ValueError):
    """A value given by the user cannot be used.

    The message is one line that names what is wrong and what would be right. The command line prints it and
    exits with status 2; nothing has been written when it is raised.
    """
