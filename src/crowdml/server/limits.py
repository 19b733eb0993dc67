"""Bounds on what others may ask of the server: rates by address and by device, sizes, and how many wait at once."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address
from itertools import accumulate

from crowdml.pace import SPEED
from crowdml.server.sizes import LARGEST_CHECK_IN
from crowdml.wire.problems import Problem


@lru_cache(maxsize=4096)
def source(address: str) -> str:
    """The name under which an address is counted: of IPv6 its /64, since whoever has one has all of it."""
    if ":" not in address:
        return address
    try:
        found = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{IPv6Address(int(found) >> 64 << 64)}/64"


PROXIES = ("127.0.0.1", "::1")
"""Where a proxy on this machine comes from."""


@dataclass
class Rates:
    """A token bucket for each name: `rate` requests a second on average, `burst` at once. Memory is bounded."""

    rate: float
    burst: float
    most: int = 100_000
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, name: str, now: float) -> None:
        """Let a request pass, or refuse it with the seconds to wait. A refused one takes no token."""
        tokens, then = self._buckets.pop(name, (self.burst, now))
        tokens = min(self.burst, tokens + (now - then) * self.rate)
        passes = tokens >= 1
        self._buckets[name] = (tokens - 1 if passes else tokens, now)
        if len(self._buckets) > self.most:
            self._buckets.popitem(last=False)
        if not passes:
            wait = max(1, math.ceil((1 - tokens) / self.rate))
            raise Problem("too-many", f"At most {self.rate:g} requests a second are answered here.", retry_after=wait)

    def give(self, name: str) -> None:
        """Take a request off the count: its sender proved who it is, and is counted by that name."""
        found = self._buckets.get(name)
        if found is not None:
            self._buckets[name] = (min(self.burst, found[0] + 1), found[1])


WITHIN = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 2.0, 5.0)
"""Seconds: check-ins are counted by which of them they took at most."""
BREATH = 0.25
"""Seconds between a batch and the next who comes, at most, for the writer to count as busy all the time."""
SPAN = 60.0
"""Seconds over which devices are counted at least."""


@dataclass
class Population:
    """How many devices are there: distinct ones that checked in lately, in spans of `span` seconds.

    Until a whole span has passed nobody knows, and all that are registered count: they may all come back at once.
    """

    span: float = SPAN
    _began: float | None = None
    _now: set[str] = field(default_factory=set)
    _before: set[str] | None = None

    def saw(self, device: str, now: float) -> None:
        self._turn(now)
        self._now.add(device)

    def size(self, registered: int, now: float) -> int:
        self._turn(now)
        return registered if self._before is None else min(registered, max(len(self._before), len(self._now)))

    def _turn(self, now: float) -> None:
        if self._began is None:
            self._began = now
        elif now - self._began >= self.span:
            missed = now - self._began >= 2 * self.span
            self._before, self._now, self._began = set() if missed else self._now, set(), now


@dataclass
class Turns:
    """How long a request may have waited before anybody read it: as long as the event loop was busy with others.

    What is read in one turn of the loop came while the turn before went on, or woke a loop that was idle.
    """

    _this: float | None = None
    """When something was first read in this turn."""
    _before: float | None = None

    def read(self, now: float) -> bool:
        """Something is read; whether it is the first of its turn, after which `turned` wants to be called."""
        if self._this is not None:
            return False
        self._this = now
        return self._before is None  # else the one that was called for the turn before calls again

    def turned(self) -> bool:
        """The next turn begins; whether this wants to be called at the one after it."""
        self._before, self._this = self._this, None
        return self._before is not None

    def waited(self, now: float) -> float:
        """Seconds at most that what is read now has waited."""
        began = self._this if self._before is None else self._before
        return 0.0 if began is None else now - began


@dataclass
class Queue:
    """How fast the writer works, how long a check-in takes until it is answered, and when to come back if refused."""

    speed: float = SPEED
    """Check-ins a second, of the last batches; at first a guess."""
    turns: Turns = field(default_factory=Turns)
    clock: Callable[[], float] = time.monotonic
    _last: float = 0.0
    """When a batch was done last."""
    _pressed: float | None = None
    """Since when many wait, after that."""
    _within: list[int] = field(default_factory=lambda: [0] * (len(WITHIN) + 1))
    _seconds: float = 0.0
    _taken: float = 0.0

    def took(self, check_ins: int, seconds: float) -> None:
        """A batch was done. The speed follows over some hundred check-ins: small batches say little.

        While many wait, what lies between two batches counts too: answers, snapshots, whatever else has the machine.
        One batch alone never halves it: the first is slow because all is cold, and one in many because the disk pauses.
        """
        now = self.clock()
        if self._pressed is not None:
            is_busy = self._pressed - self._last < BREATH
            seconds = max(seconds, now - (self._last if is_busy else self._pressed))
        self._last, self._pressed = now, None
        found = max(check_ins / max(seconds, 1e-6), self.speed / 2)
        self.speed += min(1.0, check_ins / 300) * (found - self.speed)

    def wait(self, waiting: int) -> float:
        """Seconds until one more is answered, from when it came: before it was read, and until the writer is there."""
        now = self.clock()
        if self._pressed is None:
            self._pressed = now
        return self.turns.waited(now) + waiting / self.speed

    def answered(self, seconds: float) -> None:
        """A check-in was taken, and answered so long after it came."""
        self._within[bisect_left(WITHIN, seconds)] += 1
        self._seconds += seconds

    def metrics(self) -> Iterator[str]:
        """How long check-ins took that were taken: a histogram, as Prometheus reads it."""
        yield "# TYPE crowdml_check_in_seconds histogram"
        for bound, count in zip((*WITHIN, "+Inf"), accumulate(self._within), strict=True):
            yield f'crowdml_check_in_seconds_bucket{{le="{bound}"}} {count}'
        yield f"crowdml_check_in_seconds_sum {self._seconds:.6f}"
        yield f"crowdml_check_in_seconds_count {sum(self._within)}"

    def later(self, now: float, crowd: int, pace: float = 1.0) -> int:
        """Whole seconds after which one that is refused finds room: the next place after all that were given away.

        Places follow one another at four fifths of the speed, or at the pace where that is more (small batches are slow
        ones), and never reach beyond the time that the whole crowd takes: whoever is refused twice gives its first
        place up.
        """
        rate = max(pace, 0.8 * self.speed)
        self._taken = min(max(self._taken, now + 1) + 1 / rate, now + 2 + crowd / rate)
        return math.ceil(self._taken - now)


@dataclass(frozen=True)
class Limits:
    """What the operator may set; the defaults suit a small machine."""

    body: int = LARGEST_CHECK_IN
    """Bytes of a check-in at most; of a task that needs less, what it needs."""
    bodies: int = 64 * 2**20
    """Bytes of requests that are half sent, and of check-ins that wait: of each so many, and of one address half."""
    waiting: int = 4096
    """Check-ins that wait for the writer; beyond that: 503 with Retry-After."""
    patience: float = 0.2
    """Seconds that a check-in may have to wait until it is read and the writer comes to it; beyond that: 503 with
    Retry-After."""
    batch: int = 256
    """Check-ins that are journalled in one transaction."""
    address_rate: float = 1000.0
    address_burst: float = 5000.0
    """By address, before anybody is authenticated. A check-in that is authentic does not count here."""
    device_rate: float = 5.0
    device_burst: float = 50.0
    slow: float = 30.0
    """Seconds in which the head of a request must arrive, and then its body; in which a peer must take something."""
    idle: float = 30.0
    """Seconds without a request after which a connection is closed."""
    connections: int = 10_000
    """Connections at once; beyond that: 503 with Retry-After."""
    address_connections: int = 256
    """Connections of one address at once."""
    handshake: float = 10.0
    """Seconds in which a TLS handshake must be done."""
    handshakes: int = 512
    address_handshakes: int = 64
    """TLS handshakes under way at once, in all and of one address: beyond that the oldest gives way."""
    behind_proxy: bool = False
    """Whether a proxy on this machine says who asks: `X-Forwarded-For` and `X-Forwarded-Proto` are believed of it."""
    free_space: int = 64 * 2**20
    """Bytes on disk below which nothing new is taken: 507, and reading goes on."""
    pace: float = 500.0
    """Check-ins a second that the crowd is asked to keep to."""
    snapshot_every: int = 2_000
    """Check-ins of a task between snapshots: what a restart has to fold again."""

    @property
    def proxies(self) -> tuple[str, ...]:
        """Sources that stand for many people: no bound by address holds for their connections."""
        return tuple(source(each) for each in PROXIES) if self.behind_proxy else ()
