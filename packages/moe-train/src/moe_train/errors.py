"""Errors that are for people: each message says what is wrong and what can be done."""


class RunError(RuntimeError):
    """The run cannot start or go on."""
