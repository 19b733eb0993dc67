"""What a peer is told that asked for something it must not have."""

from __future__ import annotations

from crowdml.errors import CrowdmlError


class Refused(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """A message of the other side is wrong, late or a lie. The state is as before, and nothing was said."""
