"""The server beside bare ASGI: check-ins and check-outs, in turns, with one generator and the same bodies.

The limits are uvicorn with a plain function: for a check-in it verifies one Ed25519 signature and commits the body to
SQLite in groups; for a check-out it answers fixed bytes. Ours does everything: strict decoding, authentication, rates,
validation, the hash-chained journal, the update, a new publication, a signed receipt. Each runs in a process of its own
and is charged by the CPU-seconds that the system counts for it. A ratio is the smaller of two: by the clock, and by
CPU-seconds.

Beside the ratios: a thousand devices of `crowdml fleet` with durable ledgers for a minute; and a long run of check-ins
that are journalled, applied, snapshotted and reduced (their signatures apart, which leave nothing behind), after which
the process is killed: its memory at a tenth and at the end, the disk that it took, and how long a restart takes.

And what strangers cost: how long check-ins take while somebody asks for the list of tasks fifty times a second, and how
much of the event loop's time the page of a study takes that has not changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crowdml.bench.timing import bound, spread_row, started

DEVICES, CONNECTIONS = 256, 64
CHECK_INS, CHECK_OUTS, TURNS = 4096, 12_000, 5
MSGPACK = b"application/msgpack"


LONG = 250_000
"""Check-ins of the long run; the environment variable CROWDML_BENCH_CHECK_INS gives another number."""
FLEET, FLEET_SECONDS = 1000, 60
FLOOD, FLOOD_CONNECTIONS, FLOOD_SECONDS = 50, 64, 20
"""Requests a second for the list of tasks, from one address, on so many connections at once where answers are late."""
HONEST = 25
"""Check-ins a second meanwhile."""
PAGES = 300
PUBLIC = ("digits-masked", "digits-mlp", "demo", "traffic")
"""Shipped tasks beside MNIST whose list and pages strangers ask for: masked, a network, plain, and with 106 places."""


def measure(progress: Callable[[str], None] = lambda _: None, *, turns: int = TURNS) -> dict[str, Any]:
    """Rows and ratios, as every benchmark says them."""
    check_ins = int(os.environ.get("CROWDML_BENCH_CHECK_INS", LONG))
    with tempfile.TemporaryDirectory(prefix="crowdml-bench-") as place:
        result = asyncio.run(_measure(Path(place), progress, turns))
        for more in (
            _fleet(Path(place), progress),
            _long(Path(place), progress, check_ins),
            asyncio.run(_flood(Path(place), progress)),
            _pages(Path(place), progress),
        ):
            result["rows"] += more["rows"]
            result["ratios"] += more["ratios"]
        return result


async def _measure(place: Path, progress: Callable[[str], None], turns: int) -> dict[str, Any]:
    progress("signing check-ins")
    made = make_load(turns + 1)
    with child("bare", place / "bare", made) as bare, child("ours", place / "ours", made) as ours:
        found: dict[str, list[Turn]] = {}
        loads: dict[str, Callable[[Process, int], Sequence[Sequence[bytes]]]] = {
            "check-in": lambda process, turn: made.check_ins(turn),
            "full": lambda process, turn: made.check_outs(b""),
            "304": lambda process, turn: made.check_outs(process.tag()),
        }
        before = _memory(ours.pid)
        for turn in range(turns + 1):
            for name, load in loads.items():
                for server in (bare, ours):
                    progress(f"{name}, {server.kind}, turn {turn} of {turns}")
                    result = await server.drive(load(server, turn))
                    if turn:  # the first warms up
                        found.setdefault(f"{name}/{server.kind}", []).append(result)
        return _report(found, before, ours, made)


def _report(found: dict[str, list[Turn]], before: int, ours: Process, made: Load) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    ratios: dict[str, dict[str, Any]] = {}
    for name in ("check-in", "full", "304"):
        mine, limit = found[f"{name}/ours"], found[f"{name}/bare"]
        for who, results in (("ours", mine), ("bare ASGI", limit)):
            cpu = statistics.median(each.per_cpu_second for each in results)
            p99 = 1e3 * statistics.median(each.p99 for each in results)
            rates = [each.rate for each in results]
            rows.append(spread_row(f"{name}, {who}", rates, "requests/s", per_cpu_second=cpu, p99_ms=p99))
        wall = statistics.median(a.rate / b.rate for a, b in zip(mine, limit, strict=True))
        cpu = statistics.median(a.per_cpu_second / b.per_cpu_second for a, b in zip(mine, limit, strict=True))
        ratios[name] = {"by_wall": wall, "by_cpu": cpu, "value": min(wall, cpu)}
    rows += [
        _row("bytes of a check-in", float(made.size), "bytes"),
        _row("memory, first turn", before / 2**20, "MiB"),
        _row("memory, last turn", _memory(ours.pid) / 2**20, "MiB"),
        _row("disk", _disk(ours.folder) / 2**20, "MiB"),
    ]
    worst = min(("full", "304"), key=lambda name: ratios[name]["value"])
    return {
        "id": "bench/server",
        "rows": rows,
        "ratios": [
            _ratio("check-in", "ours / bare ASGI with one verification and a group commit", ratios["check-in"], 0.6),
            _ratio("check-out", f"ours / bare ASGI ({worst}, the smaller of full and 304)", ratios[worst], 0.5),
        ],
    }


def _row(name: str, value: float, unit: str) -> dict[str, Any]:
    return spread_row(name, [value], unit)


# --- a fleet ---


FLEET_TASK = """
name = "fleet"
title = "A softmax of 50 features and 10 classes, one sample a check-in"
features = { dimension = 50, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 1, step = { c = 1.0 } }
privacy = { mechanism = "discrete-gaussian", epsilon = { gradient = 1.0 }, delta = 1e-6, \
budget = { epsilon = 1.0, samples = 100000 } }
"""


def _fleet(place: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """`crowdml serve` and `crowdml fleet`, each a process of its own, as an operator would start them."""
    progress(f"a fleet of {FLEET} for {FLEET_SECONDS} s")
    folder = place / "fleet"
    folder.mkdir()
    (folder / "fleet.toml").write_text(FLEET_TASK.replace("\\\n", ""))
    rows = max(8, 2 * FLEET_SECONDS)
    features = ",".join(["0.1"] * 50)
    with (folder / "rows.csv").open("w") as file:
        file.writelines(f"{features},{number % 10}\n" for number in range(FLEET * rows))
    crowdml = [sys.executable, "-m", "crowdml.cli"]
    much = ["--device-rate", "1e6", "--address-rate", "1e6", "--pace", "1e6"]
    serve = [*crowdml, "serve", "--folder", str(folder / "server"), "--port", "0", "--task", str(folder / "fleet.toml")]
    serve += ["--invite", str(FLEET), *much, "--json", "-"]
    with (folder / "log").open("wb") as log, started(serve, stderr=log) as (_, out):
        said = json.loads(out.readline())
        command = [*crowdml, "fleet", said["address"], said["code"], "--devices", str(FLEET), "--yes"]
        command += ["--source", f"csv:{folder / 'rows.csv'}", "--folder", str(folder / "devices")]
        command += ["--seconds", str(FLEET_SECONDS), "--json", "-"]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fleet failed: {done.stderr.decode()[-2000:]}")
    found = json.loads(done.stdout)
    wrong = found["refused"] + sum(found["problems"].values())
    name = f"fleet of {found['devices']:,}"
    holds = found["per_second"] >= 500 and found["p99"] < 2 and not wrong
    return {
        "rows": [
            _row(f"{name}, check-ins", found["per_second"], "check-ins/s"),
            _row(f"{name}, p99", 1e3 * found["p99"], "ms"),
            _row(f"{name}, errors", float(wrong), "answers"),
            _row(f"{name}, bytes up", found["bytes_up"] / max(1, found["check_ins"]), "bytes/check-in"),
        ],
        "ratios": [
            bound(
                "fleet",
                f"{name} with durable ledgers: at least 500 a second, p99 under 2 s, no error",
                found["per_second"],
                "check-ins/s",
                500.0,
            )
            | {"p99": found["p99"], "errors": wrong, "holds": holds}
        ],
    }


# --- a long run ---


def _long(place: Path, progress: Callable[[str], None], check_ins: int) -> dict[str, Any]:
    progress(f"{check_ins:,} check-ins, and a restart")
    folder = place / "long"
    folder.mkdir()
    command = [sys.executable, "-m", __name__]
    fed = subprocess.run([*command, "feed", str(folder), str(check_ins)], stdout=subprocess.PIPE, check=False)
    said = json.loads(fed.stdout.splitlines()[-1])
    disk = _disk(folder)
    began = time.perf_counter()
    with started([*command, "again", str(folder)]) as (_, out):
        out.readline()
        restart = time.perf_counter() - began
    tenth, end = said["memory"]
    return {
        "rows": [
            _row("long run, check-ins", float(check_ins), "check-ins"),
            _row("long run, rate without signatures", check_ins / said["seconds"], "check-ins/s"),
            _row("long run, memory at a tenth", tenth / 2**20, "MiB"),
            _row("long run, memory at the end", end / 2**20, "MiB"),
            _row("long run, disk", disk / check_ins, "bytes/check-in"),
            _row("long run, restart", restart, "s"),
        ],
        "ratios": [
            bound("restart", f"restart over {check_ins:,} check-ins", restart, "s", 5.0),
            bound("memory", f"memory after {check_ins:,} check-ins / after a tenth of them", end / tenth, "ratio", 1.1),
        ],
    }


def feed(folder: Path, check_ins: int) -> None:
    """Check-ins through the server's own runner, as after authentication; ends without a goodbye."""
    from crowdml.messages import SERVER, Envelope
    from crowdml.server.hub import Hub, code_hash, utc_now
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store
    from crowdml.wire.envelopes import open_signed, pack_envelope
    from crowdml.wire.keys import Key
    from crowdml.wire.statements import Statement

    made = make_load(1, signed=False)
    task, body = made.task, made.body
    keys = [Key.from_secret(secret) for secret in made.secrets]
    store = Store(folder / DATABASE, serving=True)
    store.invite(code_hash("bench"), utc_now(), uses=len(keys))
    for key in keys:
        store.enrol(code_hash("bench"), key.public, utc_now())
    store.add_task(task.canonical, task.name, utc_now(), "running")
    hub = Hub.open(store)
    memory: list[int] = []
    began, done, seq = time.perf_counter(), 0, 0
    while done < check_ins:
        seq += 1
        said = Statement(("zcdp 1/10",), seq, ("zcdp 1/10",))
        batch = [
            open_signed(
                bytes(64)
                + pack_envelope(Envelope(task.hash, key.id, frozenset((SERVER,)), seq, "sgd/gradient/1", body), said)
            )
            for key in keys[: check_ins - done]
        ]
        for at in range(0, len(batch), 64):
            part = batch[at : at + 64]
            answers = hub._accept_for(task.hash, part, [False] * len(part))
            if not all(isinstance(answer, tuple) for answer in answers):
                raise RuntimeError(f"a check-in was refused: {answers}")
            hub._snapshots_due()
        before, done = done, done + len(batch)
        if before < check_ins // 10 <= done:
            memory.append(_memory("self"))
    memory.append(_memory("self"))
    print(json.dumps({"seconds": time.perf_counter() - began, "memory": memory}), flush=True)
    os._exit(0)  # as a kill would


# --- strangers ---


async def _flood(place: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """How long check-ins take while somebody asks for the list of tasks."""
    progress(f"check-ins under {FLOOD} GET /v1/tasks a second for {FLOOD_SECONDS} s")
    made = make_load(1)
    lanes = made.check_ins(0)
    with child("public", place / "flood", made) as server:
        list_ = [_request("GET", "/v1/tasks", b"")] * max(1, FLOOD * FLOOD_SECONDS // FLOOD_CONNECTIONS)
        alone = DEVICES // CONNECTIONS  # each device's first check-in
        honest = [lane[alone : alone + max(1, HONEST * FLOOD_SECONDS // len(lanes))] for lane in lanes]
        quiet = await server.drive([lane[:alone] for lane in lanes])
        flood = [server.drive_slowly([list_] * FLOOD_CONNECTIONS, FLOOD), server.drive_slowly(honest, HONEST)]
        asked, given = await asyncio.gather(*flood)
    p99, worst = 1e3 * given.p99, 1e3 * max(given.latencies)
    name = f"check-ins under {FLOOD} GET /v1/tasks a second"
    return {
        "rows": [
            _row(f"{name}, median", 1e3 * statistics.median(given.latencies), "ms"),
            _row(f"{name}, p99", p99, "ms"),
            _row(f"{name}, slowest of {given.requests:,}", worst, "ms"),
            _row("the list of tasks meanwhile, p99", 1e3 * asked.p99, "ms"),
            _row(f"check-ins from {len(lanes)} connections at full speed and no flood, p99", 1e3 * quiet.p99, "ms"),
        ],
        "ratios": [bound("tasks-flood-ms", f"{name}, p99", p99, "ms", 300.0)],
    }


def _pages(place: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """The event loop's time for a study's page that has not changed, of every public study here."""
    progress(f"{PAGES} times the page of each study")
    folder = place / "pages"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", __name__, "pages", str(folder), str(PAGES)], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    worst = max(found, key=lambda name: found[name]["unchanged"])
    rows = [
        _row(f"page of {name}, {what}, event loop", each[what], "ms")
        for name, each in found.items()
        for what in ("first", "unchanged")
    ]
    name = f"event loop for the unchanged page of a study ({worst}, the dearest of {len(found)})"
    return {"rows": rows, "ratios": [bound("study-page-ms", name, found[worst]["unchanged"], "ms", 2.0)]}


def measure_pages(folder: Path, times: int) -> None:
    """Serve here, ask from another thread, and print the event loop's CPU time for a page in milliseconds."""
    import http.client
    import threading

    from crowdml.server.serve import Started, run, serve

    async def spent() -> float:
        return time.thread_time()

    def ask(started: Started, loop: asyncio.AbstractEventLoop) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", int(started.address.rpartition(":")[2]))

        def look(path: str, many: int) -> float:
            began = asyncio.run_coroutine_threadsafe(spent(), loop).result(60)
            for _ in range(many):
                connection.request("GET", path, headers={"Accept": "text/html"})
                answer = connection.getresponse()
                if answer.status != 200 or not answer.read():
                    raise RuntimeError(f"{path} was answered with {answer.status}.")
            return 1e3 * (asyncio.run_coroutine_threadsafe(spent(), loop).result(60) - began) / many

        found: dict[str, dict[str, float]] = {}
        try:
            for each in started.hub.hosted():
                path = f"/studies/{each.task.hash.hex()[:12]}"
                found[each.task.name] = {"first": look(path, 1), "unchanged": look(path, times)}
            print(json.dumps(found), flush=True)
        finally:
            connection.close()
            started.stop()

    def tell(started: Started) -> None:
        threading.Thread(target=ask, args=(started, asyncio.get_running_loop())).start()

    run(serve(folder, port=0, tasks=public_tasks(), started=tell))


def _ratio(key: str, name: str, found: dict[str, Any], goal: float) -> dict[str, Any]:
    return {"key": key, "name": name, "unit": "ratio", "goal": goal, "holds": found["value"] >= goal, **found}


# --- what is sent ---


@dataclass
class Load:
    """Requests as bytes, signed beforehand: each device's check-ins in order, on one connection."""

    task: Any
    secrets: list[bytes]
    signed: list[list[bytes]]
    """By device, then by seq."""
    each: int
    body: bytes

    @property
    def size(self) -> int:
        return len(self.signed[0][0])

    def check_ins(self, turn: int) -> list[list[bytes]]:
        path = f"/v1/tasks/{self.task.hash.hex()}/check-in"
        lanes: list[list[bytes]] = [[] for _ in range(CONNECTIONS)]
        for seq in range(turn * self.each, (turn + 1) * self.each):
            for number, bodies in enumerate(self.signed):
                lanes[number % CONNECTIONS].append(_request("POST", path, bodies[seq]))
        return lanes

    def check_outs(self, tag: bytes) -> list[list[bytes]]:
        path = f"/v1/tasks/{self.task.hash.hex()}/publication"
        extra = b"If-None-Match: " + tag + b"\r\n" if tag else b""
        return [[_request("GET", path, b"", extra)] * (CHECK_OUTS // CONNECTIONS) for _ in range(CONNECTIONS)]


def _request(method: str, path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\n".encode() + extra
    if method == "POST":
        head += b"Content-Type: " + MSGPACK + f"\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"\r\n" + body


def public_tasks() -> list[Any]:
    """The task that devices check in to, and others that strangers look at."""
    from crowdml.protocols import settled
    from crowdml.task import parse, shipped_text

    return [parse(shipped_text("mnist")), *(settled(parse(shipped_text(name))) for name in PUBLIC)]


def make_load(turns: int, *, signed: bool = True) -> Load:
    """Check-ins of the shipped MNIST task (50 features, 10 classes), with a gradient of zeros."""
    import numpy as np

    from crowdml.messages import SERVER, Envelope
    from crowdml.protocols import find
    from crowdml.task import parse, shipped_text
    from crowdml.wire.envelopes import sign
    from crowdml.wire.keys import Key
    from crowdml.wire.packing import pack
    from crowdml.wire.statements import Statement

    task = parse(shipped_text("mnist"))
    fields = find(task).expected(task)["sgd/gradient/1"]
    plain: dict[str, Any] = {
        name: [each.dtype, each.shape, np.zeros(each.shape, each.dtype).tobytes()]
        for name, each in fields.items()
        if name != "version"
    }
    body = pack({"errors": None, "labels": None, **plain, "version": 0})
    secrets = [number.to_bytes(32, "big") for number in range(1, DEVICES + 1)]
    each = CHECK_INS // DEVICES
    found: list[list[bytes]] = []
    for secret in secrets if signed else ():
        key = Key.from_secret(secret)
        envelopes = [
            Envelope(task.hash, key.id, frozenset((SERVER,)), seq, "sgd/gradient/1", body)
            for seq in range(1, turns * each + 1)
        ]
        found.append([sign(one, Statement(("zcdp 1/10",), one.seq, ("zcdp 1/10",)), key) for one in envelopes])
    return Load(task, secrets, found, each, body)


# --- the generator ---


@dataclass
class Turn:
    requests: int
    wall: float
    cpu: float
    latencies: list[float]

    @property
    def rate(self) -> float:
        return self.requests / self.wall

    @property
    def per_cpu_second(self) -> float:
        return self.requests / max(self.cpu, 1e-9)

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[int(0.99 * len(self.latencies))]


class Lane(asyncio.Protocol):
    """One connection: a request, its whole answer, the next."""

    def __init__(self, requests: Sequence[bytes], done: asyncio.Future[None]) -> None:
        self.requests, self.done, self.at = requests, done, 0
        self.data, self.needed = b"", 0
        self.began = 0.0
        self.latencies: list[float] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._next()

    def _next(self) -> None:
        if self.at == len(self.requests):
            self.transport.close()
            self.done.set_result(None)
            return
        self.began = time.perf_counter()
        self.transport.write(self.requests[self.at])
        self.at += 1

    def data_received(self, data: bytes) -> None:
        self.data = self.data + data if self.data else data
        if not self.needed:
            end = self.data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.data[:end].lower()
            if head[9:12] not in (b"200", b"202", b"304"):
                self._fail(f"the server answered {self.data[:600]!r}")
                return
            at = head.find(b"content-length: ")
            size = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 and head[9:12] != b"304" else 0
            self.needed = end + 4 + size
        if len(self.data) >= self.needed:
            self.latencies.append(time.perf_counter() - self.began)
            self.data, self.needed = b"", 0
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


# --- the servers, each in a process of its own ---


@dataclass
class Process:
    kind: str
    folder: Path
    port: int
    pid: int

    async def drive(self, lanes: Sequence[Sequence[bytes]]) -> Turn:
        loop = asyncio.get_running_loop()
        open_: list[Lane] = []
        cpu, wall = self._cpu(), time.perf_counter()
        for requests in lanes:
            lane = Lane(requests, loop.create_future())
            await loop.create_connection(lambda lane=lane: lane, "127.0.0.1", self.port)
            open_.append(lane)
        await asyncio.gather(*(lane.done for lane in open_))
        wall, cpu = time.perf_counter() - wall, self._cpu() - cpu
        latencies = [each for lane in open_ for each in lane.latencies]
        return Turn(sum(map(len, lanes)), wall, cpu, latencies)

    async def drive_slowly(self, lanes: Sequence[Sequence[bytes]], rate: float) -> Turn:
        """Send `rate` requests a second in all: each lane in its turn, and late where an answer is late."""
        began, latencies = time.perf_counter(), list[float]()

        async def drive(place: int, requests: Sequence[bytes]) -> None:
            for number, request in enumerate(requests):
                due = began + (number * len(lanes) + place) / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                latencies.extend((await self.drive([[request]])).latencies)

        cpu = self._cpu()
        await asyncio.gather(*(drive(place, requests) for place, requests in enumerate(lanes)))
        return Turn(sum(map(len, lanes)), time.perf_counter() - began, self._cpu() - cpu, latencies)

    def tag(self) -> bytes:
        """The entity tag that it gives now."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", f"/v1/tasks/{(self.folder / 'task').read_text()}/publication")
        found = connection.getresponse().headers["ETag"].encode()
        connection.close()
        return found

    def _cpu(self) -> float:
        """CPU-seconds of the process until now, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int | str) -> int:
    """Bytes of a process that are in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def child(kind: str, folder: Path, made: Load) -> Generator[Process]:
    folder.mkdir()
    (folder / "keys").write_bytes(b"".join(made.secrets))
    (folder / "task").write_text(made.task.hash.hex())
    with started([sys.executable, "-m", __name__, kind, str(folder)]) as (pid, out):
        said = out.readline()
        if not said:
            raise RuntimeError(f"the {kind} server did not start.")
        yield Process(kind, folder, int(said), pid)


def serve_bare(folder: Path) -> None:
    """The limit: uvicorn, one function, one verification, a group commit."""
    import uvicorn
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from crowdml.server.serve import _listen, run
    from crowdml.wire.keys import Key

    secrets = (folder / "keys").read_bytes()
    keys = [Key.from_secret(secrets[at : at + 32]) for at in range(0, len(secrets), 32)]
    public = {key.id.encode(): Ed25519PublicKey.from_public_bytes(key.public) for key in keys}
    database = sqlite3.connect(folder / "bare.sqlite", isolation_level=None, check_same_thread=False)
    for pragma in ("page_size = 8192", "journal_mode = wal", "synchronous = full"):
        database.execute(f"pragma {pragma}").fetchall()
    database.execute("create table body (id integer primary key, signed blob not null)")
    receipt, publication = bytes(262), bytes(2048)
    waiting: list[tuple[bytes, asyncio.Future[None]]] = []
    busy = False

    def commit(batch: list[bytes]) -> None:
        for data in batch:
            at = data.index(b"\xa6sender\xd9\x20") + 9
            public[data[at : at + 32]].verify(data[:64], b"crowdml/envelope/1" + data[64:])
        database.execute("begin immediate")
        database.executemany("insert into body (signed) values (?)", [(data,) for data in batch])
        database.execute("commit")

    async def work() -> None:
        nonlocal busy
        while waiting:
            batch = waiting[:256]
            del waiting[:256]
            await asyncio.get_running_loop().run_in_executor(None, commit, [data for data, _ in batch])
            for _, future in batch:
                future.set_result(None)
        busy = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal busy
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append((body, future))
            if not busy:
                busy = True
                tasks.add(asyncio.get_running_loop().create_task(work()))
            await future
            await _say(send, 202, receipt)
        elif any(name == b"if-none-match" for name, _ in scope["headers"]):
            await _say(send, 304, b"")
        else:
            await _say(send, 200, publication)

    tasks: set[asyncio.Task[None]] = set()
    listening = _listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, http="httptools", lifespan="off"))
    print(listening.getsockname()[1], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        run(server.serve(sockets=[listening]))


async def _say(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", MSGPACK), (b"content-length", str(len(body)).encode()), (b"etag", b'"1"')]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_ours(folder: Path) -> None:
    from crowdml.server.limits import Limits
    from crowdml.task import parse, shipped_text

    much = 1e9  # every bound is checked, and none is met: on a busy machine 64 at once may wait for long
    limits = Limits(address_rate=much, address_burst=much, device_rate=much, device_burst=much, patience=much)
    _enrol_crowd(folder)
    _serve(folder, tasks=[parse(shipped_text("mnist"))], limits=limits)


def serve_public(folder: Path) -> None:
    """Ours with several tasks and the bounds that an operator gets, but that no check-in is refused for its wait."""
    from crowdml.server.limits import Limits

    _enrol_crowd(folder)
    _serve(folder, tasks=public_tasks(), limits=Limits(patience=1e9))


def _enrol_crowd(folder: Path) -> None:
    """Let the server know the devices whose keys are in the folder."""
    from crowdml.server.hub import code_hash, utc_now
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store
    from crowdml.wire.keys import Key

    secrets = (folder / "keys").read_bytes()
    with Store(folder / DATABASE) as store:
        store.invite(code_hash("bench"), utc_now(), uses=DEVICES)
        for at in range(0, len(secrets), 32):
            store.enrol(code_hash("bench"), Key.from_secret(secrets[at : at + 32]).public, utc_now())


def _serve(folder: Path, **more: Any) -> None:
    """A server on what is there, which says its port first."""
    from crowdml.server.serve import Started, run, serve

    def tell(started: Started) -> None:
        print(started.address.rpartition(":")[2], flush=True)

    run(serve(folder, port=0, started=tell, **more))


if __name__ == "__main__":
    if sys.argv[1] == "feed":
        feed(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "pages":
        measure_pages(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        serve_kind = {"bare": serve_bare, "ours": serve_ours, "public": serve_public, "again": _serve}
        serve_kind[sys.argv[1]](Path(sys.argv[2]))
