"""A small admm task: what a device says in a whole step, before masks, and what the server hears of a cohort."""

from __future__ import annotations

from typing import Any

import numpy as np

from crowdml.arrays import Samples
from crowdml.messages import masked_steps, total
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Silence, Source
from crowdml.privacy.private import Private, Rows
from crowdml.protocol import Context, Send, Sensed, advance
from crowdml.protocols import admm
from crowdml.protocols.admm import Centre
from crowdml.task import Task, parse

TEXT = """
name = "rounds"
[features]
dimension = {dimension}
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
{labels}
[model]
{model}
[protocol]
kind = "admm"
batch = {batch}
rho = {rho}
local_steps = {steps}
{more}
{masking}
[privacy]
mechanism = "{mechanism}"
uses = {uses}
epsilon = {{ update = {epsilon} }}
delta = 1e-6
{stop}
"""
MASKING = "[masking]\ncohort = 6\nminimum = 5\n"
DEFAULTS: dict[str, Any] = {
    "dimension": 4,
    "labels": 'classes = ["no", "yes"]',
    "model": 'kind = "logistic"',
    "batch": 5,
    "rho": 2.0,
    "steps": 8,
    "more": "",
    "masking": MASKING,
    "mechanism": "skellam",
    "uses": 3,
    "epsilon": 1.0,
    "stop": "",
}


def admm_task(**changes: Any) -> Task:
    return parse(TEXT.format(**{**DEFAULTS, **changes}))


def contribution(task: Task, batch: Samples, weights: Any, noise: Source | None = None) -> np.ndarray[Any, Any]:
    """What a device adds to its cohort's sum: a whole protocol step, masks left out."""
    door = Door(admm.mechanisms(task), noise or Silence())
    ctx = Context(me="bench", release=door.release, masked=door.masked)
    role = admm.protocol.device
    waiting = advance(role, task, role.start(task, ctx).state, Sensed(Private(batch, Rows(0, len(batch)))), ctx)
    step = advance(role, task, waiting.state, Centre(np.asarray(weights, np.float32), np.int32(0)), ctx)
    (send,) = [effect for effect in step.effects if isinstance(effect, Send)]
    return masked_steps(send.message)["update"]


def heard(steps: Any, devices: int, version: int = 0) -> Any:
    """A cohort's total as the server hears it."""
    return total("admm/total/1", {"update": np.asarray(steps)}, devices=np.int32(devices), version=np.int32(version))
