"""Roles and steps."""

import dataclasses

import numpy as np
import pytest
from bench import masked_text

from crowdml.errors import ProtocolError, TaskError
from crowdml.privacy.private import Private, Rows
from crowdml.protocol import Context, Role, Sensed, Step, Woken, advance
from crowdml.protocols import find, sgd
from crowdml.task import parse


def test_a_step_goes_to_the_handler_of_its_event():
    role = Role(start=lambda task, ctx: Step(0), on={Woken: lambda task, state, event, ctx: Step((state, event.tag))})
    assert advance(role, None, 5, Woken("noon"), Context(me="d")).state == (5, "noon")


def test_an_event_that_a_role_does_not_hear_is_a_bug_with_a_name():
    role = Role(start=lambda task, ctx: Step(0), on={Woken: lambda task, state, event, ctx: Step(0)})
    with pytest.raises(ProtocolError, match="Nobody here hears Sensed; this role hears Woken"):
        advance(role, None, 0, Sensed(Private(np.ones((2, 2)), Rows(0, 2))), Context(me="d"))


def test_a_step_without_a_door_lets_nothing_out():
    with pytest.raises(ProtocolError, match="There is no door in this step, so nothing can leave as 'sum'"):
        Context(me="server").release("sum", Private(np.ones((2, 2)), Rows(0, 2)))


# Under masks (review, R11)


def test_a_protocol_that_needs_single_check_ins_is_refused_under_masks(monkeypatch):
    single = dataclasses.replace(sgd.protocol, contribution=None)
    monkeypatch.setattr(sgd, "protocol", single)
    find.cache_clear()  # this task has been looked at before
    with pytest.raises(TaskError, match=r"\[masking\] with protocol.kind = 'sgd': its server needs single check-ins"):
        find(parse(masked_text(epsilon="{ gradient = 1.0 }")))


def test_a_step_without_a_door_lets_nothing_out_under_masks_either():
    with pytest.raises(ProtocolError, match="nothing can leave as 'sum', masked or not"):
        Context(me="server").masked("sum", Private(np.ones((2, 2)), Rows(0, 2)))
