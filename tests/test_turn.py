"""One device turn and one server turn: doors, inspection, effects, and devices that lie."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.errors import LeakError, ProtocolError
from crowdml.messages import SERVER, Public, masked_steps, message
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import RECEIVED, Private, Release, Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import CheckOut, Context, Publish, Role, Rule, Send, Sensed, Step, Stop, Wake, Woken
from crowdml.protocols import find
from crowdml.task import parse
from crowdml.turn import Outcome, Tamper, check_in, device_turn, first_device_turn, first_turn, letter_turn, server_turn

sys.path.insert(0, str(Path(__file__).parent / "conversations"))
from bench import masked_text, samples, task_text

TASK = parse(task_text(epsilon="{ gradient = 1.0 }"))
MASKED = parse(masked_text(epsilon="{ gradient = 1.0 }"))
BATCH = samples(1)


@message("test_turn/note/1")
class Note:
    words: Public[str]


def one_check_in(task=TASK, **more):
    protocol = find(task)
    named = {"noise": SeededSource(stream(3, 0, 0)), "me": "device", **more}
    return check_in(protocol, task, BATCH, first_turn(protocol, task).published, **named)


def replaced(role, **handlers):
    """sgd with a device of our own."""
    from dataclasses import replace

    return replace(find(TASK), device=Role(role, handlers.pop("on")))


def test_a_check_in_says_one_message_and_names_what_it_let_out():
    turn = one_check_in()
    assert turn.message.kind == "sgd/gradient/1"
    assert [to for to, _ in turn.said] == [frozenset({SERVER})]
    assert [(each.row, str(each.part)) for each in turn.passages] == [("gradient", "0 to 4")]
    assert turn.state is None


def test_what_a_device_senses_has_no_door_so_nothing_leaves_before_it_checked_out():
    def early(task, state, event, ctx):
        return Step(None, (Send(SERVER, ctx.release("gradient", event.batch)),))

    protocol = replaced(find(TASK).device.start, on={Sensed: early})
    with pytest.raises(ProtocolError, match="There is no door in this step"):
        check_in(protocol, TASK, BATCH, None, noise=Silence(), me="device")


def test_a_check_in_ends_with_the_turn_that_lets_something_out_as_on_a_device():
    """A shell charges one turn: what an earlier one let out would be charged by nobody."""
    ours, published = find(TASK), first_turn(find(TASK), TASK).published
    gives = ours.device.on[type(published)]

    def draws(task, batch, model, ctx):
        gives(task, batch, model, ctx)
        return Step(batch, (Wake(1.0, "later"),))

    protocol = replaced(ours.device.start, on={**ours.device.on, type(published): draws, Woken: lambda *_: Step(None)})
    turn = check_in(protocol, TASK, BATCH, published, noise=Silence(), me="device")
    assert [each.row for each in turn.passages] == ["gradient"]


def test_a_device_starts_with_a_state_and_without_effects():
    """A shell that took the state alone would lose a timer."""

    def waits(task, ctx):
        return Step("state", (Wake(1.0, "later"),))

    protocol = replaced(waits, on=find(TASK).device.on)
    with pytest.raises(
        ProtocolError, match="the device of protocol 'sgd' starts with Wake: its start gives a state alone"
    ):
        first_device_turn(protocol, TASK, me="device")
    with pytest.raises(ProtocolError, match="starts with Wake"):
        check_in(protocol, TASK, BATCH, first_turn(protocol, TASK).published, noise=Silence(), me="device")
    assert first_device_turn(find(TASK), TASK, me="device") is None


def test_no_shell_starts_a_device_by_itself():
    package = Path(sys.modules["crowdml"].__file__).parent
    starts = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "device.start(" in path.read_text()
    }
    assert starts == {"turn.py"}


def test_who_hears_a_letter_learns_from_it_and_answers_nothing():
    def answers(task, state, event, ctx):
        return Step(state, (Wake(1.0, "later"), CheckOut()))

    protocol, named = replaced(find(TASK).device.start, on={Note: answers}), {"me": "@1", "sender": "@2", "place": 1}
    with pytest.raises(ProtocolError, match="'sgd' answers a peer's letter with CheckOut and Wake"):
        letter_turn(protocol, TASK, None, Note("hello"), **named)
    learns = replaced(find(TASK).device.start, on={Note: lambda task, state, event, ctx: Step(event.words)})
    assert letter_turn(learns, TASK, None, Note("hello"), **named) == "hello"


def test_every_message_is_inspected_before_a_shell_sees_it():
    def leaks(task, state, event, ctx):
        return Step(None, (Send(SERVER, Note(event.batch)),))

    protocol = replaced(find(TASK).device.start, on={Sensed: leaks})
    with pytest.raises(LeakError, match="holds a Private value"):
        device_turn(protocol, TASK, None, Sensed(Private(BATCH, Rows(0, 5))), noise=Silence(), me="device")


def test_a_device_without_noise_sends_no_release_of_somebody_else():
    gradient = find(TASK).contribution
    heard = gradient(Release(np.zeros((4, 3), np.int32), RECEIVED), None, None, np.int32(0))

    def repeats(task, state, event, ctx):
        return Step(None, (Send(SERVER, heard),))

    protocol = replaced(find(TASK).device.start, on={Sensed: repeats})
    with pytest.raises(LeakError, match="did not come through this device's door"):
        device_turn(protocol, TASK, None, Sensed(Private(BATCH, Rows(0, 5))), noise=None, me="device")


def test_an_effect_counts_where_its_condition_holds():
    rule = Rule("mine", "it is over", (("steps", 3),))
    yes, no = np.array(True), np.array(False)
    turn = Outcome(7, (Publish(Note("old"), no), Publish(Note("new"), yes), Stop(rule, no), Wake(5.0, "tick"),
                       Send("b", Note("x"), no), Send("b", Note("y"))))  # fmt: skip
    assert turn.published.words == "new"
    assert turn.stopped is None
    assert turn.stops[0].rule is rule
    assert [message.words for _, message in turn.said] == ["y"]
    assert turn.wakes == (Wake(5.0, "tick"),)
    assert Outcome(7, (Stop(rule, yes),)).stopped is rule


def test_a_rule_reads_as_it_was_written_and_as_an_earlier_version_wrote_it():
    rule = Rule("steps", "3 cohorts have been added up", (("steps", 3),))
    assert Rule.read(rule.plain()) == rule
    assert Rule.read("3 cohorts have been added up") == Rule("", "3 cohorts have been added up")
    assert Rule.read(None) is None


def test_a_liar_changes_what_it_says_after_the_door_and_pays_as_everybody_does():
    honest, liar = one_check_in(), one_check_in(tamper=Tamper(say=lambda row, steps: -steps))
    assert (liar.message.gradient.value == -honest.message.gradient.value).all()
    assert [each.row for each in liar.passages] == [each.row for each in honest.passages]


def test_a_liar_changes_what_it_says_under_masks():
    honest, liar = one_check_in(MASKED), one_check_in(MASKED, tamper=Tamper(say=lambda row, steps: steps * 0 + 5))
    assert masked_steps(honest.message)["gradient"].any()
    assert (masked_steps(liar.message)["gradient"] == 5).all()


def test_a_liar_may_learn_from_other_samples_than_it_sensed():
    def flipped(batch: Samples) -> Samples:
        return Samples(batch.x, (batch.y + 1) % 3)

    named = {"noise": Silence()}
    lied = one_check_in(tamper=Tamper(sense=flipped), **named).message.gradient.value
    assert (lied != one_check_in(**named).message.gradient.value).any()
    protocol = find(TASK)
    other = check_in(protocol, TASK, flipped(BATCH), first_turn(protocol, TASK).published, me="device", **named)
    assert (lied == other.message.gradient.value).all()


def test_the_server_hears_who_sent_it_and_has_no_door_unless_one_is_given():
    heard = []

    def listens(task, state, event, ctx: Context):
        heard.append((ctx.me, ctx.sender, ctx.now))
        return Step(state)

    from dataclasses import replace

    protocol = replace(find(TASK), server=Role(find(TASK).server.start, {Note: listens}))
    assert server_turn(protocol, TASK, 5, Note("x"), sender="d", now=2.0).state == 5
    assert heard == [(SERVER, "d", 2.0)]
