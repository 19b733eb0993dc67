"""Writes what version 0.1 left on disk and said on the wire: the data of tests/upgrade/0.1.

    git worktree add ../old 75795d7
    PYTHONPATH=../old/src python tests/upgrade/make.py tests/upgrade/0.1

It was run once, by hand, with the sources of commit 75795d7, and never runs in the tests: data that today's code wrote
would show nothing. For a later release write another folder beside `0.1`, with that release's sources. All rows are
made up, and every key was made for this data alone. `0.1/README.md` says what each file is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.cli.output import whole_file
from crowdml.device.client import Client
from crowdml.device.commits import Commits
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, OwnerBudget, offer
from crowdml.device.joining import choose_task, fetch_task, list_tasks, withdraw
from crowdml.device.member import Clock, Ending, Patience, terms
from crowdml.device.runner import Runner
from crowdml.device.sources import FileSource, Series
from crowdml.protocols import settled
from crowdml.server.export import export_model, write_model
from crowdml.server.hub import utc_now
from crowdml.server.limits import Limits
from crowdml.server.operators import hash_password
from crowdml.server.serve import Started, serve
from crowdml.server.transcript import write_transcript
from crowdml.server.validation import OwnRows, keep_rows
from crowdml.storage import Ledger
from crowdml.storage.server import Store
from crowdml.storage.server.looks import Terms, looks_of, validations
from crowdml.task import Task, find_task, parse

MASKED = """
name = "together"
title = "What do five devices say together?"
collects = "rows of four numbers"
[features]
dimension = 4
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["a", "b", "c"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 5
step = { c = 1.0 }
[privacy]
mechanism = "skellam"
uses = 2
epsilon = { gradient = 1.0, labels = 0.5 }
delta = 1e-6
budget = { epsilon = 1.5, samples = 200 }
[masking]
cohort = 5
minimum = 4
colluders = 0
window = 30.0
lease = 30.0
"""

LOOSE = """
name = "loose"
title = "A task whose delta is too large to promise anything"
collects = "rows of four numbers"
[features]
dimension = 4
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["a", "b", "c"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 5
step = { c = 1.0 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0 }
delta = 1e-3
budget = { epsilon = 1.0, samples = 200 }
"""

STREET = """
name = "street"
title = "How busy will it be in a quarter of an hour?"
collects = "made-up counts of vehicles"
[features]
kind = "windows"
dimension = 3
horizon = 1
[labels]
classes = ["quiet", "busy", "full"]
bins = [10, 50]
[model]
kind = "clusters"
k = 4
restarts = 3
[protocol]
kind = "proportions"
batch = 8
peers = 2
memory = 6
[privacy]
mechanism = "discrete-laplace"
epsilon = { counts = 1.0 }
budget = { epsilon = 1.0, samples = 1000 }
[[places]]
name = "corner 0"
lat = 0.0
lon = 0.0
[[places]]
name = "corner 1"
lat = 0.0
lon = 0.002
[[places]]
name = "corner 2"
lat = 0.0
lon = 0.006
"""

PASSWORD = "a password for tests alone"


def rows(task: Task, count: int, seed: int) -> list[tuple[Any, int]]:
    """Made-up rows: the same for the same seed, so that a test can go on where a device stopped."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(count, task.features.dimension)).round(3)
    return [(x, int(rng.integers(task.classes or 2))) for x in made]


def readings(count: int, place: int) -> list[float]:
    return [round(30 + 28 * np.sin(t / 5 + place), 3) for t in range(count)]


# --- the server ---


class Running:
    """`crowdml serve` in a thread."""

    def __init__(self, folder: Path, tasks: Sequence[Task] = (), invite: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        ready, said = threading.Event(), list[Started]()

        def started(told: Started) -> None:
            said.append(told)
            ready.set()

        def work() -> None:
            self.loop.run_until_complete(
                serve(folder, port=0, tasks=tasks, invite=invite, limits=limits, started=started)
            )

        limits = Limits(
            device_rate=1e4, device_burst=1e4, address_rate=1e6, address_burst=1e6, pace=1e6, snapshot_every=4
        )
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert ready.wait(60)
        (self.told,) = said
        self.hub, self.address, self.code = self.told.hub, self.told.address, self.told.code

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stop(self) -> None:
        self.told.stop()
        self.thread.join(60)


# --- what is said on the wire ---


class Recorder:
    """Stands between a device and the server, and keeps every request and every answer, byte for byte."""

    ALONE = asyncio.Lock()
    """One request at a time, whoever asks: so the order of the file is the order in which the server took them."""

    def __init__(self, port: int, heard: list[dict[str, Any]], who: str) -> None:
        self.port, self.heard, self.who = port, heard, who

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while request := await _message(reader):
                async with self.ALONE:
                    back.write(b"".join(request))
                    answer = await _message(there)
                    said = {"who": self.who, "at": int(time.time())}
                    self.heard.append({**said, **_plain("request", request), **_plain("answer", answer)})
                writer.write(b"".join(answer))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            for each in (writer, back):
                each.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | tuple[()]:
    """The head and the body of a request or an answer; nothing where the connection ends."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        size = next((int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")), 0)
        if " 304 " in lines[0]:
            size = 0
        return head, await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return ()


def _plain(name: str, message: tuple[bytes, bytes] | tuple[()]) -> dict[str, Any]:
    head, body = message or (b"", b"")
    return {name: head.decode("latin-1"), f"{name}_body": base64.b64encode(body).decode()}


# --- devices ---


class Vanished(BaseException):
    """The device's power failed at this step."""


async def _nap(_: float) -> None:
    await asyncio.sleep(0.05)


CLOCK = Clock(time.time, _nap)
"""The real time in what is signed and written; nobody waits long."""


async def join(home: Folder, address: str, code: str | None, task: Task, *, devices: int = 0, place: int = -1) -> None:
    """As `crowdml join` does: look at the tasks, fetch one, accept it, enrol. `devices`: those of a fleet."""
    client = Client(address)
    try:
        home.make()
        chosen = choose_task(await list_tasks(client), task.name)
        found, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
        home.accept(found, replace(offer(found, protocol), by="--yes", at=CLOCK.utc()))
        fleet = Fleet(home, client, found, protocol, devices or 1, not devices, CLOCK, Patience(0.05, 1.0))
        fleet.place = place
        assert code is not None
        await fleet.enrol(code, None)
    finally:
        await client.close()


async def take_part(
    home: Folder,
    address: str,
    task: Task,
    given: Sequence[Any],
    *,
    number: int | None = None,
    name: str = "csv:rows.csv:0/1",
    most: int | None = None,
    step: Callable[[str], None] = lambda _: None,
    place: int = -1,
    shared: tuple[Ledger, Commits] | None = None,
    new_data: bool = False,
    waits: bool = True,
) -> Ending | None:
    """One device's life on these rows; None where it vanished."""
    client = Client(address)
    found, protocol = home.accepted(task.hash)
    with contextlib.ExitStack() as held:
        if shared is None:
            book = held.enter_context(home.ledger())
            shared = book, Commits(book, 0.0, held.enter_context(home.marks()))
        book, commit = shared
        source = FileSource(name, Series(given, found) if place >= 0 else list(given), found)
        source.waits = waits
        runner = Runner(
            terms(home, found, protocol)(home.key(number), book.of(number or 0)), found, protocol, client, source,
            commit=commit, clock=CLOCK, patience=Patience(0.05, 0.5), most=most, tell=step,
            place=place, new_data=new_data,
        )  # fmt: skip
        try:
            return await runner.run()
        except Vanished:
            return None
        finally:
            await client.close()


def vanish_at(word: str, times: int = 1) -> Callable[[str], None]:
    """A step that ends the device when it is told this word for the `times`-th time."""
    left = times

    def step(text: str) -> None:
        nonlocal left
        left -= text == word
        if not left:
            raise Vanished

    return step


def copy_at(word: str, times: int, home: Folder, target: Path) -> Callable[[str], None]:
    """A step that copies the device's folder when it is told this word for the `times`-th time."""
    left = times

    def step(text: str) -> None:
        nonlocal left
        if text == word:
            left -= 1
            if not left:
                shutil.copytree(home.path, target)

    return step


# --- the story ---


def story(place: Path, out: Path) -> None:
    devices = place / "devices"
    plain, masked = settled(find_task("activity")), settled(parse(MASKED))
    validated, street, loose = settled(find_task("digits012")), settled(parse(STREET)), settled(parse(LOOSE))
    server = Running(place / "server", [plain, masked, validated, street, loose], invite=1000)
    code = server.code
    rng = np.random.default_rng(7)
    x = rng.normal(size=(40, 64)).astype(np.float32)
    private = OwnRows(x, rng.integers(3, size=40).astype(np.float32), x)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    public = OwnRows(x, rng.integers(3, size=30).astype(np.float32), x)
    hub = server.hub
    server.call(
        hub.write(
            keep_rows, hub.store, validated, private, Terms("private.csv", Fraction(1, 2), Fraction(3), 1), utc_now()
        )
    )
    server.call(hub.write(keep_rows, hub.store, loose, public, Terms("public.csv", None, None, 1), utc_now()))
    server.call(hub.write(hub.store.set_operator, "operator", hash_password(PASSWORD), utc_now()))
    server.stop()
    shutil.copytree(place / "server", place / "before")
    server = Running(place / "server")
    heard: list[dict[str, Any]] = []

    # A plain task: a device with an owner's budget, recorded from its first request on.
    device = Folder(devices / "device")

    async def first() -> None:
        async with Recorder(server.port, heard, "device").listening() as address:
            await join(device, address, code, plain)
            device.set_budget(OwnerBudget("2", 500))
            given = rows(plain, 200, 1)
            step = copy_at("charged", 3, device, devices / "device-unsent")
            await take_part(device, address, plain, given, most=3, step=step)
        await take_part(device, server.address, plain, given, step=vanish_at("charged"))  # never sent

    asyncio.run(first())

    # A masked task: one round to its end, recorded; then one that stops in the middle.
    one, crowd = Folder(devices / "masked"), Folder(devices / "masked-fleet")

    async def rounds() -> None:
        async with contextlib.AsyncExitStack() as held:
            recorded = [
                await held.enter_async_context(Recorder(server.port, heard, who).listening())
                for who in ("masked", *(f"masked-fleet {number}" for number in range(4)))
            ]
            await join(one, recorded[0], code, masked)
            await join(crowd, recorded[1], code, masked, devices=4)
            step = copy_at("charged", 1, one, devices / "masked-drawn")
            await together(recorded, [step, *(lambda _: None for _ in range(4))], most=1)
        steps = [
            vanish_at("charged"),
            vanish_at("acknowledged"),
            vanish_at("shared"),
            vanish_at("shared"),
            vanish_at("charged"),
        ]
        await together([server.address] * 5, steps)

    async def together(
        addresses: Sequence[str], steps: Sequence[Callable[[str], None]], most: int | None = None
    ) -> None:
        with crowd.ledger() as book, crowd.marks() as marks:
            commit = Commits(book, 0.0, marks)
            await asyncio.gather(
                take_part(one, addresses[0], masked, rows(masked, 20, 10), most=most, step=steps[0]),
                *(
                    take_part(
                        crowd, addresses[n + 1], masked, rows(masked, 20, 11 + n), number=n, shared=(book, commit),
                        most=most,
                        step=steps[n + 1], name=f"csv:rows.csv:{n}/4",
                    )
                    for n in range(4)
                ),
            )  # fmt: skip

    asyncio.run(rounds())

    # A fleet: three devices of a task that is validated on private rows; the last did not get to send.
    fleet = Folder(devices / "fleet")

    async def fleets() -> None:
        await join(fleet, server.address, code, validated, devices=3)
        for number in range(3):
            step = vanish_at("charged") if number == 2 else lambda _: None
            given, name = rows(validated, 28, 20 + number), f"csv:rows.csv:{number}/3"
            await take_part(fleet, server.address, validated, given, number=number, name=name, step=step)
            until(server, validated, looks=min(number + 1, 2))

    asyncio.run(fleets())

    # A ledger that was lost and began again from the signed statement; samples that wait; two devices that are gone.
    recovered, sensing = Folder(devices / "recovered"), Folder(devices / "sensing")
    gone, revoked = Folder(devices / "gone"), Folder(devices / "revoked")

    async def others() -> None:
        await join(recovered, server.address, code, plain)
        await take_part(recovered, server.address, plain, rows(plain, 40, 30))
        (recovered.path / "ledger.sqlite").unlink()
        client = Client(server.address)
        found, protocol = recovered.accepted(plain.hash)
        (await Fleet(recovered, client, found, protocol, clock=CLOCK).open_ledger()).close()
        await client.close()
        given = rows(plain, 20, 31)
        await take_part(recovered, server.address, plain, given, name="csv:new.csv:0/1", new_data=True)
        for each, seed in ((gone, 40), (revoked, 41)):
            await join(each, server.address, code, plain)
            await take_part(each, server.address, plain, rows(plain, 20, seed))
        await join(sensing, server.address, code, plain)
        step = vanish_at("sensed", 2)  # of a live sensor: what it sensed waits in the folder
        await take_part(sensing, server.address, plain, rows(plain, 50, 60), step=step, waits=False)
        client = Client(server.address)
        await withdraw(client, gone.key(), CLOCK)
        await client.close()
        shutil.rmtree(gone.path)

    asyncio.run(others())
    server.call(server.hub.revoke(revoked.key().id))

    # A relayed task: three places; the last device has a letter that it did not get to send.
    corners = [Folder(devices / f"corner-{place_}") for place_ in range(3)]

    async def streets() -> None:
        for at, home in enumerate(corners):
            await join(home, server.address, code, street, place=at)
        for batches in (1, 2, 3):
            for at, home in enumerate(corners):
                step = vanish_at("charged") if (at, batches) == (2, 3) else lambda _: None
                await take_part(home, server.address, street, readings(8 * batches + 3, at), place=at, step=step)

    asyncio.run(streets())

    # A task with a large delta, validated on public rows.
    wide = Folder(devices / "loose")

    async def wides() -> None:
        await join(wide, server.address, code, loose)
        await take_part(wide, server.address, loose, rows(loose, 20, 50))

    asyncio.run(wides())
    until(server, loose, looks=1)
    server.stop()
    write(place, out, heard, [plain, masked, validated, street, loose], code)


def until(server: Running, task: Task, *, looks: int) -> None:
    """Wait until the server has looked at the task's validation rows so often."""
    assert server.hub.store.path is not None
    with Store(server.hub.store.path) as store:
        for _ in range(600):
            if len(looks_of(store, validations(store)[task.hash])) >= looks:
                return
            time.sleep(0.05)
    raise SystemExit("the server did not look at its rows")


# --- what is kept ---


def write(place: Path, out: Path, heard: list[dict[str, Any]], tasks: Sequence[Task], code: str | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for home in sorted((place / "devices").iterdir()):
        Ledger(home / "ledger.sqlite").close()  # folds SQLite's log into the file
    facts: dict[str, Any] = {"code": code, "password": PASSWORD, "devices": {}, "tasks": {}}
    for home in sorted((place / "devices").iterdir()):
        facts["devices"][home.name] = about(Folder(home))
    (out / "transcripts").mkdir(exist_ok=True)
    (out / "model").mkdir(exist_ok=True)
    with Store(place / "server" / "server.sqlite") as store:
        lengths = store.check()
        store.backup(place / "backup.sqlite")
        for task in tasks:
            path = out / "transcripts" / task.name
            with path.open("wb") as file:
                done = write_transcript(store, task.hash, file)
            facts["tasks"][task.name] = {
                "hash": task.hash.hex(),
                "entries": lengths[task.hash],
                "version": done.version,
                "publication": done.hash,
            }
        for found in validations(store).values():
            facts["tasks"][next(task.name for task in tasks if task.hash == found.task)]["validation"] = {
                "rows": found.count,
                "spent": str(found.spent),
                "left": found.left,
                "looks": [(look.version, look.value, str(look.step)) for look in looks_of(store, found)],
            }
        model = export_model(store, tasks[0].hash)
        write_model(model, [out / "model" / "activity.safetensors", out / "model" / "activity.onnx"], whole_file)
        facts["model"] = {
            "version": model.version,
            "weights": hashlib.sha256(np.asarray(model.weights, "<f4").tobytes()).hexdigest(),
        }
    pack(out / "devices.tar.xz", place / "devices")
    pack(out / "server.tar.xz", place / "server")
    pack(out / "server-before.tar.xz", place / "before")
    (out / "backup.sqlite.xz").write_bytes(lzma.compress((place / "backup.sqlite").read_bytes(), preset=9))
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [json.dumps(each, ensure_ascii=False) for each in heard]
    (out / "conversations.jsonl").write_text("\n".join(lines) + "\n")


def about(home: Folder) -> dict[str, Any]:
    """What a device's folder says, for the tests to hold today's reading against."""
    with home.ledger() as book:
        return {
            str(number): {
                "id": home.key(number if home.is_fleet else None).id,
                "charges": len(each.charges()),
                "samples": each.samples_given(),
                "serial": each.next_serial(),
                "unsent": len(each.resend()),
                "waiting": sum(len(each.waiting(bytes.fromhex(task))) for task in home.consents()),
                "receipts": len(each.receipts()),
                "sample": 0.0 if (top := each.dearest_sample(1e-6)) is None else top[1].epsilon(1e-6),
                "device": each.device_total().epsilon(1e-6),
                "device_alone": each.device_total(alone=True).epsilon(1e-6),
                "sources": dict(each.sources()),
                "round": None if not (found := rounds_of(home, each)) else found,
            }
            for number in (book.devices() if home.is_fleet else (0,))
            for each in (book.of(number),)
        }


def rounds_of(home: Folder, book: Ledger) -> dict[str, Any]:
    found = {task: book.round(bytes.fromhex(task)) for task in home.consents()}
    return {task[:12]: [each.number, each.body is not None] for task, each in found.items() if each is not None}


def pack(path: Path, folder: Path) -> None:
    """A folder without its owner's name and times, small."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for each in sorted(folder.rglob("*")):
            if each.name == "lock":
                continue
            info = archive.gettarinfo(each, str(each.relative_to(folder)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if each.is_file():
                with each.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        story(Path(made), Path(sys.argv[1]))
