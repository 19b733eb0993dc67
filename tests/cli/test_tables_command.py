"""`crowdml simulate --data FILE` and `crowdml data show`: a table of somebody's own, from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cli_runner import crowdml, refused

from crowdml.price import Price
from crowdml.protocols import PROTOCOLS, find, settled
from crowdml.task import find_task

KEY = re.compile(r"[a-z_]+ = ")

TASK = """
name = "own"
[features]
dimension = 2
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["left", "right"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 5
step = { c = 3.0 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 4.0 }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table of two classes that lie on two sides, held by ten people, and a task for it."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(1)
    lines = ["who,a,b,side"]
    for row in range(200):
        side = row % 2
        a, b = chance.normal(2.0 * side - 1, 0.3), chance.normal(0, 0.3)
        lines.append(f"p{row % 10},{a:.3f},{b:.3f},{('left', 'right')[side]}")
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "own.toml").write_text(TASK)
    return tmp_path


def test_a_task_runs_on_a_table_and_learns_it(own: Path):
    said = crowdml("simulate", "own.toml", "--data", "own.csv", "--ignore", "who", "--seed", "1", "--json", "-").json
    assert said["data"] == "own.csv"
    assert said["accuracy"] > 0.9
    assert said["devices"] == 32
    assert said["population"] == "iid"


def test_a_column_says_which_device_holds_a_row(own: Path):
    said = crowdml("simulate", "own.toml", "--data", "own.csv", "--device", "who", "--seed", "1", "--json", "-").json
    assert said["devices"] == 10
    assert said["population"] == "by_user"


def test_an_outlook_counts_the_devices_that_a_column_names(own: Path):
    (own / "own.toml").write_text(TASK.replace("gradient = 4.0", "gradient = 0.01"))
    said = crowdml("simulate", "own.toml", "--data", "own.csv", "--device", "who", "--seed", "1", "--json", "-").json
    assert "all that 10 devices give" in said["outlook"]


def test_a_table_and_a_task_that_do_not_fit_are_refused(own: Path):
    assert (
        "task 'own' takes rows of 2 numbers and data set 'own.csv' has 1 feature. Leave fewer columns out, or name"
    ) in refused("simulate", "own.toml", "--data", "own.csv", "--ignore", "who", "--ignore", "a")
    assert (
        "own.csv, line 2: column 'who' holds texts and looks like it says which device holds a row. Say --device who, "
        "or leave it out: --ignore who."
    ) in refused("simulate", "own.toml", "--data", "own.csv")
    assert "has no column 'sid' for --label. Did you mean 'side'?" in refused(
        "simulate", "own.toml", "--data", "own.csv", "--label", "sid"
    )
    assert "own.csv has 160 rows for devices: too few for 300 of them. Say --devices 160 or fewer." in refused(
        "simulate", "own.toml", "--data", "own.csv", "--ignore", "who", "--devices", "300"
    )
    assert "name columns and --test for a file alone" in refused("simulate", "digits012", "--label", "side")


def table(name: str, heading: str, row: Callable[[int], Sequence[object]], rows: int = 60) -> str:
    """A file with these rows."""
    lines = [heading, *(",".join(map(str, row(place))) for place in range(rows))]
    Path(name).write_text("\n".join(lines) + "\n")
    return name


@pytest.mark.parametrize(
    ("heading", "label"),
    [
        ("x,y,label", "label"),
        ("label,x,y", "label"),
        ("target,x,label", "label"),
        ("x,Diagnosis,z", "Diagnosis"),
        ("x,y,z", "z"),
        ("class,target,y", "target"),
    ],
)
def test_the_label_is_the_same_column_for_every_command(own: Path, heading: str, label: str):
    place = heading.split(",").index(label)
    data = table("t.csv", heading, lambda row: [row % 2 if each == place else f"{row / 7:.3f}" for each in range(3)])
    shown = crowdml("data", "show", data)
    assert f"task new my-task.toml --data t.csv --label {label}\n" in shown.out
    answer = crowdml("task", "new", "t.toml", "--data", data)
    assert answer.code == 0, answer.err
    assert find_task("t.toml").labels.classes == ("0", "1")
    taken = f"t.csv: the labels were taken from column '{label}', by its name. Name another with --label."
    assert (taken in " ".join(answer.out.split())) == (place < 2)


@pytest.mark.parametrize(
    ("name", "value", "looks"),
    [
        ("household_size", lambda row: row % 5, "feature"),
        ("home_owner", lambda row: row % 2, "feature"),
        ("person_id", lambda row: 1000 + row % 45, "device"),
        ("userId", lambda row: row % 6, "device"),
        ("person_id", lambda row: 1000 + 7 * row, "row id"),
        ("id", lambda row: 1000 + 7 * row, "row id"),
        ("number", lambda row: row + 1, "row id"),
        ("income", lambda row: 1000 + 7 * row * row, "feature"),
    ],
)
def test_a_column_that_numbers_rows_or_devices_is_named_before_it_is_a_feature(
    own: Path, name: str, value: Callable[[int], int], looks: str
):
    data = table("t.csv", f"{name},a,label", lambda row: [value(row), f"{row / 7:.3f}", row % 2])
    facts = crowdml("data", "show", data, "--json", "-").json
    assert facts["columns"][0]["looks"] == looks
    said = " ".join(crowdml("task", "new", "t.toml", "--data", data).out.split())
    device = (
        f"t.csv: column '{name}' looks like it says which device holds a row, and is used as a feature. Say --device "
    )
    assert (device in said) == (looks == "device")
    assert (f"t.csv: column '{name}' looks like it numbers rows, and is used" in said) == (looks == "row id")
    assert (f"leave it out: --ignore {name}." in said) == (looks != "feature")


def test_whole_numbers_that_are_all_different_are_no_classes(own: Path):
    data = table("t.csv", "a,b,n", lambda row: [f"{row / 7:.3f}", f"{row % 8 / 3:.3f}", 7 * row])
    said = " ".join(crowdml("task", "new", "t.toml", "--data", data).out.split())
    assert (
        "t.csv: column 'n' holds 60 different whole numbers in 60 rows, so they are numbers to predict and no classes. "
        "If they name classes, write them as texts"
    ) in said
    assert find_task("t.toml").classes is None
    assert "'n' holds numbers" in crowdml("data", "show", data).out
    data = table("few.csv", "a,b,n", lambda row: [f"{row / 7:.3f}", f"{row % 8 / 3:.3f}", row % 30])
    crowdml("task", "new", "few.toml", "--data", data)
    assert find_task("few.toml").classes == 30


def test_a_stray_text_and_a_missing_value_are_shown_by_their_lines(own: Path):
    def row(place: int) -> list[object]:
        return ["tall" if place == 6 else f"{place / 7:.3f}", "" if place == 8 else place % 8 / 3, place % 2]

    shown = " ".join(crowdml("data", "show", table("t.csv", "a,b,label", row)).out.split())
    assert "1 value missing, in b (first: line 10). Fill them in" in shown
    assert "Column 'a' holds a text among numbers (in 1 row, first: line 8). Write numbers there, or delete" in shown
    assert shown.endswith("Next: crowdml task new my-task.toml --data t.csv --label label")
    numbers = table("n.csv", "a,b,target", lambda row: [row % 3, row % 7, "tall" if row == 6 else f"{row / 7:.3f}"])
    assert "'target' holds a text among numbers (in 1 row, first: line 8)" in crowdml("data", "show", numbers).out
    assert "n.csv, line 8: column 'target' holds a text" in refused("task", "new", "t.toml", "--data", numbers)


def test_a_label_of_no_class_is_refused_by_its_line_in_every_file(own: Path):
    rows = (own / "own.csv").read_text().splitlines()
    (own / "odd.csv").write_text("\n".join([*rows[:5], rows[5].replace("left", "up"), *rows[6:]]) + "\n")
    args = ("simulate", "own.toml", "--ignore", "who", "--seed", "1", "--data")
    why = "odd.csv, line 6: column 'side' has the label 'up', which is none of the task's: left, right (as in 1 of 200"
    assert why in refused(*args, "odd.csv")
    assert why in refused(*args, "own.csv", "--test", "odd.csv")
    assert why in refused(*args, "own.csv", "--public", "odd.csv")


def test_rows_outside_the_bounds_are_said_by_file_line_and_column(own: Path):
    args = ("--data", "own.csv", "--ignore", "who", "--bounds", "-1.9,0.5")
    shown = " ".join(crowdml("task", "new", "made.toml", *args).out.split())
    assert "own.csv, line 3: a number is outside the bounds of its column (in " in shown
    assert "which are named with --bounds -1.9,0.5. Most often it is column 'a' (" in shown
    assert "Devices clip it to the bound: name wider bounds with --bounds" in shown
    assert "is outside" not in Path("made.toml").read_text(), "a task's file tells nothing of rows"
    quick = ("--protocols", "gram", "--masked", "--trials", "1", "--epsilon", "8", "--seed", "1")
    assert "own.csv, line 3: a number is outside" in " ".join(crowdml("compare", *args, *quick).err.split())


def test_bounds_that_erase_a_column_are_not_passed_over(own: Path):
    Path("public.csv").write_text("a,b,side\n-1.5,0.25,left\n1.5,0.25,right\n")
    said = " ".join(
        crowdml(
            "task", "new", "made.toml", "--data", "own.csv", "--ignore", "who", "--public", "public.csv"
        ).out.split()
    )
    assert (
        "public.csv: column 'b' has one value in all 2 rows, so its bounds are equal and devices would make 0" in said
    )


def test_a_table_is_shown_with_what_its_columns_look_like(own: Path):
    shown = crowdml("data", "show", "own.csv")
    assert "Classes in 'side': right 100, left 100." in " ".join(shown.out.split())
    assert "'who' names 10 devices." in shown.out
    assert "Next: crowdml task new my-task.toml --data own.csv --label side --device who" in " ".join(shown.out.split())
    facts = crowdml("data", "show", "own.csv", "--json", "-").json
    assert facts["rows"] == 200
    assert {column["name"]: column["looks"] for column in facts["columns"]}["side"] == "label"


def number_task(own: Path) -> None:
    """A table whose label is a number, and a task that predicts it."""
    chance = np.random.default_rng(2)
    x = chance.uniform(0, 1000, (400, 2))
    y = 0.001 * x[:, 0] - 0.5 + chance.normal(0, 0.02, 400)
    rows = "\n".join(f"{a:.3f},{b:.3f},{target:.4f}" for (a, b), target in zip(x, y, strict=True))
    (own / "numbers.csv").write_text(f"a,b,target\n{rows}\n")
    text = TASK.replace('classes = ["left", "right"]', 'kind = "number"').replace("softmax", "linear")
    text = text.replace("4.0", "100.0")
    (own / "numbers.toml").write_text(text.replace("[labels]", "low = 0\nhigh = [1000.0, 900.0]\n[labels]"))


def test_a_table_of_numbers_is_predicted_and_scored_by_r2_and_the_mean_distance(own: Path):
    number_task(own)
    args = ("simulate", "numbers.toml", "--data", "numbers.csv", "--seed", "1", "--trials", "2", "--test", "0.25")
    said = crowdml(*args, "--json", "-").json
    assert said["r2"] > 0.5
    assert said["r2_low"] <= said["r2"] <= said["r2_high"]
    assert 0 < said["mean_absolute_error"] < 0.2
    assert "accuracy" not in said
    shown = " ".join(crowdml(*args).out.split())
    assert "R²" in shown
    assert "mean absolute error" in shown
    assert "rows have a number outside features.low and features.high, most often in column 'b'" in shown


def test_public_rows_alone_are_a_line_to_compare_with(own: Path):
    rows = (own / "own.csv").read_text().splitlines()
    (own / "public.csv").write_text("\n".join(rows[:40]) + "\n")
    args = ("--data", "own.csv", "--device", "who", "--public", "public.csv", "--seed", "1", "--json", "-")
    assert crowdml("simulate", "own.toml", *args).json["public_only"] > 0.9


def test_public_rows_alone_are_seen_through_the_map_of_the_task(own: Path):
    chance = np.random.default_rng(2)
    places = chance.uniform(-0.7, 0.7, (200, 2))
    sides = np.where(np.linalg.norm(places, axis=1) < 0.55, "left", "right")  # no line parts them
    lines = [f"{a:.3f},{b:.3f},{side}" for (a, b), side in zip(places, sides, strict=True)]
    for name, rows in (("ring.csv", lines[100:]), ("public.csv", lines[:100])):
        (own / name).write_text("\n".join(["a,b,side", *rows]) + "\n")
    through = 'kind = "gram"\nbatch = 5\nmap = { kind = "cosine", seed = 1, features = 64, width = 0.5 }\n'
    masks = "[masking]\ncohort = 16\nminimum = 16\n"
    text = TASK.replace('kind = "sgd"\nbatch = 5\nstep = { c = 3.0 }\n', through).replace("softmax", "ridge")
    (own / "ring.toml").write_text(text.replace("discrete-gaussian", "skellam").replace("gradient", "moments") + masks)
    args = ("--data", "ring.csv", "--public", "public.csv", "--seed", "1", "--json", "-")
    assert crowdml("simulate", "ring.toml", *args).json["public_only"] > 0.8


def new(*args: str) -> str:
    """The file that `task new` writes for own.csv."""
    answer = crowdml("task", "new", "made.toml", "--data", "own.csv", "--label", "side", *args)
    assert answer.code == 0, answer.err
    return Path("made.toml").read_text()


@pytest.mark.parametrize("protocol", ["sgd", "gram", "admm", "local_updates"])
def test_a_task_that_is_written_for_a_table_is_sound_and_keeps_its_price(own: Path, protocol: str):
    new("--device", "who", "--protocol", protocol, "--epsilon", "2")
    said = crowdml("task", "check", "made.toml", "--json", "-").json
    task = find_task("made.toml")
    assert said["hash"] == settled(task).hash.hex()
    assert Price.of(find(task), task).sample_epsilon(task.privacy.uses) <= 2
    assert task.labels.classes == ("left", "right")
    assert task.features.dimension == 2


LEARNERS = [name for name in PROTOCOLS if name not in ("proportions", "secprobe")]  # no table is enough for these


@pytest.mark.parametrize("kind", ["class", "number"])
@pytest.mark.parametrize("masked", ["--masked", "--alone"])
@pytest.mark.parametrize("protocol", LEARNERS)
def test_every_key_of_a_task_that_is_written_for_a_table_has_a_comment(
    own: Path, protocol: str, masked: str, kind: str
):
    number_task(own)
    data = ["own.csv", "--ignore", "who"] if kind == "class" else ["numbers.csv"]
    answer = crowdml("task", "new", "made.toml", "--protocol", protocol, masked, "--data", *data)
    if protocol == "gram" and masked == "--alone":
        assert "gram needs masks" in answer.err
        return
    assert answer.code == 0, answer.err
    lines = Path("made.toml").read_text().splitlines()
    without = [line for above, line in pairwise(lines) if KEY.match(line) and above[:1] != "#"]
    assert not without
    assert "see its page" not in Path("made.toml").read_text()


def test_a_task_that_is_written_for_a_table_learns_it(own: Path):
    text = new("--ignore", "who", "--epsilon", "4")
    said = crowdml("simulate", "made.toml", "--data", "own.csv", "--ignore", "who", "--seed", "1", "--json", "-").json
    assert said["accuracy"] > 0.9
    assert said["epsilon_sample"] <= 4
    assert "# a first choice for 16 devices with 10 rows each" in text


def test_what_no_epsilon_covers_is_said_in_the_file_unless_it_was_public(own: Path):
    uncovered = "no ε covers what they reveal"
    assert uncovered in " ".join(new("--ignore", "who").replace("\n#", "").split())
    Path("made.toml").unlink()
    text = new("--ignore", "who", "--bounds", "-2,2.5")
    assert uncovered not in text
    assert "low = [-2.0, -2.0]" in text
    Path("made.toml").unlink()
    Path("bounds.csv").write_text("column,low,high\nb,-1,1\na,-3,3\n")
    assert "low = [-3.0, -1.0]" in new("--ignore", "who", "--bounds", "bounds.csv")
    Path("made.toml").unlink()
    Path("public.csv").write_text("a,b,side\n-1.5,-0.5,left\n1.5,0.25,right\n")
    text = new("--ignore", "who", "--public", "public.csv")
    assert "low = [-1.5, -0.5]" in text
    assert "were read from" not in text


def test_a_table_of_numbers_gets_a_task_that_predicts_a_number(own: Path):
    number_task(own)
    args = ("task", "new", "n.toml", "--data", "numbers.csv", "--devices", "40", "--epsilon", "8", "--protocol")
    for protocol in ("gram", "sgd"):
        Path("n.toml").unlink(missing_ok=True)
        assert crowdml(*args, protocol).code == 0
        assert find_task("n.toml").labels.kind == "number"
        said = crowdml("simulate", "n.toml", "--data", "numbers.csv", "--seed", "1", "--json", "-").json
        assert said["r2"] > 0.3


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--ignore", "who", "--devices", "500"), "has 200 rows, 160 without those to test on: too few for 500"),
        (("--ignore", "who", "--bounds", "3,1"), "the lower bound 3 is above the upper bound 1"),
        (("--ignore", "who", "--bounds", "low"), "name two numbers, the lower bound first"),
        (("--ignore", "who", "--bounds", "none.csv"), "--bounds none.csv cannot be read"),
        (("--ignore", "who", "--bounds", "short.csv"), "--bounds short.csv says nothing of column 'b'"),
        (("--ignore", "who", "--bounds", "odd.csv"), "odd.csv, line 1: own.csv has no column 'aa'. Did you mean 'a'?"),
        (("--ignore", "who", "--protocol", "trees"), "protocol = 'trees': choose one of"),
        (("--from", "activity"), "Name one of them"),
        (("--label", "sid"), "has no column 'sid' for --label. Did you mean 'side'?"),
        (
            ("--ignore", "who", "--bounds", "3,3"),
            "--bounds 3,3: both bounds are 3, and a column within them says nothing",
        ),
        (("--ignore", "who", "--bounds", "flat.csv"), "flat.csv, line 2: both bounds are 3"),
        (
            ("--ignore", "who", "--test", "1.5"),
            "--test 1.5: name a file, or a share of the rows between 0 and 1, such as",
        ),
        (
            ("--ignore", "who", "--test", "some"),
            "--test some: name a file, or a share of the rows between 0 and 1, such",
        ),
        (
            ("--ignore", "who", "--test", "0.99"),
            "own.csv has 200 rows, 2 without those to test on: too few for a crowd",
        ),
    ],
)
def test_what_makes_no_task_is_refused_and_nothing_is_written(own: Path, args: tuple[str, ...], why: str):
    Path("short.csv").write_text("a,0,1\n")
    Path("odd.csv").write_text("aa,0,1\n")
    Path("flat.csv").write_text("a,0,1\nb,3,3\n")
    assert why in refused("task", "new", "made.toml", "--data", "own.csv", *args)
    assert not Path("made.toml").exists()


def test_options_for_a_table_are_refused_without_one(own: Path):
    given = ("--epsilon", "0.01", "--label", "x", "--protocol", "gram", "--devices", "7")
    said = refused("task", "new", "made.toml", *given)
    assert (
        "--protocol, --epsilon, --devices and --label fit a task to a table, and no table is named. Add --data" in said
    )
    assert "--masked fits a task to a table" in refused("task", "new", "made.toml", "--masked")
    assert not Path("made.toml").exists()


def test_a_comparison_of_too_few_rows_says_so(own: Path):
    args = ("compare", "--data", "own.csv", "--ignore", "who", "--protocols", "gram", "--test")
    assert "own.csv has 200 rows, 2 without those to test on: too few for a crowd, which has at least 5" in refused(
        *args, "0.99"
    )
    rows = table("one.csv", "a,b,side", lambda row: [row % 3, row % 7 / 2, "left" if row else "right"])
    args = ("compare", "--data", rows, "--protocols", "gram", "--seed", "1", "--test", "0.9")
    assert "one.csv: 6 rows of one class are left besides those to test on" in refused(*args)
