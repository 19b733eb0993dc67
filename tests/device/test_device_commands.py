"""The commands of a device's owner, as processes against a real server; and the examples of sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import SMALL, rows, serving, small_task

import crowdml

ROOT = Path(__file__).resolve().parents[2]
TASK = small_task(samples=20)


def command(*arguments: object, cwd: Path, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "crowdml.cli", *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120, input=stdin,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
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
    assert "blurred so that no sample shows" in refused.stdout
    first = command("join", server.address, server.code, "--source", source, "--yes", "--check-ins", 1, cwd=tmp_path)
    assert "any one sample loses at most ε = 1.5" in " ".join(first.stdout.split())
    consent = json.loads((tmp_path / "crowdml-device" / "consent.json").read_text())[TASK.hash.hex()]
    assert (consent["by"], len(consent["promises"])) == ("--yes", 2)
    command("budget", "set", "--epsilon", "2", "--samples", 10, cwd=tmp_path)
    again = command("join", server.address, server.code, "--source", source, "--json", "-", cwd=tmp_path)
    result = json.loads(again.stdout)
    assert (result["check_ins"], result["endings"]) == (1, {"budget": 1})
    assert "0 of 10 are left of your budget" in again.stderr
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
        *_, address, code, _, _ = line.split()  # ... URL CODE --source csv:FILE
        source = write_rows(tmp_path / "rows.csv", 10)
        refused = command("join", address, code, "--source", source, "--yes", cwd=tmp_path, code=1)
        assert "no certificate that we trust" in refused.stderr
        options = ("--source", source, "--yes", "--ca", certificate, "--json", "-")
        result = json.loads(command("join", address, code, *options, cwd=tmp_path).stdout)
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


def test_the_broker_example_runs_where_paho_is_installed_and_says_so_where_not():
    example = ROOT / "examples/sources/mqtt.py"
    done = subprocess.run(
        [sys.executable, str(example), "--host", "127.0.0.1", "--port", "1", "--topic", "t"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "pip install paho-mqtt" in done.stderr or "refused" in done.stderr


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
