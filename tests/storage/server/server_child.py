"""A process of its own for the tests of the server's store: it appends until it is killed, or its disk is full."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from server_builders import NOW, TASK, check_in, name, prepare

from crowdml.storage.server import Entry, Store, StoreError

DEVICES = 5


def appends(url: str) -> None:
    """Append, snapshot and reduce for ever; say each acknowledged entry in one write."""
    with Store(url) as store:
        if store.task(TASK) is None:
            prepare(store, DEVICES)
        seqs = {device: last.seq for device, last in store.last_seq(TASK).items()}
        turn = store.head(TASK).index
        while True:
            rows = []
            for number in range(DEVICES)[: 1 + turn % DEVICES]:
                seqs[name(number)] = seqs.get(name(number), 0) + 1
                rows.append(check_in(number, seqs[name(number)], size=3000))
            answers = store.append(TASK, rows)
            assert all(isinstance(answer, Entry) and answer.is_new for answer in answers), answers
            sys.stdout.write("".join(f"{a.index} {a.device} {a.seq} {a.hash.hex()} {a.chain.hex()}\n" for a in answers))
            sys.stdout.flush()
            turn += 1
            if turn % 4 == 0:
                head = store.head(TASK)
                store.snapshot(TASK, head.index, head.chain, b"state after %d" % head.index)
            if turn % 8 == 0:
                store.reduce(TASK, head.index)


def posts(url: str) -> None:
    """Post letters from five places for ever, three of each kept; say each acknowledged entry in one write."""
    with Store(url) as store:
        if store.task(TASK) is None:
            prepare(store, DEVICES)
        for number in range(DEVICES):
            assert store.claim(TASK, number, name(number)) in ("new", "again")
        seqs = {device: last.seq for device, last in store.last_seq(TASK).items()}
        while True:
            seqs = {name(number): seqs.get(name(number), 0) + 1 for number in range(DEVICES)}
            rows = [check_in(number, seqs[name(number)], size=3000) for number in range(DEVICES)]
            answers = store.post(TASK, rows, range(DEVICES), 3)
            assert all(isinstance(answer, Entry) and answer.is_new for answer in answers), answers
            sys.stdout.write("".join(f"{answer.index}\n" for answer in answers if isinstance(answer, Entry)))
            sys.stdout.flush()


def full(path: str) -> None:
    """Fill the disk with batches, say what happened, then make room and go on."""
    with Store(path) as store:
        prepare(store, DEVICES)
        room = Path(f"{path}-wal").stat().st_size + 200_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        seq = 0
        try:
            while True:
                store.append(TASK, [check_in(number, seq + 1, size=3000) for number in range(DEVICES)])
                seq += 1
        except StoreError as error:
            print(seq, error, flush=True)
        assert store.head(TASK).index == DEVICES * seq
        assert store.verify_chain(TASK).index == DEVICES * seq
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for number in (1, 2):
            store.append(TASK, [check_in(each, seq + number, size=3000) for each in range(DEVICES)])


def born(path: str) -> None:
    """Open a new database where there is no room for one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        Store(path)
    except StoreError as error:
        print(error, flush=True)


def opens(url: str) -> None:
    """Wait for a word, then open the database: so that several do it at once."""
    print("ready", flush=True)
    sys.stdin.readline()
    with Store(url) as store:
        print(store.add_task(b"a task", "digits", NOW).hex(), flush=True)


if __name__ == "__main__":
    {"appends": appends, "posts": posts, "full": full, "born": born, "opens": opens}[sys.argv[1]](sys.argv[2])
