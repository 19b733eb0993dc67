"""A device's side of a round: six steps, each a pure function from state and message to state.

`state.sent` is what the step says: commit the state, then send it, and send the same bytes until they are acknowledged.
All chance comes from `root`, drawn once when the round begins, so that a device that was killed repeats itself and
never says a second thing. A step that raises Refused changed nothing and said nothing.

What the device itself makes sure of, whatever the server says, stands in docs/secagg.md under "Who enforces what".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from crowdml.arrays import Integers
from crowdml.errors import TaskError
from crowdml.secagg import masks, ring, sealed, shamir
from crowdml.secagg.cohort import Roster, read_roster
from crowdml.secagg.masks import Binding, derive
from crowdml.secagg.messages import (
    ADVERT_BODY,
    Advert,
    Agreement,
    Agreements,
    Cohort,
    Held,
    Masked,
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
    text,
)
from crowdml.secagg.refusals import Refused
from crowdml.secagg.terms import Terms
from crowdml.wire.keys import SIGNATURE_SIZE, Key, verify

ADVERTISED, SHARED, HELD, MASKED, AGREED, REVEALED = "advertised", "shared", "held", "masked", "agreed", "revealed"


@dataclass(frozen=True)
class DeviceRound:
    """All that a device keeps of a round: plain values, some secret, none of them a sample. Keep it in one transaction
    with the ledger, where only the owner may read."""

    me: str = text()
    round: int = number()
    phase: str = text()
    root: bytes = binary()
    roster: bytes = binary()
    adverts: bytes = binary()
    sharers: bytes = binary()
    publication: bytes = binary()  # its hash
    opened: bytes = binary()
    shares: bytes = binary()
    survivors: bytes = binary()
    sent: bytes = binary()

    def __repr__(self) -> str:
        return f"DeviceRound({self.me}, round {self.round}, {self.phase})"

    def encode(self) -> bytes:
        return encode(self)

    @staticmethod
    def decode(data: bytes) -> DeviceRound:
        return decode(DeviceRound, data)


def advertise(
    terms: Terms,
    round: int,  # noqa: A002  our word
    key: Key,
    *,
    after: int,
    entropy: Callable[[int], bytes] = os.urandom,
) -> DeviceRound:
    """Take part in a round: fresh keys, signed. `after` is the last round of this task that the device ever began; it
    must be on disk, and be raised to `round` in the transaction that keeps the state."""
    if round <= after:
        raise Refused(f"Round {round} was offered after round {after}. A device takes part in each round once.")
    root = entropy(32)
    pair, seal, seed = _secrets(root, terms.task, round)
    advert = Advert.make(terms.task, round, key, masks.public_of(pair), masks.public_of(seal), seed_commitment(seed))
    return DeviceRound(key.id, round, ADVERTISED, root, b"", b"", b"", b"", b"", b"", b"", encode(advert))


def share(terms: Terms, state: DeviceRound, message: Cohort) -> DeviceRound:
    """Look at the cohort, and share both secrets among the neighbours in it."""
    _expect(state, ADVERTISED, message.round)
    roster = read_roster(terms, state.round, message.roster)
    own = roster.index(state.me)
    if own is None or roster.adverts[own] != decode(Advert, state.sent).hash:
        raise Refused("This device, with the keys that it advertised, is not in the cohort that it was shown.")
    neighbours = roster.neighbours[own]
    if len(message.adverts) != len(neighbours) * ADVERT_BODY:
        raise Refused(f"The cohort gives this device {len(neighbours)} neighbours; their keys are not all here.")
    pair, seal, seed = _secrets(state.root, terms.task, state.round)
    sealing = X25519PrivateKey.from_private_bytes(seal)
    coins = Cipher(algorithms.AES(derive(state.root, roster.hash, "coefficients")), modes.CTR(bytes(16))).encryptor()
    shares = shamir.split([pair, seed], roster.plan.threshold, neighbours + 1, lambda size: coins.update(bytes(size)))
    letters: list[bytes] = []
    for at, peer in enumerate(neighbours.tolist()):
        body = message.adverts[at * ADVERT_BODY : (at + 1) * ADVERT_BODY]
        advert = Advert.from_body(state.round, roster.publics[peer], body)
        if advert.hash != roster.adverts[peer] or not advert.verify(terms.task):
            raise Refused(f"The keys of neighbour {roster.ids[peer]} are not those that it signed for this round.")
        masks.check_point(advert.pair)
        secret = masks.agree(sealing, advert.seal)
        content = shamir.to_bytes(shares[at])
        letters.append(sealed.seal(secret, roster.sealing, state.me, roster.ids[peer], content))
    return replace(
        state,
        phase=SHARED,
        roster=message.roster,
        adverts=message.adverts,
        sent=encode(Shares(state.round, b"".join(letters))),
    )


def hold(terms: Terms, state: DeviceRound, message: Held, publication: bytes) -> DeviceRound:
    """Take the neighbours' shares. Nothing is said; now the device may draw its noise and mask.

    `publication` is the hash of what this device was shown to work with. Masks and signatures are bound to it: with
    whoever was shown another one this device shares no mask, and agrees to nothing.

    A letter that does not open is left out: one bad neighbour must not keep this device from taking part.
    """
    _expect(state, SHARED, message.round)
    roster, own = _roster(terms, state)
    sharers = members(message.sharers, len(roster))
    present = roster.neighbours[own][sharers[roster.neighbours[own]]]
    if not sharers[own]:
        raise Refused("This device delivered its shares, and is said not to have.")
    if sharers.sum() < roster.plan.survivors or len(present) < roster.plan.threshold:
        raise Refused(
            f"{int(sharers.sum())} devices delivered shares, {len(present)} of them neighbours; "
            f"{roster.plan.survivors} and {roster.plan.threshold} are needed. Nothing was masked."
        )
    if len(message.sealed) != len(present) * sealed.SEALED_SIZE:
        raise Refused(f"{len(present)} neighbours delivered shares; these are not as many.")
    sealing = X25519PrivateKey.from_private_bytes(_secrets(state.root, terms.task, state.round)[1])
    adverts = _neighbour_adverts(state, roster, own)
    opened: list[bytes | None] = []
    for at, peer in enumerate(present.tolist()):
        letter = message.sealed[at * sealed.SEALED_SIZE : (at + 1) * sealed.SEALED_SIZE]
        secret = masks.agree(sealing, adverts[peer].seal)
        opened.append(sealed.unseal(secret, roster.sealing, roster.ids[peer], state.me, letter))
    return replace(
        state,
        phase=HELD,
        sharers=message.sharers,
        publication=publication,
        opened=bitmap([content is not None for content in opened]),
        shares=b"".join(content or bytes(sealed.CONTENT_SIZE) for content in opened),
        sent=b"",
    )


def mask(terms: Terms, state: DeviceRound, vectors: Mapping[str, Integers]) -> DeviceRound:
    """Mask the integers of this round, noise included: one vector for each field of the terms. This is done once."""
    if state.phase != HELD:
        raise Refused(f"This device has {state.phase} in round {state.round}; it masks once, after it holds shares.")
    roster, _ = _roster(terms, state)
    view = roster.view(state.sharers, state.publication)
    salt = Binding(terms.task, state.round, view).salt
    pair, _, seed = _secrets(state.root, terms.task, state.round)
    secrets = pair_secrets(terms, state, X25519PrivateKey.from_private_bytes(pair))
    body = mask_vectors(terms, vectors, salt, state.me, seed, secrets)
    sent = encode(Masked(state.round, view, body))
    return replace(state, phase=MASKED, sent=sent)


def pair_secrets(terms: Terms, state: DeviceRound, private: X25519PrivateKey) -> dict[str, bytes]:
    """What this device shares with each neighbour that delivered shares: one X25519 each."""
    roster, own = _roster(terms, state)
    adverts = _neighbour_adverts(state, roster, own)
    sharers = members(state.sharers, len(roster))
    return {roster.ids[peer]: masks.agree(private, adverts[peer].pair) for peer in adverts if sharers[peer]}


def mask_vectors(
    terms: Terms, vectors: Mapping[str, Integers], salt: bytes, me: str, seed: bytes, secrets: Mapping[str, bytes]
) -> bytes:
    """Every field as elements, plus the device's own stream, plus or minus one for each neighbour."""
    if set(vectors) != {field.tag for field in terms.fields}:
        raise TaskError(f"The terms mask {[field.tag for field in terms.fields]}; given were {sorted(vectors)}.")
    parts: list[bytes] = []
    for field in terms.fields:
        elements = ring.encode(vectors[field.tag], field.bits)
        if elements.shape != (field.length,):
            raise TaskError(f"{field.tag!r} has {field.length:,} entries in the terms; given were {elements.shape}.")
        keys = [(masks.self_key(seed, salt, me, field.tag), 1)]
        for peer, secret in secrets.items():
            keys.append((masks.pair_key(secret, salt, me, peer, field.tag), 1 if me < peer else -1))
        masks.add_stream(elements, keys)
        parts.append(ring.to_bytes(elements))
    return b"".join(parts)


def agree(terms: Terms, state: DeviceRound, key: Key, message: Survivors) -> DeviceRound:
    """Look at the list of survivors, and sign it if it keeps to the terms. A device signs one list a round."""
    _expect(state, MASKED, message.round)
    roster, own = _roster(terms, state)
    survivors, sharers = members(message.survivors, len(roster)), members(state.sharers, len(roster))
    around = int(survivors[roster.neighbours[own]].sum())
    if (survivors & ~sharers).any():
        raise Refused("A device is called a survivor that never delivered shares.")
    if not survivors[own]:
        raise Refused("This device is called missing. It signs nothing, and reveals nothing.")
    if survivors.sum() < roster.plan.survivors or around < roster.plan.threshold:
        raise Refused(
            f"{int(survivors.sum())} survivors, {around} of them neighbours; {roster.plan.survivors} and "
            f"{roster.plan.threshold} are needed. No share was revealed."
        )
    view = roster.view(state.sharers, state.publication)
    signature = key.sign(survivors_bytes(terms.task, state.round, view, message.survivors))
    return replace(state, phase=AGREED, survivors=message.survivors, sent=encode(Agreement(state.round, signature)))


def reveal(terms: Terms, state: DeviceRound, message: Agreements) -> DeviceRound:
    """Reveal one share of each neighbour, once a quorum of others has signed the same list. All secrets are dropped.

    Of a survivor it is the share of its seed, of a missing one that of its pair key; never both.
    """
    _expect(state, AGREED, message.round)
    roster, own = _roster(terms, state)
    survivors, sharers = members(state.survivors, len(roster)), members(state.sharers, len(roster))
    signers = members(message.signers, len(roster))
    if len(message.signatures) != int(signers.sum()) * SIGNATURE_SIZE:
        raise Refused(f"{int(signers.sum())} signatures are announced; these are not as many.")
    view = roster.view(state.sharers, state.publication)
    signed = survivors_bytes(terms.task, state.round, view, state.survivors)
    found = 0
    for at, signer in enumerate(np.flatnonzero(signers).tolist()):
        if signer == own or not survivors[signer] or found >= roster.plan.quorum:
            continue
        signature = message.signatures[at * SIGNATURE_SIZE : (at + 1) * SIGNATURE_SIZE]
        found += verify(roster.publics[signer], signature, signed)
    if found < roster.plan.quorum:
        raise Refused(
            f"{found} other devices signed the survivors that this device was shown; {roster.plan.quorum} are needed. "
            "No share was revealed."
        )
    present = roster.neighbours[own][sharers[roster.neighbours[own]]]
    opened = members(state.opened, len(present))
    shown: list[bytes] = []
    for at, peer in enumerate(present.tolist()):
        if opened[at]:
            content = state.shares[at * sealed.CONTENT_SIZE : (at + 1) * sealed.CONTENT_SIZE]
            shown.append(content[shamir.SHARE_SIZE :] if survivors[peer] else content[: shamir.SHARE_SIZE])
    sent = encode(Reveal(state.round, state.opened, b"".join(shown)))
    return replace(state, phase=REVEALED, root=b"", shares=b"", opened=b"", adverts=b"", sent=sent)


def _secrets(root: bytes, task: bytes, round: int) -> tuple[bytes, bytes, bytes]:  # noqa: A002
    """The pair key, the sealing key and the seed of the self-mask."""
    if len(root) != 32:
        raise Refused("The secrets of this round are gone: it is over for this device.")
    salt = Binding(task, round, b"").salt
    pair, seal, seed = (derive(root, salt, name) for name in ("pair key", "sealing key", "seed"))
    return pair, seal, seed


def _expect(state: DeviceRound, phase: str, round: int) -> None:  # noqa: A002
    if round != state.round:
        raise Refused(f"A message of round {round} came to a device in round {state.round}.")
    if state.phase != phase:
        raise Refused(
            f"This device has {state.phase} in round {state.round}, and hears this once, after it has {phase}. "
            "It sends again what it sent, and nothing else."
        )


def _roster(terms: Terms, state: DeviceRound) -> tuple[Roster, int]:
    roster = read_roster(terms, state.round, state.roster)
    own = roster.index(state.me)
    assert own is not None, "looked at when the cohort was"
    return roster, own


def _neighbour_adverts(state: DeviceRound, roster: Roster, own: int) -> dict[int, Advert]:
    """By index. They were verified when the cohort was looked at."""
    return {
        peer: Advert.from_body(
            state.round, roster.publics[peer], state.adverts[at * ADVERT_BODY : (at + 1) * ADVERT_BODY]
        )
        for at, peer in enumerate(roster.neighbours[own].tolist())
    }
