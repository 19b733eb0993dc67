"""Records are dataclasses, frozen unless they say otherwise, whenever their methods are made."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import field
from typing import Any

import pytest

from crowdml.records import record


def make() -> tuple[type[Any], type[Any]]:
    @record
    class Charge:
        """With a default, a factory and a check."""

        row: str
        cost: int = 1
        more: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            if self.cost < 0:
                raise ValueError("a charge is never refunded")

    @record
    class Late(Charge):
        days: int = 0

    return Charge, Late


def test_a_record_behaves_as_a_frozen_dataclass_does():
    Charge, _ = make()
    one = Charge("gradient", cost=2)
    assert (one.row, one.cost, one.more) == ("gradient", 2, [])
    assert one == Charge("gradient", 2) != Charge("gradient", 3)
    assert "row='gradient', cost=2, more=[]" in repr(one)
    assert dataclasses.replace(one, cost=3).cost == 3
    assert one.more is not Charge("labels").more
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.cost = 1
    with pytest.raises(ValueError, match="never refunded"):
        Charge("gradient", -1)
    with pytest.raises(TypeError, match="row"):
        Charge()


def test_a_record_shows_its_fields_before_the_first_one_is_made():
    Charge, Late = make()
    assert [each.name for each in dataclasses.fields(Late)] == ["row", "cost", "more", "days"]
    assert dataclasses.is_dataclass(Charge)
    assert Late("gradient", days=3) == Late("gradient", 1, [], 3)
    assert Late("gradient") != Charge("gradient")


def test_a_record_may_be_changed_or_be_equal_to_itself_alone_where_it_says_so():
    @record(frozen=False)
    class Counts:
        check_ins: int = 0

    @record(eq=False)
    class Role:
        name: str

    counts = Counts()
    counts.check_ins += 1
    assert counts == Counts(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(counts)
    role = Role("device")
    assert role != Role("device")
    assert {role: 1}[role] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "server"


def test_records_hash_by_their_fields():
    @record
    class Key:
        name: str

    assert {Key("a"): 1}[Key("a")] == 1


def test_two_threads_that_make_the_first_one_both_get_one():
    for _ in range(50):
        Charge, _ = make()
        found: list[Any] = []
        start = threading.Barrier(4)

        def work(cls: type[Any] = Charge, wait: threading.Barrier = start, into: list[Any] = found) -> None:
            wait.wait()
            into.append(cls("gradient"))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert found == [Charge("gradient")] * 4
