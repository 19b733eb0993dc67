"""A small server of rounds on a real socket, for devices: the core of masking, a clock of seconds, and room for lies.

It runs in the test's own loop, forgets nothing while it lives, and shows everything it knows. The real one is in
tests/loopback.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from loopback import SMALL, joined

from crowdml.device.folder import Folder, Server
from crowdml.messages import SERVER, encode
from crowdml.protocol import Context, Publish
from crowdml.protocols import find
from crowdml.secagg import server as core
from crowdml.secagg.messages import encode as pack_message
from crowdml.secagg.messages import open_message
from crowdml.secagg.refusals import Refused
from crowdml.secagg.server import ServerRound
from crowdml.secagg.terms import terms_of
from crowdml.task import Task, parse
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import Receipt, chain_next, chain_start
from crowdml.wire.requests import parse_authorization
from crowdml.wire.rounds import RoundView, publication_hash

MASKING = """
[masking]
cohort = {cohort}
minimum = {minimum}
colluders = 0
window = {window}
lease = {lease}
"""


def masked_task(
    name: str = "masked",
    *,
    uses: int = 1,
    samples: int = 1000,
    cohort: int = 5,
    minimum: int = 4,
    window: float = 30.0,
    lease: float = 30.0,
) -> Task:
    """The small task of loopback.py, under masks."""
    text = SMALL.format(name=name, samples=samples).replace('"discrete-gaussian"', f'"skellam"\nuses = {uses}')
    return parse(text + MASKING.format(cohort=cohort, minimum=minimum, window=window, lease=lease))


class RoundServer:
    """Rounds of one task. Every device that shows a key is admitted: admission is tested elsewhere."""

    def __init__(self, task: Task) -> None:
        self.task, self.protocol, self.key = task, find(task), Key.generate()
        self.terms = terms_of(task, self.protocol.mechanisms(task))
        effects = self.protocol.server.start(task, Context(me=SERVER)).effects
        params = next(effect.message for effect in effects if isinstance(effect, Publish))
        self.publication = (0, params.kind, encode(params))
        self.rounds: dict[int, ServerRound] = {}
        self.publics: dict[str, bytes] = {}
        self.seqs: Counter[str] = Counter()
        self.hashes: dict[tuple[str, int], bytes] = {}
        self.index, self.chain = 0, chain_start(task.hash)
        self.heard: list[tuple[str, int, str, bytes]] = []
        """Everything that was posted: sender, round, kind, and all of its bytes."""
        self.masked: dict[int, dict[str, bytes]] = {}
        """Bodies of masked check-ins by round and device."""
        self.lie: Callable[[str, RoundView], RoundView] = lambda _, view: view
        """Changes what a device is told."""
        self.lose: Callable[[str, str], bool] = lambda _, kind: False
        """Whether the answer to this kind of message gets lost on its way."""
        self.most = 10**9
        """Rounds to open."""
        self.address = ""
        self._timer: asyncio.TimerHandle | None = None
        self._open()

    # --- rounds ---

    @property
    def last(self) -> ServerRound:
        return self.rounds[max(self.rounds)]

    @property
    def summed(self) -> list[int]:
        return [number for number, each in self.rounds.items() if each.phase == core.SUMMED]

    def sums(self, number: int) -> dict[str, Any]:
        return core.sums(self.terms, self.rounds[number])

    def survivors(self, number: int) -> set[str]:
        from crowdml.secagg.cohort import read_roster
        from crowdml.secagg.messages import members

        state = self.rounds[number]
        roster = read_roster(self.terms, number, state.roster)
        return {roster.ids[at] for at in np.flatnonzero(members(state.survivors, len(roster)))}

    def _open(self) -> None:
        number = max(self.rounds, default=0) + 1
        if number <= self.most:
            self._set(core.begin(number))

    def _set(self, state: ServerRound) -> None:
        """Keep a round; where its phase is complete or new, see to its end."""
        before = self.rounds.get(state.round)
        self.rounds[state.round] = state
        if core.is_complete(self.terms, state):
            self.close(state.round)
        elif before is None or before.phase != state.phase:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if state.phase in (core.SUMMED, core.ABANDONED):
                self._open()
            elif before is not None or state.adverts:
                self._arm(state)
        elif before.phase == core.ADVERTISE and self._timer is None and len(state.adverts) >= self.terms.smallest:
            self._arm(state)

    def _arm(self, state: ServerRound) -> None:
        masking = self.task.masking
        assert masking is not None
        seconds = float(masking.window if state.phase == core.ADVERTISE else masking.lease)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late, state.round, state.phase)

    def _late(self, number: int, phase: str) -> None:
        if self.rounds[number].phase == phase:
            self.close(number)

    def close(self, number: int) -> None:
        self._set(core.close(self.terms, self.rounds[number], publication_hash(*self.publication)))

    # --- what is asked ---

    def view(self, device: str, number: int | None) -> RoundView:
        state = self.last if number is None else self.rounds.get(number)
        if state is None:
            raise Problem("round-over", f"Round {number} is over.")
        message = core.tell(self.terms, state, device)
        publication = self.publication if message is not None and state.phase == core.MASK else None
        body, kind = (b"", "") if message is None else (pack_message(message), message.kind)
        if state.phase == core.MASK and device in self.masked.get(state.round, {}):
            body, kind, publication = b"", "", None
        return self.lie(device, RoundView(state.round, state.phase, kind, body, 1000, 20, publication, state.why))

    def hear(self, data: bytes, checks_in: bool) -> tuple[int, bytes, str]:
        signed = open_signed(data)
        envelope = signed.envelope
        message = open_message(envelope.kind, envelope.body)
        if isinstance(message, core.Advert):
            self.publics[envelope.sender] = message.public
        public = self.publics.get(envelope.sender)
        if public is None or not signed.verify(public):
            raise Problem("signature", "Not signed by this device.")
        if checks_in:
            return *self._check_in(signed, message), envelope.kind
        self.heard.append((envelope.sender, message.round, envelope.kind, data))
        self._take(envelope.sender, message)
        return 202, self.view(envelope.sender, message.round).encode(), envelope.kind

    def _take(self, sender: str, message: Any) -> None:
        state = self.rounds.get(message.round)
        if state is None or state.phase in (core.SUMMED, core.ABANDONED):
            raise Problem("round-over", f"Round {message.round} is over.")
        try:
            self._set(core.hear(self.terms, state, sender, message))
        except Refused as error:
            late = "belongs to" in str(error)
            raise Problem("round-over" if late else "round-refused", str(error)) from error

    def _check_in(self, signed: Any, message: Any) -> tuple[int, bytes]:
        sender, seq = signed.envelope.sender, signed.envelope.seq
        if self.hashes.get((sender, seq)) == signed.hash:
            status = 200
        else:
            if seq != self.seqs[sender] + 1:
                raise Problem("seq-gap", "Another number.", expected=self.seqs[sender] + 1)
            self._take(sender, message)
            self.masked.setdefault(message.round, {})[sender] = message.body
            self.seqs[sender], self.hashes[sender, seq], status = seq, signed.hash, 202
        self.index += 1
        self.chain = chain_next(self.chain, self.task.hash, sender, seq, signed.hash)
        receipt = Receipt(self.task.hash, sender, seq, self.index, signed.hash, self.chain)
        return status, receipt.sign(self.key).encode()

    # --- HTTP ---

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, target, _ = line.decode().split(" ")
                headers: dict[str, str] = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                status, data, lost = self._route(method, target, headers, body)
                if lost:
                    break
                writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _route(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes, bool]:
        try:
            parts = urlsplit(target)
            if method == "POST":
                status, data, kind = self.hear(body, parts.path.endswith("/check-in"))
                sender = open_signed(body).envelope.sender
                return status, data, self.lose(sender, kind)
            said = parse_authorization(headers.get("authorization"))
            number = parse_qs(parts.query).get("round")
            return 200, self.view(said.device, None if number is None else int(number[0])).encode(), False
        except Problem as problem:
            return problem.status, problem.encode(), False


@asynccontextmanager
async def rounds_of(task: Task) -> AsyncIterator[RoundServer]:
    """A server of this task's rounds on a free port of this machine."""
    server = RoundServer(task)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.most = 0
        listening.close()


def masked_home(path: Path, task: Task, server: RoundServer) -> Folder:
    """A folder whose owner accepted the task, and which knows the server."""
    home = joined(path, task)
    home.ledger().close()
    home.pin(Server(server.address, server.key.public.hex()))
    return home
