"""The SQLite file of a ledger: made whole, checked when it is opened, and written in transactions.

A file that cannot be trusted or written is a `LedgerError` in one sentence.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from crowdml.errors import ASK_FOR_STATEMENT, LedgerError
from crowdml.privacy.spending import NOTHING_SENT
from crowdml.storage.migrations import apply, bring_up_to_date, migrations


class LedgerFile:
    """An open ledger. `changed` is called, within a transaction, where another connection has written since the last.

    A file that is not there is made, readable by its owner alone; with `must_exist` it is an error.
    """

    def __init__(self, path: str, changed: Callable[[], None], *, must_exist: bool = False) -> None:
        self.path = path
        self._changed = changed
        self._version = -1
        """SQLite's count of what others wrote."""
        with self.explained():
            if path == ":memory:":
                self.connection = _connect(path)
                apply(self.connection, migrations())
            else:
                self._prepare(must_exist=must_exist)
                self.connection = _connect(_uri(path, "rw"))
        try:
            with self.explained():
                for pragma in (
                    "secure_delete = on",  # what is erased is overwritten with zeros,
                    "journal_mode = truncate",  # and no log keeps it: a write-ahead log has old pages long after
                    "synchronous = full",
                    "foreign_keys = on",
                    "trusted_schema = off",
                ):
                    self.connection.execute(f"pragma {pragma}").fetchall()
                flaws = self.connection.execute("pragma quick_check(1)").fetchone()
                if flaws != ("ok",):
                    raise self.corrupt(str(flaws[0] if flaws else "no answer"))
                bring_up_to_date(self.connection, f"the ledger {path}")
        except BaseException:
            self.connection.close()
            raise

    @contextlib.contextmanager
    def transaction(
        self, kind: Literal["deferred", "immediate", "single"], undone: Callable[[], None]
    ) -> Generator[None]:
        """One transaction; inside another, a part of it that succeeds or fails by itself.

        What only reads (`deferred`) or makes a single change (`single`) has nothing to undo there. `undone` is called
        where what was written is gone again.
        """
        with self.explained():
            inner = self.connection.in_transaction
            if inner and kind != "immediate":
                yield
                return
            begin, end, undo = "begin deferred" if kind == "deferred" else "begin immediate", "commit", ("rollback",)
            if inner:
                begin, end, undo = "savepoint step", "release step", ("rollback to step", "release step")
            self.connection.execute(begin)
            try:
                if not inner:
                    self._look_round()
                yield
                self.connection.execute(end)
            except BaseException:
                if self.connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # what was not committed is gone either way
                        for statement in undo:
                            self.connection.execute(statement)
                if kind != "deferred":
                    undone()
                raise

    def _look_round(self) -> None:
        """Notice if another connection has written: once a transaction, within it."""
        version: int = self.connection.execute("pragma data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._changed()

    def read(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows that answer a question which stands by itself."""
        with self.explained():
            return self.connection.execute(question, values).fetchall()

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Say in one sentence what the disk or SQLite said in a word."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            raise self._unwritten(error.strerror or str(error)) from error

    def _explain(self, error: sqlite3.Error) -> LedgerError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            return self._unwritten(str(error))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerError(
                f"the ledger {self.path} is in use by another process ({error}). {NOTHING_SENT} "
                "Stop the other one, or try again."
            )
        if isinstance(error, sqlite3.IntegrityError):
            return LedgerError(f"the ledger {self.path} refused: {error}. {NOTHING_SENT} Report this as a bug.")
        return self.corrupt(str(error))

    def _unwritten(self, reason: str) -> LedgerError:
        room = ""
        with contextlib.suppress(OSError):
            import shutil

            free = shutil.disk_usage(Path(self.path).resolve().parent).free
            room = f" There are {free:,} bytes free on its disk."
        return LedgerError(
            f"the ledger {self.path} could not be written: {reason}.{room} {NOTHING_SENT} "
            "Free some space, or check the folder's permissions, and try again."
        )

    def corrupt(self, flaw: str) -> LedgerError:
        return LedgerError(f"the ledger {self.path} cannot be trusted: {flaw}. Nothing was sent. {ASK_FOR_STATEMENT}")

    def _prepare(self, *, must_exist: bool) -> None:
        """Make the file where there is none. It gets its name when it is whole: half a ledger is never found."""
        path = Path(self.path)
        if path.exists():
            if os.name == "posix" and path.stat().st_mode & 0o077:
                path.chmod(0o600)
            return
        logs = (Path(f"{self.path}-wal"), Path(f"{self.path}-journal"))
        remains = [log for log in logs if log.exists() and log.stat().st_size]
        if must_exist or remains:
            found = f", though {remains[0]} is" if remains else ""
            raise LedgerError(
                f"the ledger {self.path} is not there{found}: what this device has given is not known. "
                f"Nothing was sent. {ASK_FOR_STATEMENT}"
            )
        import tempfile  # a device makes its ledger once

        handle, draft = tempfile.mkstemp(prefix=f"{path.name}.new-", dir=path.parent)  # mode 0600
        os.close(handle)
        try:
            connection = _connect(_uri(draft, "rw"))
            try:
                connection.execute("pragma synchronous = full")
                apply(connection, migrations())
            finally:
                connection.close()
            with contextlib.suppress(FileExistsError):  # another process was first: its ledger is the ledger
                os.link(draft, path)
        finally:
            os.unlink(draft)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _connect(target: str) -> sqlite3.Connection:
    return sqlite3.connect(target, uri=target.startswith("file:"), isolation_level=None, timeout=10.0)


def _uri(path: str, mode: str) -> str:
    return f"file:{quote(os.path.abspath(path))}?mode={mode}"
