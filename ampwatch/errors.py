"""Errors that ampwatch raises, all at construction or at a boundary, never inside a training loop.

AmpwatchError
├── InvalidBatch            a batch that cannot be read; names the field and the reason
│   └── UnsupportedVersion  a batch written by a newer ampwatch
├── InvalidPolicy           a scaler policy, or a parameter of one, that there is not
├── MissingExtra            a part that was not installed; names the pip command
├── SettingsError           a setting or argument that cannot be used
├── RunNotFound             a run, directory or trace that does not exist
└── SpoolError              a spool directory that cannot be written
"""

from __future__ import annotations


class AmpwatchError(Exception):
    """Base of every error that ampwatch raises on purpose."""


class InvalidBatch(AmpwatchError):
    """A batch that cannot be read.

    Arguments:
        field: where in the batch, as a dotted path (`columns.loss`), or `body` for the whole.
        reason: what was got and what is allowed.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidPolicy(AmpwatchError):
    """A scaler policy, or a parameter of one, that there is not.

    Arguments:
        field: `policy`, or `parameters.<name>`.
        reason: what was got and what is allowed.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


class UnsupportedVersion(InvalidBatch):
    """A batch whose format version this ampwatch does not know."""


class MissingExtra(AmpwatchError):
    """An optional part of ampwatch is not installed.

    Arguments:
        what: what was asked for, for the message.
        extra: the name of the extra that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed: pip install 'ampwatch[{extra}]'")
        self.extra = extra


class SettingsError(AmpwatchError):
    """A setting or an argument that cannot be used; the message says what is allowed."""


class RunNotFound(AmpwatchError):
    """No run, spool directory or trace stands at the place that was named."""


class SpoolError(AmpwatchError):
    """The spool directory cannot be written."""
