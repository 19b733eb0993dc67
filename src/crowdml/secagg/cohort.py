"""A cohort as everyone must see it: its devices in order of their ids, its hash, its plan and its graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from crowdml.arrays import Array
from crowdml.secagg.graph import COMPLETE, GraphPlan, circle, neighbours_on
from crowdml.secagg.masks import Binding
from crowdml.secagg.messages import Advert
from crowdml.secagg.refusals import Refused
from crowdml.secagg.terms import Terms
from crowdml.wire.keys import PUBLIC_SIZE, device_id
from crowdml.wire.packing import pack

ENTRY = PUBLIC_SIZE + 32


@dataclass(frozen=True, eq=False)
class Roster:
    """The devices of a round, and what follows from them alone."""

    ids: tuple[str, ...]
    publics: tuple[bytes, ...]
    adverts: tuple[bytes, ...]  # hashes
    hash: bytes
    plan: GraphPlan
    neighbours: Array  # [devices, k], indices in rising order
    sealing: bytes  # the salt under which shares are sealed

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, device: str) -> int | None:
        return self._places.get(device)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {device: place for place, device in enumerate(self.ids)}

    def view(self, sharers: bytes, publication: bytes) -> bytes:
        """The hash of the cohort, of who delivered shares, and of what all of them work with, which is given by its own
        hash: masks and signatures are bound to it."""
        return hashlib.sha256(b"crowdml/secagg/view/1" + pack([self.hash, publication, sharers])).digest()


def pack_roster(adverts: Iterable[Advert]) -> bytes:
    """Public key and hash of the advert of each device, in order of their ids."""
    return b"".join(
        advert.public + advert.hash for advert in sorted(adverts, key=lambda advert: device_id(advert.public))
    )


def read_roster(terms: Terms, round: int, data: bytes) -> Roster:  # noqa: A002  our word
    """What a roster says. Refused if it is too small or too large for the task, or not in strictly rising order.

    The graph's seed is the hash of all that was advertised: nobody chooses it alone, the server included. The last ones
    are remembered: 64 of complete graphs, a third of a megabyte each, and 8 of sparse ones, which take more.
    """
    return (_read_small if len(data) <= COMPLETE * ENTRY else _read_large)(terms, round, data)


def _read(terms: Terms, round: int, data: bytes) -> Roster:  # noqa: A002  our word
    devices, rest = divmod(len(data), ENTRY)
    if rest or not terms.smallest <= devices <= terms.largest:
        raise Refused(
            f"A cohort of this task has {terms.smallest:,} to {terms.largest:,} devices; this one has {devices:,}."
        )
    entries = [data[at : at + ENTRY] for at in range(0, len(data), ENTRY)]
    publics = tuple(entry[:PUBLIC_SIZE] for entry in entries)
    ids = tuple(device_id(public) for public in publics)
    if any(one >= other for one, other in pairwise(ids)):
        raise Refused("The devices of a cohort come in strictly rising order of their ids, each once.")
    found = hashlib.sha256(b"crowdml/secagg/cohort/1" + pack([terms.task, round, data])).digest()
    plan = terms.plan(devices)
    graph = neighbours_on(circle(ids, found) if not plan.complete else [*range(devices)], plan.neighbours)
    sealing = Binding(terms.task, round, found).salt
    return Roster(ids, publics, tuple(entry[PUBLIC_SIZE:] for entry in entries), found, plan, graph, sealing)


_read_small, _read_large = lru_cache(maxsize=64)(_read), lru_cache(maxsize=8)(_read)
