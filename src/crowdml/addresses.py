"""Addresses of servers and peers, as people write them: one parser for devices, operators and commands.

An address stands unquoted in commands that people copy into a shell and in pages that they follow, so it has the
characters of a host name, a port and a plain path, and nothing else.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

from crowdml.errors import CrowdmlError
from crowdml.records import record

LONGEST = 1024
PORTS = {"http": 80, "https": 443}
_PARTS = re.compile(
    r"(?i:(https?))://(?:\[([0-9a-fA-F:.]+)((?:%[0-9A-Za-z._-]+)?)\]|([0-9A-Za-z._-]+))(?::([0-9]{1,5}))?(/.*)?"
)
_LABEL = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?")
_PATH = re.compile(r"(?:[0-9A-Za-z._~/-]|%[0-9A-Fa-f]{2})*")


class BadAddress(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """A text that is no address of a server."""


@record
class WebAddress:
    """An http or https address in its parts. `path` has no slash at its end."""

    scheme: str
    host: str
    """Without the brackets of IPv6."""
    port: int
    authority: str
    """Host and port as they were written."""
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def read_address(text: str) -> WebAddress:
    """The parts of an address such as https://study.example:8443. A text that is none raises `BadAddress`."""
    match = _PARTS.fullmatch(text.strip()) if len(text) <= LONGEST else None
    if match is None:
        raise _bad(text)
    scheme, inner, zone, name, port, path = match.groups()
    scheme, path = scheme.lower(), (path or "").rstrip("/")
    if inner is not None:
        try:
            IPv6Address(inner)
        except ValueError as error:
            raise _bad(text) from error
    elif len(name) > 253 or not all(map(_LABEL.fullmatch, name.removesuffix(".").split("."))):
        raise _bad(text)
    if not _PATH.fullmatch(path):
        raise _bad(text)
    number = PORTS[scheme] if port is None else int(port)
    if not 1 <= number <= 65_535:
        raise BadAddress(f"{text!r} has no usable port: one lies between 1 and 65535.")
    host = name if inner is None else inner + zone
    shown = name if inner is None else f"[{host}]"
    return WebAddress(scheme, host, number, shown if port is None else f"{shown}:{port}", path)


def _bad(text: str) -> BadAddress:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return BadAddress(
        f"{shown!r} is no address of a server. Write one like https://study.example:8443: letters, digits, '.' and "
        "'-', without a name or password, a query or a blank."
    )
