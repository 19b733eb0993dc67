"""Conversations of a device's machine, event by event: what it hears, and what is to be done then.

`make_vectors.py` writes these beside the vectors of the wire. The server is the one of `machine_bench.py`. Noise is
left out, time passes in waits alone, and each number that is drawn by chance is 1/2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "conversations"))

from machine_bench import CHANCE, DEVICE, PLENTY, SERVER_KEY, Device, Server, refuses, silent, unheard, untouched

from crowdml.arrays import Samples
from crowdml.device.client import Answer
from crowdml.device.machine import (
    Acknowledge,
    Answered,
    Ask,
    Effect,
    Exhaust,
    Silent,
    Tell,
    TurnedDown,
    Wait,
    Waited,
    Write,
    Written,
)
from crowdml.device.sending import Outbox
from crowdml.privacy.spending import Charge
from crowdml.task import parse
from crowdml.wire.packing import pack

TASK = parse("""
name = "vector-machine"
[features]
dimension = 2
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["no", "yes"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 3
step = { c = 1.0 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0, labels = 0.5 }
delta = 1e-6
""")

# Eighths, so that JSON is exact.
BATCHES = tuple(
    Samples(np.array(x, np.float32) / 8, np.array(y, np.int32))
    for x, y in (([[3, -5], [8, 1], [-4, 2]], [1, 0, 1]), ([[1, 1], [-7, 0], [2, 6]], [0, 0, 1]))
)


def one_check_in(server: Server, device: Device) -> None:
    device.give(BATCHES[0])


def two_check_ins(server: Server, device: Device) -> None:
    for batch in BATCHES:
        device.give(batch)


def paused(server: Server, device: Device) -> None:
    away = Answered(Answer(200, {"crowdml-state": "paused", "crowdml-next": "60"}, b""))
    server.instead.extend((*untouched(1), lambda _: away))
    device.give(BATCHES[0])


def lost_answers(server: Server, device: Device) -> None:
    server.instead.extend((silent, refuses("busy", at="statement", retry_after=10), *untouched(2), unheard(server)))
    device.give(BATCHES[0])


def restored(server: Server, device: Device) -> None:
    device.give(BATCHES[0])
    server.forget(0)
    device.give(BATCHES[1])


def unproven(server: Server, device: Device) -> None:
    server.instead.extend((*untouched(2), refuses("seq-gap", "Seq 1 came before 9.", expected=9)))
    device.give(BATCHES[0])


def copied(server: Server, device: Device) -> None:
    Device(TASK, server).give(BATCHES[0])
    device.give(BATCHES[1])


def too_late(server: Server, device: Device) -> None:
    server.instead.extend((*untouched(2), refuses("stale", "The version is too old.")))
    device.give(BATCHES[0])
    device.give(BATCHES[1])


def revoked(server: Server, device: Device) -> None:
    server.instead.extend((*untouched(2), refuses("revoked", "Ask whoever runs the study.")))
    device.give(BATCHES[0])


def stopped(server: Server, device: Device) -> None:
    ended = Answered(Answer(200, {"crowdml-state": "stopped"}, b""))
    server.instead.extend((*untouched(1), lambda _: ended))
    device.give(BATCHES[0])


def nothing_waits(server: Server, device: Device) -> None:
    device.do(Outbox())


CONVERSATIONS: dict[str, Callable[[Server, Device], None]] = {
    "one check-in": one_check_in,
    "two check-ins": two_check_ins,
    "a task that is paused": paused,
    "no answer, a busy server, and an answer that was lost": lost_answers,
    "a server that was restored": restored,
    "a number that no signed message proves": unproven,
    "a ledger that is an older copy": copied,
    "a message that is dropped": too_late,
    "a device that was revoked": revoked,
    "a task that has stopped": stopped,
    "an empty outbox": nothing_waits,
}


def build() -> Any:
    return {
        "chance": CHANCE,
        "device_secret": (b"\x01" * 32).hex(),
        "device": DEVICE.id,
        "server_key": SERVER_KEY.public.hex(),
        "task": json.loads(TASK.canonical),
        "patience": {"first": 1.0, "cap": 8.0},
        "budget": {"epsilon": str(PLENTY.epsilon), "delta": PLENTY.delta, "samples": PLENTY.samples},
        "batches": [{"x": batch.x.tolist(), "y": batch.y.tolist()} for batch in BATCHES],
        "conversations": [conversation(name, talk) for name, talk in CONVERSATIONS.items()],
    }


def conversation(name: str, talk: Callable[[Server, Device], None]) -> Any:
    server = Server(TASK)
    device = Device(TASK, server)
    talk(server, device)
    ending = device.life.ending
    return {
        "name": name,
        "gives": [next(n for n, batch in enumerate(BATCHES) if batch is given) for given in device.batches],
        "steps": [
            {"at": now, "hears": heard(event), "does": [done(each) for each in effects]}
            for event, now, effects in device.steps
        ],
        "ending": None if ending is None else {"kind": ending.kind, "reason": ending.reason},
    }


def heard(event: Any) -> Any:
    match event:
        case Answered():
            answer = event.answer
            return {"answered": {"status": answer.status, "headers": dict(answer.headers), "body": answer.body.hex()}}
        case TurnedDown():
            return {"turned-down": event.problem.members()}
        case Silent():
            return {"silent": event.why}
        case Written():
            return "written"
        case Waited():
            return "waited"
        case _:
            return {"begins": type(event).__name__}


def done(effect: Effect) -> Any:
    match effect:
        case Ask():
            asked = {"method": effect.method, "path": effect.path, "headers": dict(effect.headers)}
            return {"ask": {**asked, "body": effect.body.hex(), "signed": effect.signed}}
        case Wait():
            return {"wait": effect.seconds, "why": effect.why}
        case Tell():
            return {"tell": effect.text}
        case Exhaust():
            return "exhaust"
        case Acknowledge():
            return {"acknowledge": {"place": effect.message.waiting.seq, "receipt": effect.receipt.hex()}}
        case Write():
            return {"write": written(effect)}


def written(write: Write) -> Any:
    used = write.used
    return {
        "charges": [charged(each) for each in write.charges],
        "outbox": [
            {"place": each.waiting.seq, "seq": each.seq, "signed": each.waiting.body.hex()} for each in write.sealed
        ],
        "forgotten": list(write.done),
        "standing": pack(write.standing).hex(),
        "used": None if used is None else [used.serials[0], used.serials[-1]],
    }


def charged(charge: Charge) -> Any:
    return {
        "mechanism": charge.mechanism,
        "loss": str(charge.loss),
        "device_loss": str(charge.device_loss),
        "span": [charge.first_sample, charge.last_sample],
        "at": charge.charged_at,
    }
