"""When a device may work."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest

from crowdml.device.conditions import Conditions, on_mains, parse_hours
from crowdml.errors import CrowdmlError


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2025, 1, 31, hour, minute)


def supply(folder, name: str, kind: str, online: str | None = None) -> None:
    (folder / name).mkdir()
    (folder / name / "type").write_text(f"{kind}\n")
    if online is not None:
        (folder / name / "online").write_text(f"{online}\n")


def test_hours_may_go_over_midnight():
    night, day = parse_hours("22:00-06:00"), parse_hours("9:30-17:00")
    assert (night.wait(at(23)), night.wait(at(5, 59)), night.wait(at(6))) == (0, 0, 16 * 3600)
    assert (day.wait(at(9, 30)), day.wait(at(9)), day.wait(at(17))) == (0, 1800, 16.5 * 3600)


@pytest.mark.parametrize("text", ["", "22-6", "24:00-01:00", "22:60-23:00", "10:00-10:00", "10:00"])
def test_hours_that_cannot_be_read_are_refused(text):
    with pytest.raises(CrowdmlError):
        parse_hours(text)


def test_a_board_without_a_battery_is_on_mains(tmp_path):
    assert on_mains(tmp_path / "absent")
    assert on_mains(tmp_path)


def test_a_device_with_a_battery_is_on_mains_when_a_supply_says_so(tmp_path):
    supply(tmp_path, "BAT0", "Battery")
    supply(tmp_path, "AC", "Mains", "0")
    assert not on_mains(tmp_path)
    (tmp_path / "AC" / "online").write_text("1\n")
    assert on_mains(tmp_path)


def test_a_device_waits_until_every_condition_holds(tmp_path):
    supply(tmp_path, "BAT0", "Battery")
    supply(tmp_path, "AC", "Mains", "0")
    clock, said, slept = [at(21)], [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] = at(22)
        if len(slept) == 2:
            (tmp_path / "AC" / "online").write_text("1\n")
        if len(slept) == 3:
            (tmp_path / "free").touch()

    conditions = Conditions(parse_hours("22:00-06:00"), True, f"test -e '{tmp_path / 'free'}'", tmp_path)
    asyncio.run(conditions.wait(lambda: clock[0], sleep, said.append))
    assert slept == [3600, 60, 60]
    assert [text.split()[2] for text in said] == ["22:00", "mains", "a"]
