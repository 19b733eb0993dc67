"""How a device comes to a server, and how it leaves: tasks to choose from, enrolment, a lost ledger, withdrawal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from crowdml import artefacts
from crowdml.device.client import Client
from crowdml.device.folder import Folder, Server, readable_task
from crowdml.device.marks import Marked
from crowdml.device.member import Clock
from crowdml.device.statements import ROUND_KINDS, open_own, statement_path
from crowdml.errors import BudgetExhausted, CrowdmlError, UnknownName
from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, Total, Unbounded
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.storage import Budget, Charge, Ledger, Round
from crowdml.task import Task
from crowdml.texts import did_you_mean, one_line
from crowdml.wire.envelopes import Signed
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.requests import LARGEST_ENROLMENT, Enrolled, authorize, check_code, enrol, open_enrolled

LARGEST_LIST = 4 * 2**20
LONGEST_CONTACT = 400
"""Characters of what a server says about who runs it."""
LARGEST_TASK = 2**20


@record
class Listed:
    """A task as the server lists it: enough to choose. What it costs is computed from the task itself."""

    hash: str
    name: str
    title: str
    state: str


async def list_tasks(client: Client) -> list[Listed]:
    """GET /v1/tasks."""
    answer = await client.request("GET", "/v1/tasks", headers={"Accept": "application/json"}, largest=LARGEST_LIST)
    return list(_listed(client, answer.body)[0])


def _listed(client: Client, body: bytes) -> tuple[tuple[Listed, ...], dict[str, Any]]:
    """The tasks in an answer, and the whole of it."""
    try:
        found = json.loads(body)
        rows = found["tasks"]
        return tuple(
            Listed(str(row["hash"]), str(row["name"]), str(row.get("title", "")), str(row.get("state", "")))
            for row in rows
        ), found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CrowdmlError(f"{client.url} answered with no list of tasks. Is it a server of this kind?") from error


@record
class Invited:
    """What an invitation's code admits to, and how many more devices; None where the server does not say so."""

    tasks: tuple[Listed, ...]
    left: int | None = None
    run_by: str = ""
    """One line that says who runs the server."""


def read_link(url: str, code: str | None) -> tuple[str, str]:
    """A server's address and a code, from both of them or from the one link that has both: `https://.../join/CODE`."""
    address, found, rest = url.partition("?")[0].partition("#")[0].rpartition("/join/")
    linked = rest.strip("/")
    if found and "/" not in linked and linked:
        if code is not None and code.strip().lower() != linked.lower():
            raise CrowdmlError(
                f"The link ends in the code {one_line(linked)}, and {one_line(code)} is another. Nothing was sent. "
                "Name the link alone."
            )
        return address, linked
    if code is None:
        raise CrowdmlError(
            f"There is no code in {one_line(url)}. Nothing was sent. Name the whole link of the invitation, such as "
            "https://study.example/join/CODE, or the address and the code."
        )
    return url, code


async def check_invitation(client: Client, code: str) -> Invited:
    """POST /v1/invitations/check: what the code admits to. It is refused here if it would be refused later.

    A server that does not know the question yet lists what runs there instead.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    try:
        answer = await client.request("POST", "/v1/invitations/check", check_code(code), headers, largest=LARGEST_LIST)
    except Problem as problem:
        if problem.slug == "malformed":
            raise CrowdmlError(
                f"{one_line(code)!r} is no code: it has letters, digits and '-'. Nothing was sent. Copy it again."
            ) from problem
        if problem.slug not in ("not-found", "method"):
            raise
        return Invited(tuple(await list_tasks(client)))
    rows, found = _listed(client, answer.body)
    left, runs = found.get("left"), found.get("run_by")
    lines = runs.splitlines() if isinstance(runs, str) else []
    shown = one_line(", ".join(line.strip() for line in lines if line.strip()))[:LONGEST_CONTACT]
    return Invited(rows, left if isinstance(left, int) else None, shown)


def choose_task(listed: Sequence[Listed], wanted: str | None) -> Listed:
    """The one that runs, or the one that is asked for by its name or the beginning of its hash."""
    if not listed:
        raise UnknownName("No study runs there yet.")
    found = [each for each in listed if each.state in ("running", "")]
    if wanted is not None:
        found = [each for each in listed if each.name == wanted or each.hash.startswith(wanted[:64].ljust(8, "-"))]
        if found and all(each.state == "stopped" for each in found):
            raise UnknownName(f"The study {one_line(found[0].name)!r} was stopped.")
        found = [each for each in found if each.state != "stopped"]
    if len(found) == 1:
        return found[0]
    if found:
        called = "" if wanted is None else f" called {wanted!r}"
        which = f"such as --task {one_line(found[0].name) if wanted is None else found[0].hash[:12]}"
        raise UnknownName(f"The code admits to {len(found)} studies{called}: {_names(found)}. Choose one, {which}.")
    if wanted is not None:
        meant = did_you_mean(wanted, [each.name for each in listed])
        raise UnknownName(f"The code admits to no study called {wanted!r}.{meant} It admits to: {_names(listed)}.")
    if len(listed) == 1:
        name, state = one_line(listed[0].name), listed[0].state
        if state == "paused":
            raise UnknownName(f"The study {name!r} is paused. Try again later, or join it now with --task {name}.")
        raise UnknownName(f"The study {name!r} {'was stopped' if state == 'stopped' else 'does not run yet'}.")
    states = ", ".join(f"{one_line(each.name)} ({one_line(each.state)})" for each in listed)
    raise UnknownName(f"No study that the code admits to runs now. They are: {states}.")


def _names(listed: Sequence[Listed]) -> str:
    return ", ".join(f"{one_line(each.name)} ({each.hash[:12]})" for each in listed)


async def fetch_task(
    client: Client, hash_: bytes, key: Key | None = None, clock: Clock | None = None
) -> tuple[Task, Protocol]:
    """The task whose SHA-256 is `hash_`, read from its own bytes; one that no device should run is refused.

    `key`: of a device that joined, for a closed task.
    """
    path, headers = f"/v1/tasks/{hash_.hex()}", dict[str, str]()
    if key is not None:
        headers["Authorization"] = authorize(key, "GET", client.prefix + path, now=(clock or Clock()).now())
    answer = await client.request("GET", path, headers=headers, largest=LARGEST_TASK)
    return readable_task(answer.body, hash_)


async def fetch_artefacts(client: Client, folder: Folder, task: Task) -> None:
    """Have the public files that a task names: from the package, the folder, or GET /v1/artefacts/{sha256}.

    What the server sends is kept if it has the hash that the task names and fits the task, and refused otherwise.
    """
    for sha256 in task.artefacts:
        if not artefacts.is_here(sha256):
            data = folder.artefact(sha256)
            if data is None:
                data = await _fetch_artefact(client, sha256)
                folder.make()
                folder.keep_artefact(data, sha256)
            artefacts.admit(data, sha256, f"The artefact {sha256[:12]}")
    if task.features.extractor is not None:
        from crowdml.features.extractor import check_extractor  # for pictures alone

        check_extractor(task.features.extractor, task.features.dimension)


async def _fetch_artefact(client: Client, sha256: str) -> bytes:
    try:
        answer = await client.request("GET", f"/v1/artefacts/{sha256}", largest=artefacts.LARGEST)
    except Problem as problem:
        if problem.slug != "not-found":
            raise
        raise CrowdmlError(
            f"{client.url} does not have the artefact {sha256[:12]} that its task names. Nothing was sent. Ask whoever "
            "runs the study."
        ) from problem
    return artefacts.checked(answer.body, sha256, f"The artefact that {client.url} sent")


async def enrol_device(client: Client, key: Key, code: str, task: bytes) -> tuple[Enrolled, bool]:
    """POST /v1/devices, and whether the server never knew this key. The same key again changes nothing."""
    enrolled, is_new = await _enrol(client, key, code, (task.hex(),))
    if task.hex() not in enrolled.tasks:
        raise CrowdmlError(f"The invitation does not admit this device to task {task.hex()[:12]}. Nothing was sent.")
    return enrolled, is_new


async def admitted_tasks(client: Client, key: Key, code: str) -> list[Listed]:
    """The tasks that a device may take part in which joined with this code before; any other device is refused.

    For a code that is used up or has ended: it opens nothing new then, and asking changes nothing.
    """
    admitted = (await _enrol(client, key, code, ()))[0].tasks
    listed = {each.hash: each for each in await list_tasks(client)}
    return [listed.get(each) or Listed(each, each[:12], "", "") for each in admitted]


async def _enrol(client: Client, key: Key, code: str, tasks: tuple[str, ...]) -> tuple[Enrolled, bool]:
    body, signature = enrol(key, code, tasks)
    headers = {"Content-Type": "application/msgpack", "Crowdml-Signature": signature}
    answer = await client.request("POST", "/v1/devices", body, headers, largest=LARGEST_ENROLMENT)
    enrolled = open_enrolled(answer.body)
    if enrolled.device != key.id:
        raise CrowdmlError(f"The server enrolled device {enrolled.device}, and this one is {key.id}. Nothing was sent.")
    return enrolled, answer.status == 201


async def claim_place(client: Client, key: Key, task: Task, place: int, clock: Clock) -> None:
    """POST /v1/tasks/{hash}/places/{n}, signed: this device stands there from now on. Again: nothing changes."""
    path = f"/v1/tasks/{task.hash.hex()}/places/{place}"
    header = authorize(key, "POST", client.prefix + path, now=clock.now())
    name = f"{one_line(task.places[place].name)!r} (place {place})"
    try:
        await client.request("POST", path, headers={"Authorization": header}, largest=65_536)
    except Problem as problem:
        if problem.slug == "place-taken":
            raise CrowdmlError(
                f"Another device stands at {name}. Nothing was sent. Choose another --place; if that was this device "
                "with another key, whoever runs the study can revoke it."
            ) from problem
        if problem.slug == "place-held":
            held = problem.extra.get("held")
            known = isinstance(held, int) and 0 <= held < len(task.places)
            where = f"{one_line(task.places[held].name)!r}" if known and isinstance(held, int) else "another place"
            raise CrowdmlError(
                f"This device stands at {where} already, and cannot stand at {name} too. Nothing was sent. Say --place "
                f"{held if known else 'with that one'}, or use another --folder for another device."
            ) from problem
        raise


def pinned(folder: Folder, client: Client, enrolled: Enrolled, ca: str | None) -> None:
    """Know this server from now on by its key, and by the certificates that the owner named."""
    if ca is not None and ca != folder.authority:
        folder.trust(ca)
    folder.pin(Server(client.url, enrolled.server_key.hex(), ca))


async def withdraw(client: Client, key: Key, clock: Clock) -> None:
    """POST /v1/devices/{id}/withdraw, signed. A device that the server does not know has left already."""
    path = f"/v1/devices/{key.id}/withdraw"
    header = authorize(key, "POST", client.prefix + path, now=clock.now())
    try:
        await client.request("POST", path, headers={"Authorization": header}, largest=65_536)
    except Problem as problem:
        if problem.slug not in ("withdrawn", "unknown-device"):
            raise


# --- a lost ledger ---


async def recover(folder: Folder, client: Client, keys: Sequence[tuple[int, Key]], clock: Clock) -> tuple[int, int]:
    """Begin a new ledger from each device's last signed statement; how many were found, and how many are exhausted.

    A server that does not answer leaves everything as it is. One that has no statement, or another than that of the
    last message which this device sealed, leaves the device as exhausted: nobody knows what it gave, so it gives
    nothing more. Any older statement is the device's own too, and names smaller totals.
    """
    found: dict[int, Signed] = {}
    marked = folder.marked()
    masked = any(folder.consented(bytes.fromhex(task)).masking is not None for task in folder.consents())
    for number, key in keys:
        signed = await _statement(client, key, clock)
        if signed is not None and number in marked and signed.hash.hex() == marked[number].last.hash:
            found[number] = signed
    exhausted = {number for number, _ in keys if number not in found}
    with folder.new_ledger() as ledger:
        for number, signed in found.items():
            try:
                _begin_from(ledger.of(number), signed, marked[number], clock.utc(), masked=masked)
            except BudgetExhausted:  # a total that no charge can stand for
                exhausted.add(number)
        folder.note_recovery(frozenset(found), frozenset(exhausted))
    return len(found), len(exhausted)


async def _statement(client: Client, key: Key, clock: Clock) -> Signed | None:
    path = statement_path(key)
    header = authorize(key, "GET", client.prefix + path, now=clock.now())
    try:
        answer = await client.request("GET", path, headers={"Authorization": header})
    except Problem as problem:
        if problem.status >= 500 or problem.status in (408, 429) or problem.slug == "clock":
            raise
        return None
    return open_own(answer.body, key)


def _begin_from(ledger: Ledger, signed: Signed, marked: Marked, now: str, *, masked: bool) -> None:
    """One charge of each kind of loss on as many samples as were given: each as dear as the dearest was.

    The ledger then knows the last check-in that was marked, and goes into no round up to those that were.
    `masked`: some of it may have left under masks. What that costs if everyone else colludes is in no statement, so
    nothing is promised.
    """
    observer, unknown = (Observer.AGGREGATE, Unbounded()) if masked else (Observer.ANYONE, None)
    statement, task = signed.statement, signed.envelope.task
    span = ledger.take_serials(statement.samples)
    device, dearest = _losses(statement.device_total), _losses(statement.dearest_total)
    charges = [
        Charge(
            task,
            "recovered",
            dearest.get(kind, _nothing(loss)),
            loss,
            observer,
            Adjacency.REPLACE_SAMPLE,
            span[0],
            span[-1],
            now,
            unknown,
            unknown,
        )
        for kind, loss in device.items()
    ]
    everything = Budget(Fraction(10**12), 1e-6, len(span), plan=statement.dearest_total)
    if signed.envelope.kind in ROUND_KINDS:  # its seq is the round's; that of check-ins is found out by asking
        ledger.charge(task, charges, [everything], round_=Round(signed.envelope.seq, None))
    else:
        ledger.charge(task, charges, [everything], state=pack({"seq": signed.envelope.seq, "state": None}))
    if marked.check_in is not None:
        ledger.adopt(bytes.fromhex(marked.check_in.task) or task, bytes.fromhex(marked.check_in.hash))
    for name, mark in marked.highest.items():
        if name and ((round_ := ledger.round(bytes.fromhex(name))) is None or round_.number < mark.round):
            ledger.keep_round(bytes.fromhex(name), Round(mark.round, None))


def _losses(total: Total) -> dict[str, Loss]:
    losses: dict[str, Loss] = {}
    if total.pure:
        losses["pure"] = Pure(total.pure)
    if total.zcdp:
        losses["zcdp"] = ZCDP(total.zcdp)
    if any(total.values):
        losses["renyi"] = Renyi(total.orders, total.values)
    if total.unbounded:
        losses["unbounded"] = Unbounded()
    return losses


def _nothing(loss: Loss) -> Loss:
    """No loss, of the same kind."""
    return Renyi(loss.orders, tuple(Fraction(0) for _ in loss.orders)) if isinstance(loss, Renyi) else Pure(Fraction(0))
