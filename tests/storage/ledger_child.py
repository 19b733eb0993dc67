"""A process that writes a ledger and dies, for the tests that look at what it leaves behind.

steps PATH             check in for ever, and say so after each commit, until killed
statements FOLDER N    for n = 1, 2, ...: a process that kills itself before its n-th SQL statement or touch of a
                       file, up to the one that lives; every N-th only
full PATH              fill a disk that is too small, then go on when there is room
born PATH              make a ledger where there is no room for one
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import sys
from pathlib import Path

from ledger_builders import PLENTY, TASK, charge

from crowdml.errors import LedgerError
from crowdml.storage import Ledger
from crowdml.storage.device import file as module

FILE_EVENTS = {"open", "os.chmod", "os.link", "os.remove", "os.rename", "tempfile.mkstemp"}


def step(ledger: Ledger, padding: int = 3000) -> str:
    """One check-in of five fresh samples. Its message names its own span, so that a reader can look for the charges."""
    span, seq = ledger.take_serials(5), ledger.next_seq(TASK)
    text = f"{seq} {span[0]} {span[-1]}"
    charges = [charge(span[0], span[-1]), charge(span[0], span[-1], row="labels")]
    body = text.encode() + b" " + os.urandom(padding)
    ledger.charge(TASK, charges, [PLENTY], outbox={seq: body}, state=text.encode())
    return text


def say(line: str) -> None:
    """In one write: a pipe takes so short a line whole or not at all, and `print` may write it in pieces."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def steps(path: str) -> None:
    with Ledger(path) as ledger:
        while True:
            text = step(ledger)
            say(f"charged {text}")
            if (seq := int(text.split()[0])) % 4 == 3:
                ledger.acknowledge(TASK, seq - 2)
                say(f"acknowledged {seq - 2}")


def die_before(path: str, n: int) -> None:
    count = 0

    def statement(_: object) -> None:
        nonlocal count
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(target: str) -> sqlite3.Connection:
        connection = real_connect(target)
        connection.set_trace_callback(statement)
        return connection

    def touch(event: str, args: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and any(str(each).startswith(path) for each in args):
            statement(event)

    real_connect, module._connect = module._connect, connect
    sys.addaudithook(touch)
    with Ledger(path) as ledger:
        step(ledger, 10)
        step(ledger, 10)
        ledger.acknowledge(TASK, 0)


def statements(folder: str, every: int) -> None:
    n, alive = 1, False
    while not alive:
        home = Path(folder) / str(n)
        home.mkdir()
        child = os.fork()
        if child == 0:
            try:
                die_before(str(home / "ledger.db"), n)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not (alive := status == 0):
            assert os.WIFSIGNALED(status), status
            assert os.WTERMSIG(status) == signal.SIGKILL
        n += every


def full(path: str) -> None:
    with Ledger(path) as ledger:
        step(ledger)
        room = Path(path).stat().st_size + 60_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        done = 1
        try:
            while True:
                step(ledger)
                done += 1
        except LedgerError as error:
            print(done, error, flush=True)
        assert (len(ledger.charges()), len(ledger.resend()), ledger.next_seq(TASK)) == (2 * done, done, done)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _ in range(5):
            step(ledger)


def born(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        Ledger(path)
    except LedgerError as error:
        print(error, flush=True)
    print(*sorted(file.name for file in Path(path).parent.iterdir()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["steps", path]:
            steps(path)
        case ["statements", folder, every]:
            statements(folder, int(every))
        case ["full", path]:
            full(path)
        case ["born", path]:
            born(path)
        case _:
            sys.exit(__doc__)
