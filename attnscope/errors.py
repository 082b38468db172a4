"""What can go wrong, in words a person can act on.

The library raises these; the command line prints each as one line and leaves with its `exit_code`.
"""


class AttnscopeError(Exception):
    """Something a person can act on: what happened, and the next step.

    `message` says what was expected and what came; `hint` says what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(AttnscopeError):
    """An argument, a selection or a configuration that cannot be meant."""

    exit_code = 2


class ModelError(AttnscopeError):
    """A model that cannot be found, loaded or read."""

    exit_code = 3


class InputError(AttnscopeError):
    """A text that cannot be read, or that does not fit the model."""

    exit_code = 4


class MemoryLimitError(AttnscopeError):
    """More memory than there is; the hint says what would fit."""

    exit_code = 5
