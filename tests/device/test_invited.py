"""An invitation knows its task: one string joins, a code is checked before anything is read, a mistake uses none up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from loopback import LoopbackServer, rows, serving, small_task

import crowdml as crowdml_package
from crowdml.cli import cli
from crowdml.device.folder import Folder
from crowdml.device.joining import read_link
from crowdml.errors import CrowdmlError
from crowdml.server.hub import code_hash, utc_now
from crowdml.server.invitations import make_batch
from crowdml.storage.server.operating import end_sheet

CITY, TOWN, SEA = (small_task(name, samples=20) for name in ("city", "town", "sea"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """Three studies: two of them run, one is stopped."""
    with serving(tmp_path_factory.mktemp("server"), CITY, TOWN, SEA) as running:
        running.call(running.hub.change(SEA.hash, "stop"))
        yield running


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [f"{','.join(f'{value:.3f}' for value in x)},{'abc'[y]}\n" for x, y in rows(12)]
    (tmp_path / "rows.csv").write_text("".join(lines))
    return "csv:rows.csv"


def crowdml(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments], prog_name="crowdml")


def code_for(server: LoopbackServer, *tasks: bytes, uses: int = 1) -> str:
    return server.call(server.hub.invite(uses=uses, tasks=tasks))


def used(server: LoopbackServer, code: str) -> int:
    found = server.hub.store.invitation(code_hash(code))
    assert found is not None
    return found.used


@pytest.mark.parametrize("command", ["join", "fleet"])
def test_the_link_of_an_invitation_joins_its_task_among_several(server: LoopbackServer, source: str, command: str):
    """Review 2, users: operator 2, owner 3, the tutorial's step 10."""
    code = code_for(server, TOWN.hash, uses=2)
    options = ("--source", source, "--yes", "--json", "-", *(("--devices", 2) if command == "fleet" else ()))
    done = crowdml(command, f"{server.address}/join/{code}", *options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["check_ins"] == 2
    consents = json.loads(Path(f"crowdml-{'device' if command == 'join' else 'fleet'}/consent.json").read_text())
    assert [each["name"] for each in consents.values()] == ["town"]


def test_every_command_that_is_printed_for_a_code_joins_a_study(server: LoopbackServer, source: str):
    """Review 2, users: operator 2. Cards, CSV and `invite` print the same words."""
    (card,) = make_batch(server.hub.store, utc_now(), server.address, tasks=[CITY.hash]).cards
    words = card.command.replace("csv:FILE", source).split()
    assert words[:2] == ["crowdml", "join"]
    assert crowdml(*words[1:], "--yes").exit_code == 0
    (broad,) = make_batch(server.hub.store, utc_now(), server.address).cards
    assert "--task TASK" in broad.command
    words = broad.command.replace("csv:FILE", source).replace("TASK", "town").split()
    assert crowdml(*words[1:], "--yes", "--folder", "another").exit_code == 0


def test_a_code_for_several_running_studies_lists_them_and_asks_for_one(server: LoopbackServer, source: str):
    done = crowdml("join", server.address, server.code, "--source", source, "--yes")
    assert done.exit_code == 1
    assert "The code admits to 2 studies: city (" in done.stderr
    assert "such as --task city." in done.stderr
    assert "sea" not in done.stderr


def test_a_code_that_lets_nobody_in_is_refused_before_the_consent_is_shown(server: LoopbackServer, source: str):
    """Review 2, users: owner 13."""
    spent = code_for(server, CITY.hash)
    assert crowdml("join", server.address, spent, "--source", source, "--yes", "--folder", "first").exit_code == 0
    over = code_for(server, CITY.hash)
    end_sheet(server.hub.store, [code_hash(over)], "2020-01-31T12:00:00+00:00")
    for code, sentence in (
        ("abcd-efgh", "No invitation has this code."),
        (spent, "This invitation was for one device, and is used up."),
        (over, "This invitation ended on 2020-01-31 12:00 UTC."),
        ("a code?", "'a code?' is no code"),
    ):
        done = crowdml("join", server.address, code, "--source", source)
        assert done.exit_code == 1
        assert sentence in done.stderr
        assert done.stdout == ""
    assert not Path("crowdml-device").exists()


@pytest.mark.parametrize("command", ["join", "fleet"])
def test_a_wrong_task_uses_no_code_up(server: LoopbackServer, source: str, command: str):
    """Review 2, users: owner 13."""
    code, devices = code_for(server, CITY.hash), len(server.hub.keys)
    more = ("--devices", 1) if command == "fleet" else ()
    done = crowdml(command, f"{server.address}/join/{code}", "--task", "town", "--source", source, "--yes", *more)
    assert done.exit_code == 1
    assert "The code admits to no study called 'town'. It admits to: city (" in done.stderr
    assert (used(server, code), len(server.hub.keys)) == (0, devices)


def test_the_server_itself_spends_no_use_on_a_device_that_asks_for_another_task(server: LoopbackServer):
    """A device in another language may ask for the wrong task, too."""
    import asyncio

    from crowdml.device.client import Client
    from crowdml.device.joining import enrol_device
    from crowdml.wire.keys import Key
    from crowdml.wire.problems import Problem

    code, key = code_for(server, CITY.hash), Key.generate()

    async def ask(task: bytes) -> None:
        client = Client(server.address)
        try:
            await enrol_device(client, key, code, task)
        finally:
            await client.close()

    with pytest.raises(Problem) as refused:
        asyncio.run(ask(TOWN.hash))
    assert refused.value.slug == "invitation"
    assert (used(server, code), key.id in server.hub.keys) == (0, False)
    asyncio.run(ask(CITY.hash))
    assert (used(server, code), key.id in server.hub.keys) == (1, True)


def test_a_device_that_joined_goes_on_with_its_used_up_code(server: LoopbackServer, source: str):
    code = code_for(server, CITY.hash, TOWN.hash)
    for task in ("city", "town"):  # the second is a new consent, with a code that has no use left
        done = crowdml("join", server.address, code, "--task", task, "--source", source, "--yes", "--check-ins", 1)
        assert done.exit_code == 0, done.output
    assert used(server, code) == 1


@pytest.mark.parametrize("command", ["join", "fleet"])
def test_a_refused_join_leaves_a_joined_folder_as_it_was(server: LoopbackServer, source: str, command: str):
    """A newcomer's trial, owner 1: a study that the code does not open stayed among the accepted ones."""
    link = f"{server.address}/join/{code_for(server, CITY.hash)}"
    more = ("--devices", 1) if command == "fleet" else ()
    first = (command, link, "--source", source, "--yes", "--check-ins", 1, "--folder", "mine", *more)
    assert crowdml(*first).exit_code == 0
    kept = sorted((each, each.read_bytes()) for each in Path("mine").glob("**/*.json"))
    for wanted in ("town", "citi"):
        refused = crowdml(*first, "--task", wanted)
        assert refused.exit_code == 1
        assert f"The code admits to no study called '{wanted}'." in refused.stderr
        assert refused.stderr.strip().endswith(f"It admits to: city ({CITY.hash.hex()[:12]}).")
        assert refused.stdout == "", "no consent is shown for what cannot be joined"
    assert sorted((each, each.read_bytes()) for each in Path("mine").glob("**/*.json")) == kept
    assert crowdml(*first).exit_code == 0


def test_a_consent_is_taken_back_where_the_server_then_refuses_the_device(
    server: LoopbackServer, source: str, monkeypatch: pytest.MonkeyPatch
):
    """A newcomer's trial, owner 1. The code is used up by others between the question and the enrolment."""
    from crowdml.cli import device as commands

    assert crowdml("join", server.address, code_for(server, CITY.hash), "--source", source, "--yes").exit_code == 0
    code = code_for(server, TOWN.hash)
    shown = commands._show

    def show_and_end(*arguments: object, **options: object) -> None:
        shown(*arguments, **options)
        end_sheet(server.hub.store, [code_hash(code)], "2020-01-31T12:00:00+00:00")

    monkeypatch.setattr(commands, "_show", show_and_end)
    refused = crowdml("join", server.address, code, "--source", source, "--yes")
    assert (refused.exit_code, "ended on 2020-01-31" in refused.stderr) == (1, True)
    assert [each.name for each in Folder("crowdml-device").consents().values()] == ["city"]
    assert [each.stem for each in Path("crowdml-device/tasks").iterdir()] == [CITY.hash.hex()]


def test_a_link_is_taken_apart_as_it_was_copied():
    for link in ("http://a.example:80/join/k7qd-3m9x", "http://a.example:80/join/k7qd-3m9x/?lang=de"):
        assert read_link(link, None) == ("http://a.example:80", "k7qd-3m9x")
        assert read_link(link, "K7QD-3M9X") == ("http://a.example:80", "k7qd-3m9x")
    assert read_link("https://a.example/crowd/join/abc", None) == ("https://a.example/crowd", "abc")
    assert read_link("a.example", "abc") == ("a.example", "abc")
    with pytest.raises(CrowdmlError, match="There is no code in http"):
        read_link("http://a.example", None)
    with pytest.raises(CrowdmlError, match="and abc is another"):
        read_link("http://a.example/join/k7qd", "abc")


def test_what_a_code_admits_to_is_told_to_its_holder_alone(server: LoopbackServer):
    import http.client

    code = code_for(server, TOWN.hash, uses=3)
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

    def ask(body: bytes) -> tuple[int, dict]:
        line.request("POST", "/v1/invitations/check", body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())

    status, found = ask(json.dumps({"code": code.upper()}).encode())
    assert (status, found["left"], found["ends_at"]) == (200, 3, None)
    assert [(each["name"], each["state"], each["closed"]) for each in found["tasks"]] == [("town", "running", False)]
    assert [set(each) for each in found["tasks"]] == [{"hash", "name", "title", "state", "closed"}]
    assert ask(b'{"code": "abcd-efgh"}')[0] == 403
    for body in (b"", b"[]", b'{"code": 1}', b'{"code": "a b"}', b'{"code": "a", "more": 1}', b"{" * 900):
        assert ask(body)[0] == 400
    line.close()


# --- what an owner reads before and after ---


def test_the_consent_names_purpose_who_runs_it_the_odds_and_how_to_leave(server: LoopbackServer, source: str):
    """Review 2, users: owner 7. No exponent, no hash broken in a line, nothing wider than a terminal."""
    task = small_task("harbour", samples=20).with_(
        title="Who crosses the harbour?", purpose="Plan the ferry.", collects="Four numbers."
    )
    server.call(server.hub.add_task(task))
    server.hub.store.set_setting("contact", b"City Hall\nMain Street 1\n\x1b[8mhall@city.example")
    code = code_for(server, task.hash)
    done = crowdml("join", f"{server.address}/join/{code}", "--source", source, "--folder", "mine")
    assert done.exit_code == 1  # nobody is there to say yes
    lines, whole = done.stdout.splitlines(), " ".join(done.stdout.split())
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Who crosses the harbour?"
    for words in (
        "Purpose: Plan the ferry.",
        f"Run by: City Hall, Main Street 1, \ufffd[8mhall@city.example ({server.address})",
        "It reads: Four numbers.",
        "The price, at δ = 10⁻⁶: any one sample loses at most ε = 1.5",
        "is right at most 81.8 % of the time after all that is sent.",
        "leave for good with `crowdml leave --folder mine`. What was given until then stays in the model.",
    ):
        assert words in whole, words
    assert lines[-1] == task.hash.hex()
    server.hub.store.set_setting("contact", b"")
    assert crowdml("join", f"{server.address}/join/{code}", "--source", source, "--yes").exit_code == 0
    (consent,) = json.loads(Path("crowdml-device/consent.json").read_text()).values()
    assert (consent["purpose"], consent["run_by"]) == ("Plan the ferry.", server.address)


def test_a_device_that_was_revoked_does_not_end_as_if_all_were_well(server: LoopbackServer, source: str):
    """Review 2, users: a refused join exits with 1."""
    link = f"{server.address}/join/{code_for(server, CITY.hash)}"
    assert crowdml("join", link, "--source", source, "--yes", "--check-ins", 1).exit_code == 0
    server.call(server.hub.revoke(Folder("crowdml-device").key().id))
    done = crowdml("join", link, "--source", source, "--yes")
    assert done.exit_code == 1
    assert "revoked" in done.stderr


def test_an_interrupted_join_says_that_it_goes_on_with_the_same_command(server: LoopbackServer, tmp_path: Path):
    """Review 2, users: owner 14."""
    environment = {**os.environ, "PYTHONPATH": str(Path(crowdml_package.__file__).parents[1])}
    link = f"{server.address}/join/{code_for(server, CITY.hash)}"
    words = [sys.executable, "-m", "crowdml", "join", link, "--source", "csv:-", "--yes"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as device:  # fmt: skip
        assert device.stdout is not None
        assert any("Joined as device" in line for line in iter(device.stdout.readline, ""))
        device.send_signal(signal.SIGINT)
        said = device.communicate(timeout=60)[1]
    assert device.returncode == 130
    assert said.strip() == "crowdml: interrupted. What waits is kept: start the same command to go on."


def test_the_check_ins_of_a_fleet_are_said_to_be_those_of_each_device():
    """Review 2, users: errors. `fleet --check-ins 30` made 141 of them."""
    said = " ".join(crowdml("fleet", "--help").output.split())
    assert "Stop each device after this many check-ins." in said
    assert "csv:- and ndjson:- read stdin." in " ".join(crowdml("join", "--help").output.split())
