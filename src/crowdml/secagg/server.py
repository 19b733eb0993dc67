"""The server's side of a round: it collects, passes on, adds, and takes the masks off the sum.

Pure: `hear` takes a message of an authenticated device, `close` ends a phase when its deadline has come or everyone has
answered, `tell` says what a device is told now. The shell owns deadlines, sockets and storage. A masked vector is added
when it arrives, and only its hash is kept. A round ends `summed`, or `abandoned` with the reason, nothing unmasked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crowdml.arrays import Array, Integers
from crowdml.errors import ProtocolError
from crowdml.secagg import masks, ring, sealed, shamir
from crowdml.secagg.cohort import Roster, pack_roster, read_roster
from crowdml.secagg.masks import Binding
from crowdml.secagg.messages import (
    Advert,
    Agreement,
    Agreements,
    Cohort,
    Held,
    Masked,
    Message,
    Reveal,
    Shares,
    Survivors,
    binary,
    bitmap,
    decode,
    encode,
    members,
    number,
    seed_commitment,
    survivors_bytes,
    table,
    text,
)
from crowdml.secagg.refusals import Refused
from crowdml.secagg.terms import Terms
from crowdml.wire.keys import device_id, verify

ADVERTISE, SHARE, MASK, AGREE, REVEAL = "advertise", "share", "mask", "agree", "reveal"
SUMMED, ABANDONED = "summed", "abandoned"
PHASES = (ADVERTISE, SHARE, MASK, AGREE, REVEAL, SUMMED)

PATIENCE = 3
"""Windows in which one device above the minimum is waited for, after the margin has shrunk to nothing."""
ATTEMPTS = 32
"""With how many sets of holders a secret is tried that did not come back right: some of them may lie."""
NAMED = 8
"""Devices of each kind that an operator is told of by name."""
DECODED, COMPARED, GLANCED = 8, 64, 4
"""After each attempt: secrets whose shares are decoded with errors, and secrets whose other shares are looked at; of
these a few where all went well, so that a liar is seen whom nobody asked."""


@dataclass(frozen=True)
class ServerRound:
    """All that the server keeps of a round. Tables are by index in the cohort; `adverts` by the device's id."""

    round: int = number()
    phase: str = text()
    cause: str = text()  # it was abandoned: in a word
    why: str = text()  # and in a sentence
    blamed: str = text()  # whose shares were wrong, for the operator alone
    adverts: Mapping[str, bytes] = table(named=True)
    roster: bytes = binary()
    shares: Mapping[int, bytes] = table()
    sharers: bytes = binary()
    publication: bytes = binary()  # the hash of what this cohort works with
    masked: Mapping[int, bytes] = table()  # hashes
    body: bytes = binary()  # the sum of masked vectors, then of the vectors
    survivors: bytes = binary()
    agreements: Mapping[int, bytes] = table()
    reveals: Mapping[int, bytes] = table()

    def __repr__(self) -> str:
        return f"ServerRound(round {self.round}, {self.phase}{': ' + self.why if self.why else ''})"

    def encode(self) -> bytes:
        return encode(self)

    @staticmethod
    def decode(data: bytes) -> ServerRound:
        return decode(ServerRound, data)


def begin(round: int) -> ServerRound:  # noqa: A002  our word
    """Open a round; the number must be above that of every earlier round of the task, abandoned ones included."""
    return ServerRound(round, ADVERTISE, "", "", "", {}, b"", {}, b"", b"", {}, b"", b"", {}, {})


def enough_devices(least: int, most: int, windows: int) -> int:
    """With how many devices a cohort is fixed when its window is over, after so many windows with too few of them.

    Enough is the minimum and a quarter of the room above it, for some will go missing; half of that margin after
    each further window, so that a small crowd gets its round. Down to one: with the bare minimum a single device
    that vanishes costs everybody the round, so it is taken only if nobody else came for `PATIENCE` more windows.
    """
    quarter = math.ceil((most - least) / 4)
    margin = quarter >> windows
    if not margin and windows < quarter.bit_length() + PATIENCE:
        margin = min(1, most - least)
    return least + margin


def hear(terms: Terms, state: ServerRound, sender: str, message: Message) -> ServerRound:
    """Take a message of `sender`, whom the shell has authenticated. Twice the same is once; late is Refused."""
    if message.round != state.round:
        raise Refused(f"A message of round {message.round} came in round {state.round}.")
    if isinstance(message, Advert):
        return _hear_advert(terms, state, sender, message)
    if not state.roster:
        raise Refused("The cohort is not fixed yet.")
    roster = read_roster(terms, state.round, state.roster)
    own = roster.index(sender)
    if own is None:
        raise Refused(f"Device {sender} is not in the cohort of round {state.round}.")
    if isinstance(message, Shares):
        if not _is_new(state, SHARE, state.shares.get(own), message.sealed):
            return state
        if len(message.sealed) != roster.plan.neighbours * sealed.SEALED_SIZE:
            raise Refused(f"{roster.plan.neighbours} neighbours get a share each; these are not as many.")
        return replace(state, shares={**state.shares, own: message.sealed})
    if isinstance(message, Masked):
        return _hear_masked(terms, state, roster, own, message)
    if isinstance(message, Agreement):
        if not _is_new(state, AGREE, state.agreements.get(own), message.signature):
            return state
        if not members(state.survivors, len(roster))[own]:
            raise Refused(f"Device {sender} is not among the survivors.")
        view = roster.view(state.sharers, state.publication)
        signed = survivors_bytes(terms.task, state.round, view, state.survivors)
        if not verify(roster.publics[own], message.signature, signed):
            raise Refused(f"Device {sender} did not sign these survivors.")
        return replace(state, agreements={**state.agreements, own: message.signature})
    if isinstance(message, Reveal):
        packed = encode(message)
        if not _is_new(state, REVEAL, state.reveals.get(own), packed):
            return state
        if not members(state.survivors, len(roster))[own]:
            raise Refused(f"Device {sender} is not among the survivors.")
        around = roster.neighbours[own]
        held = members(message.held, int(members(state.sharers, len(roster))[around].sum()))
        if len(message.shares) != int(held.sum()) * shamir.SHARE_SIZE:
            raise Refused("The shares are not as many as the list of those held says.")
        return replace(state, reveals={**state.reveals, own: packed})
    raise Refused(f"A device does not send a {message.kind}.")


def _is_new(state: ServerRound, phase: str, before: bytes | None, now: bytes) -> bool:
    if before == now:
        return False
    if before is not None:
        raise Refused(f"This device said something else before in round {state.round}; it stays at that.")
    if state.phase != phase:
        raise Refused(f"Round {state.round} is at {state.phase!r}; this belongs to {phase!r}. It was not looked at.")
    return True


def _hear_advert(terms: Terms, state: ServerRound, sender: str, advert: Advert) -> ServerRound:
    packed = encode(advert)
    if not _is_new(state, ADVERTISE, state.adverts.get(sender), packed):
        return state
    if len(state.adverts) >= terms.largest:
        raise Refused(f"The cohort of round {state.round} is full. Wait for the next round.")
    if device_id(advert.public) != sender or not advert.verify(terms.task):
        raise Refused(f"Device {sender} did not sign these keys for round {state.round}.")
    masks.check_point(advert.pair)
    masks.check_point(advert.seal)
    return replace(state, adverts={**state.adverts, sender: packed})


def can_mask(terms: Terms, state: ServerRound, sender: str, message: Masked) -> bool:
    """Whether `hear` would add this vector: False if it did before. Refused like there; nothing is added."""
    if message.round != state.round or not state.roster:
        raise Refused(f"A masked vector of round {message.round} came in round {state.round}, phase {state.phase!r}.")
    roster = read_roster(terms, state.round, state.roster)
    own = roster.index(sender)
    if own is None:
        raise Refused(f"Device {sender} is not in the cohort of round {state.round}.")
    return _is_masked_new(terms, state, roster, own, message, hashlib.sha256(message.body).digest())


def _is_masked_new(terms: Terms, state: ServerRound, roster: Roster, own: int, message: Masked, hashed: bytes) -> bool:
    if not _is_new(state, MASK, state.masked.get(own), hashed):
        return False
    if not members(state.sharers, len(roster))[own]:
        raise Refused(f"Device {roster.ids[own]} delivered no shares in time.")
    if message.view != roster.view(state.sharers, state.publication) or len(message.body) != terms.size:
        raise Refused(f"A masked body of this round has {terms.size:,} bytes and the hash of this cohort.")
    return True


def _hear_masked(terms: Terms, state: ServerRound, roster: Roster, own: int, message: Masked) -> ServerRound:
    hashed = hashlib.sha256(message.body).digest()
    if not _is_masked_new(terms, state, roster, own, message, hashed):
        return state
    body = add(terms, state.body, message.body)
    return replace(state, masked={**state.masked, own: hashed}, body=body)


def add(terms: Terms, total: bytes, vector: bytes) -> bytes:
    """One more masked vector in the sum, field by field in its ring."""
    pairs = zip(_elements(terms, total), _elements(terms, vector), strict=True)
    return b"".join(ring.to_bytes(one + other) for one, other in pairs)


def _elements(terms: Terms, body: bytes) -> list[Array]:
    parts: list[Array] = []
    at = 0
    for field in terms.fields:
        parts.append(ring.from_bytes(body[at : at + field.size], field.bits, field.length))
        at += field.size
    return parts


def expected(terms: Terms, state: ServerRound) -> frozenset[str]:
    """Those from whom a message is still to come in this phase. Empty while devices advertise: anyone may."""
    if state.phase in (ADVERTISE, SUMMED, ABANDONED):
        return frozenset()
    roster = read_roster(terms, state.round, state.roster)
    everyone = set(range(len(roster)))
    survivors = set(np.flatnonzero(members(state.survivors, len(roster))).tolist()) if state.survivors else set[int]()
    waiting = {
        SHARE: lambda: everyone - set(state.shares),
        MASK: lambda: set(np.flatnonzero(members(state.sharers, len(roster))).tolist()) - set(state.masked),
        AGREE: lambda: survivors - set(state.agreements),
        REVEAL: lambda: set(state.agreements) - set(state.reveals),
    }[state.phase]()
    return frozenset(roster.ids[index] for index in waiting)


def is_complete(terms: Terms, state: ServerRound) -> bool:
    """Whether the phase can be closed before its deadline: nobody is missing."""
    if state.phase == ADVERTISE:
        return len(state.adverts) >= terms.largest
    return state.phase in PHASES[1:-1] and not expected(terms, state)


def takes_part(terms: Terms, state: ServerRound, device: str) -> bool:
    """Whether the round still counts on this device: it is in the cohort, and missed no phase that is over.

    Nobody does while devices advertise, or once it ended.
    """
    return may_be_summed(terms, state, device) and (
        state.phase != REVEAL or read_roster(terms, state.round, state.roster).index(device) in state.agreements
    )


def may_be_summed(terms: Terms, state: ServerRound, device: str) -> bool:
    """Whether the vector of this device is in the sum, or can still come into it. False before the cohort is fixed, and
    once the round ended."""
    if state.phase in (ADVERTISE, SUMMED, ABANDONED):
        return False
    roster = read_roster(terms, state.round, state.roster)
    own = roster.index(device)
    if own is None or state.phase == SHARE:
        return own is not None
    return bool(members(state.sharers if state.phase == MASK else state.survivors, len(roster))[own])


def has_answered(terms: Terms, state: ServerRound, device: str) -> bool:
    """Whether the message of this device in this phase is here."""
    if state.phase == ADVERTISE:
        return device in state.adverts
    if state.phase in (SUMMED, ABANDONED):
        return False
    own = read_roster(terms, state.round, state.roster).index(device)
    heard = {SHARE: state.shares, MASK: state.masked, AGREE: state.agreements, REVEAL: state.reveals}[state.phase]
    return own is not None and own in heard


def tell(terms: Terms, state: ServerRound, device: str) -> Message | None:
    """What this device is told in this phase; None if nothing is."""
    if state.phase in (ADVERTISE, SUMMED, ABANDONED):
        return None
    roster = read_roster(terms, state.round, state.roster)
    own = roster.index(device)
    if own is None:
        return None
    around = roster.neighbours[own]
    if state.phase == SHARE:
        bodies = _bodies(tuple(state.adverts[one] for one in roster.ids))
        return Cohort(state.round, state.roster, b"".join(bodies[peer] for peer in around.tolist()))
    sharers = members(state.sharers, len(roster))
    if state.phase == MASK:
        if not sharers[own]:
            return None
        letters: list[bytes] = []
        for peer in around[sharers[around]].tolist():
            at = int(np.searchsorted(roster.neighbours[peer], own)) * sealed.SEALED_SIZE
            letters.append(state.shares[peer][at : at + sealed.SEALED_SIZE])
        return Held(state.round, state.sharers, b"".join(letters))
    if not members(state.survivors, len(roster))[own]:
        return None
    if state.phase == AGREE:
        return Survivors(state.round, state.survivors)
    if own not in state.agreements:
        return None
    signers = np.zeros(len(roster), bool)
    chosen = [one for one in sorted(state.agreements) if one != own][: roster.plan.quorum]
    signers[chosen] = True
    return Agreements(state.round, bitmap(signers), b"".join(state.agreements[one] for one in chosen))


@lru_cache(maxsize=4)
def _bodies(adverts: tuple[bytes, ...]) -> list[bytes]:
    """The body of each advert of the cohort. Every device is told some of them: they are unpacked once."""
    return [decode(Advert, packed).body for packed in adverts]


def close(terms: Terms, state: ServerRound, publication: bytes = b"") -> ServerRound:
    """End the phase: on to the next one with those who answered, or abandon the round.

    `publication`: the hash of what the cohort works with from now on, where the phase of shares ends. Devices bind
    their masks to what they were shown, so who was shown something else is in no sum.
    """
    if state.phase == ADVERTISE:
        return _close_advertise(terms, state)
    if state.phase not in PHASES[1:-1]:
        raise ProtocolError(f"Round {state.round} is {state.phase}; there is nothing to close.")
    roster = read_roster(terms, state.round, state.roster)
    plan = roster.plan
    if state.phase == SHARE:
        sharers = _chosen(roster, state.shares)
        if sharers.sum() < plan.survivors:
            return abandon(
                state, "shares", f"{int(sharers.sum())} devices delivered shares; {plan.survivors} are needed"
            )
        zeros = bytes(terms.size)
        return replace(state, phase=MASK, sharers=bitmap(sharers), publication=publication, body=zeros)
    if state.phase == MASK:
        survivors = _chosen(roster, state.masked)
        if survivors.sum() < plan.survivors:
            return abandon(state, "survivors", f"{int(survivors.sum())} devices survived; {plan.survivors} are needed")
        around = survivors[roster.neighbours].sum(1)[members(state.sharers, len(roster))]
        if around.min() < plan.threshold:
            return abandon(
                state,
                "neighbours",
                f"a device has {int(around.min())} neighbours left; {plan.threshold} are needed for its secret",
            )
        return replace(state, phase=AGREE, survivors=bitmap(survivors))
    if state.phase == AGREE:
        if len(state.agreements) < plan.quorum + 1:
            return abandon(
                state,
                "agreements",
                f"{len(state.agreements)} devices signed the survivors; {plan.quorum + 1} are needed",
            )
        return replace(state, phase=REVEAL)
    return _sum(terms, state, roster)


def _close_advertise(terms: Terms, state: ServerRound) -> ServerRound:
    if len(state.adverts) < terms.smallest:
        return abandon(state, "devices", f"{len(state.adverts)} devices came; {terms.smallest} are needed")
    roster = pack_roster([decode(Advert, packed) for packed in state.adverts.values()])
    return replace(state, phase=SHARE, roster=roster)


def abandon(state: ServerRound, cause: str, why: str) -> ServerRound:
    """The end without a sum: the masked total is dropped too, so that later shares are of no use."""
    nothing: dict[Any, bytes] = {}
    return replace(
        state, phase=ABANDONED, cause=cause, why=why, adverts=nothing, shares=nothing, body=b"", agreements=nothing,
        reveals=nothing,
    )  # fmt: skip


def _chosen(roster: Roster, present: Mapping[int, Any]) -> Array:
    chosen = np.zeros(len(roster), bool)
    chosen[list(present)] = True
    return chosen


def _sum(terms: Terms, state: ServerRound, roster: Roster) -> ServerRound:
    """Rebuild the secrets, check each against what its owner signed, take off the masks, and check the bound."""
    sharers, survivors = members(state.sharers, len(roster)), members(state.survivors, len(roster))
    adverts = [decode(Advert, state.adverts[one]) for one in roster.ids]
    rebuilt = _rebuild(state, roster, adverts, sharers, survivors)
    secrets = rebuilt.secrets
    state = replace(state, blamed=_blamed(terms, roster, rebuilt))
    lost = [index for index in np.flatnonzero(sharers).tolist() if index not in secrets]
    if lost:
        return abandon(
            state,
            "secrets",
            f"the secrets of {len(lost)} devices did not come back: shares are missing or wrong "
            f"({len(state.reveals)} devices revealed, {roster.plan.threshold} neighbours are needed)",
        )
    salt = Binding(terms.task, state.round, roster.view(state.sharers, state.publication)).salt
    pairs: list[tuple[str, str, bytes]] = []  # survivor, missing, their secret
    for missing in np.flatnonzero(sharers & ~survivors).tolist():
        private = X25519PrivateKey.from_private_bytes(secrets[missing])
        around = roster.neighbours[missing]
        pairs.extend(
            (roster.ids[peer], roster.ids[missing], masks.agree(private, adverts[peer].pair))
            for peer in around[survivors[around]].tolist()
        )
    unmasked: list[bytes] = []
    left = int(survivors.sum())
    for field, masked in zip(terms.fields, _elements(terms, state.body), strict=True):
        elements = masked.copy()
        keys = [
            (masks.self_key(secrets[one], salt, roster.ids[one], field.tag), -1)
            for one in np.flatnonzero(survivors).tolist()
        ]
        for survivor, missing, secret in pairs:
            keys.append((masks.pair_key(secret, salt, survivor, missing, field.tag), -1 if survivor < missing else 1))
        masks.add_stream(elements, keys)
        found = ring.decode(elements, field.bits)
        largest = max(int(found.max()), -int(found.min()))
        if largest > left * field.bound + field.slack:
            return abandon(
                state,
                "bound",
                f"the sum of {field.tag!r} has an entry of magnitude {largest:,}, and {left} devices with their noise "
                f"reach {left * field.bound + field.slack:,}: somebody sent what the task does not allow",
            )
        unmasked.append(ring.to_bytes(elements))
    return replace(state, phase=SUMMED, adverts={}, shares={}, agreements={}, reveals={}, body=b"".join(unmasked))


class Rebuilt(NamedTuple):
    """Secrets by index of their owners; of how many each holder's share was wrong, among those that were compared; how
    many of those who revealed could not open the letter of an owner; and the owners whose secret did not come back
    though enough neighbours had a share of it."""

    secrets: dict[int, bytes]
    blame: Array
    sealed: Array
    useless: list[int]


def _rebuild(state: ServerRound, roster: Roster, adverts: list[Advert], sharers: Array, survivors: Array) -> Rebuilt:
    """Secrets by index: of a survivor its seed, of a missing one its pair key. Those that verify, and no others.

    Holders may lie. A few secrets are decoded with errors; where one verifies, a holder whose share of it lies off its
    polynomial is blamed, and those with the least blame are asked first from then on. They are not left out: an owner
    may have dealt the wrong share itself, and so a few owners could take away honest holders from everybody.
    """
    threshold = roster.plan.threshold
    shown: dict[int, dict[int, Array]] = {index: {} for index in np.flatnonzero(sharers).tolist()}
    unopened = np.zeros(len(roster), np.int64)
    for holder in sorted(state.reveals):
        message = decode(Reveal, state.reveals[holder])
        around = roster.neighbours[holder][sharers[roster.neighbours[holder]]]
        held = members(message.held, len(around))
        unopened[around[~held]] += 1
        for owner, one in zip(around[held].tolist(), shamir.from_bytes(message.shares), strict=True):
            shown[owner][holder] = one
    found: dict[int, bytes] = {}
    blame = np.zeros(len(roster), np.int64)
    waiting = [owner for owner, shares in shown.items() if len(shares) >= threshold]
    undecoded = list(waiting)
    for attempt in range(ATTEMPTS):
        if not waiting:
            break
        chosen = {owner: _some(list(shown[owner]), threshold, blame, owner, attempt) for owner in waiting}
        if attempt:
            undecoded = [owner for owner in undecoded if owner not in found]
            many = len(undecoded) if attempt == ATTEMPTS - 1 else DECODED
            for owner in undecoded[:many]:
                chosen[owner] = _without_errors(shown[owner], threshold) or chosen[owner]
            undecoded = undecoded[many:]
        points = np.array([chosen[owner] for owner in waiting]) + 1
        shares = np.array([[shown[owner][holder] for holder in chosen[owner]] for owner in waiting])
        verified = {
            owner: secret
            for owner, secret in zip(waiting, shamir.join(points, shares), strict=True)
            if secret is not None and _is_right(adverts[owner], secret, survived=bool(survivors[owner]))
        }
        found |= verified
        waiting = [owner for owner in waiting if owner not in found and len(shown[owner]) > threshold]
        many = COMPARED if waiting or attempt else GLANCED
        for owner in list(verified)[:: max(1, len(verified) // many)]:
            blame[_off(shown[owner], chosen[owner])] += 1
    enough = [owner for owner, shares in shown.items() if len(shares) >= threshold]
    return Rebuilt(found, blame, unopened, [owner for owner in enough if owner not in found])


def _blamed(terms: Terms, roster: Roster, rebuilt: Rebuilt) -> str:
    """A sentence that names the devices at fault: those that revealed wrong shares of more devices than may have dealt
    wrong ones, those whose shares more devices could not open than may lie, and those whose shares gave no secret.

    An owner can deal a wrong share to an honest holder, and a holder can say of anyone that it could not open its
    letter. If at most `colluders` lie, and at most one where none are counted on, all that the first two name have.
    """
    said: list[str] = []
    came = np.isin(np.arange(len(roster)), list(rebuilt.secrets))
    for counted, what in (
        (rebuilt.blame, "revealed wrong shares of {} devices"),
        (np.where(came, 0, rebuilt.sealed), "dealt shares that {} neighbours could not open"),
    ):
        named = np.flatnonzero(counted > max(1, terms.colluders)).tolist()
        said += [f"device {roster.ids[one]} {what.format(counted[one])}" for one in named[:NAMED]]
        said += [f"{len(named) - NAMED} more did so"] if len(named) > NAMED else []
    said += [
        f"the shares of device {roster.ids[one]} gave no secret: it dealt wrong ones, or too many neighbours lied"
        for one in rebuilt.useless[:NAMED]
    ]
    return "; ".join(said)


def _some(holders: list[int], count: int, blame: Array, owner: int, attempt: int) -> list[int]:
    """`count` of the holders: the first ones, and at later attempts others, those with the least blame first."""
    if attempt == 0:
        return holders[:count]
    drawn = hashlib.shake_256(b"crowdml/secagg/holders/1" + b"%d %d" % (owner, attempt)).digest(8 * len(holders))
    order = np.lexsort((np.frombuffer(drawn, "<u8"), blame[holders]))
    return [holders[place] for place in order[:count].tolist()]


def _without_errors(shares: Mapping[int, Array], threshold: int) -> list[int] | None:
    """As many holders as are needed whose shares lie on one polynomial with most others; None where too many lie."""
    holders = np.array(list(shares))
    wrong = shamir.wrong(holders + 1, np.array(list(shares.values())), threshold)
    return None if wrong is None else holders[~wrong][:threshold].tolist()


def _off(shares: Mapping[int, Array], right: list[int]) -> list[int]:
    """Holders whose shares lie off the polynomial through those of the `right` ones."""
    others = sorted(shares.keys() - set(right))
    if not others:
        return []
    wanted = shamir.at(np.array(others) + 1, np.array(right) + 1, np.array([shares[holder] for holder in right]))
    differs = (wanted != np.array([shares[holder] for holder in others])).any(1)
    return np.array(others)[differs].tolist()


def _is_right(advert: Advert, secret: bytes, *, survived: bool) -> bool:
    """Whether it is what the device signed before the round: its seed by its hash, its pair key by its public half."""
    return seed_commitment(secret) == advert.commitment if survived else masks.public_of(secret) == advert.pair


def sums(terms: Terms, state: ServerRound) -> dict[str, Integers]:
    """The sum of each field over the survivors: exact int64. Only of a round that is summed."""
    if state.phase != SUMMED:
        raise ProtocolError(f"Round {state.round} is {state.phase}; it has no sum.")
    return {
        field.tag: ring.decode(elements, field.bits)
        for field, elements in zip(terms.fields, _elements(terms, state.body), strict=True)
    }
