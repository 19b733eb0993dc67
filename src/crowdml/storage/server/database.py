"""One database for the server: SQLite in a file, or PostgreSQL. Connections, transactions, migrations, backups, errors.

What a transaction wrote is on disk when it returns, or nothing of it is there. A database that is full, away, damaged
or newer than this library is a `StoreError` of one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from crowdml.errors import CrowdmlError
from crowdml.storage.server.schema import HEAD, metadata

NOTHING_WRITTEN = "Nothing was written."
BUSY_SECONDS = 30
ROUNDS_ABOVE = "rounds above"
"""A setting of a restored database: rounds of masking have numbers above it, in digits; devices may know lower ones."""
_WRITING_LOCK = 0x63726F77646D6C01
_SERVING_LOCK = 0x63726F77646D6C02


class StoreError(CrowdmlError):
    """The server's database could not be read, written or trusted. Nothing of the call that raised it was written."""


class UnwrittenError(StoreError):
    """The disk is full, or the file cannot be written: it may be read still, and more room or another mode mends it."""


class Database:
    """`Database("crowdml.db")`, a URL `sqlite:///crowdml.db` or `postgresql://...`; `sqlite://` forgets at the end.

    Opening brings the schema up to date, in one transaction; two processes may do it at once. With `serving` it is also
    an error that another process serves from the same database. Any thread may call; writers wait for one another.
    """

    def __init__(self, url: str | os.PathLike[str], *, serving: bool = False) -> None:
        self.url = _url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.path = Path(self.url.database) if self.is_sqlite and self.url.database else None
        self.name = str(self.path or self.url.render_as_string(hide_password=True))
        self._lock = threading.RLock()
        self._held: Any = None
        with self._explained():
            if self.path is not None:
                self._make_file(self.path)
            self.engine = _engine(self.url, in_memory=self.is_sqlite and self.path is None)
        try:
            if serving:
                self._hold()
            self._migrate()
            if serving:
                self.cut_log()  # what a server erased before it was killed
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Transactions

    @contextlib.contextmanager
    def reading(self) -> Generator[Connection]:
        """A connection that sees one moment of the database."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._explained())
            if self.is_sqlite and self.path is None:  # one connection for all
                stack.enter_context(self._lock)
            yield stack.enter_context(self.engine.connect())

    @contextlib.contextmanager
    def writing(self) -> Generator[Connection]:
        """A transaction of the one writer: durable when it ends, or nothing of it is there."""
        with self._explained(), self._lock, self.engine.connect() as connection:
            connection.execution_options(crowdml_begin="begin immediate")
            try:
                with connection.begin():
                    if not self.is_sqlite:  # one writer here too, over all processes
                        connection.exec_driver_sql(f"select pg_advisory_xact_lock({_WRITING_LOCK})")
                    yield connection
            except BaseException:
                if not self.is_sqlite and getattr(connection.connection.driver_connection, "closed", False):
                    connection.invalidate()
                raise

    def read(self, query: sa.Executable) -> Sequence[Any]:
        """The rows of a query that stands by itself."""
        with self.reading() as connection:
            return connection.execute(query).all()

    def read_value(self, query: sa.Executable) -> Any:
        """The first value of the first row; None where there is no row."""
        with self.reading() as connection:
            return connection.execute(query).scalar()

    def change(self, statement: sa.Executable) -> int:
        """Carry out one change as a transaction; how many rows it changed."""
        with self.writing() as connection:
            return connection.execute(statement).rowcount  # pyright: ignore[reportAttributeAccessIssue]

    def cut_log(self) -> bool:
        """Fold SQLite's write-ahead log into the file, and cut it to nothing: it has old pages of what was erased.

        Whoever erases calls this afterwards. It waits for nobody: while somebody reads an older moment, or the disk is
        full, it answers False, and the next call does it. PostgreSQL has logs and dead rows of its own.
        """
        if self.path is None:
            return True
        with self._explained(), self._lock, self.engine.connect() as connection:
            plain: Any = connection.connection.driver_connection  # no transaction: a checkpoint has none
            plain.execute("pragma busy_timeout = 0")
            try:
                busy, *_ = plain.execute("pragma wal_checkpoint(truncate)").fetchone()
            except sqlite3.OperationalError:  # another process writes, or the disk takes nothing
                busy = 1
            finally:
                plain.execute(f"pragma busy_timeout = {1000 * BUSY_SECONDS}")
            return not busy

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Say in one sentence what the database or the disk said in a word."""
        try:
            yield
        except DBAPIError as error:
            raise self._explain(error.orig or error) from error
        except SQLAlchemyError as error:
            raise self._explain(error) from error
        except OSError as error:
            raise self._unwritten(error.strerror or str(error)) from error
        except Exception as error:
            if isinstance(error, sqlite3.Error) or type(error).__module__.startswith("psycopg"):
                raise self._explain(error) from error
            raise

    def _explain(self, error: BaseException) -> StoreError:
        said = str(error).strip().split("\n")[0].rstrip(".")
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                return self._unwritten(said)
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return StoreError(
                    f"the database {self.name} is in use by another process ({said}). {NOTHING_WRITTEN} "
                    "Stop the other one, or try again."
                )
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
                return self.corrupt(said)
        sqlstate = getattr(error, "sqlstate", None) or ""
        if sqlstate.startswith("53"):  # insufficient resources: disk, memory, connections
            return self._unwritten(said)
        if sqlstate.startswith("XX"):
            return self.corrupt(said)
        if not self.is_sqlite and (type(error).__name__ in ("OperationalError", "InterfaceError", "AdminShutdown")):
            return StoreError(
                f"the database {self.name} is away: {said}. A batch that was being committed is there whole or not at "
                "all, and to append it again is safe. Check the database and try again."
            )
        return StoreError(f"the database {self.name} refused: {said}. {NOTHING_WRITTEN} Report this as a bug.")

    def _unwritten(self, reason: str) -> StoreError:
        room = ""
        with contextlib.suppress(OSError):
            free = self.free_space()
            room = "" if free is None else f" There are {free:,} bytes free on its disk."
        return UnwrittenError(
            f"the database {self.name} could not be written: {reason}.{room} {NOTHING_WRITTEN} "
            "Free some space, or check the folder's permissions, and try again."
        )

    def corrupt(self, flaw: str) -> StoreError:
        how = "Move it away, and put a backup in its place with `crowdml restore`." if self.is_sqlite else "Check it."
        return StoreError(f"the database {self.name} cannot be trusted: {flaw}. {NOTHING_WRITTEN} {how}")

    # The file, the schema and the one who serves

    def _make_file(self, path: Path) -> None:
        """A new file is readable by its owner alone; SQLite gives its log the same mode."""
        if not path.exists() and (log := path.with_name(f"{path.name}-wal")).exists():
            raise StoreError(
                f"the database {path} is not there, though {log} is: entries may be lost. {NOTHING_WRITTEN} "
                "Put the database back beside its log, or restore the backup to another place."
            )
        with contextlib.suppress(FileExistsError):
            # One that is there is not opened: closing it again would drop every lock that this process has on it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    def _migrate(self) -> None:
        with self.reading() as connection:
            revision = self._revision(connection)
        if revision == HEAD:
            return
        from alembic import command  # a third of a second, and only where there is something to do
        from alembic.config import Config

        with self.writing() as connection:
            revision = self._revision(connection)  # another process may have been here
            if revision == HEAD:
                return
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _revision(self, connection: Connection) -> str | None:
        """The schema's migration; None where there is no schema yet. Refuses what is not ours to touch."""
        tables = set(sa.inspect(connection).get_table_names())
        if "alembic_version" not in tables:
            ours = tables & set(metadata.tables)
            if ours:
                raise self.corrupt(f"it has a table {min(ours)!r} and no record of any migration")
            return None
        rows = connection.exec_driver_sql("select version_num from alembic_version").fetchall()
        revision = rows[0][0] if rows else None
        if revision is not None and revision > HEAD:
            raise StoreError(
                f"the database {self.name} is at migration {revision}, and this version knows {HEAD}. "
                f"{NOTHING_WRITTEN} Run the version of crowdml that wrote it, or a later one."
            )
        if revision is not None and set(metadata.tables) - tables and revision == HEAD:
            raise self.corrupt(f"the table {min(set(metadata.tables) - tables)!r} is gone")
        return revision

    def _hold(self) -> None:
        busy = StoreError(
            f"another server runs on the database {self.name}. {NOTHING_WRITTEN} "
            "Stop it, or give this one a data folder of its own."
        )
        if self.path is not None:
            import fcntl

            with self._explained():
                self._held = self.path.with_name(f"{self.path.name}.serving").open("w")
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
            except OSError as error:
                raise busy from error
        elif not self.is_sqlite:
            with self._explained():
                self._held = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                self._held.detach()  # a connection of its own: the lock ends with it
                if not self._held.execute(sa.select(sa.func.pg_try_advisory_lock(_SERVING_LOCK))).scalar():
                    raise busy

    # Room, checks and copies

    def free_space(self) -> int | None:
        """Bytes free on the database's disk; None where it is not ours to see (PostgreSQL)."""
        return None if self.path is None else shutil.disk_usage(self.path.resolve().parent).free

    def size(self) -> int:
        """Bytes that the database takes, with its log."""
        if self.path is not None:
            files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
            return sum(file.stat().st_size for file in files if file.exists())
        query = (
            "select page_count * page_size from pragma_page_count(), pragma_page_size()"
            if self.is_sqlite
            else "select pg_database_size(current_database())"
        )
        with self.reading() as connection:
            return int(connection.exec_driver_sql(query).scalar_one())

    def check_pages(self) -> None:
        """Read every page of a SQLite file and raise where one is damaged. Seconds a gigabyte."""
        if self.is_sqlite:
            with self.reading() as connection:
                flaw = connection.exec_driver_sql("pragma integrity_check(1)").scalar()
                orphans = connection.exec_driver_sql("pragma foreign_key_check").fetchall()
            if flaw != "ok" or orphans:
                raise self.corrupt(str(flaw if flaw != "ok" else f"{len(orphans)} rows refer to nothing"))

    def check_schema(self) -> None:
        """Raise where a SQLite file has another table, index or trigger than a new one: each could lie or erase."""
        if self.is_sqlite:
            with Database("sqlite://") as fresh:
                ours, theirs = fresh._schema(), self._schema()
            odd = min(set(ours.items()) ^ set(theirs.items()), default=None)
            if odd is not None:
                raise self.corrupt(f"its {odd[0][0]} {odd[0][1]!r} is not as this version makes it")

    def _schema(self) -> dict[tuple[str, str], str]:
        query = "select type, name, sql from sqlite_master where name not like 'sqlite\\_%' escape '\\'"
        with self.reading() as connection:
            return {(row[0], row[1]): str(row[2]) for row in connection.exec_driver_sql(query)}

    def backup(self, path: str | os.PathLike[str]) -> int:
        """Copy one moment of a SQLite database to a new file while others read and write; its size in bytes.

        The copy is checked and on disk before it gets its name. PostgreSQL has its own tool: `pg_dump -Fc`.
        """
        return self._copy(path)

    def _copy(self, path: str | os.PathLike[str], change: Callable[[sqlite3.Connection], None] | None = None) -> int:
        if self.path is None:
            tool = "a database in memory has no copy" if self.is_sqlite else "use `pg_dump --format=custom` for it"
            raise StoreError(f"the database {self.name} is no SQLite file: {tool}. {NOTHING_WRITTEN}")
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        if target.exists():
            raise StoreError(f"{target} is already there. {NOTHING_WRITTEN} Choose another name for the backup.")
        try:
            with self._explained():
                partial.unlink(missing_ok=True)
                os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                with (
                    contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as source,
                    contextlib.closing(sqlite3.connect(partial)) as copy,
                ):
                    source.backup(copy)  # in one step: a copy made in several begins anew with every commit
                    copy.execute("pragma journal_mode = delete")
                    if change is not None:
                        change(copy)
                        copy.commit()
                    flaw = copy.execute("pragma quick_check(1)").fetchone()[0]
                if flaw != "ok":
                    raise self.corrupt(str(flaw))
                _keep(partial)
                os.replace(partial, target)
                _keep(target.resolve().parent)
                return target.stat().st_size
        finally:
            partial.unlink(missing_ok=True)


def restore(
    backup: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Put a backup of a SQLite database in place, where none is. The backup itself is only read.

    `sha256`: what `crowdml backup` printed; another file is refused. `check` is called with the copy before it is in
    place, and raises where it cannot be trusted; without one its pages are read alone.

    What it has is as old as the backup, and a device never goes into a round below one that it was in: numbers of
    rounds go on far above, for every task, and higher each time that the same backup is restored. Charged validation
    is halted.
    """
    source, target = Path(backup), Path(path)
    for file in (target, target.with_name(f"{target.name}-wal")):
        if file.exists():
            raise StoreError(f"{file} is there. {NOTHING_WRITTEN} Move it away before you restore a backup over it.")
    if not source.is_file():
        raise StoreError(f"there is no backup {source}. {NOTHING_WRITTEN} Name the file that `crowdml backup` wrote.")
    if sha256 is not None and (found := file_hash(source)) != sha256.strip().lower():
        raise StoreError(
            f"{source} has the SHA-256 {found}, and not the one that was asked for: it is another file, or it was "
            f"changed. {NOTHING_WRITTEN} Name the backup that `crowdml backup` printed this hash of."
        )
    if not _is_ours(source):
        raise StoreError(
            f"{source} is no backup of a crowdml server. {NOTHING_WRITTEN} Name the file that `crowdml backup` wrote."
        )
    if source.with_name(f"{source.name}-wal").exists():
        raise StoreError(
            f"{source} has a log beside it: it is a database in use, and no backup. {NOTHING_WRITTEN} "
            "Copy it with `crowdml backup`, and name that copy."
        )
    partial = target.with_name(f"{target.name}.partial")
    try:
        _put(source, partial, check)
        os.replace(partial, target)
        _keep(target.resolve().parent)
    except OSError as error:
        raise StoreError(f"{target} could not be written: {error.strerror}. Free some space, and try again.") from error
    except StoreError as error:  # people know the backup, and not the copy
        raise StoreError(str(error).replace(str(partial), str(source))) from error
    finally:
        for file in (partial, *(partial.with_name(f"{partial.name}-{more}") for more in ("wal", "shm"))):
            file.unlink(missing_ok=True)


def _put(source: Path, partial: Path, check: Callable[[Path], object] | None) -> None:
    """A checked copy of the backup, up to date and on disk."""
    partial.unlink(missing_ok=True)
    with (
        source.open("rb") as backup,
        os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy,
    ):
        shutil.copyfileobj(backup, copy)
    with Database(partial) as database:
        database.check_pages()
        if check is not None:
            check(partial)
        with database._explained(), contextlib.closing(sqlite3.connect(partial)) as copy:
            _prepare_copy(copy)
            copy.commit()
    with database._explained(), contextlib.closing(sqlite3.connect(partial)) as copy:
        copy.execute("pragma journal_mode = delete").fetchall()
    _keep(partial)


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare_copy(copy: sqlite3.Connection) -> None:
    _raise_rounds(copy)
    _halt_looks(copy)


def _halt_looks(copy: sqlite3.Connection) -> None:
    """What was charged since the backup nobody knows: no more looks at charged rows before the operator says so."""
    charged = "select number from validation_rows where kind = 'charged'"
    copy.execute(f"update validation set halted = 'restored' where rows in ({charged})")


def _raise_rounds(copy: sqlite3.Connection) -> None:
    """A million rounds on, and as many as there are milliseconds since 1970: a second restore is above the first."""
    (last,) = copy.execute('select coalesce(max(number), 0) from "round"').fetchone()
    before = copy.execute("select value from setting where name = ?", (ROUNDS_ABOVE,)).fetchone()
    above = max(last, int(before[0]) if before else 0) + 1_000_000
    above = max(above, 1_000_000 + time.time_ns() // 1_000_000)
    row = (ROUNDS_ABOVE, b"%d" % above)
    copy.execute("insert or replace into setting (name, value) values (?, ?)", row)


def _is_ours(file: Path) -> bool:
    """Whether the file is a SQLite database with our schema. It is only read; a damaged one is told elsewhere."""
    try:
        with file.open("rb") as opened:
            if opened.read(16) != b"SQLite format 3\0":
                return False
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except (OSError, sqlite3.Error):
        return True
    return "alembic_version" in tables and bool(tables & set(metadata.tables))


def insert(connection: Connection, table: sa.Table, **values: Any) -> Any:
    """Add a row; the first part of its key, which is its number where the table numbers its rows."""
    row = connection.execute(table.insert().values(**values))
    return row.inserted_primary_key[0] if row.inserted_primary_key else None


def utc(time: str) -> str:
    """The time as it is stored: UTC, microseconds, so that text sorts as time does."""
    try:
        parsed = datetime.fromisoformat(time)
    except ValueError as error:
        raise _no_time(time) from error
    if parsed.tzinfo is None:
        raise _no_time(time)
    return parsed.astimezone(UTC).isoformat(timespec="microseconds")


def _no_time(time: str) -> StoreError:
    return StoreError(
        f"{time!r} is no UTC time in ISO 8601. {NOTHING_WRITTEN} Pass one like '2025-01-31T12:00:00+00:00'."
    )


def _keep(path: Path) -> None:
    """Ask the disk for what was written to this file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _url(url: str | os.PathLike[str]) -> URL:
    text = os.fspath(url)
    try:
        parsed = make_url(text) if "://" in text else URL.create("sqlite", database=text)
    except ArgumentError as error:
        raise _no_url(text) from error
    match parsed.get_backend_name():
        case "sqlite":
            database = None if parsed.database in (None, "", ":memory:") else parsed.database
            return URL.create("sqlite+pysqlite", database=database)
        case "postgresql" | "postgres":
            return parsed.set(drivername="postgresql+psycopg")
        case _:
            raise _no_url(parsed.render_as_string(hide_password=True))


def _no_url(text: str) -> StoreError:
    return StoreError(
        f"{text!r} names no database that this server knows. {NOTHING_WRITTEN} "
        "Give a file, sqlite:///FILE or postgresql://USER@HOST/NAME."
    )


def _engine(url: URL, *, in_memory: bool) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            options = {"timeout": BUSY_SECONDS, "check_same_thread": False, "isolation_level": None}
            pool: dict[str, Any] = {"poolclass": StaticPool} if in_memory else {}
            engine = sa.create_engine(url, connect_args=options, **pool)
            listen(engine, "connect", _prepare_sqlite)
            listen(engine, "begin", _begin_sqlite)
            return engine
        engine = sa.create_engine(url, pool_size=4, max_overflow=8)
    except (ImportError, NoSuchModuleError) as error:
        raise StoreError(f"{error}. Install `crowdml[server]`, which has the driver for PostgreSQL.") from error
    listen(engine, "connect", _prepare_postgresql)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.execute("pragma page_size = 8192")  # of a new file: three bodies of 2 kB a page
    _write_ahead(connection)
    for pragma in (
        "secure_delete = on",  # what is erased is overwritten, whatever SQLite was built with
        "synchronous = full",
        "foreign_keys = on",
        "trusted_schema = off",
        "cache_size = -16384",  # 16 MiB
        "wal_autocheckpoint = 2000",  # 16 MiB of log
        "journal_size_limit = 67108864",
    ):
        connection.execute(f"pragma {pragma}").fetchall()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Set the journal's mode. SQLite does not wait for another process that does so too, so this does."""
    ends = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("pragma journal_mode = wal").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
            time.sleep(0.005)


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("crowdml_begin", "begin"))


def _prepare_postgresql(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("set synchronous_commit = on")
        cursor.execute("set time zone 'UTC'")
    connection.commit()
