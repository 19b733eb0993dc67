"""When a device may work: in some hours, on mains power, on a network that costs nothing. Its owner says so."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, time, timedelta
from pathlib import Path

from crowdml.errors import CrowdmlError
from crowdml.records import record

POWER = Path("/sys/class/power_supply")
LOOK_AGAIN = 60.0
"""Seconds between two looks at the power supply or the network."""
HOOK_TIMEOUT = 30.0


@record
class Hours:
    """From `start` to `end` of local time, the end not included; over midnight where the end comes first."""

    start: time
    end: time

    def wait(self, now: datetime) -> float:
        """Seconds until they begin; 0 while they last."""
        clock = now.time()
        inside = self.start <= clock < self.end if self.start < self.end else clock >= self.start or clock < self.end
        if inside:
            return 0.0
        begin = now.replace(hour=self.start.hour, minute=self.start.minute, second=0, microsecond=0)
        return ((begin if begin > now else begin + timedelta(days=1)) - now).total_seconds()


def parse_hours(text: str) -> Hours:
    """'22:00-06:00'."""
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)", text.strip())
    if found is None:
        raise CrowdmlError(f"hours {text!r} cannot be read. Write them like 22:00-06:00.")
    a, b, c, d = map(int, found.groups())
    if (a, b) == (c, d):
        raise CrowdmlError(f"hours {text!r} begin when they end. Leave the option out to allow every hour.")
    return Hours(time(a, b), time(c, d))


def on_mains(folder: Path = POWER) -> bool:
    """Whether a supply of type Mains or USB is online; true where there is no battery, as on a board without one."""
    supplies = {entry: _word(entry / "type") for entry in folder.iterdir()} if folder.is_dir() else {}
    if not any(kind == "Battery" for kind in supplies.values()):
        return True
    return any(
        kind in ("Mains", "USB", "Wireless") and _word(entry / "online") == "1" for entry, kind in supplies.items()
    )


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


@record
class Conditions:
    """All of them must hold. `unmetered` is a command of the owner's: exit code 0 means that the network is free."""

    hours: Hours | None = None
    mains: bool = False
    unmetered: str | None = None
    power: Path = POWER

    @property
    def always(self) -> bool:
        """Whether there is none."""
        return self.hours is None and not self.mains and self.unmetered is None

    async def wait(
        self,
        now: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Return when all conditions hold."""
        while True:
            pause, why = await self._missing(now())
            if not why:
                return
            tell(why)
            await sleep(pause)

    async def _missing(self, now: datetime) -> tuple[float, str]:
        if self.hours is not None and (pause := self.hours.wait(now)):
            return pause, f"waiting for {self.hours.start:%H:%M}"
        if self.mains and not on_mains(self.power):
            return LOOK_AGAIN, "waiting for mains power"
        if self.unmetered is not None and not await _succeeds(self.unmetered):
            return LOOK_AGAIN, "waiting for a network that costs nothing"
        return 0.0, ""


async def _succeeds(command: str) -> bool:
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(HOOK_TIMEOUT):
            return await process.wait() == 0
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return False
