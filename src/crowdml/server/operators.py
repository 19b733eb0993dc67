"""Operators: who they are, that they are there, and that a form is theirs.

A password is kept as argon2id. A session is a random token in a cookie, of which the store has the SHA-256 alone; it
ends when nobody used it for `IDLE`, and after `LONGEST` in any case. Every form carries a token of its session, and has
to come from a page of this server. Until the first operator exists, a set-up token that was printed once lets one in.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from starlette.requests import Request
from starlette.responses import Response

from crowdml.errors import CrowdmlError, FormError
from crowdml.server.limits import Rates
from crowdml.storage.server import Session, Store, StoreError
from crowdml.storage.server.operating import end_other_sessions, extend_session, first_operator, remove_setting
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.server.hub import Hub

T = TypeVar("T")
log = logging.getLogger("crowdml.server")

IDLE = timedelta(hours=2)
LONGEST = timedelta(hours=12)
SHORTEST_PASSWORD, LONGEST_PASSWORD = 12, 1024
SETUP = "setup-token"
COOKIE, FORM_COOKIE, PATH = "crowdml-operator", "crowdml-form", "/operator"
FORM_FIELD, LIVE = "form-token", "crowdml-live"
NAME = re.compile(r"[a-z0-9][a-z0-9._@-]{0,63}")
TOKEN = re.compile(r"([A-Za-z0-9_-]{43})\.([0-9]{1,10})")
WRONG = "This name and password do not belong together."
MOST_WAITING = 16
"""Passwords that wait for the one thread that hashes: 64 MiB and about a tenth of a second each."""

_hasher = PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=1)


class BadOperator(FormError):  # noqa: N818  # reads as the sentence it raises
    """A name or password that cannot be used, or is wrong. `about` is the field that it stands next to."""


class LoginNeeded(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """Nobody is logged in here, or no longer."""


def check_name(name: str) -> str:
    """The name as it is kept, or a refusal."""
    plain = name.strip().lower()
    if not NAME.fullmatch(plain):
        raise BadOperator("A name has up to 64 letters, digits, '.', '-', '_' and '@', such as anna.", "name")
    return plain


def check_password(password: str, name: str) -> str:
    """The password as it is hashed, or a refusal. Length counts; which characters does not."""
    plain = unicodedata.normalize("NFKC", password)
    if len(plain) < SHORTEST_PASSWORD:
        raise BadOperator(
            f"This password has {len(plain)} characters; take at least {SHORTEST_PASSWORD}, such as four words.",
            "password",
        )
    if len(plain) > LONGEST_PASSWORD:
        raise BadOperator(f"A password has at most {LONGEST_PASSWORD} characters.", "password")
    if len(set(plain)) < 5 or (name and name in plain.lower() and len(plain) < len(name) + 8):
        raise BadOperator("This password is easy to guess; take four words that nobody expects together.", "password")
    return plain


def hash_password(password: str) -> str:
    """argon2id with a salt of its own: 64 MiB, three passes."""
    return _hasher.hash(unicodedata.normalize("NFKC", password))


def new_setup_token(store: Store) -> str | None:
    """A fresh set-up token, of which the store has the hash; the one before is void. None once somebody is there."""
    if store.operators():
        remove_setting(store, SETUP)
        return None
    token = secrets.token_urlsafe(24)
    store.set_setting(SETUP, _digest(b"crowdml/setup/1", token))
    return token


def operators_of(request: Request) -> Operators:
    """The one of this server."""
    state = request.app.state
    if not hasattr(state, "operators"):
        state.operators = Operators(state.hub)
    return state.operators


@dataclass
class Operators:
    """Logs operators in and out. Passwords are hashed in a thread of its own, one at a time."""

    hub: Hub
    addresses: Rates = field(default_factory=lambda: Rates(1 / 6, 20))
    """Attempts from one address: twenty at once, ten a minute."""
    names: Rates = field(default_factory=lambda: Rates(1 / 30, 10))
    """Failed attempts on one name: ten at once, two a minute."""

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="argon2")
        self._waiting = 0
        self._nobody: str | None = None
        self._secret = hmac.digest(self.hub.store.setting("server-key") or b"", b"crowdml/forms/1", "sha256")

    # --- log in and out ---

    async def log_in(self, name: str, password: str, address: str) -> str:
        """The token of a new session. Wrong names cost the same time as wrong passwords."""
        who, now = name.strip().lower()[:64], time.monotonic()
        self._take(self.addresses, address, now)
        self._take(self.names, who, now)
        known = await asyncio.to_thread(self.hub.store.operator_password, who) if NAME.fullmatch(who) else None
        right = await self._hashing(lambda: self._verify(known, password))
        if not right or known is None:
            log.info("a login from %s was refused", address)
            raise BadOperator(WRONG, "password")
        self.names.give(who)
        renewed: str | None = None
        if _hasher.check_needs_rehash(known):
            renewed = await self._hashing(lambda: hash_password(password))
        return await self._open(who, "logged in", known, renewed)

    def _take(self, rates: Rates, name: str, now: float) -> None:
        try:
            rates.take(name, now)
        except Problem as problem:
            seconds = problem.retry_after or 1
            raise Problem("too-many", f"Too many attempts. Try again in {seconds} s.", retry_after=seconds) from problem

    def _verify(self, known: str | None, password: str) -> bool:
        if self._nobody is None:
            self._nobody = hash_password(secrets.token_urlsafe(16))
        try:
            return _hasher.verify(known or self._nobody, unicodedata.normalize("NFKC", password[:LONGEST_PASSWORD]))
        except (VerificationError, InvalidHashError):
            return False

    async def _hashing(self, work: Callable[[], T]) -> T:
        if self._waiting >= MOST_WAITING:
            raise Problem("busy", "Many people log in at once. Try again.", retry_after=2)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= 1

    async def _open(self, name: str, did: str, known: str, renewed: str | None = None) -> str:
        """The token of a session for whoever gave the password behind `known`, if that still holds by then."""
        now = self._now()
        token = f"{secrets.token_urlsafe(32)}.{int(now.timestamp())}"  # its hash covers when it began
        opened = Session(_token_hash(token), secrets.token_urlsafe(24), name, _iso(now + IDLE))

        def work() -> bool:
            done = self.hub.store.open_session(opened, _iso(now), known, renewed)
            if done:
                self.hub.store.record("operator", _iso(now), f"{name} {did}")
            return done

        if not await self.hub.write(work):
            raise BadOperator(WRONG, "password")
        return token

    async def log_out(self, session: Session) -> None:
        await self.hub.write(self.hub.store.close_session, session.token_hash)

    async def set_up(self, token: str, name: str, password: str, address: str) -> str:
        """A session of the first operator, by the token that was printed; that one is void from then on."""
        self._take(self.addresses, address, time.monotonic())
        if not await asyncio.to_thread(self.may_set_up, token):
            raise BadOperator("This set-up address is not, or no longer, valid.", "token")
        who = check_name(name)
        hashed = await self._hashing(lambda: hash_password(check_password(password, who)))

        def work() -> bool:
            store = self.hub.store
            added = self.may_set_up(token) and first_operator(store, who, hashed, self.hub.clock())
            remove_setting(store, SETUP)
            return added

        if not await self.hub.write(work):
            raise BadOperator("Somebody has set this server up already.", "token")
        return await self._open(who, "set this server up", hashed)

    def may_set_up(self, token: str) -> bool:
        kept = self.hub.store.setting(SETUP)
        return kept is not None and hmac.compare_digest(kept, _digest(b"crowdml/setup/1", token))

    async def change_password(self, session: Session, old: str, new: str) -> None:
        """Every other session of this operator ends."""
        self._take(self.names, session.operator, time.monotonic())
        known = await asyncio.to_thread(self.hub.store.operator_password, session.operator)
        if not await self._hashing(lambda: self._verify(known, old)) or known is None:
            raise BadOperator("This is not your password.", "old")
        self.names.give(session.operator)
        hashed = await self._hashing(lambda: hash_password(check_password(new, session.operator)))

        def work() -> bool:
            done = end_other_sessions(self.hub.store, session.operator, session.token_hash, known, hashed)
            if done:
                self.hub.store.record("operator", self.hub.clock(), f"{session.operator} changed the password")
            return done

        if not await self.hub.write(work):
            raise BadOperator("This is not your password.", "old")

    async def add(self, session: Session, name: str, password: str) -> str:
        """Another operator, by one who is logged in."""
        who = check_name(name)
        if who in await asyncio.to_thread(self.hub.store.operators):
            raise BadOperator(f"There is an operator {who} already.", "name")
        hashed = await self._hashing(lambda: hash_password(check_password(password, who)))

        def work() -> None:
            self.hub.store.set_operator(who, hashed, self.hub.clock())
            self.hub.store.record("operator", self.hub.clock(), f"{session.operator} added operator {who}")

        await self.hub.write(work)
        return who

    # --- requests ---

    async def require(self, request: Request) -> Session:
        """The session of this request; raises `LoginNeeded`."""
        token = request.cookies.get(COOKIE, "")
        match = TOKEN.fullmatch(token)
        if match is None:
            raise LoginNeeded("Log in first.")
        now, begun = self._now(), datetime.fromtimestamp(int(match[2]), tz=self._now().tzinfo)
        found = await asyncio.to_thread(self.hub.store.session, _token_hash(token), _iso(now))
        if found is None:
            raise LoginNeeded("Your session has ended. Log in again.")
        last = begun + LONGEST
        if now >= last:
            await self.hub.write(self.hub.store.close_session, found.token_hash)
            raise LoginNeeded("Your session has ended. Log in again.")
        until = min(now + IDLE, last)
        used = LIVE not in request.headers  # a page that looks again by itself is nobody at work
        if used and until - datetime.fromisoformat(found.ends_at) > timedelta(minutes=1):
            with contextlib.suppress(StoreError):  # a full disk: reading goes on
                await self.hub.write(extend_session, self.hub.store, found.token_hash, _iso(until))
        return found

    def check_form(self, request: Request, given: str, session: Session | None) -> None:
        """Refuse a form that did not come from a page of this server in this browser."""
        wanted = session.csrf if session else self._form_token(request.cookies.get(FORM_COOKIE, ""))
        if not same_origin(request) or not wanted or not hmac.compare_digest(wanted.encode(), given.encode()):
            raise Problem("form-token", "This form is too old, or it came from another site. Nothing was changed.")

    def open_form(self, request: Request) -> tuple[str, str]:
        """For a form before anybody is logged in: a value for its cookie, and the token that goes with it."""
        value = request.cookies.get(FORM_COOKIE, "")
        if not re.fullmatch(r"[A-Za-z0-9_-]{32}", value):
            value = secrets.token_urlsafe(24)
        return value, self._form_token(value)

    def _form_token(self, value: str) -> str:
        return hmac.digest(self._secret, value.encode(), "sha256").hex() if value else ""

    # --- cookies ---

    def set_cookie(self, response: Response, request: Request, value: str, name: str = COOKIE) -> None:
        """For this server's operator pages alone, gone with the browser, out of reach of scripts and other sites."""
        secure = request.url.scheme == "https"
        response.set_cookie(name, value, path=PATH, secure=secure, httponly=True, samesite="strict")

    def clear_cookie(self, response: Response, request: Request) -> None:
        secure = request.url.scheme == "https"
        response.delete_cookie(COOKIE, path=PATH, secure=secure, httponly=True, samesite="strict")

    def _now(self) -> datetime:
        return datetime.fromisoformat(self.hub.clock())


def same_origin(request: Request) -> bool:
    """Whether the browser says that a page of this server sent the request; a client without a word on it may pass.

    Our pages name their origin in forms (Referrer-Policy: same-origin); browsers say `null` for others.
    """
    fetched = request.headers.get("sec-fetch-site")
    if fetched is not None and fetched != "same-origin":
        return False
    origin = request.headers.get("origin")
    if origin is None:
        return True
    return origin.lower() == f"{request.url.scheme}://{request.headers.get('host', '')}".lower()


def _token_hash(token: str) -> bytes:
    return _digest(b"crowdml/session/1", token)


def _digest(prefix: bytes, token: str) -> bytes:
    return hashlib.sha256(prefix + token.encode()).digest()


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")
