"""A device's folder: its key, its ledger, what its owner accepted, and the server that it talks to.

    key.pem         the device's own key (fleet: keys/000000.pem, ...)
    ledger.sqlite   charges, outbox, waiting samples, receipts, what peers said and samples to learn from
    given.log       which message was sealed last, for the day on which the ledger is lost
    device.json     the server's address and key, the owner's budget, where the device stands
    authority.pem   the certificates by which the server is known, where the owner named some
    consent.json    which tasks the owner accepted, what was shown, who accepted it and when
    tasks/          those tasks, byte for byte
    artefacts/      public files that those tasks name by hash, from the server

The folder has mode 0700 and its files 0600. A file is replaced whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from crowdml import artefacts
from crowdml.device.marks import Marked, Marks, read_marks
from crowdml.errors import CrowdmlError, DataError, GuaranteeError, LedgerError, TaskError
from crowdml.price import Price
from crowdml.privacy.losses import Unbounded
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.storage import Budget, Ledger
from crowdml.task import Task, from_canonical, largest_delta
from crowdml.texts import digits_below
from crowdml.wire.keys import Key

LEDGER, DEVICE, CONSENT, KEY, LOCK = "ledger.sqlite", "device.json", "consent.json", "key.pem", "lock"
GIVEN, AUTHORITY, ARTEFACTS = "given.log", "authority.pem", "artefacts"


@record
class Server:
    """The server that the owner named, and the key by which it signs receipts, from the first enrolment on."""

    url: str
    key: str  # hex
    ca: str | None = None
    """The file of certificates that the owner named when joining; those that count are the folder's own copy."""


@record
class OwnerBudget:
    """What the owner permits over all tasks: any one sample's total, samples in a life, and the device's total."""

    epsilon: str
    samples: int
    device_epsilon: str | None = None
    delta: float = 1e-6

    @property
    def budget(self) -> Budget:
        """The budget as it was set, to read what is left of it."""
        device = None if self.device_epsilon is None else Fraction(self.device_epsilon)
        return Budget(Fraction(self.epsilon), self.delta, self.samples, device)

    def to_give_under(self) -> Budget:
        """The budget that the ledger holds new charges against. A delta above its ceiling is refused: it voids them."""
        most = largest_delta(max(1, self.samples))
        if self.delta > most:
            raise GuaranteeError(
                f"the owner's budget has delta = {self.delta:g}: a promise may fail with this probability, so for "
                f"{self.samples:,} samples it may be at most {digits_below(most)}. Nothing was sent. Set it with "
                f"`crowdml budget set --delta {digits_below(min(1e-6, most))}`."
            )
        return self.budget


@record
class Consent:
    """What the owner was shown and accepted. The hash pins the task: an edited one is another."""

    task: str  # hex
    name: str
    title: str
    collects: str
    promises: tuple[str, ...]
    epsilon_sample: float
    epsilon_device: float
    """After all the check-ins that the task's own budget allows; after one, where it names none."""
    check_ins: int | None
    delta: float
    by: str = ""
    at: str = ""
    colluders: int | None = None
    """Under masks: with so many the two prices hold, and the next two if everyone else colludes. None: no masks."""
    epsilon_sample_alone: float | None = None
    epsilon_device_alone: float | None = None
    uses: int = 1
    """How often a sample serves: what it loses is for all of them together."""
    purpose: str = ""
    run_by: str = ""
    """The server's own words about who runs it, and its address."""


def readable_task(data: bytes, expected: bytes) -> tuple[Task, Protocol]:
    """The task behind the bytes, if its hash is the one asked for and a device may run it at all."""
    found = hashlib.sha256(data).digest()
    if found != expected:
        raise TaskError(
            f"the server sent a task with hash {found.hex()[:12]}, and {expected.hex()[:12]} was asked for. "
            "Nothing was sent. Ask whoever runs the study."
        )
    from crowdml.protocols import check_for_devices  # models and all: when a task is there, and not before

    task = from_canonical(data)
    protocol = check_for_devices(task)
    if task.as_published:
        raise TaskError(f"task {task.name!r} is as published, with a paper's own formulas: only the simulator runs it.")
    if any(isinstance(row.loss, Unbounded) for row in Price.of(protocol, task).rows):
        raise TaskError(f"task {task.name!r} would let values out without noise. No device runs it.")
    return task, protocol


def consent_to(price: Price) -> Consent:
    """What an owner is shown before joining: computed from the task itself, not from what the server says."""
    task, whole, masked = price.task, price.whole, price.colluders is not None
    return Consent(
        task.hash.hex(),
        task.name,
        task.title,
        task.collects,
        tuple(row.mechanism.promise for row in price.rows),
        whole.sample,
        whole.device,
        price.check_ins,
        price.delta,
        colluders=price.colluders,
        epsilon_sample_alone=whole.sample_alone if masked else None,
        epsilon_device_alone=whole.device_alone if masked else None,
        uses=task.privacy.uses,
        purpose=task.purpose,
    )


class Folder:
    """One device's folder, or that of a fleet."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def make(self) -> None:
        """Make it, for its owner alone. An existing folder is kept, and shut to others."""
        self._refuse_file()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.name == "posix" and self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
        except OSError as error:
            raise DataError(
                f"The folder {self.path} cannot be made: {error.strerror}. Name another --folder."
            ) from error

    def _refuse_file(self) -> None:
        if self.path.is_file():
            raise DataError(
                f"{self.path} is a file, and a device keeps its key and its ledger in a folder. Nothing was done. Name "
                f"another --folder, such as {self.path.stem}-device; a file of rows is named with --source."
            )

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """One process at a time: two would give the same samples twice."""
        self.make()
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise CrowdmlError(
                        f"Another process works in {self.path}. Nothing was done. "
                        "Stop it first, or name another --folder."
                    ) from error
            yield
        finally:
            os.close(handle)

    # --- keys ---

    def key(self, number: int | None = None) -> Key:
        """The device's key; made where this folder has never joined anything. `number`: of a device of a fleet."""
        path = self.path / KEY if number is None else self.path / "keys" / f"{number:06d}.pem"
        if not path.exists() and (number is not None or not self.joined):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            Key.generate().save(path)
        return Key.load(path)

    @property
    def is_fleet(self) -> bool:
        """Whether many devices share this folder."""
        return (self.path / "keys").is_dir()

    # --- what is remembered ---

    @property
    def joined(self) -> bool:
        return self.server is not None

    @property
    def server(self) -> Server | None:
        found = self._read(DEVICE).get("server")
        return None if found is None else Server(**found)

    def pin(self, server: Server) -> None:
        """Remember the server. Its key never changes: one that does is another server."""
        known = self.server
        if known is not None and known.key != server.key:
            raise CrowdmlError(
                f"{server.url} signs with the key {server.key[:12]}, and this device knows its server by "
                f"{known.key[:12]}. "
                "Nothing was sent. Ask whoever runs the study. Another server needs another --folder, with a ledger "
                "and a budget of its own: what is given there is not counted here."
            )
        self._write(DEVICE, {**self._read(DEVICE), "server": asdict(server)})

    @property
    def authority(self) -> str | None:
        """The certificates to trust instead of the system's, as they were when the device joined."""
        copy = self.path / AUTHORITY
        if copy.exists():
            return str(copy)
        return None if self.server is None else self.server.ca

    def trust(self, certificates: Path | str) -> None:
        """Keep a copy of the owner's certificates: the file that they came from may go."""
        try:
            data = Path(certificates).read_bytes()
        except OSError as error:
            raise DataError(f"{certificates} cannot be read: {error.strerror}.") from error
        self._replace(Path(AUTHORITY), data)

    @property
    def budget(self) -> OwnerBudget | None:
        found = self._read(DEVICE).get("budget")
        return None if found is None else OwnerBudget(**found)

    def set_budget(self, budget: OwnerBudget) -> None:
        _ = budget.to_give_under()  # refuse one that cannot be kept
        self._write(DEVICE, {**self._read(DEVICE), "budget": asdict(budget)})

    def place(self, task: bytes) -> int | None:
        """Where in the task's list this device stands; None where it has not said so yet."""
        return self._read(DEVICE).get("places", {}).get(task.hex())

    def stand(self, task: bytes, place: int) -> None:
        """Remember the place that the server gave this device: for good."""
        places = {**self._read(DEVICE).get("places", {}), task.hex(): place}
        self._write(DEVICE, {**self._read(DEVICE), "places": places})

    @property
    def exhausted(self) -> frozenset[int]:
        """Devices whose ledger was lost, and of which nobody knows what they gave. They give nothing more."""
        return frozenset(self._read(DEVICE).get("exhausted", ()))

    @property
    def recovered(self) -> frozenset[int]:
        """Devices whose ledger began from the totals of a signed statement: which task took them is not known."""
        return frozenset(self._read(DEVICE).get("recovered", ()))

    def note_recovery(self, recovered: frozenset[int], exhausted: frozenset[int]) -> None:
        noted = {"recovered": sorted(recovered | self.recovered), "exhausted": sorted(exhausted | self.exhausted)}
        self._write(DEVICE, {**self._read(DEVICE), **noted})

    # --- consent ---

    def accept(self, task: Task, shown: Consent) -> None:
        """Keep the task, byte for byte, and what its owner was shown."""
        (self.path / "tasks").mkdir(mode=0o700, exist_ok=True)
        self._replace(Path("tasks") / f"{shown.task}.json", task.canonical)
        self._write(CONSENT, {**self._read(CONSENT), shown.task: asdict(shown)})

    def forget(self, hash_: str) -> None:
        """Drop a consent whose join was refused, and its task: nothing was given under it."""
        self._write(CONSENT, {known: each for known, each in self._read(CONSENT).items() if known != hash_})
        (self.path / "tasks" / f"{hash_}.json").unlink(missing_ok=True)

    def consents(self) -> dict[str, Consent]:
        found: dict[str, dict[str, Any]] = self._read(CONSENT)
        return {hash_: replace(Consent(**each), promises=tuple(each["promises"])) for hash_, each in found.items()}

    def accepted(self, hash_: bytes) -> tuple[Task, Protocol]:
        """The task that the owner accepted under this hash, and no other, if a device may still give to it."""
        return readable_task(self._accepted(hash_), hash_)

    def consented(self, hash_: bytes) -> Task:
        """The task that the owner accepted under this hash, to read what was given: also one that a device may not run
        any more."""
        return from_canonical(self._accepted(hash_))

    def _accepted(self, hash_: bytes) -> bytes:
        if hash_.hex() not in self.consents():
            raise TaskError(
                f"task {hash_.hex()[:12]} is not what the owner of this device accepted. Nothing was sent. "
                "Join it with `crowdml join`, which shows its price first."
            )
        try:
            return (self.path / "tasks" / f"{hash_.hex()}.json").read_bytes()
        except OSError as error:
            raise DataError(f"The accepted task {hash_.hex()[:12]} cannot be read: {error.strerror}.") from error

    # --- public files that tasks name ---

    def artefact(self, sha256: str) -> bytes | None:
        """The artefact of this hash, if it is in the folder as it was."""
        path = self.path / ARTEFACTS / f"{sha256}{artefacts.ENDING}"
        try:
            with path.open("rb") as file:
                return artefacts.checked(file.read(artefacts.LARGEST + 1), sha256, str(path))
        except (OSError, DataError):  # another file is fetched in its place
            return None

    def keep_artefact(self, data: bytes, sha256: str) -> None:
        """Keep an artefact that was checked, whole or not at all."""
        (self.path / ARTEFACTS).mkdir(mode=0o700, exist_ok=True)
        self._replace(Path(ARTEFACTS) / f"{sha256}{artefacts.ENDING}", data)

    # --- the ledger ---

    @property
    def lost(self) -> bool:
        """Whether this device has joined and its ledger is gone: then what it gave is not known."""
        return self.joined and not (self.path / LEDGER).exists()

    def ledger(self) -> Ledger:
        if self.lost:
            raise LedgerError(
                f"the ledger {self.path / LEDGER} is not there: what this device has given is not known. Nothing was "
                "sent. `crowdml join` asks the server for the device's last signed statement."
            )
        return Ledger(self.path / LEDGER)

    @contextlib.contextmanager
    def new_ledger(self) -> Generator[Ledger]:
        """A ledger that takes the place of a lost one when it is complete."""
        import tempfile

        with tempfile.TemporaryDirectory(prefix=".recovery-", dir=self.path) as draft:
            path = Path(draft) / LEDGER
            with Ledger(path) as ledger:
                yield ledger
            for beside in ("-wal", "-shm", "-journal"):  # what is left of the lost one would be taken for its log
                (self.path / f"{LEDGER}{beside}").unlink(missing_ok=True)
            os.replace(path, self.path / LEDGER)  # SQLite has folded its log into the file on the last close
            _sync(self.path)

    @contextlib.contextmanager
    def marks(self) -> Generator[Marks]:
        """Which message each device sealed last: written before it is sent, read where the ledger is lost or old."""
        marks = Marks(self.path / GIVEN, lambda data: self._replace(Path(GIVEN), data))
        try:
            yield marks
        finally:
            marks.close()

    def marked(self) -> dict[int, Marked]:
        """What `given.log` says of each device."""
        return read_marks(self.path / GIVEN)

    @property
    def untouched(self) -> bool:
        """Whether nobody has used this folder yet: it is not there, or empty but for the lock."""
        return not self.path.exists() or all(each.name == LOCK for each in self.path.iterdir())

    def erase(self) -> None:
        """Forget everything: key, ledger, samples. It cannot be undone."""
        import shutil

        shutil.rmtree(self.path)

    # --- files ---

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            self._refuse_file()
            raise
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path / name} cannot be read: {error}. Nothing was sent. Mend it by hand: an older copy may not "
                "know any more that this device gives nothing more, or what its owner has set since."
            ) from error

    def _write(self, name: str, values: dict[str, Any]) -> None:
        self._replace(Path(name), (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())

    def _replace(self, name: Path, data: bytes) -> None:
        target = self.path / name
        try:
            import tempfile

            handle, draft = tempfile.mkstemp(prefix=f".{name.name}-", dir=target.parent)  # mode 0600
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
            _sync(target.parent)
        except OSError as error:
            raise DataError(f"{target} cannot be written: {error.strerror}. Check the disk and try again.") from error


def _sync(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
