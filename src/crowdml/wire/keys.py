"""Keys: Ed25519, from `cryptography`. A device is known by the hash of its public key.

`cryptography` is imported with the first key, not with this module: a command that signs nothing starts without it.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from crowdml.errors import DataError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PUBLIC_SIZE = 32
SIGNATURE_SIZE = 64
ID = re.compile(r"[0-9a-f]{32}")
"""A device's address."""


@lru_cache(maxsize=16_384)
def device_id(public: bytes) -> str:
    """The first 32 hex digits of SHA-256 of the 32 raw bytes of the public key."""
    if len(public) != PUBLIC_SIZE:
        raise ValueError(f"A public key has {PUBLIC_SIZE} bytes; this has {len(public)}.")
    return hashlib.sha256(public).hexdigest()[:32]


def is_sound(public: bytes) -> bool:
    """Whether these bytes are a key that one party alone can sign for: in its one encoding, and of no small order.

    For a point of small order (1, 2, 4 or 8) there are signatures that hold for many messages, and nobody's secret is
    behind them. An honest key is never one of them.
    """
    if len(public) != PUBLIC_SIZE:
        return False
    y = int.from_bytes(public, "little") & (2**255 - 1)
    return y < _FIELD and y not in _SMALL_ORDER


_FIELD = 2**255 - 19
_SMALL_ORDER = frozenset(
    (
        0,  # order 4
        1,  # the neutral element
        _FIELD - 1,  # order 2
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,  # order 8
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,  # order 8
    )
)


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made with the private half of `public`. No input raises."""
    if len(public) != PUBLIC_SIZE or len(signature) != SIGNATURE_SIZE:
        return False
    try:
        _public(public).verify(signature, data)
    except ValueError:
        return False
    except Exception as error:
        if _is_invalid(error):
            return False
        raise
    return True


def _is_invalid(error: Exception) -> bool:
    from cryptography.exceptions import InvalidSignature

    return isinstance(error, InvalidSignature)


@lru_cache(maxsize=16_384)
def _public(public: bytes) -> Ed25519PublicKey:
    """The parsed key: a device comes back, and parsing costs as much as a tenth of a verification."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(public)


class Key:
    """A private key. Its repr shows its id alone, and it is neither pickled nor printed."""

    __slots__ = ("_private", "id", "public")

    public: bytes
    id: str

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()
        self.id = device_id(self.public)

    @staticmethod
    def generate() -> Key:
        """A new key, from the operating system's entropy."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Key(Ed25519PrivateKey.generate())

    @staticmethod
    def from_secret(secret: bytes) -> Key:
        """The key of these 32 secret bytes: for keys kept elsewhere, and for test vectors."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Key(Ed25519PrivateKey.from_private_bytes(secret))

    @staticmethod
    def load(path: Path | str) -> Key:
        """The key in a PEM file (PKCS #8, not encrypted)."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = load_pem_private_key(Path(path).read_bytes(), password=None)
        except FileNotFoundError as error:
            raise DataError(f"There is no key at {path}. Join again to make one; it is a new device then.") from error
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"The key {path} cannot be read: {error}. Restore it from its backup.") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise DataError(f"The key {path} is not an Ed25519 key. Restore it from its backup.")
        return Key(private)

    def save(self, path: Path | str) -> None:
        """Write the key to a new file that its owner alone may read (mode 0600). A key is never overwritten."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        pem = self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise DataError(
                f"There is a key at {path} already, and a key is never overwritten. Move it away."
            ) from error
        except OSError as error:
            raise DataError(f"The key {path} cannot be written: {error}. Check the folder's permissions.") from error
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())

    def sign(self, data: bytes) -> bytes:
        """64 bytes. The same key and data always give the same signature."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A private key is not pickled. Save it to a file that its owner alone may read.")
