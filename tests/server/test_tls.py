"""TLS by a local authority: who may trust what, for how long, and that a real device joins over it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import json
import os
import re
import select
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from device import serving as running

from crowdml.server import serve as serving
from crowdml.server.limits import Limits
from crowdml.server.serve import Started, run, serve
from crowdml.server.tls import TlsError, local_certificate, own_addresses, reachable_host

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in found}


def test_keys_are_for_their_owner_alone(tmp_path: Path):
    local_certificate(tmp_path, "127.0.0.1", NOW)
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / "tls" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def test_a_certificate_is_for_localhost_this_machine_and_the_host_that_was_given(tmp_path: Path):
    local = local_certificate(tmp_path, "study.example", NOW)
    found = names(local.certificate)
    assert {"localhost", "127.0.0.1", "::1", "study.example"} <= found
    assert set(own_addresses()) <= found
    assert set(local.names) == found


def test_the_authority_may_sign_for_private_networks_and_named_hosts_alone(tmp_path: Path):
    local = local_certificate(tmp_path, "study.example", NOW)
    limits = certificate(local.authority).extensions.get_extension_for_class(x509.NameConstraints)
    assert limits.critical
    allowed = limits.value.permitted_subtrees or []
    domains = {each.value for each in allowed if isinstance(each, x509.DNSName)}
    assert "study.example" in domains
    assert not domains & {"", "com", "example", "org"}
    networks = [each.value for each in allowed if isinstance(each, x509.IPAddress)]
    assert not any(ipaddress.ip_address("8.8.8.8") in net for net in networks if net.version == 4)
    basic = certificate(local.authority).extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)


def test_a_certificate_lasts_ninety_days_and_the_authority_stays_when_it_is_renewed(tmp_path: Path):
    first = local_certificate(tmp_path, "127.0.0.1", NOW)
    before = first.certificate.read_bytes()
    assert certificate(first.certificate).not_valid_after_utc == NOW + timedelta(days=90)
    local_certificate(tmp_path, "127.0.0.1", NOW + timedelta(days=59))
    assert first.certificate.read_bytes() == before
    second = local_certificate(tmp_path, "127.0.0.1", NOW + timedelta(days=61))
    assert second.certificate.read_bytes() != before
    assert second.fingerprint == first.fingerprint


def test_a_new_host_within_the_limits_gets_a_new_certificate_and_one_beyond_them_is_refused(tmp_path: Path):
    first = local_certificate(tmp_path, "127.0.0.1", NOW)
    second = local_certificate(tmp_path, "study.local", NOW)
    assert "study.local" in names(second.certificate)
    assert second.fingerprint == first.fingerprint
    with pytest.raises(TlsError, match=r"may not sign for study\.example"):
        local_certificate(tmp_path, "study.example", NOW)


@pytest.mark.parametrize("lost", ["server.pem", "server.key"])
def test_a_lost_half_of_the_certificate_is_made_anew(tmp_path: Path, lost: str):
    local = local_certificate(tmp_path, "127.0.0.1", NOW)
    (tmp_path / "tls" / lost).unlink()
    local_certificate(tmp_path, "127.0.0.1", NOW)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(local.certificate, local.key)


def test_an_authority_without_its_key_or_near_its_end_is_said_and_not_replaced(tmp_path: Path):
    local = local_certificate(tmp_path, "127.0.0.1", NOW)
    with pytest.raises(TlsError, match="ends at"):
        local_certificate(tmp_path, "127.0.0.1", NOW + timedelta(days=3640))
    (tmp_path / "tls" / "ca.key").unlink()
    before = local.authority.read_bytes()
    with pytest.raises(TlsError, match=r"ca\.key"):
        local_certificate(tmp_path, "127.0.0.1", NOW)
    assert local.authority.read_bytes() == before


def test_a_server_that_listens_everywhere_is_named_by_an_address_that_others_reach():
    assert reachable_host("study.example") == "study.example"
    assert reachable_host("::1") == "[::1]"
    assert reachable_host("0.0.0.0") not in ("0.0.0.0", "")


def test_a_real_device_joins_a_real_server_over_its_local_authority_and_a_browser_would_too(tmp_path: Path):
    data = tmp_path / "data"
    command = [sys.executable, "-m", "crowdml.cli"]
    options = ["--port", "0", "--task", "digits012", "--invite", "1", "--tls-local", "--log", "json", "--json", "-"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "serve", "--folder", str(data), *options],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert server.stdout is not None
    try:
        said = json.loads(server.stdout.readline())
        address, authority = said["address"], said["authority"]
        assert address.startswith("https://")
        port = address.rpartition(":")[2]
        trusting = ssl.create_default_context(cafile=authority)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
        )
        for host in ("localhost", "127.0.0.1"):
            with opener.open(f"https://{host}:{port}/healthz", timeout=20) as answer:
                assert answer.status == 200
        with opener.open(f"https://localhost:{port}/operator/login", timeout=20) as answer:
            assert "Secure" in answer.headers["set-cookie"]
        with opener.open(f"https://localhost:{port}/ca.pem", timeout=20) as answer:
            assert answer.read() == Path(authority).read_bytes()

        def join(*more: str) -> subprocess.CompletedProcess[str]:
            where = ("--folder", str(tmp_path / "device"), "--source", "shard:digits012", "--shard", "0/10", "--yes")
            ends = ("--check-ins", "1", "--json", "-", *more)
            return subprocess.run(
                [*command, "join", address, said["code"], *where, *ends],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

        stranger = join()
        assert stranger.returncode == 1
        assert "no certificate that we trust" in stranger.stderr
        done = join("--ca", authority)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["check_ins"] == 1
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stdout.close()
    everything = (tmp_path / "log").read_text().splitlines()
    written = [line for line in everything if line.startswith("{")]  # the rest is for people
    assert {"time", "level", "request", "method", "path", "status", "milliseconds"} <= set(json.loads(written[0]))
    assert not [line for line in written if said["code"] in line or said["setup"].partition("token=")[2] in line]


@contextlib.contextmanager
def over_tls(folder: Path) -> Iterator[Started]:
    """A server of this process, with its local authority."""
    ready: list[Started] = []
    listening = threading.Event()

    def tell(started: Started) -> None:
        ready.append(started)
        listening.set()

    thread = threading.Thread(target=lambda: run(serve(folder, port=0, tls_local=True, started=tell)), daemon=True)
    thread.start()
    assert listening.wait(30)
    try:
        yield ready[0]
    finally:
        ready[0].stop()
        thread.join(30)
    assert not thread.is_alive()


def test_an_operator_sets_up_over_tls_with_a_cookie_for_tls_alone(tmp_path: Path):
    with over_tls(tmp_path) as started:
        assert started.setup is not None
        assert started.local is not None
        host, _, port = started.address.removeprefix("https://").partition(":")
        line = http.client.HTTPSConnection(
            host, int(port), timeout=20, context=ssl.create_default_context(cafile=str(started.local.authority))
        )
        line.request("GET", started.setup.removeprefix(started.address))
        page = line.getresponse()
        form = re.search(r'name="form-token" value="([^"]+)"', page.read().decode())
        assert form is not None
        cookie = page.headers["set-cookie"].partition(";")[0]
        fields = {"form-token": form[1], "token": started.setup.partition("token=")[2], "name": "anna"}
        words = {"password": "correct horse battery staple", "again": "correct horse battery staple"}
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Cookie": cookie,
            "Sec-Fetch-Site": "same-origin",
        }
        body = urlencode({**fields, **words})
        line.request("POST", "/operator/setup", body, {**headers, "Origin": started.address.replace("https", "http")})
        refused = line.getresponse()
        refused.read()
        assert refused.status == 403, "a page without TLS is another origin"
        line.request("POST", "/operator/setup", body, {**headers, "Origin": started.address})
        answer = line.getresponse()
        answer.read()
        assert answer.status == 303
        assert {"Secure", "HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
        line.close()


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "RENEW_EVERY", 0.05)
    with over_tls(tmp_path) as started:
        assert started.local is not None
        host, _, port = started.address.removeprefix("https://").partition(":")
        before = ssl.get_server_certificate((host, int(port)))
        started.local.certificate.unlink()
        ends = time.monotonic() + 120
        while ssl.get_server_certificate((host, int(port))) == before:
            assert time.monotonic() < ends
        assert certificate(started.local.certificate).public_bytes(Encoding.PEM).decode().strip() == (
            ssl.get_server_certificate((host, int(port))).strip()
        )


def test_files_that_are_no_certificate_are_said_before_the_server_starts(tmp_path: Path):
    (tmp_path / "x.pem").write_text("nothing")
    command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(tmp_path / "d"), "--port", "0"]
    done = subprocess.run([*command, "--certificate", str(tmp_path / "x.pem"), str(tmp_path / "x.pem")],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
    both = subprocess.run([*command, "--tls-local", "--certificate", "a", "b"], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert "choose one of them" in both.stderr


def test_of_half_handshakes_there_are_few_and_the_oldest_gives_way(tmp_path: Path):
    limits = Limits(handshakes=8, address_handshakes=4, address_connections=6)
    with flooded(tmp_path, limits) as (started, context, address):
        half = [socket.create_connection(address, timeout=20) for _ in range(40)]
        assert len(with_answer(half, 36)) == 36, "they are cut, though they said nothing and waited for nothing"
        with over(context, address) as line:
            assert asked(line) == b"HTTP/1.1 200", "whoever goes on is served"
        assert started.hub.counts == {}
        for each in half:
            each.close()


def test_a_handshake_that_takes_long_is_cut(tmp_path: Path):
    with flooded(tmp_path, Limits(handshake=0.2)) as (_, context, address):
        with socket.create_connection(address, timeout=20) as silent, socket.create_connection(address) as slow:
            slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a greeting
            assert len(with_answer([silent, slow], 2)) == 2
        with socket.create_connection(address, timeout=20) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert with_answer([plain], 1)
        with over(context, address) as line:
            assert asked(line) == b"HTTP/1.1 200"


def test_connections_over_tls_are_counted_and_told_so(tmp_path: Path):
    with flooded(tmp_path, Limits(address_connections=3)) as (_, context, address), contextlib.ExitStack() as stack:
        lines = [stack.enter_context(over(context, address)) for _ in range(3)]
        assert [asked(line) for line in lines] == [b"HTTP/1.1 200"] * 3
        with over(context, address) as more:
            assert more.recv(12) == b"HTTP/1.1 503"


def test_what_comes_with_the_end_of_a_handshake_is_read(tmp_path: Path):
    """The client sends its request in one piece with the last message of the handshake."""
    with flooded(tmp_path, Limits()) as (_, context, address), socket.create_connection(address, timeout=20) as raw:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65536))
        tls.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.sendall(outgoing.read())
        while True:
            incoming.write(raw.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                assert tls.read(12) == b"HTTP/1.1 200"
                break


@contextlib.contextmanager
def flooded(folder: Path, limits: Limits) -> Iterator[tuple[Started, ssl.SSLContext, tuple[str, int]]]:
    """A server over TLS within these limits, who to trust there, and where it is."""
    with running(folder, limits=limits, tls_local=True) as server:
        started = server.started
        assert started.local is not None
        host, _, port = started.address.removeprefix("https://").partition(":")
        yield started, ssl.create_default_context(cafile=str(started.local.authority)), (host, int(port))


@contextlib.contextmanager
def over(context: ssl.SSLContext, address: tuple[str, int]) -> Iterator[ssl.SSLSocket]:
    plain = socket.create_connection(address, timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost") as line:
        yield line


def asked(line: ssl.SSLSocket) -> bytes:
    line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    return line.recv(65536)[:12]


def with_answer(lines: list[socket.socket], most: int) -> set[socket.socket]:
    """Those that the server has ended, until there are so many of them."""
    ended: set[socket.socket] = set()
    while len(ended) < most:
        waiting = [each for each in lines if each not in ended]
        ready = select.select(waiting, [], [], 20)[0]
        assert ready, f"{len(ended)} of {len(lines)} connections were cut, and no more"
        ended.update(ready)
    return ended


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.1", "no address of this machine"), ("nobody.invalid", "nobody knows the name")]
)
def test_an_address_that_is_not_ours_is_said_so(tmp_path: Path, host: str, said: str):
    with pytest.raises(serving.CannotServe, match=said):
        asyncio.run(serve(tmp_path, host=host, port=0))


def test_a_port_that_is_taken_is_said_so(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(serving.CannotServe, match="another program"):
        asyncio.run(serve(tmp_path, port=taken.getsockname()[1]))


def test_help_names_the_limits_that_hold():
    from click.testing import CliRunner

    from crowdml.cli.serve import serve as command

    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    limits = Limits()
    for value in (limits.address_rate, limits.connections, limits.address_connections, limits.device_rate, limits.pace,
                  limits.snapshot_every, limits.free_space / 2**20):  # fmt: skip
        assert f"[default: ({value:.0f});" in shown
