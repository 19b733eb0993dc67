"""How fast a live crowd goes: public constants that the server, a fleet of devices and the simulator share."""

from __future__ import annotations

POLLS = 400.0
"""Times a second that the devices of a masked task ask for their round, all together."""
SHORTEST_WAIT, LONGEST_WAIT = 0.15, 5.0
"""Seconds between two looks of a device at its round, at least and at most."""
SPEED = 400.0
"""Check-ins a second that a small machine takes, before anybody has measured it."""
MOVING = 20
"""Looks of a device in which a phase of its round is usually over; a longer one waits for somebody who left."""
GROUP_WINDOW = 0.05
"""Seconds that a device of a fleet waits for others to be committed with it."""
AT_WORK = 128
"""Devices of a fleet between check-out and receipt at a time: more would only wait for one another on one processor."""


def poll_wait(crowd: int) -> float:
    """Seconds between two looks of each device, so that so many of them ask `POLLS` times a second in all."""
    return min(LONGEST_WAIT, max(SHORTEST_WAIT, crowd / POLLS))
