"""What this library raises: one root, and one class for each kind of thing that went wrong.

A message says what happened, with numbers; how things stand; and what to do. It never contains a sample.
"""

from __future__ import annotations


class CrowdmlError(Exception):
    """The root of everything that this library raises on purpose."""


class TaskError(CrowdmlError):
    """A task file or a setting is wrong."""


class PluginError(TaskError):
    """A plug-in cannot be imported, is not installed, or is not the one that a task pins."""


class DataError(CrowdmlError):
    """Data is missing or corrupt."""


class FitError(TaskError, DataError, ValueError):
    """A parameter of an estimator, or the data it was given, cannot be used."""


class PrivacyWarning(UserWarning):
    """Something was read off the data that no epsilon covers."""


class FormError(CrowdmlError):
    """What somebody wrote into a form cannot be used. `about` is the field that the sentence stands next to."""

    def __init__(self, sentence: str, about: str = "") -> None:
        super().__init__(sentence)
        self.about = about


class BudgetExhausted(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The owner's budget does not allow this release; nothing was sent."""


class LedgerError(CrowdmlError):
    """The ledger could not be read or written; nothing was sent."""


ASK_FOR_STATEMENT = (
    "Move `ledger.sqlite`, and the files whose names begin with it, out of the folder: `crowdml join` then asks the "
    "server for the last statement that this device signed, and begins a new ledger from its totals."
)
"""What to do about a ledger that cannot be trusted. An older copy in its place would forget what was given since."""

LOST_MARKS = (
    "Nothing was sent. Put the newest copy of `given.log` that there is in its place, and leave the ledger as it is; "
    "if there is none, join with another --folder, and with samples that were never given."
)
"""What to do about a `given.log` that cannot be trusted. The ledger must know what an older copy of it names."""


class LeakError(CrowdmlError):
    """The door or the seal refused to let a value out."""


class UnknownName(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """A name that nothing here answers to: a figure, a data set, a mechanism, a protocol."""


class GuaranteeError(CrowdmlError):
    """A guarantee was asked for that nobody has proved, or that makes no sense."""


class MissingExtra(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """An optional dependency is needed and not installed; the message names the extra."""


class WorkerKilled(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """A process that computed beside this one was killed, so its part of the result is missing."""


class ProtocolError(CrowdmlError):
    """A shell asked a role for something that its protocol does not know: a bug, not a peer's fault."""
