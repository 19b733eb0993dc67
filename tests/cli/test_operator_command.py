"""`crowdml operator`, `invite` and `invitation`, beside a server that runs and beside one that does not."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from cli_runner import crowdml, refused
from click.testing import CliRunner

from crowdml.cli import cli

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from device import Device, make_task, serving

TASK = make_task()
PASSWORD = "correct horse battery staple"


def with_password(*args: str, password: str = PASSWORD) -> tuple[int, str]:
    """A command that reads a password from stdin; its code and all that it said."""
    result = CliRunner().invoke(cli, list(args), input=f"{password}\n", prog_name="crowdml")
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's folder, whose server has run and stopped."""
    found = tmp_path_factory.mktemp("server")
    with serving(found, TASK, invite=0):
        pass
    return found


def test_operators_are_added_listed_given_a_password_and_removed(folder: Path):
    from crowdml.storage.server import Store

    where = ("--folder", str(folder))
    assert crowdml("operator", "list", *where, "--json", "-").json == {"operators": []}
    assert with_password("operator", "add", "Anna", *where) == (0, "Operator anna may log in.\n")
    assert with_password("operator", "add", "bert", *where)[0] == 0
    assert crowdml("operator", "list", *where, "--json", "-").json == {"operators": ["anna", "bert"]}
    with Store(folder / "server.sqlite") as store:
        before = store.operator_password("bert")
    assert with_password("operator", "password", "bert", *where, password="another good password")[0] == 0
    with Store(folder / "server.sqlite") as store:
        assert store.operator_password("bert") != before
        assert str(before).startswith("$argon2id$")
    assert crowdml("operator", "remove", "anna", *where).code == 0
    assert "the last operator" in refused("operator", "remove", "bert", *where)
    assert "no operator 'carla'" in refused("operator", "remove", "carla", *where)


def test_a_password_is_checked_and_never_printed(folder: Path):
    code, said = with_password("operator", "add", "dora", "--folder", str(folder), password="short")
    assert code == 1
    assert "at least 12" in said
    code, said = with_password("operator", "add", "dora", "--folder", str(folder))
    assert PASSWORD not in said
    assert "already" in refused("operator", "add", "dora", "--folder", str(folder))


def test_invitations_are_written_as_csv_and_as_a_sheet_and_let_devices_in(tmp_path: Path):
    data = tmp_path / "data"
    with serving(data, TASK, invite=0) as server:
        table, sheet = tmp_path / "codes.csv", tmp_path / "codes.html"
        said = crowdml("invite", "--folder", str(data), "--task", TASK.name, "--number", "50", "--uses", "1", "--ends",
                       "30d", "--rate", "10", "--label", "Class 7b", "--csv", str(table), "--sheet", str(sheet),
                       "--json", "-").json  # fmt: skip
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert [row["code"] for row in rows] == [each["code"] for each in said["invitations"]]
        assert rows[0]["url"] == f"{server.started.address}/join/{rows[0]['code']}"
        assert table.stat().st_mode & 0o77 == sheet.stat().st_mode & 0o77 == 0
        assert sheet.read_text().count("<svg") == 50
        assert Device(server.line()).enrol(rows[7]["code"]).status == 201
        (listed,) = crowdml("invitation", "list", "--folder", str(data), "--json", "-").json["invitations"]
        assert (listed["number"], listed["used"], listed["label"]) == (50, 1, "Class 7b")
        ended = crowdml("invitation", "end", listed["id"][:8], "--folder", str(data), "--json", "-").json
        assert ended["ended"] == 50
        assert Device(server.line()).enrol(rows[8]["code"]).slug == "invitation"
        assert "(over)" in crowdml("invitation", "list", "--folder", str(data)).out
        (one,) = crowdml("invite", "--folder", str(data), "--json", "-").json["invitations"]
        assert Device(server.line()).enrol(one["code"]).status == 201
        assert "used up" in crowdml("invitation", "list", "--folder", str(data)).out
        assert "0 batches" in refused("invitation", "end", "000000", "--folder", str(data))


def test_without_a_file_the_commands_to_join_are_printed(folder: Path):
    said = crowdml("invite", "--folder", str(folder), "--number", "2", "--address", "https://study.example/")
    lines = said.out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("crowdml join https://study.example/join/") for line in lines)


def test_a_csv_of_invitations_is_said_to_have_the_codes_and_how_a_device_joins(folder: Path, tmp_path: Path):
    """Review 2, users: the tutorial's step 8, where no code was to be seen."""
    target = tmp_path / "codes.csv"
    options = ("--folder", str(folder), "--task", TASK.name, "--address", "https://study.example")
    said = crowdml("invite", *options, "--csv", str(target))
    assert "a row with label, code, url and command for each invitation" in " ".join(said.out.split())
    assert "crowdml join https://study.example/join/CODE --source csv:FILE" in said.out
    assert "where it has not, add --label COLUMN" in " ".join(said.out.split())
    (row,) = csv.DictReader(target.open())
    assert row["command"] == f"crowdml join https://study.example/join/{row['code']} --source csv:FILE"
    assert row["code"] not in said.out
    assert said.err == ""


def test_an_invitation_that_only_this_machine_can_follow_is_pointed_out(folder: Path):
    """Review 2, users: operator 11."""
    for address in ("http://127.0.0.1:18280", "http://localhost:8080", "http://[::1]:8080"):
        said = crowdml("invite", "--folder", str(folder), "--address", address)
        assert said.code == 0
        assert f"Only this machine reaches {address}." in " ".join(said.err.split())


def test_an_invitation_to_several_tasks_says_that_one_has_to_be_named(folder: Path):
    options = ("--folder", str(folder))
    assert crowdml("task", "start", "digits012", *options).code == 0
    said = crowdml("invite", *options, "--address", "https://study.example")
    command, *named = said.out.splitlines()
    assert command.endswith(" --task TASK --source csv:FILE")
    assert " ".join(named) == f"The code admits to 2 tasks: name one in place of TASK: {TASK.name}, digits012."
    one = crowdml("invite", *options, "--address", "https://study.example", "--task", "digits012").out
    assert "--task" not in one


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ends", "yesterday"), "is no end"),
        (("--number", "0"), "between 1 and"),
        (("--uses", "0"), "between 1 and"),
        (("--rate", "0"), "at least 1"),
        (("--task", "none"), "No task here is called"),
        (("--address", "nowhere"), "is no address"),
        (("--address", "http://["), "is no address"),  # review 2, network finding L7
        (("--address", "http://a b;rm -rf ~"), "is no address"),  # review 2, network finding L11
        (("--ends", "9999-12-31"), "within ten years"),  # review 2, network finding L7
        (("--label", "a\x1bb"), "control character"),  # review 2, network finding L4
        (("--sheet", "cards.pdf"), "cards.pdf: a sheet to print ends in .html. No invitation was made."),
    ],
)
def test_what_cannot_be_invited_is_one_sentence(folder: Path, options: tuple[str, ...], said: str):
    before = crowdml("invitation", "list", "--folder", str(folder), "--json", "-").json
    assert said in refused("invite", "--folder", str(folder), *options)
    assert crowdml("invitation", "list", "--folder", str(folder), "--json", "-").json == before


def test_a_stopped_task_takes_no_invitations_until_it_runs_again(folder: Path):
    options = ("--folder", str(folder))
    crowdml("task", "stop", TASK.name, *options)
    said = refused("invite", "--task", TASK.name, *options)
    assert said.endswith("is stopped: nobody can join it. No invitation was made.")
    crowdml("task", "start", TASK.name, *options)
    assert crowdml("invite", "--task", TASK.name, *options).code == 0


def test_a_folder_without_a_server_is_said(tmp_path: Path):
    for command in (("operator", "list"), ("invite",), ("invitation", "list")):
        assert "there is no server" in refused(*command, "--folder", str(tmp_path / "none"))
