"""Codes of invitations: 100 random bits that can be read aloud and typed."""

from __future__ import annotations

import secrets

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's: without i, l, o and u, which are taken for others."""


def new_code() -> str:
    """Five groups of four, such as 'k7qd-3m9x-05tz-w2nb-h8ce'."""
    return "-".join("".join(secrets.choice(ALPHABET) for _ in range(4)) for _ in range(5))
