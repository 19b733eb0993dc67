"""The real command in a process of its own: exit codes, streams, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import refused

import crowdml
from crowdml.protocols import settled
from crowdml.server.tls import is_loopback
from crowdml.task import find_task


def run(*args: str, **extra) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "crowdml.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **extra)


def test_the_version_is_the_packages():
    assert run("--version").stdout.strip().endswith(crowdml.__version__)


def test_start_up_imports_nothing_heavy():
    code = (
        "import sys, crowdml, crowdml.cli;"
        "print([name for name in ('jax', 'matplotlib', 'sklearn', 'scipy', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_price_needs_no_jax():
    code = (
        "import sys\n"
        "from crowdml.cli import cli\n"
        "try: cli.main(['task', 'check', 'activity'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'jax' not in sys.modules and 'sklearn' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_json_on_stdout_is_one_object_and_people_read_stderr():
    done = run("task", "check", "mnist", "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["name"] == "mnist"
    assert "What it costs" in done.stderr


def test_a_usage_error_is_exit_code_2_and_an_error_of_ours_1():
    assert run("simulate").returncode == 2
    assert run("nonsense").returncode == 2
    wrong = run("task", "check", "nonsense")
    assert wrong.returncode == 1
    assert wrong.stdout == ""
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_port_that_no_machine_has_is_refused_before_anything_starts():
    found = run("serve", "--port", "99999")
    assert found.returncode == 2
    assert "0<=x<=65535" in found.stderr


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("::1", True), ("localhost", True),
                                             ("0.0.0.0", False), ("study.example", False)])  # fmt: skip
def test_only_this_machine_reaches_a_loopback_address(host: str, alone: bool):
    assert is_loopback(host) == alone


def test_a_full_disk_behind_stdout_is_one_sentence_and_exit_code_1():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "crowdml.cli", "task", "list", "--json", "-"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("crowdml: No space left on device")
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m crowdml.cli task check activity | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_a_server_prints_a_command_for_each_task_that_runs_and_where_operators_log_in(tmp_path: Path):
    """Review 2, users: operator 2, and the tutorial's step 7: what is printed works beside several studies."""
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store

    with Store(tmp_path / DATABASE) as store:
        for name, state in (("first", "running"), ("second", "running"), ("third", "stopped")):
            store.add_task(
                settled(find_task("digits012").with_(name=name)).canonical, name, "2026-01-31T12:00:00+00:00", state
            )
        store.set_operator("me", "no hash", "2026-01-31T12:00:00+00:00")
    command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(tmp_path), "--port", "0", "--invite", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        assert served.stderr is not None
        said: list[str] = []
        for line in served.stdout:
            said.append(line.rstrip())
            if "/operator" in line:
                served.terminate()
        assert "Stopped. What was acknowledged is kept" in served.stderr.read()
    address = said[0].rpartition(" at ")[2]
    assert said[0] == f"Serving first, second, third (stopped) at {address}"
    assert said[1] == "A device joins one of the tasks with:"
    for line, name in zip(said[2:4], ("first", "second"), strict=True):
        assert line.startswith(f"  crowdml join {address}/join/")
        assert line.endswith(f" --task {name} --source csv:FILE")
    assert said[4].startswith(f"Only this machine reaches {address}.")
    assert said[-1] == f"Operators log in at {address}/operator"


def test_the_package_runs_as_a_module():
    """Review 2, users: data scientist 15."""
    done = subprocess.run([sys.executable, "-m", "crowdml", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(crowdml.__version__)


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path):
    """Review 2, users: errors. `--folder meter.csv` spoke of the disk."""
    meter = tmp_path / "meter.csv"
    meter.write_text("1,2\n")
    for command in (("leave",), ("budget", "set", "--epsilon", "1", "--samples", "5"), ("predict",)):
        said = refused(*command, "--folder", str(meter))
        assert f"{meter} is a file, and a device keeps its key and its ledger in a folder. Nothing was done." in said
        assert "such as meter-device" in said
    assert f"{meter} is there and is no folder." in refused("serve", "--folder", str(meter), "--port", "0")
    assert meter.read_text() == "1,2\n"
