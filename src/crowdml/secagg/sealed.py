"""Shares on their way to a holder: the server carries them and cannot open them.

ChaCha20-Poly1305 under a key from X25519 and HKDF-SHA256, bound to task, round, cohort, sender and holder. Each key
seals one message, the same one however often it is made, so the nonce is zero.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from crowdml.secagg.masks import derive
from crowdml.secagg.shamir import SHARE_SIZE

CONTENT_SIZE = 2 * SHARE_SIZE
"""A share of the pair key, then one of the self-mask's seed."""
SEALED_SIZE = CONTENT_SIZE + 16
_NONCE = bytes(12)


def seal(secret: bytes, salt: bytes, sender: str, holder: str, content: bytes) -> bytes:
    """`content` for `holder` alone; `secret` is what the two agreed on with their sealing keys."""
    return ChaCha20Poly1305(derive(secret, salt, "seal", sender, holder)).encrypt(_NONCE, content, None)


def unseal(secret: bytes, salt: bytes, sender: str, holder: str, sealed: bytes) -> bytes | None:
    """What `sender` sealed for `holder` in this round of this cohort; None if these bytes are not that."""
    try:
        return ChaCha20Poly1305(derive(secret, salt, "seal", sender, holder)).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        return None
