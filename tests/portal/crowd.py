"""A server with a study on it, and devices that check in what they are told: for the pages to show."""

from __future__ import annotations

import contextlib
import http.cookiejar
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from device import Answer, Device, Running, serving

from crowdml.messages import SERVER, Envelope, encode
from crowdml.price import Price
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import find, settled
from crowdml.protocols.sgd import Gradient
from crowdml.server.limits import Limits
from crowdml.task import Task, parse
from crowdml.wire.envelopes import sign
from crowdml.wire.requests import owner_link
from crowdml.wire.statements import Statement

TEXT = """
name     = "{name}"
title    = "{title}"
purpose  = "Learn to tell standing still, walking and riding apart, for a city's transport study."
collects = "Motion of the phone, 20 times a second. It never leaves the phone; noisy gradients do."
features = {{ kind = "accelerometer-spectrum", dimension = 64, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["still", "on foot", "in vehicle"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 20, step = {{ schedule = "1/sqrt(t)", c = 1.0 }}, radius = 200.0 }}
privacy = {{ mechanism = "discrete-gaussian", epsilon = {epsilon}, delta = 1e-6 {budget} }}
stop = {{ steps = 20000 {stop} }}
"""
BUDGET = ", budget = { epsilon = 2.0, samples = 2000 }"
COUNTED = "{ gradient = 0.9, errors = 0.5, labels = 0.5 }"


def make_study(
    name: str = "activity", title: str = "What is the owner of this phone doing?", *,
    epsilon: str = COUNTED, budget: str = BUDGET, stop: str = ", error = 0.02",
) -> Task:  # fmt: skip
    return settled(parse(TEXT.format(name=name, title=title, epsilon=epsilon, budget=budget, stop=stop)))


@lru_cache
def price(task: Task) -> Price:
    return Price.of(find(task), task)


@dataclass
class Page:
    """An answer as a browser sees it."""

    status: int
    headers: dict[str, str]
    text: str
    address: str


@dataclass
class Browser:
    """Follows redirects and keeps cookies; no script runs."""

    base: str
    language: str = "en"
    jar: http.cookiejar.CookieJar = field(default_factory=http.cookiejar.CookieJar)

    def __post_init__(self) -> None:
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self.jar)
        )

    def get(self, path: str, **headers: str) -> Page:
        return self._ask(urllib.request.Request(self.base + path), headers)

    def post(self, path: str, **form: str) -> Page:
        return self._ask(urllib.request.Request(self.base + path, urlencode(form).encode(), method="POST"), {})

    def _ask(self, request: urllib.request.Request, headers: dict[str, str]) -> Page:
        asked = {"Accept": "text/html", "Accept-Language": self.language, **headers}
        for name, value in asked.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            answer = self.opener.open(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            found = {name.lower(): value for name, value in answer.headers.items()}
            return Page(answer.status, found, answer.read().decode(errors="replace"), answer.url)


@dataclass
class Crowd:
    """A study on a server, and its devices."""

    running: Running
    task: Task
    devices: list[Device] = field(default_factory=list)
    links: set[int] = field(default_factory=set)

    @property
    def base(self) -> str:
        return self.running.started.address

    @property
    def path(self) -> str:
        return f"/studies/{self.task.hash.hex()[:12]}"

    def browser(self, language: str = "en") -> Browser:
        return Browser(self.base, language)

    def device(self) -> Device:
        self.devices.append(self.running.device())
        return self.devices[-1]

    def check_in(self, device: Device, errors: int = 5, labels: tuple[int, ...] = (10, 7, 3), **of: Any) -> Answer:
        """A check-in of what a task of three classes would let out; the gradient is nothing."""
        task = of.get("task", self.task)
        table = find(task).mechanisms(task)
        counted = {"errors": [errors], "labels": labels}
        heard = {row: Release(np.asarray(counted[row], np.int32), RECEIVED) for row in counted if row in table}
        zero = Release(np.zeros((64, 3), np.int32), RECEIVED)
        body = encode(Gradient(zero, heard.get("errors"), heard.get("labels"), np.int32(0)))
        seq = of.get("seq", device.seq + 1)
        priced = price(task)
        said = Statement.of(priced.device(seq), 20 * seq, priced.sample())
        envelope = Envelope(task.hash, device.key.id, frozenset((SERVER,)), seq, "sgd/gradient/1", body)
        answer = device.send(task, sign(envelope, said, device.key))
        assert answer.status == 202, answer.body
        device.seq = seq
        return answer

    def point(self) -> None:
        """Keep a moment now, rather than at the watcher's next look."""
        hub = self.running.hub
        hub._writer.submit(hub._point).result(60)

    def goes_on(self, check_ins: int, moments: int, seed: int = 1) -> None:
        """A crowd that learns: errors fall, and counts have the noise that the task asks for."""
        draw = np.random.default_rng(seed)
        self.devices += [self.running.device() for _ in range(12 - len(self.devices))]
        for number in range(check_ins):
            share = 0.08 + 0.5 * math.exp(-4 * number / check_ins)
            noise = draw.laplace(0, [2, 4, 4, 4])
            errors = draw.binomial(20, share) + round(noise[0])
            labels = draw.multinomial(20, [0.5, 0.32, 0.18]) + np.rint(noise[1:]).astype(int)
            first = 2 + number * 11 // check_ins
            self.check_in(self.devices[number % first], int(errors), tuple(int(count) for count in labels))
            if number % (check_ins // moments) == 0:
                self.point()
        self.point()

    def owner_address(self, device: Device, *, at: int | None = None, lasts: int = 900) -> str:
        """A link of this device; each another one, for a link is opened once."""
        when = int(time.time()) if at is None else at
        while at is None and when in self.links:
            when -= 1
        self.links.add(when)
        return f"/device/{device.key.id}?{owner_link(device.key, when, lasts)}"


@contextlib.contextmanager
def open_crowd(folder: Path, *more: Task, limits: Limits | None = None, database: str | None = None) -> Iterator[Crowd]:
    task = make_study()
    generous = limits or Limits(device_rate=1e6, device_burst=1e6)
    with serving(folder, task, *more, limits=generous, database=database) as running:
        yield Crowd(running, task)
