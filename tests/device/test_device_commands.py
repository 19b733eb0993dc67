"""The commands of a device's owner, against a real server; and the examples of sources."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from loopback import SMALL, rows, serving, small_task

import crowdml
from crowdml.cli import cli
from crowdml.cli.device import Attempt, _show
from crowdml.cli.output import Report
from crowdml.device.client import Client, Unreachable
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, consent_to
from crowdml.device.joining import Listed, choose_task
from crowdml.device.verification import check_receipts
from crowdml.errors import UnknownName
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.server.tls import local_certificate
from crowdml.server.transcript import write_transcript
from crowdml.storage import Ledger
from crowdml.task import parse
from crowdml.wire.keys import Key
from crowdml.wire.receipts import open_receipt
from crowdml.wire.requests import open_owner_link

ROOT = Path(__file__).resolve().parents[2]
TASK = small_task(samples=20)


def command(*arguments: object, cwd: Path, code: int = 0, stdin: str = "") -> Result:
    """Run the command in this folder and in this process: a new one takes a third of a second to start."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(cli, [*map(str, arguments)], prog_name="crowdml", input=stdin)
    assert done.exit_code == code, done.output
    return done


def write_rows(path: Path, n: int) -> str:
    path.write_text("".join(f"{','.join(f'{value:.3f}' for value in x)},{'abc'[y]}\n" for x, y in rows(n)))
    return f"csv:{path.name}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), TASK) as server:
        yield server


def test_an_owner_joins_sees_the_price_caps_it_reads_the_ledger_and_leaves(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 30)
    refused = command("join", server.address, server.code, "--source", source, cwd=tmp_path, code=1)
    assert "Nobody is there to answer. Nothing was sent." in refused.stderr
    assert "blurred with noise" in refused.stdout
    first = command("join", server.address, server.code, "--source", source, "--yes", "--check-ins", 1, cwd=tmp_path)
    assert "any one sample loses at most ε = 1.5" in " ".join(first.stdout.split())
    assert ", this device ε = " in " ".join(first.stdout.split())
    consent = json.loads((tmp_path / "crowdml-device" / "consent.json").read_text())[TASK.hash.hex()]
    assert (consent["by"], len(consent["promises"])) == ("--yes", 2)
    capped = command("budget", "set", "--epsilon", "2", "--samples", 10, cwd=tmp_path).stdout
    assert "kept in crowdml-device." in " ".join(capped.split())
    assert "already" not in capped
    again = command("join", server.address, server.code, "--source", source, "--json", "-", cwd=tmp_path)
    result = json.loads(again.stdout)
    assert (result["check_ins"], result["endings"]) == (1, {"budget": 1})
    assert "0 of 10 are left of your budget" in again.stderr
    for more in (("--samples", 10), ("--samples", 100, "--device-epsilon", "1/2")):
        spent = command("budget", "set", "--epsilon", "2", *more, cwd=tmp_path).stdout
        assert "already" in spent
        assert "no more is given under this budget." in " ".join(spent.split())
    ledger = json.loads(command("ledger", "--folder", "crowdml-device", "--json", "-", cwd=tmp_path).stdout)
    assert (ledger["samples"], len(ledger["charges"])) == (10, 4)
    left = command("leave", "--yes", cwd=tmp_path)
    assert "stays there" in left.stdout
    assert "The server was told." in left.stdout
    assert not (tmp_path / "crowdml-device").exists()
    nothing = command("leave", "--yes", cwd=tmp_path, code=1)
    assert "nothing to leave" in nothing.stderr


def test_leaving_a_server_that_is_away_erases_nothing_unless_told_so(tmp_path):
    with serving(tmp_path / "server", TASK) as server:
        command("join", server.address, server.code, "--source", "csv:-", "--yes", cwd=tmp_path)
    refused = command("leave", "--yes", cwd=tmp_path, code=1)
    assert "nothing was erased" in refused.stderr
    assert (tmp_path / "crowdml-device" / "key.pem").exists()
    assert "could not be told" in command("leave", "--yes", "--even-if-unreachable", cwd=tmp_path).stdout


def test_samples_come_through_a_pipe(server, tmp_path):
    lines = "".join(json.dumps({"x": [round(float(v), 3) for v in x], "y": y}) + "\n" for x, y in rows(12))
    options = ("--source", "ndjson:-", "--yes", "--json", "-")
    done = command("join", server.address, server.code, *options, cwd=tmp_path, stdin=lines)
    assert json.loads(done.stdout)["check_ins"] == 2
    ended = "Every full batch was given. 2 samples are too few for a check-in of 5, and wait in the folder for more."
    assert ended in " ".join(done.stderr.split())


def test_a_fleet_reports_what_it_did(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 100)
    options = ("--devices", 10, "--source", source, "--yes", "--json", "-")
    result = json.loads(command("fleet", server.address, server.code, *options, cwd=tmp_path).stdout)
    assert (result["devices"], result["check_ins"], result["refused"]) == (10, 20, 0)
    assert result["endings"] == {"source": 10}
    assert result["epsilon_sample"] == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--source", "tape:x"), "is not known"),
        (("--source", "csv:absent.csv"), "no file"),
        (("--source", "csv:-", "--hours", "soon"), "cannot be read"),
        (("--source", "csv:-", "--task", "unknown"), "called 'unknown'"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_the_server_hears_of_no_device(server, tmp_path, arguments, sentence):
    before = len(server.hub.keys)
    done = command("join", server.address, server.code, *arguments, "--yes", cwd=tmp_path, code=1)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(server.hub.keys) == before


def listed(name: str, state: str, digit: str = "a") -> Listed:
    return Listed(digit * 64, name, "", state)


@pytest.mark.parametrize(
    ("there", "wanted", "sentence"),
    [
        ([], None, "No study runs there yet."),
        ([], "city", "No study runs there yet."),
        ([listed("city", "stopped")], None, "The study 'city' was stopped."),
        ([listed("city", "stopped"), listed("town", "running", "b")], "city", "The study 'city' was stopped."),
        ([listed("city", "draft")], None, "The study 'city' does not run yet."),
        (
            [listed("city", "paused")],
            None,
            "The study 'city' is paused. Try again later, or join it now with --task city.",
        ),
        (
            [listed("city", "stopped"), listed("town", "paused", "b")],
            None,
            "No study that the code admits to runs now. They are: city (stopped), town (paused).",
        ),
        (
            [listed("city", "running")],
            "citi",
            f"The code admits to no study called 'citi'. Did you mean 'city'? It admits to: city ({'a' * 12}).",
        ),
        (
            [listed("city", "running"), listed("town", "running", "b"), listed("sea", "stopped", "c")],
            None,
            f"The code admits to 2 studies: city ({'a' * 12}), town ({'b' * 12}). Choose one, such as --task city.",
        ),
        (
            [listed("city", "running"), listed("city", "paused", "b"), listed("city", "stopped", "c")],
            "city",
            f"The code admits to 2 studies called 'city': city ({'a' * 12}), city ({'b' * 12}). "
            f"Choose one, such as --task {'a' * 12}.",
        ),
    ],
)
def test_where_no_study_can_be_joined_the_reason_is_one_sentence(there, wanted, sentence):
    with pytest.raises(UnknownName) as refused:
        choose_task(there, wanted)
    assert str(refused.value) == sentence


def test_the_study_that_runs_is_chosen_and_a_paused_one_by_its_name():
    there = [listed("city", "paused"), listed("town", "running", "b")]
    assert [choose_task(there, wanted).name for wanted in (None, "city", "b" * 8)] == ["town", "city", "town"]
    renewed = [listed("city", "stopped"), listed("city", "running", "b")]
    assert [choose_task(renewed, wanted).hash for wanted in (None, "city")] == ["b" * 64] * 2


def test_rows_that_do_not_fit_are_refused_before_any_price_is_shown(server, tmp_path):
    (tmp_path / "rows.csv").write_text("0.1,0.2,a\n" * 20)
    before = len(server.hub.keys)
    for name, *more in (("join",), ("fleet", "--devices", 2)):
        options = ("--source", "csv:rows.csv", "--yes", *more)
        done = command(name, server.address, server.code, *options, cwd=tmp_path, code=1)
        assert done.stdout == ""
        said = "rows.csv: its first line has 3 fields, and the task wants 4 numbers and a label. Nothing was sent."
        assert done.stderr == f"crowdml: {said}\n"
    assert len(server.hub.keys) == before
    assert [each.name for each in tmp_path.iterdir()] == ["rows.csv"]


def test_too_few_rows_are_said_before_a_code_is_used_up_and_are_no_success(server, tmp_path):
    """Review 2, owner 4."""
    source, before = write_rows(tmp_path / "rows.csv", 9), len(server.hub.keys)
    one = command("join", server.address, server.code, "--source", source, "--shard", "0/2", "--yes", cwd=tmp_path)
    assert "1 check-in." in one.stdout
    assert len(server.hub.keys) == before + 1
    again = command("join", server.address, server.code, "--source", source, "--shard", "0/2", "--yes", cwd=tmp_path)
    assert "0 check-ins." in again.stdout  # all was given: nothing to mend, so no failure for systemd to repeat
    few = "and a check-in of this task takes 5. Nothing was sent."
    for name, *more, said in (
        ("join", "--shard", "1/2", f"--source {source} has 4 samples, {few}"),
        ("fleet", "--devices", 2, f"--source {source} has 4 samples for one of its 2 devices, {few} Say --devices 1"),
    ):
        options = ("--source", source, "--yes", "--folder", "other", *more)
        done = command(name, server.address, server.code, *options, cwd=tmp_path, code=1)
        assert (done.stdout, said in done.stderr) == ("", True)
    assert len(server.hub.keys) == before + 1
    assert not (tmp_path / "other").exists()
    write_rows(tmp_path / "short.csv", 3)
    later = command("join", server.address, server.code, "--source", "csv:short.csv", cwd=tmp_path, code=1)
    assert f"--source csv:short.csv has 3 samples, {few}" in later.stderr
    assert later.stdout == "", "a device that has nothing to send is refused as a new one is"


def test_rows_that_cannot_be_used_are_told_to_the_owner_before_the_price_and_counted_in_the_end(server, tmp_path):
    """Review 2, owner 5: labels of no class and NaN were charged without a word."""
    good = "0,0,0,0.5,a\n"
    (tmp_path / "rows.csv").write_text("0,1,2,3,y\n" + good * 3 + "0,0,0,1,12\nnan,0,0,0,a\n" + good * 5)
    options = ("--source", "csv:rows.csv", "--yes", "--check-ins", 2)
    done = command("join", server.address, server.code, *options, "--json", "-", "--folder", "one", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    told = "3 of 11 rows cannot be used: a label that is none of the task's: 2 (first in line 1); "
    assert told + "a field that is no finite number: 1 (first in line 6)." in said
    assert "If the first line is a heading, say --header yes." in said
    assert said.index(told) < said.index("What leaves this device")
    assert json.loads(done.stdout)["unreadable"] == {"label": 2, "number": 1}
    fleet = ("--devices", 2, "--header", "yes", "--json", "-", "--folder", "two")
    done = command("fleet", server.address, server.code, *options, *fleet, cwd=tmp_path)
    assert "2 of 10 rows cannot be used" in " ".join(done.stderr.split())
    assert json.loads(done.stdout)["unreadable"] == {"label": 1, "number": 1}


def test_a_device_that_the_server_refuses_says_why_and_fails(tmp_path):
    """Review 2, network finding M2: `join` said "0 check-ins" without a reason, and exited with 0."""
    with serving(tmp_path / "server", TASK) as server:
        server.hub.limits = replace(server.hub.limits, body=100)
        source = write_rows(tmp_path / "rows.csv", 20)
        options = ("--source", source, "--yes", "--json", "-")
        done = command("join", server.address, server.code, *options, cwd=tmp_path, code=1)
        assert json.loads(done.stdout.splitlines()[-1])["check_ins"] == 0
        assert "At most 100 bytes are read here" in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
        with Ledger(tmp_path / "crowdml-device" / "ledger.sqlite", must_exist=True) as ledger:
            assert ledger.samples_given() == 5, "one batch of four"


def test_a_wrong_code_is_refused_in_a_sentence(server, tmp_path):
    done = command("join", server.address, "wrong", "--source", "csv:-", "--yes", cwd=tmp_path, code=1)
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("crowdml: ")


def test_a_device_trusts_the_authority_that_its_owner_names_and_no_other(tmp_path):
    certificate, key = self_signed(tmp_path)
    (tmp_path / "task.toml").write_text(SMALL.format(name="tls", samples=20))
    served = subprocess.Popen(
        [sys.executable, "-m", "crowdml.cli", "serve", "--folder", "server", "--port", "0", "--task", "task.toml",
         "--invite", "5", "--certificate", certificate, key, "--json", "started.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert served.stdout is not None
        for line in served.stdout:
            if "joins with" in line:
                break
        *_, link, _, _ = line.split()  # ... LINK --source csv:FILE
        source = write_rows(tmp_path / "rows.csv", 10)
        refused = command("join", link, "--source", source, "--yes", cwd=tmp_path, code=1)
        assert "no certificate that we trust" in refused.stderr
        options = ("--source", source, "--yes", "--ca", certificate, "--json", "-")
        result = json.loads(command("join", link, *options, cwd=tmp_path).stdout)
        assert result["check_ins"] == 2
    finally:
        served.terminate()
        served.wait(30)


def self_signed(folder: Path) -> tuple[Path, Path]:
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_the_accelerometer_example_reads_the_tree_that_the_kernel_offers(tmp_path):
    device = tmp_path / "iio:device0"
    device.mkdir()
    (device / "in_accel_scale").write_text("0.01\n")
    for axis, counts in zip("xyz", (0, 0, 981), strict=True):
        (device / f"in_accel_{axis}_raw").write_text(f"{counts}\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/sources/iio.py"), "--path", str(tmp_path), "--label", "still",
         "--windows", "2", "--rate", "5000"],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["y"] for line in lines] == ["still", "still"]
    assert len(lines[0]["x"]) == 64
    assert lines[0]["x"][0] == pytest.approx(9.81, abs=1e-3)
    assert max(lines[0]["x"][1:]) < 1e-6


def packet(kind: int, *parts: bytes) -> bytes:
    """An MQTT 3.1.1 packet of fewer than 128 bytes."""
    body = b"".join(parts)
    return bytes([kind, len(body)]) + body


def broker(listening: socket.socket, topic: bytes, payloads: list[bytes]) -> None:
    """For one client: lets it connect and subscribe to `topic`, and publishes `payloads` to it."""
    line, _ = listening.accept()
    with line, line.makefile("rb") as heard:
        while head := heard.read(2):
            body = heard.read(head[1])
            if head[0] >> 4 == 1:
                line.sendall(packet(0x20, b"\0\0"))
            elif head[0] >> 4 == 8:
                assert body[2:] == len(topic).to_bytes(2) + topic + b"\1"
                line.sendall(packet(0x90, body[:2], b"\1"))
                for payload in payloads:
                    line.sendall(packet(0x30, len(topic).to_bytes(2), topic, payload))


def test_the_broker_example_writes_a_line_for_every_message_of_its_topic():
    pytest.importorskip("paho.mqtt")
    payloads = [b'{"x": [1, 2], "y": "on foot"}', b"no JSON", b'{"x": [3, 4],\n "y": "still"}']
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=broker, args=(listening, b"home/motion", payloads), daemon=True).start()
        example = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/sources/mqtt.py"), "--host", "127.0.0.1",
             "--port", str(listening.getsockname()[1]), "--topic", "home/motion"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert example.stdout is not None
        try:
            lines = [json.loads(example.stdout.readline()) for _ in payloads]
        finally:
            example.terminate()
            example.wait(20)
            example.stdout.close()
    assert lines == [{"x": [1, 2], "y": "on foot"}, None, {"x": [3, 4], "y": "still"}]


def test_the_broker_example_says_what_it_needs_where_paho_is_not_installed(tmp_path):
    (tmp_path / "paho.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/sources/mqtt.py"), "--topic", "t"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "pip install paho-mqtt" in done.stderr


def test_the_unit_of_systemd_is_the_one_in_the_docs_and_says_what_join_understands(tmp_path):
    unit = (ROOT / "examples/crowdml-device.service").read_text()
    assert f"```ini\n{unit}```" in (ROOT / "docs/device.md").read_text()
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(shlex.split(start.removeprefix("ExecStart="))[-1])
    assert words[:2] == ["exec", "$HOME/crowdml/bin/crowdml"]
    refused = command(*words[2:], cwd=tmp_path, code=1).stderr  # no such server: everything before that was understood
    assert "study.example" in refused, refused
    if shutil.which("systemd-analyze"):
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(ROOT / "examples/crowdml-device.service")],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert "crowdml-device.service" not in checked.stderr, checked.stderr


def test_importing_the_device_imports_nothing_of_the_server_and_nothing_heavy():
    code = (
        "import sys, crowdml.device.fleet, crowdml.device.joining\n"
        "print(*{'jax', 'scipy', 'sklearn', 'starlette', 'uvicorn', 'sqlalchemy', 'matplotlib'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ""


def test_the_page_about_devices_has_a_heading_for_every_option():
    from crowdml.cli import cli

    page = (ROOT / "docs/device.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    for name in ("join", "fleet", "leave", "budget set"):
        assert f"## `crowdml {name}`" in headings
        found = cli.commands[name.split()[0]]
        found = found.commands["set"] if name == "budget set" else found
        for option in found.params:
            for word in (word for word in option.opts if word.startswith("--") and word not in ("--json", "--help")):
                assert any(word in heading.replace(",", " ").split() for heading in headings), f"{name} {word}"


WITHOUT_RICH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "rich" else find(name, *more)
sys.modules["rich"] = None
from crowdml.cli import main
main()
"""


def test_a_device_says_the_same_without_rich(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 10)
    command("join", server.address, server.code, "--source", source, "--yes", cwd=tmp_path)

    def without(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RICH, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        return done.stdout

    plain, drawn = without("ledger"), command("ledger", cwd=tmp_path).stdout
    assert plain.split("when")[0].split() == drawn.split("when")[0].split()
    assert [line.split() for line in plain.splitlines()[-4:]] == [
        line.split() for line in drawn.splitlines() if "gradient" in line or "labels" in line
    ]
    fleet = without("fleet", server.address, server.code, "--devices", "2", "--source", source, "--yes")
    assert "2 devices" in fleet


# --- an attempt to join that fails ---


def test_a_join_that_fails_before_anything_was_enrolled_leaves_nothing_behind(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 30)
    options = ("--source", source, "--yes")
    command("join", server.address, "no-such-code", *options, cwd=tmp_path, code=1)
    command("join", "http://127.0.0.1:1", server.code, *options, cwd=tmp_path, code=1)
    command("join", server.address, server.code, "--source", "csv:missing.csv", "--yes", cwd=tmp_path, code=1)
    command("join", server.address, server.code, "--source", source, cwd=tmp_path, code=1)  # nobody said yes
    assert not (tmp_path / "crowdml-device").exists()
    command("fleet", server.address, "no-such-code", "--devices", 2, *options, cwd=tmp_path, code=1)
    assert not (tmp_path / "crowdml-fleet").exists()


def test_an_invitation_for_fewer_devices_than_a_fleet_has_is_one_sentence_and_another_goes_on(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 30)
    options = ("--devices", 4, "--source", source, "--yes", "--check-ins", 1)
    code = server.call(server.hub.invite(uses=2))
    refused = command("fleet", server.address, code, *options, cwd=tmp_path, code=1)
    assert "Traceback" not in refused.stderr
    said = "The code lets in 2 more devices, and these are 4. Nothing was sent. Say --devices 2, or ask for"
    assert said in refused.stderr.splitlines()[-1]
    assert "4 devices" in command("fleet", server.address, server.code, *options, cwd=tmp_path).stdout


def test_a_folder_with_the_owners_budget_outlives_a_join_that_fails(server, tmp_path):
    options = ("--epsilon", "2", "--samples", 10)
    refused = command("budget", "set", *options, cwd=tmp_path, code=1)
    assert "There is no device in crowdml-device" in refused.stderr
    assert not (tmp_path / "crowdml-device").exists()
    command("budget", "set", *options, "--before-joining", cwd=tmp_path)
    source = write_rows(tmp_path / "rows.csv", 30)
    command("join", server.address, "no-such-code", "--source", source, "--yes", cwd=tmp_path, code=1)
    assert (tmp_path / "crowdml-device" / "device.json").exists()


def test_a_join_whose_enrolment_may_have_arrived_keeps_its_key_and_goes_on_with_it(server, tmp_path):
    """The server enrols the device and its answer is lost: the same key must come again."""
    home = Folder(tmp_path / "device")
    attempt = Attempt(home)

    def lose_the_answer() -> None:
        with attempt.joining():
            attempt.fleet = Fleet(home, Client(server.address), TASK, find(TASK), asked=True)
            made.append(home.key().id)
            raise Unreachable("the answer was lost.")

    made: list[str] = []
    with pytest.raises(Unreachable):
        lose_the_answer()
    assert made == [home.key().id]


# --- a closed task ---


def test_a_closed_task_is_joined_and_read_with_the_devices_signature(tmp_path):
    task = small_task("closed", samples=20)
    source = write_rows(tmp_path / "rows.csv", 20)
    with serving(tmp_path / "server", task) as server:
        server.call(server.hub.set_closed(task.hash, True))
        refused = command("join", server.address, server.code, "--source", source, cwd=tmp_path, code=1)
        assert "Nobody is there to answer" in refused.stderr
        assert not (tmp_path / "crowdml-device").exists()
        (tmp_path / "narrow.csv").write_text("0.1,a\n")
        options = ("--source", "csv:narrow.csv", "--yes")
        assert (
            "its first line has 2 fields"
            in command("join", server.address, server.code, *options, cwd=tmp_path, code=1).stderr
        )  # it had to enrol to see the task, and has withdrawn
        assert not (tmp_path / "crowdml-device").exists()
        done = command("join", server.address, server.code, "--source", source, "--yes", "--json", "-", cwd=tmp_path)
        assert json.loads(done.stdout)["check_ins"] == 4
        verified = command("ledger", "--verify", "--json", "-", cwd=tmp_path)
        assert json.loads(verified.stdout)["tasks"][0]["in_chain"] == 4


# --- the owner's link, and receipts ---


def test_the_owners_link_is_signed_by_the_device_and_opens_its_page(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 10)
    command("join", server.address, server.code, "--source", source, "--yes", cwd=tmp_path)
    made = json.loads(command("ledger", "--web", "--no-open", "--json", "-", cwd=tmp_path).stdout)
    parts = urlsplit(made["link"])
    query = dict(parse_qsl(parts.query))
    key = Folder(tmp_path / "crowdml-device").key()
    assert (parts.path, made["opened"]) == (f"/device/{key.id}", False)
    ends = open_owner_link(key.public, key.id, query["at"], query["for"], query["signature"], now=made["at"])
    assert ends == made["at"] + 600


def test_receipts_are_verified_against_the_key_the_chain_and_a_transcript(tmp_path):
    task = small_task("verified", samples=1000)
    source = write_rows(tmp_path / "rows.csv", 20)
    with serving(tmp_path / "server", task) as server:
        for folder in ("a", "b"):
            command("join", server.address, server.code, "--source", source, "--folder", folder, "--yes", cwd=tmp_path)
        with (tmp_path / "transcript").open("wb") as file:
            write_transcript(server.hub.store, task.hash, file)
        options = ("ledger", "--folder", "b", "--verify", "--transcript", "transcript")
        said = command(*options, cwd=tmp_path).stdout
        assert "4 receipts for 4 messages" in said
        assert "4 of 4 are in the journal's chain" in said
        found = json.loads(command(*options, "--json", "-", cwd=tmp_path).stdout)
        (result,) = found["tasks"]
        assert (found["holds"], result["in_chain"], result["in_transcript"], result["flaws"]) == (True, 4, 4, [])
        assert result["head"] == {"index": 8, "chain": server.hub.find(task.hash).offer.chain.hex()}

        # another history: the second device's first check-in is no longer what it was
        with Ledger(tmp_path / "b" / "ledger.sqlite") as ledger:
            first = open_receipt(ledger.receipts()[0]).chain
        with server.hub.store.writing() as connection:
            guards = (
                connection.execute(sa.text("select name from sqlite_schema where type = 'trigger'")).scalars().all()
            )
            for guard in guards:
                connection.execute(sa.text(f"drop trigger {guard}"))
            connection.execute(sa.text("update journal set chain = zeroblob(32) where chain = :c"), {"c": first})
        broken = command(*options[:4], "--json", "-", cwd=tmp_path, code=1)
        assert "do not hold" in broken.stderr
        (result,) = json.loads(broken.stdout)["tasks"]
        assert result["in_chain"] in (2, 3)
        assert "is no longer at place" in result["flaws"][0]
    alone = command(*options[:4], cwd=tmp_path).stdout  # the server is away: what can be checked here still is
    assert "The server signed each" in alone
    assert "The chain was not looked at" in alone


def test_a_receipt_of_another_server_or_for_other_bytes_does_not_hold(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 10)
    command("join", server.address, server.code, "--source", source, "--yes", cwd=tmp_path)
    home = Folder(tmp_path / "crowdml-device")
    with home.ledger() as ledger:
        sent = ledger.sent()
    mine, theirs = bytes.fromhex(home.server.key), Key.generate().public
    assert [result.holds for result in check_receipts(sent, home.key().id, mine)] == [True]
    (forged,) = check_receipts(sent, home.key().id, theirs)
    assert len(forged.flaws) == len(sent)
    (other,) = check_receipts([replace(each, hash=bytes(32)) for each in sent], home.key().id, mine)
    assert all("other bytes than were sent" in flaw for flaw in other.flaws)
    (turned,) = check_receipts(sent[::-1], home.key().id, mine)
    assert len(turned.flaws) == 1


def test_a_servers_own_authority_is_trusted_and_kept_in_the_folder(tmp_path):
    home = Folder(tmp_path / "device")
    home.make()
    authority = tmp_path / "ca.pem"
    authority.write_bytes(local_certificate(tmp_path / "server", "127.0.0.1").authority.read_bytes())
    home.trust(authority)
    authority.unlink()
    assert Client("https://127.0.0.1:1", ca=home.authority)
    assert home.authority == str(home.path / "authority.pem")


def test_the_consent_screen_shows_the_study_s_words_as_they_are_and_on_lines_of_their_own(tmp_path):
    text = SMALL.format(name="plain-words", samples=20).replace(
        "A small task", 'A [/red] task :smile:"\ncollects = "Nothing.\\n - [conceal]no gradient'
    )
    source = write_rows(tmp_path / "rows.csv", 10)
    with serving(tmp_path / "server", parse(text)) as server:
        done = command("join", server.address, server.code, "--source", source, "--yes", cwd=tmp_path)
    assert "\nIt reads: Nothing. - [conceal]no gradient\nWhat leaves this device:\n" in done.stdout
    assert done.stdout.startswith("A [/red] task :smile:\n")


def test_the_consent_screen_shows_controls_that_a_task_of_another_making_has(capsys):
    bad = "Nothing leaves.\x1b[8m\u202e"
    price = Price.of(find(TASK), TASK)
    shown = replace(consent_to(price), title=bad, collects=bad, promises=(bad,))
    _show(Report(None), shown, price, Folder("device"))
    said = capsys.readouterr().out
    assert said.count("Nothing leaves.\ufffd[8m\ufffd") == 3
    assert "\x1b" not in said


def test_the_receipts_of_a_fleet_are_verified_together(server, tmp_path):
    source = write_rows(tmp_path / "rows.csv", 30)
    options = ("--source", source, "--devices", "3", "--folder", "many", "--yes")
    made = json.loads(command("fleet", server.address, server.code, *options, "--json", "-", cwd=tmp_path).stdout)
    found = json.loads(command("ledger", "--folder", "many", "--verify", "--json", "-", cwd=tmp_path).stdout)
    assert (found["holds"], found["devices"]) == (True, 3)
    assert found["tasks"][0]["receipts"] == found["tasks"][0]["in_chain"] == made["check_ins"] > 0
    assert "one device" in command("ledger", "--folder", "many", "--web", cwd=tmp_path, code=1).stderr


def test_a_link_to_a_server_that_is_away_says_so(tmp_path):
    task = small_task("away", samples=1000)
    source = write_rows(tmp_path / "rows.csv", 10)
    with serving(tmp_path / "server", task) as server:
        command("join", server.address, server.code, "--source", source, "--yes", cwd=tmp_path)
    done = command("ledger", "--web", "--json", "-", cwd=tmp_path)
    assert "does not answer now" in done.stderr
    assert (json.loads(done.stdout)["server_answers"], json.loads(done.stdout)["opened"]) == (False, False)
