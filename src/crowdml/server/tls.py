"""TLS without a certificate authority at hand: `--tls-local` makes one for this data folder.

The authority may sign for this machine and for private networks alone (RFC 5280, name constraints), so whoever trusts
it trusts nobody to speak for another site. Certificates last 90 days and are renewed 30 days before their end, at a
start or while the server runs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crowdml.errors import CrowdmlError

FOLDER = "tls"
AUTHORITY_DAYS, SERVER_DAYS, RENEW_DAYS = 3650, 90, 30
PRIVATE = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
           "::1/128", "fc00::/7", "fe80::/10")  # fmt: skip
LOCAL_NAMES = ("localhost", "local", "lan", "internal", "home.arpa")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TlsError(CrowdmlError):
    """A certificate could not be made or used."""


@dataclass(frozen=True)
class Local:
    """The files of a local authority, and the names that its certificate is for."""

    authority: Path
    certificate: Path
    key: Path
    names: tuple[str, ...]
    fingerprint: str
    """SHA-256 of the authority's certificate, as people compare it."""


def local_certificate(folder: Path, host: str, now: datetime | None = None) -> Local:
    """A certificate for this machine by the folder's own authority; made where it is missing or near its end.

    The authority stays the same for ten years: those who trust it need nothing new.
    """
    at = now or datetime.now(UTC)
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, authority_key = home / "ca.pem", home / "ca.key"
    certificate, key = home / "server.pem", home / "server.key"
    if not authority.exists():
        _make_authority(authority, authority_key, host, at)
    ca, signer = _read(authority), _read_key(authority_key)
    if ca.not_valid_after_utc - at < timedelta(days=RENEW_DAYS):
        raise TlsError(
            f"The local authority {authority} ends at {ca.not_valid_after_utc:%Y-%m-%d}. Remove {home}, start again, "
            "and trust the new authority wherever the old one was trusted."
        )
    names = _permitted(ca, _names(host))
    if _is_explicit(host) and host not in names:
        raise TlsError(
            f"The local authority {authority} may not sign for {host}. Remove {home}, start again, and trust the new "
            "authority wherever the old one was trusted."
        )
    if not _is_current(certificate, key, ca, names, at):
        _make_server(certificate, key, ca, signer, names, at)
    printed = ca.fingerprint(hashes.SHA256()).hex(":").upper()
    return Local(authority, certificate, key, names, printed)


def own_addresses() -> tuple[str, ...]:
    """The addresses of this machine that others on its network may reach."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found[str(place[0]).partition("%")[0]] = None
    for family, away in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((away, 9))  # sends nothing: it asks the routing table
            found[str(probe.getsockname()[0]).partition("%")[0]] = None
    return tuple(each for each in found if not ipaddress.ip_address(each).is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def reachable_host(host: str) -> str:
    """The host for addresses that people follow: of a server that listens everywhere, this machine's on its network."""
    if _is_explicit(host):
        return f"[{host}]" if ":" in host else host
    outside = [each for each in own_addresses() if not ipaddress.ip_address(each).is_loopback]
    plain = sorted(outside, key=lambda each: ":" in each)
    found = plain[0] if plain else "localhost"
    return f"[{found}]" if ":" in found else found


def _is_explicit(host: str) -> bool:
    return host not in ("", "0.0.0.0", "::", "*")


def _names(host: str) -> tuple[str, ...]:
    machine = socket.gethostname().lower()
    wanted = ["localhost", "127.0.0.1", "::1", machine, machine.partition(".")[0] + ".local", *own_addresses()]
    if _is_explicit(host):
        wanted.insert(0, host.lower())
    return tuple(dict.fromkeys(name for name in wanted if name.isascii() and name))


def _ip(name: str) -> Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _permitted(ca: x509.Certificate, names: tuple[str, ...]) -> tuple[str, ...]:
    allowed = ca.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or []
    networks = [each.value for each in allowed if isinstance(each, x509.IPAddress)]
    domains = [each.value for each in allowed if isinstance(each, x509.DNSName)]

    def may(name: str) -> bool:
        address = _ip(name)
        if address is not None:
            return any(isinstance(net, Network) and address in net for net in networks)
        return any(name == domain or name.endswith(f".{domain}") for domain in domains)

    return tuple(name for name in names if may(name))


def _make_authority(path: Path, key_path: Path, host: str, at: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    machine = socket.gethostname().lower()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"crowdml on {machine}"[:64])])
    networks = [ipaddress.ip_network(each) for each in PRIVATE]
    networks += [
        ipaddress.ip_network(each)
        for each in dict.fromkeys((*own_addresses(), host))
        if (found := _ip(each)) is not None
        and not any(found.version == net.version and found in net for net in networks)
    ]
    named = [host.lower()] if _is_explicit(host) and _ip(host) is None else []
    domains: dict[str, None] = dict.fromkeys([*LOCAL_NAMES, machine, *named])
    permitted = [x509.DNSName(each) for each in domains] + [x509.IPAddress(each) for each in networks]
    made = (
        _begin(name, name, key.public_key(), at, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .add_extension(x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _pem(key), 0o600)
    _write(path, made.public_bytes(serialization.Encoding.PEM), 0o644)


def _make_server(
    path: Path,
    key_path: Path,
    ca: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    at: datetime,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "crowdml")])
    alternatives = [x509.DNSName(name) if (found := _ip(name)) is None else x509.IPAddress(found) for name in names]
    issuer_key = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        _begin(subject, ca.subject, key.public_key(), at, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        .sign(signer, hashes.SHA256())
    )
    chain = made.public_bytes(serialization.Encoding.PEM) + ca.public_bytes(serialization.Encoding.PEM)
    path.unlink(missing_ok=True)  # never the old certificate beside the new key
    _write(key_path, _pem(key), 0o600)
    _write(path, chain, 0o644)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    """What a key signs: certificates and their revocations, or the handshakes of a server. It encrypts nothing."""
    return x509.KeyUsage(
        key_cert_sign=certificates,
        crl_sign=certificates,
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, at: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - timedelta(hours=1))
        .not_valid_after(at + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _is_current(path: Path, key_path: Path, ca: x509.Certificate, names: tuple[str, ...], at: datetime) -> bool:
    if not path.exists() or not key_path.exists():
        return False
    found = _read(path)
    if found.not_valid_after_utc - at < timedelta(days=RENEW_DAYS) or found.issuer != ca.subject:
        return False
    if found.public_key() != _read_key(key_path).public_key():
        return False
    try:
        found.verify_directly_issued_by(ca)
    except Exception:  # another authority's: any failure to verify means a new one
        return False
    return set(names) <= set(_alternatives(found))


def _alternatives(certificate: x509.Certificate) -> Iterator[str]:
    for each in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value:
        yield str(each.value)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TlsError(f"The certificate {path} cannot be read: {error}.") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise TlsError(f"The key {path} cannot be read: {error}. Put it back, or remove its folder.") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise TlsError(f"The key {path} is none that this server made. Remove its folder, and start again.")
    return found


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others for a moment."""
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise TlsError(f"{path} cannot be written: {error.strerror or error}.") from error
