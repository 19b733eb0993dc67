"""Whether the server keeps its word about what a device gave: receipts against the key, the chain and a transcript.

What a receipt that verifies proves: the server, by the key that this device pinned when it joined, said that exactly
these bytes are the `index`-th check-in of the task. Two signed receipts that contradict each other convict it.

What the chain adds: the server shows its chain, a hash for each place, and the device computes its own link again from
what it alone knows. So the journal that is shown now still has this check-in, at its place, as it was sent. The other
links only their own devices can check: all of them together check the journal.

What a transcript adds: the message stands at its place in the exported file, word for word. Whether that file leads to
the published weights, `crowdml replay` says.

What none of it proves: that the server shows everyone the same journal (compare the head that it names with others),
or that it computed anything from what was given beyond what a replay repeats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crowdml.device.client import Client, whole_number
from crowdml.device.member import Clock
from crowdml.errors import DataError
from crowdml.storage import Sent
from crowdml.task import from_canonical
from crowdml.wire.keys import Key
from crowdml.wire.packing import Reader
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import Receipt, chain_next, open_receipt
from crowdml.wire.requests import authorize
from crowdml.wire.transcripts import BadTranscript, Entry, read_transcript

HASH = 32
MOST_LINKS = 1024
ATTEMPTS, LONGEST_PAUSE = 5, 10
"""How often a busy server is asked again, and the longest pause in seconds."""


@dataclass
class Verified:
    """What was checked of one task, and every flaw that was found, as sentences."""

    task: bytes
    device: str
    sent: int = 0
    receipts: list[Receipt] = field(default_factory=list)
    contents: dict[int, bytes] = field(default_factory=dict)
    """Hashes of the messages, by their place in the journal."""
    unhashed: int = 0
    """Receipts for messages from before their hash was kept: what they were for was checked when they came."""
    in_chain: int | None = None
    """Receipts whose link the server's chain still has; None where it was not asked."""
    head: tuple[int, str] | None = None
    """The head that the server's publication names: compare it with what others see."""
    in_transcript: int | None = None
    under_masks: int = 0
    """Receipts of a masked task where a transcript was given: it has sums alone, and no message to compare."""
    flaws: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.flaws


def check_receipts(sent: Sequence[Sent], device: str, server_key: bytes) -> list[Verified]:
    """Every receipt of a device: signature, what it is for, and the order of their places. One result for each task."""
    found: dict[bytes, Verified] = {}
    for each in sent:
        result = found.setdefault(each.task, Verified(each.task, device))
        result.sent += 1
        if each.receipt is None:
            continue
        try:
            receipt = open_receipt(each.receipt)
        except Problem as problem:
            result.flaws.append(f"Message {each.seq + 1}: its receipt cannot be read. {problem}")
            continue
        name = f"The receipt for check-in {receipt.seq}"
        if not receipt.verify(server_key):
            result.flaws.append(f"{name} is not signed by the server that this device joined.")
        if (receipt.task, receipt.device) != (each.task, device):
            result.flaws.append(f"{name} is for another task or device.")
        if each.hash is None:
            result.unhashed += 1
        elif receipt.hash != each.hash:
            result.flaws.append(f"{name} is for other bytes than were sent.")
        if result.receipts and not (
            receipt.seq > result.receipts[-1].seq and receipt.index > result.receipts[-1].index
        ):
            result.flaws.append(
                f"{name} has place {receipt.index}, and the one before has {result.receipts[-1].index}."
            )
        result.receipts.append(receipt)
        if each.content is not None:
            result.contents[receipt.index] = each.content
    return list(found.values())


def together(results: Iterable[Verified]) -> list[Verified]:
    """What was checked of many devices, one result for each task; each flaw says whose it is."""
    found: dict[bytes, Verified] = {}
    for each in results:
        whole = found.setdefault(each.task, Verified(each.task, ""))
        whole.sent += each.sent
        whole.receipts += each.receipts
        whole.unhashed += each.unhashed
        whole.head = each.head if whole.head is None or (each.head or (0, ""))[0] > whole.head[0] else whole.head
        for name in ("in_chain", "in_transcript"):
            if (more := getattr(each, name)) is not None:
                setattr(whole, name, (getattr(whole, name) or 0) + more)
        whole.flaws += [f"Device {each.device[:12]}: {flaw}" for flaw in each.flaws]
    return list(found.values())


async def check_chain(client: Client, key: Key, result: Verified, clock: Clock) -> None:
    """Compute this device's links of the chain that the server shows now, and note the head that it publishes."""
    path = f"/v1/tasks/{result.task.hex()}"
    answer = await _read(client, key, f"{path}/publication", clock)
    index, chain = answer.headers.get("crowdml-index", ""), answer.headers.get("crowdml-chain", "")
    if (head := whole_number(index)) is None:
        raise DataError(f"{client.url} does not show its chain. Nothing was compared with it.")
    result.in_chain = 0
    result.head = head, chain
    wanted = {place for receipt in result.receipts for place in (receipt.index - 1, receipt.index)}
    beyond = [receipt for receipt in result.receipts if receipt.index > head]
    result.flaws += [f"The receipt for check-in {each.seq} has place {each.index}, and the journal ends at {head}."
                     for each in beyond]  # fmt: skip
    values: dict[int, bytes] = {}
    for first, last in _ranges(sorted(place for place in {*wanted, head} if place <= head)):
        answer = await _read(client, key, f"{path}/chain?from={first}&to={last}", clock)
        values |= _values(answer.body, first, last)
    if values[head].hex() != chain:
        result.flaws.append(f"The head of the chain at place {head} is not the one that the publication names.")
    for receipt in result.receipts:
        if receipt.index > head:
            continue
        here, before = values[receipt.index], values[receipt.index - 1]
        link = chain_next(before, result.task, receipt.device, receipt.seq, receipt.hash)
        if here != receipt.chain or here != link:
            result.flaws.append(f"Check-in {receipt.seq} is no longer at place {receipt.index} of the journal.")
        else:
            result.in_chain += 1


def check_transcript(path: Path, results: Iterable[Verified]) -> None:
    """Whether each message stands at its place in an exported transcript, as far back as that goes."""
    try:
        with path.open("rb") as file:
            canonical, start, parts = read_transcript(file)
            task, begin = from_canonical(canonical), 0 if start is None else start.index
            bodies = {each.index: hashlib.sha256(each.body).digest() for each in parts if isinstance(each, Entry)}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except BadTranscript as error:
        raise DataError(f"{path} is no whole transcript: {error}. Ask for it again.") from error
    last = max(bodies, default=begin)
    for result in results:
        if result.task != task.hash:
            continue
        covered = [receipt for receipt in result.receipts if begin < receipt.index <= last]
        result.in_transcript = 0
        if task.masking is not None:  # it has the sums of cohorts: what one device said is known to nobody
            result.under_masks = len(covered)
            continue
        for receipt in covered:
            content = result.contents.get(receipt.index)
            if content is None:
                continue
            if bodies.get(receipt.index) == content:
                result.in_transcript += 1
            else:
                result.flaws.append(f"Place {receipt.index} of the transcript is not what check-in {receipt.seq} said.")


async def _read(client: Client, key: Key, path: str, clock: Clock) -> Any:
    """Signed only where the task is closed: who verifies is nobody's business. A server that is busy is asked again."""
    headers: dict[str, str] = {}
    for left in range(ATTEMPTS - 1, -1, -1):
        try:
            return await client.request("GET", path, headers=headers)
        except Problem as problem:
            if problem.slug in ("closed", "authorization") and not headers and left:
                headers = {"Authorization": authorize(key, "GET", client.prefix + path, now=clock.now())}
            elif problem.status in (429, 503) and left:
                await clock.sleep(min(LONGEST_PAUSE, problem.retry_after or 1))
            else:
                raise
    raise AssertionError("the last attempt returns or raises")


def _ranges(places: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Stretches to ask for at once: places that lie near each other, at most `MOST_LINKS` in one."""
    first = last = places[0]
    for place in places[1:]:
        if place - last > 32 or place - first >= MOST_LINKS:
            yield first, last
            first = place
        last = place
    yield first, last


def _values(body: bytes, first: int, last: int) -> dict[int, bytes]:
    reader = Reader(body, "The chain", limit=MOST_LINKS * HASH + 64)
    reader.map(2)
    reader.key("chain")
    data = reader.binary("chain", MOST_LINKS * HASH, exactly=(last - first + 1) * HASH)
    reader.key("from")
    if reader.integer("from", 0, last) != first:
        reader.fail(f"it does not begin at {first}")
    reader.end()
    return {first + at: data[at * HASH : (at + 1) * HASH] for at in range(last - first + 1)}
