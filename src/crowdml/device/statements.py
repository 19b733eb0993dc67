"""What a server can prove to a device: the last message that the device itself signed, with its totals.

A ledger that does not know that message is an older copy of the one that sealed it: samples were given that it does not
count. Nobody but the device can sign such a message, so it is a proof, as a number or a refusal of the server is not.
"""

from __future__ import annotations

import hashlib

from crowdml.storage import Ledger
from crowdml.wire.envelopes import Signed, open_signed
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt
from crowdml.wire.statements import Statement, totals_fell

ROUND_KINDS = ("secagg/agreement/1", "secagg/reveal/1")
"""What a device says in a round after its draw: the server keeps it, with the statement, when the vector is gone."""
EARLY_KINDS = ("secagg/advert/1", "secagg/shares/1")
"""What a device says in a round before its draw. An honest server never shows it as a statement."""


def statement_path(key: Key) -> str:
    """Where a server keeps the last signed statement of the device with this key."""
    return f"/v1/devices/{key.id}/statement"


def open_own(data: bytes, key: Key) -> Signed | None:
    """The message in these bytes, if this device signed it and had given samples by then."""
    try:
        signed = open_signed(data)
    except Problem:
        return None
    return signed if signed.verify(key.public) and signed.statement.samples else None


def is_known(ledger: Ledger, signed: Signed, *, recovered: bool) -> bool:
    """Whether the ledger has this message of its own device. `recovered`: the ledger began from a statement.

    A ledger keeps the hash of every check-in. It keeps none of what was said later in a round: there its totals, and
    where it stands in that round, tell whether it is older. Totals also tell of a ledger that version 0.1 recovered,
    for it does not know the message that it began from.
    """
    if ledger.knows(signed.hash):
        return True
    kind = signed.envelope.kind
    if recovered or kind in ROUND_KINDS or kind in EARLY_KINDS:
        return not _is_short_of(ledger, signed) and (recovered or _reached(ledger, signed))
    # Version 0.1 kept no hash of its first messages: their receipts name it, and those that wait are whole.
    hashes = (hashlib.sha256(each.body).digest() for each in ledger.resend())
    receipts = (open_receipt(each).hash for each in ledger.receipts())
    return signed.hash in hashes or signed.hash in receipts


def _is_short_of(ledger: Ledger, signed: Signed) -> bool:
    """Whether the ledger's totals are below those that the message names."""
    with ledger.reading():
        now = Statement.of(*ledger.after([], 0))
    return totals_fell(signed.said or pack(signed.statement.plain()), pack(now.plain()))


def _reached(ledger: Ledger, signed: Signed) -> bool:
    """Whether the ledger stands where the device stood in the round of this message, or later."""
    from crowdml.device.rounds import has_said  # with its keys and curves: for masked tasks alone

    found = ledger.round(signed.envelope.task)
    if found is None or found.number < signed.envelope.seq:
        return False
    return found.number > signed.envelope.seq or found.body is None or has_said(found.body, signed.envelope.kind)
