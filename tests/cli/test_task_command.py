"""`crowdml task`: price, refusals, new files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_runner import crowdml, refused
from plugged import EXAMPLES, MEDIANS, no_plugins_left

from crowdml.cli.output import Report, say_error
from crowdml.price import Price, check_budget
from crowdml.protocols import find, settled
from crowdml.server.invitations import admitted, join_commands
from crowdml.server.serve import DATABASE
from crowdml.storage.server import Store
from crowdml.task import find_task, shipped, shipped_text
from crowdml.texts import epsilon_text


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_task_is_valid_and_keeps_its_own_budget(name: str):
    task = find_task(name)
    assert task.name == name
    assert check_budget(find(task), task).sample_epsilon() <= float(task.privacy.budget.epsilon) * (1 + 1e-9)


def test_the_list_names_every_shipped_task():
    assert [row["name"] for row in crowdml("task", "list", "--json", "-").json["tasks"]] == shipped()


def test_check_prints_the_price_and_the_hash():
    answer = crowdml("task", "check", "activity")
    assert answer.code == 0
    for word in (
        "gradient",
        "discrete-gaussian",
        "count-laplace",
        "all 100 check-ins",
        "0.9585",
        "29.81",
        "blurred with noise",
    ):
        assert word in answer.out
    assert settled(find_task("activity")).hash.hex() in answer.out, "the hash that a server would host"


def test_a_rule_that_the_protocol_does_not_have_is_refused_before_anything_is_printed(tmp_path: Path):
    text = shipped_text("digits012")
    for rule in ("grouping", "fltrust"):
        combine = f'combine = {{ rule = "{rule}", uploads = 10, rows = 60 }}'
        kind = "sgd" if rule == "grouping" else "gram"
        wrong = text if rule == "grouping" else shipped_text("digits-gram")
        wrong = wrong.replace("[protocol]", f"[protocol]\n{combine}", 1)
        said = refused("task", "check", written(tmp_path, wrong))
        assert f'protocol.combine.rule = "{rule}"' in said
        assert kind in said


def test_check_tells_whether_the_crowd_that_is_expected_is_too_small_for_the_price():
    few, many = ((*["task", "check", "activity", "--held", "100", "--devices"], number) for number in ("20", "20000"))
    said = " ".join(crowdml(*few).out.split())
    assert "20 devices with 100 samples each: This crowd is small for its price" in said
    assert "What would help: about" in said
    found = crowdml(*few, "--json", "-").json
    assert found["crowd"] == {"devices": 20, "held": 100}
    assert "20 devices" in found["outlook"]
    assert "20,000 devices with 100 samples each: This crowd is large enough" in " ".join(crowdml(*many).out.split())
    assert crowdml(*many, "--json", "-").json["outlook"] is None


@pytest.mark.parametrize(
    ("devices", "held", "why"),
    [
        ("5", "14", "5 devices with 14 samples each: No round could end: each needs masking.minimum = 20 devices."),
        (
            "25",
            "13",
            "25 devices with 13 samples each: No device could check in: a check-in takes 14 samples, and each",
        ),
    ],
)
def test_check_says_first_where_nothing_could_ever_arrive(devices: str, held: str, why: str):
    args = ("task", "check", "digits-masked", "--devices", devices, "--held", held)
    said = " ".join(crowdml(*args).out.split())
    assert why in said
    assert (
        f"to at most {devices}; each device then adds more noise" in said or f"lower protocol.batch to {held}" in said
    )
    assert "large enough" not in said
    assert why.partition(": ")[2] in crowdml(*args, "--json", "-").json["outlook"]


def test_check_says_first_where_a_round_of_uploads_could_never_close():
    said = " ".join(crowdml("task", "check", "robust-digits", "--devices", "2").out.split())
    assert "No round could end: each needs" in said


def test_check_says_what_is_missing_where_nothing_tells_how_large_the_crowd_will_be(tmp_path: Path):
    said = " ".join(crowdml("task", "check", "activity").out.split())
    assert "does not say how many devices there will be. With --devices N, and --held M" in said
    text = re.sub(r"budget = .*", "", shipped_text("digits-masked"))
    task = written(tmp_path, re.sub(r"gradient = 4.0", "gradient = 0.1", text))  # one full cohort, a batch each
    assert crowdml("task", "check", task, "--json", "-").json["crowd"] == {"devices": 25, "held": 14}
    assert "25 devices with 14 samples each: This crowd is small" in " ".join(
        crowdml("task", "check", task).out.split()
    )
    for counting in ((), ("--devices", "9")):
        said = crowdml("task", "check", "traffic", *counting).out
        assert ("No rule tells whether a crowd is too small" in said) == bool(counting)


def test_checks_json_prices_a_sample_once_and_the_device_after_1_10_and_all_check_ins():
    found = crowdml("task", "check", "activity", "--json", "-").json
    assert [line["check_ins"] for line in found["device"]] == [1, 10, 100]
    costs = [line["epsilon"] for line in found["device"]]
    assert found["epsilon_sample"] < costs[0] < costs[1] < costs[2]
    assert {row["row"] for row in found["rows"]} == {"gradient", "errors", "labels"}
    assert all(row["promise"] and row["sensitivity"] and row["noise"] for row in found["rows"])


def test_a_task_that_overspends_its_budget_is_refused_with_both_numbers(tmp_path: Path):
    text = shipped_text("digits012").replace("gradient = 4.0", "gradient = 5.0")
    for command in (["task", "check"], ["simulate"]):
        line = refused(*command, written(tmp_path, text))
        assert "5" in line
        assert "privacy.budget.epsilon = 4" in line


def test_five_passes_cost_five_times_and_are_refused():
    line = refused("simulate", "digits012", "--passes", "5")
    assert "5 check-ins" in line
    assert "privacy.budget.epsilon = 4" in line


def test_a_budget_below_one_batch_is_refused(tmp_path: Path):
    text = shipped_text("digits012").replace("samples = 28", "samples = 27")
    assert "privacy.budget.samples = 27" in refused("task", "check", written(tmp_path, text))


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("batch = 20", "batch = 0", "protocol.batch"),
        ("batch = 20", "bacth = 20", "protocol.bacth"),
        ('kind = "softmax"', 'kind = "forest"', "forest"),
        ("delta = 1e-6", "delta = 0.0", "privacy.delta"),
        ("delta = 1e-6", 'delta = "small"', "privacy.delta"),
        ("gradient = 0.9", "gradient = -1", "privacy.epsilon.gradient"),
        ('kind = "sgd"', 'kind = "gossip"', "protocol.kind"),
        ("[features]", "[features", "not a task file"),
        ("epsilon = 1.0, samples", "epsilon = 0.1, samples", "privacy.budget.epsilon"),
    ],
)
def test_a_wrong_task_file_is_refused_by_the_name_of_its_key(tmp_path: Path, before: str, after: str, named: str):
    text = shipped_text("activity")
    assert before in text
    assert named in refused("task", "check", written(tmp_path, text.replace(before, after, 1)))


def test_a_task_file_that_is_not_there_or_not_text_is_one_sentence(tmp_path: Path):
    assert "no task file" in refused("task", "check", str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused("task", "check", str(tmp_path / "binary.toml"))
    assert "cannot be read" in refused("task", "check", str(tmp_path))
    assert "activity" in refused("task", "check", "nonsense")


def test_new_writes_a_task_that_check_accepts_and_never_overwrites(tmp_path: Path):
    path = tmp_path / "study.toml"
    assert crowdml("task", "new", str(path), "--from", "mnist").code == 0
    assert crowdml("task", "check", str(path)).code == 0
    before = path.read_bytes()
    assert "already there" in refused("task", "new", str(path))
    assert path.read_bytes() == before
    assert "nonsense" in refused("task", "new", str(tmp_path / "b.toml"), "--from", "nonsense")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["study.toml"]


def test_a_task_is_started_closed_listed_and_opened_again_on_a_servers_folder(tmp_path: Path):
    folder = ("--folder", str(tmp_path))
    assert "no server in" in refused("task", "list", *folder)
    with Store(tmp_path / DATABASE):
        pass
    assert crowdml("task", "list", *folder, "--json", "-").json == {"tasks": []}
    said = crowdml("task", "start", "demo", "--closed", *folder, "--json", "-").json
    assert (said["state"], said["closed"]) == ("running", True)
    (row,) = crowdml("task", "list", *folder, "--json", "-").json["tasks"]
    assert row == {
        "name": "demo",
        "hash": said["hash"],
        "state": "running",
        "closed": True,
        "check_ins": 0,
        "devices": 0,
        "why": None,
        "validation": None,
    }
    assert "who joined" in crowdml("task", "list", *folder).out
    assert crowdml("task", "pause", "demo", *folder, "--json", "-").json["state"] == "paused"
    again = crowdml("task", "resume", "demo", *folder, "--json", "-").json
    assert (again["state"], again["closed"]) == ("running", True), "going on leaves who may read as it was"
    assert crowdml("task", "stop", "demo", *folder, "--json", "-").json["state"] == "stopped"
    assert "is stopped, so there is nothing to pause" in refused("task", "pause", "demo", *folder)
    assert "crowdml task start demo" in refused("task", "resume", "demo", *folder)
    with Store(tmp_path / DATABASE) as store:
        assert [event.kind for event in store.events()][:3] == ["stopped", "running", "paused"]
    assert crowdml("task", "start", "demo", "--open", *folder, "--json", "-").json["closed"] is False


@pytest.mark.parametrize("title", ["Digits [/red]", "[bold red]Digits[/]", "Digits :smile: :AB:CD:"])
def test_the_words_of_a_task_are_printed_as_they_are_and_never_as_markup(tmp_path: Path, title: str):
    path = tmp_path / "mine.toml"
    text = shipped_text("activity")
    line = next(each for each in text.splitlines() if each.startswith("title"))
    path.write_text(text.replace(line, f'title = "{title}"'), encoding="utf-8")
    answer = crowdml("task", "check", str(path))
    assert answer.code == 0, answer.err
    assert f"activity  {title}" in answer.out


def test_a_fingerprint_is_printed_digit_by_digit(capsys: pytest.CaptureFixture[str]):
    fingerprint = "AB:CD:A:B:M:X:O2:AB:1F:VS:ID:UP"
    report = Report(None)
    report.line(f"  SHA-256 {fingerprint}")
    report.print(fingerprint)
    report.heading(fingerprint)
    report.note(fingerprint)
    shown = capsys.readouterr()
    assert (shown.out.count(fingerprint), shown.err.count(fingerprint)) == (3, 1)


def test_words_of_a_server_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    report = Report(None)
    for say in (report.line, report.print, report.heading, report.note, say_error):
        say("before\x1b[8m\x9b8m\u202eafter")
    shown = capsys.readouterr()
    assert shown.out.count("before\ufffd[8m\ufffd8m\ufffdafter") == 3
    assert shown.err.count("before\ufffd[8m\ufffd8m\ufffdafter") == 2


def test_the_lists_of_commands_are_in_whole_sentences():
    for arguments in ((), ("task",), ("data",)):
        lines = crowdml(*arguments, "--help").out.partition("Commands:")[2].splitlines()
        cut = {line.split()[0] for line in lines if line.endswith("...")}
        assert not cut
    assert "start, pause, stop and export them on a server" in crowdml("task", "--help").out


def test_a_masked_task_is_checked_with_both_prices_and_its_cohorts():
    answer = crowdml("task", "check", "digits-masked")
    assert answer.code == 0
    text = " ".join(answer.out.split())
    for words in (
        "at most 2 colluders",
        "if everyone else colludes",
        "Cohorts of 20 to 25: every pair of devices shares a mask",
        "18 of them honest",
        "a ring of 32 bits",
        "all 5 check-ins",
    ):
        assert words in text
    found = crowdml("task", "check", "digits-masked", "--json", "-").json
    assert found["uses"] == 5
    assert found["epsilon_sample"] <= 4 < found["epsilon_sample_alone"]
    assert found["device"][-1]["check_ins"] == 5
    assert found["device"][-1]["epsilon"] < found["device"][-1]["epsilon_alone"]
    assert found["device"][0]["epsilon_sample"] < found["epsilon_sample"] == found["device"][-1]["epsilon_sample"]
    assert found["masking"]["honest"] == 18
    assert found["masking"]["bytes"] == 640 * 4
    task = settled(find_task("digits-masked"))
    price = Price.of(find(task), task)
    assert found.items() >= price.plain.items()
    for after, *epsilons in price.table:
        assert " ".join([after, *map(epsilon_text, epsilons)]) in text
    assert price.note in text
    assert [row["observer"] for row in found["rows"]] == ["aggregate"]


def test_a_large_cohort_has_a_sparse_graph(tmp_path: Path):
    text = (
        shipped_text("digits-masked").replace("cohort = 25", "cohort = 1000").replace("minimum = 20", "minimum = 900")
    )
    found = crowdml("task", "check", written(tmp_path, text), "--json", "-").json["masking"]
    assert not found["complete"]
    assert found["threshold"] <= found["neighbours"] < 999


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("minimum = 20", "minimum = 14", ["masking.minimum = 14", "at least 15 must survive"]),
        ("lease = 30.0", "lease = 30.0\nfloor = 5.0", ["masking.floor = 5", "if everyone else colludes"]),
        ('mechanism = "skellam"', 'mechanism = "discrete-gaussian"', ['"skellam"']),
        ("uses = 5", "uses = 0", ["privacy.uses = 0"]),
        ("gradient = 4.0", "gradient = 0.001", ["no Skellam noise"]),
    ],
)
def test_a_masked_task_that_cannot_be_is_refused_by_key(tmp_path: Path, before: str, after: str, words: list[str]):
    line = refused("task", "check", written(tmp_path, shipped_text("digits-masked").replace(before, after)))
    for word in words:
        assert word in line


def test_one_task_has_one_hash_in_every_command(tmp_path: Path):
    """Review 2, users: data scientist 13. The hash is that of the task as it is published, its grid filled in."""
    checked = crowdml("task", "check", "digits012", "--json", "-").json["hash"]
    listed = {each["name"]: each["hash"] for each in crowdml("task", "list", "--json", "-").json["tasks"]}
    simulated = crowdml("simulate", "digits012", "--seed", "1", "--devices", "4", "--json", "-").json["task"]
    assert listed["digits012"] == checked == simulated


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("task", "check", "digit012"), "Did you mean 'digits012'? Shipped are activity"),
        (("task", "new", "mine.toml", "--from", "digit"), "Did you mean 'digits'? There are activity"),
        (("simulate", "digits012", "--data", "digitz"), "Did you mean 'digits'? Known are digits"),
        (("bench", "devise"), "Did you mean 'device'? There are"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_one_that_is(arguments: tuple[str, ...], sentence: str):
    """Review 2, users: errors."""
    assert sentence in refused(*arguments)


def test_a_wrong_key_of_a_protocol_names_its_file(tmp_path: Path):
    """A newcomer's trial, operator 21: other mistakes in a task file were told with its name."""
    path = tmp_path / "mine.toml"
    path.write_text(shipped_text("digits012").replace("\nbatch = ", "\nbacth = "))
    for command in (("task", "check"), ("simulate",)):
        done = crowdml(*command, str(path))
        assert (done.code, done.err.count(str(path))) == (1, 1)
        assert f"{path}: protocol.bacth = 28: no such key. Did you mean 'batch'?" in done.err


def test_a_mistyped_option_is_answered_with_the_nearest_one():
    """A newcomer's trial, owner 21."""
    assert "No such option '--sorce'. Did you mean '--source'?" in crowdml("join", "link", "--sorce", "csv:a").err


def test_a_hosted_task_whose_plugin_is_not_here_is_listed_and_its_join_command_names_the_file(tmp_path: Path):
    folder, medians = str(tmp_path), str(EXAMPLES / "medians.toml")
    with no_plugins_left(), Store(tmp_path / DATABASE) as store:
        assert crowdml("task", "start", medians, "--plugin", str(MEDIANS), "--folder", folder).code == 0
        (command,) = join_commands("https://here", "CODE", admitted(store, []))
    assert command == "crowdml join https://here/join/CODE --plugin FILE.py --source csv:FILE"
    answer = crowdml("task", "list", "--folder", folder, "--json", "-")
    (row,) = answer.json["tasks"]
    assert (row["name"], row["state"]) == ("medians", "aside")
    assert row["why"].startswith("protocol.kind = 'medians' needs the plug-in sha256:")
    assert "medians is put aside: protocol.kind" in crowdml("task", "list", "--folder", folder).out
