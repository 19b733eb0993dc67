"""/openapi.json is true: schemathesis reads it and holds every route of a live server to what it says.

Requests are made from the description, right and wrong ones; answers must have a documented status, content type,
headers and schema, and none may be a server's error. Half of them name a task and a device that are there, and half of
the bodies in msgpack are ones that a device signed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from device import Running, make_task, serving
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from masked_device import MaskedDevice, make_masked
from proportions_task import street

from crowdml.secagg import device as masker
from crowdml.server.limits import Limits
from crowdml.server.openapi import OPERATIONS, describe
from crowdml.wire.keys import Key
from crowdml.wire.requests import authorize, enrol

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance  # noqa: E402

TASK, CLOSED, MASKED = make_task("open"), make_task("closed"), make_masked("described", cohort=1000, minimum=990)
STREET = street(400)
LIMITS = Limits(device_rate=1e9, device_burst=1e9, address_rate=1e9, address_burst=1e9, address_connections=100_000)
FEW, MANY = 15, 200
RELAYED = ("/places/{place}", "/places", "/mailbox")

schemathesis.openapi.media_type("application/msgpack", st.binary(max_size=300))
schemathesis.openapi.media_type("application/octet-stream", st.binary(max_size=30))


@schemathesis.serializer("application/msgpack", "application/octet-stream")
def as_it_is(ctx: Any, value: Any) -> Any:
    return value if isinstance(value, bytes) else repr(value).encode()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("api"), TASK, CLOSED, MASKED, STREET, limits=LIMITS, invite=100_000) as server:
        server.started.hub.closed.add(CLOSED.hash)
        yield server


schema = schemathesis.openapi.from_dict(describe())
QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture)
EXCLUDED = [
    # What msgpack bodies and signatures have to be, no schema can say: docs/protocol.md does, and spec/.
    positive_data_acceptance
]


def ask(case: Any, running: Running, kind: str, seed: int) -> None:
    """Make some of the requests right, as a device would; then ask, and hold the answer to the description."""
    parameters, key = case.path_parameters or {}, Key.from_secret(seed.to_bytes(32, "big"))
    headers: dict[str, str] = {}  # given apart, so that schemathesis knows them as ours and tries it without, too
    if kind != "as made" and "task" in parameters:
        named = MASKED if case.path.endswith("/round") else STREET if case.path.endswith(RELAYED) else TASK
        parameters["task"] = (CLOSED if kind == "closed" else named).hash.hex()
    if kind == "signed":
        device = running.device()
        if "device" in parameters:
            parameters["device"] = device.key.id
            target = case.formatted_path
            headers["Authorization"] = authorize(device.key, case.method, target, b"", now=time.time())
            case.body = b"" if case.method == "POST" else case.body
        elif case.path.endswith("/round"):
            member = MaskedDevice(device, MASKED, 0)
            if case.method == "POST":
                state = masker.advertise(member.terms, 1, device.key, after=0)
                case.body = member.envelope("secagg/advert/1", state.sent, 1)
            else:
                case.query = {} if seed % 2 else {"round": 1}
                target = member.path + ("" if seed % 2 else "?round=1")
                headers["Authorization"] = authorize(device.key, "GET", target, b"", now=time.time())
        elif case.path.endswith(RELAYED):
            if seed % 2:
                parameters["place"] = seed % 400
            target = case.formatted_path
            if case.method == "POST":
                case.body = b""
            else:
                claim = f"{case.formatted_path.rpartition('/')[0]}/places/{seed % 400}"
                if case.path.endswith("/mailbox"):
                    case.query = {"after": seed % 3}
                    target += f"?after={seed % 3}"
                assert device.signed("POST", claim).status in (201, 409)
            headers["Authorization"] = authorize(device.key, case.method, target, b"", now=time.time())
        elif case.path.endswith("/check-in"):
            case.body = device.envelope(TASK, 1)
        elif case.path == "/v1/devices" and case.method == "POST":
            case.body, case.headers["Crowdml-Signature"] = enrol(key, running.started.code or "", ())
        elif case.path == "/v1/invitations/check" and case.method == "POST":
            case.body = {"code": running.started.code}
    changed = [] if kind == "as made" else [negative_data_rejection]  # what was made wrong may be right now
    case.call_and_validate(base_url=running.started.address, headers=headers, excluded_checks=[*EXCLUDED, *changed])


KINDS = st.sampled_from(["as made", "named", "closed", "signed"])


@schema.given(kind=KINDS, seed=st.integers(1, 2**64))
@schema.parametrize()
@settings(max_examples=FEW, deadline=None, suppress_health_check=QUIET, phases=(Phase.explicit, Phase.generate))
def test_every_route_answers_as_its_description_says(case: Any, running: Running, kind: str, seed: int) -> None:
    ask(case, running, kind, seed)


@pytest.mark.slow
@schema.given(kind=KINDS, seed=st.integers(1, 2**64))
@schema.parametrize()
@settings(max_examples=MANY, deadline=None, suppress_health_check=QUIET)
def test_every_route_answers_as_its_description_says_many_times(
    case: Any, running: Running, kind: str, seed: int
) -> None:
    ask(case, running, kind, seed)


def test_the_description_that_was_tested_is_the_one_that_the_server_gives(running: Running) -> None:
    assert json.loads(running.line().ask("GET", "/openapi.json").body) == describe()
    described = {(each.ok().method.upper(), each.ok().path) for each in schema.get_all_operations()}
    assert described == {(each.method.upper(), each.path) for each in OPERATIONS}
