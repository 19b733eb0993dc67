"""Whether a store can be trusted: what `Store.check` reads, and what only the server's own code can say of it.

A backup that was changed where nothing is compared (a password's hash, the text of an event) is known by its SHA-256
alone, which `crowdml backup` prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from crowdml.errors import CrowdmlError
from crowdml.messages import SERVER, decode
from crowdml.server.fold import Fold, uploads_in
from crowdml.storage.server import Snapshot, Store, StoredTask, StoreError
from crowdml.task import from_canonical
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key
from crowdml.wire.transcripts import read_published

SERVER_KEY, SERVER_ID = "server-key", "server-id"
"""Settings: the server's secret key, and the id of its public one."""
CLOSE = 1e-5
"""By how much of itself a weight may differ that is computed again: linear algebra rounds as the machine likes."""


def check_store(store: Store) -> dict[bytes, int]:
    """Verify everything that can be: pages, tables, chains, keys, and that check-ins lead to what was published.

    How long each task's journal is; a StoreError where something is not as it was written.
    """
    lengths = store.check()
    _check_key(store)
    for stored in store.tasks():
        try:
            _check_fold(store, stored)
        except StoreError:
            raise
        except CrowdmlError as error:
            raise store.corrupt(f"task {stored.name!r} cannot be folded again ({error})") from error
        except Exception as error:  # handlers trust a state that they wrote themselves
            raise store.corrupt(f"task {stored.name!r} cannot be folded again ({type(error).__name__})") from error
    return lengths


def _check_key(store: Store) -> None:
    """The key is the one that the server said to be its own, and that its entries of the journal were signed with."""
    secret, noted, wrote = store.setting(SERVER_KEY), store.setting(SERVER_ID), store.server_name()
    if secret is None and noted is None and wrote is None:  # nobody has served from it
        return
    name = "" if secret is None or len(secret) != 32 else Key.from_secret(secret).id
    if not name or (noted is not None and noted != name.encode()) or (wrote is not None and wrote != name):
        raise store.corrupt("the server's key is not the one that it served with")


def _check_fold(store: Store, stored: StoredTask) -> None:
    """The newest snapshot is where the check-ins before it lead, the newest publication is that snapshot's, and every
    check-in since can be folded."""
    task, newest = from_canonical(stored.canonical), store.last_snapshot(stored.hash)
    last, said = store.last_publication(stored.hash), None if newest is None else read_published(newest.published)
    if last is not None:
        if said is None or last.version > said.version:
            raise store.corrupt(f"task {stored.name!r} published version {last.version}, and no snapshot has it")
        if last.version == said.version and (last.kind, last.body) != (said.kind, said.body):
            raise store.corrupt(f"version {last.version} of task {stored.name!r} is not what its snapshot published")
    fold = Fold(task, uploads_in(store, stored.hash))
    masked = task.masking is not None
    start = store.oldest_snapshot(stored.hash)
    if start is not None and newest is not None and start.index == newest.index:
        start = None if _has_all(store, stored.hash, newest.index, masked=masked) else start
    if start is not None:
        fold.resume(start)
    after = 0 if start is None else start.index
    compared = newest is None or after == newest.index
    for index, sender, kind, body in _bodies(store, stored.hash, after, masked=masked):
        if not compared and newest is not None and index > newest.index:
            _compare(store, stored, fold, newest)
            compared = True
        fold.hear(index, kind, body, sender)
    if not compared and newest is not None:
        _compare(store, stored, fold, newest)


def _bodies(store: Store, hash_: bytes, after: int, *, masked: bool) -> Iterator[tuple[int, str, str, bytes]]:
    for index, data in store.totals(hash_, after) if masked else store.tail(hash_, after):
        envelope = open_signed(data).envelope
        yield index, SERVER if masked else envelope.sender, envelope.kind, envelope.body


def _has_all(store: Store, hash_: bytes, upto: int, *, masked: bool) -> bool:
    """Whether every body up to this entry is kept: those of a device that withdrew may be gone."""
    try:
        for index, _ in store.totals(hash_) if masked else store.tail(hash_):
            if index >= upto:
                break
    except StoreError:
        return False
    return True


def _compare(store: Store, stored: StoredTask, fold: Fold, newest: Snapshot) -> None:
    """The snapshot and what it published are where the fold is, but for how another machine rounds its last bits."""
    said, kept = read_published(newest.published), Fold(fold.task)
    kept.resume(newest)
    same = fold.reason == said.reason and _is_close(fold.weights, kept.weights)
    if fold.message is not None and same:
        ours, theirs = fold.message, decode(said.kind, said.body)
        same = type(ours) is type(theirs) and int(ours.version) == said.version
        same = same and all(
            _is_close(getattr(ours, each.name), getattr(theirs, each.name)) for each in dataclasses.fields(ours)
        )
    if not same:
        raise store.corrupt(f"the check-ins of task {stored.name!r} lead to another model than its newest snapshot has")


def _is_close(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype.kind not in "biuf":
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    scale = float(np.abs(one).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True))
