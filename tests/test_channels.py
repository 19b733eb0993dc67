"""One contribution, and what every channel makes of it."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from crowdml.arrays import Integers
from crowdml.channels import Channel, Gathered, Gathering, Stacked, contribution, heard_by, stacked
from crowdml.errors import LeakError, TaskError
from crowdml.messages import KINDS, Public
from crowdml.privacy.private import RECEIVED, Private, Release
from crowdml.protocols import PROTOCOLS, find
from crowdml.task import parse

sys.path.insert(0, str(Path(__file__).parent / "conversations"))
from bench import masked_text, task_text


@contribution("test_channels/votes/1", masked="test_channels/masked/1", total="test_channels/total/1")
class Votes:
    """What the tests give."""

    votes: Release[Integers]
    extra: Release[Integers] | None
    version: Public[Integers]


def names(kind):
    return sorted(field.name for field in fields(kind))


def test_all_messages_of_a_contribution_come_from_one_declaration():
    assert names(Votes) == ["extra", "version", "votes"]
    assert names(Votes.masked) == ["extra", "votes"]
    assert names(Votes.total) == ["devices", "extra", "version", "votes"]
    assert {KINDS[f"test_channels/{kind}/1"] for kind in ("votes", "masked", "total")} == {
        Votes, Votes.masked, Votes.total,
    }  # fmt: skip


def test_one_handler_hears_one_device_and_a_cohort_alike():
    heard = heard_by(Votes, len)
    assert {kind: heard.pop(kind) for kind in (Votes, Votes.total)} == {Votes: len, Votes.total: len}
    assert list(heard) == [Gathered]  # a round that a rule combined
    one = Votes(Release(np.zeros(2, np.int32), RECEIVED), None, np.int32(0))
    assert one.devices == 1


def test_a_contribution_that_could_carry_a_sample_is_refused_when_it_is_declared():
    with pytest.raises(LeakError, match=r"Private.*nothing would say whether it\s+depends on a sample"):

        @contribution("test_channels/leak/1", masked="test_channels/leak_masked/1", total="test_channels/leak_total/1")
        class Leak:
            votes: Private[Integers]

    assert "test_channels/leak/1" not in KINDS


@pytest.mark.parametrize(
    "fields", [{"note": Public[Integers]}, {"version": Release[Integers]}, {"devices": Release[Integers]}]
)
def test_a_contribution_whose_total_would_lose_a_row_is_refused_when_it_is_declared(fields):
    declared = type("Lost", (), {"__annotations__": fields, "__module__": __name__})
    with pytest.raises(LeakError, match="Lost leaves under masks, so it needs a row of its own"):
        contribution(None, masked="test-channels/lost/1", total="test-channels/lost-total/1")(declared)
    assert not [kind for kind in KINDS if "lost" in kind]


def test_a_task_chooses_its_channel():
    assert find(parse(task_text())).channel(parse(task_text())) is Channel.ONE_BY_ONE
    masked = parse(masked_text())
    assert find(masked).channel(masked) is Channel.SUMMED


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_protocol_of_ours_has_a_form_under_masks(name: str):
    says, hears = PROTOCOLS[name].masked
    assert names(hears) == sorted([*names(says), "devices", "version"])


def test_uploads_are_read_at_once_in_blocks_or_by_columns():
    many = [Votes(Release(np.arange(6, dtype=np.int32).reshape(2, 3) * k, RECEIVED), None, 0) for k in range(5)]
    uploads = stacked(many)
    assert isinstance(uploads, Stacked)
    assert uploads.count == 5
    assert uploads.devices.tolist() == [1] * 5
    whole = uploads.array("votes")
    assert whole.shape == (5, 2, 3)
    assert (np.concatenate(list(uploads.blocks("votes", 2))) == whole).all()
    assert [block.shape[0] for block in uploads.blocks("votes", 2)] == [2, 2, 1]
    flat = np.zeros((5, 6))
    for where, part in uploads.columns("votes", 4):
        flat[:, where] = part
    assert (flat == whole.reshape(5, 6)).all()


@pytest.mark.parametrize("wrong", [(0, 0, None), (3, 4, None), (3, 0, None), (3, 1, 0.0), (3, 1, -1.0), (3, 1, 1e12)])
def test_a_round_that_could_not_close_is_refused(wrong):
    with pytest.raises(TaskError, match="a round closes"):
        Gathering(*wrong)
