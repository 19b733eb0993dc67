"""A task is one file: what is wrong in it is said by key, value and what would be allowed."""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import pytest
from bench import masked_text, task_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

import crowdml.tasks
from crowdml.errors import TaskError
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.task import StopRule, Task, from_canonical, load, parse

WHOLE = """
name     = "activity"
title    = "What is the owner of this phone doing?"
purpose  = "A study."
collects = "Motion."
[features]
kind = "vector"
dimension = 8
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["still", "on foot", "in vehicle"]
[model]
kind = "softmax"
l2 = 0.01
[protocol]
kind = "sgd"
batch = 20
buffer = 200
step = { schedule = "1/sqrt(t)", c = 30.0 }
radius = 200.0
held_out = 2
update = "sgd"
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 0.9, errors = 0.05, labels = 0.05 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 2000 }
unit = "sample"
[stop]
steps = 20000
error = 0.05
"""


def refused(text, *words):
    with pytest.raises(TaskError) as caught:
        find(parse(text, "study.toml"))
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_a_whole_task_reads_exactly():
    task = parse(WHOLE)
    assert task.privacy.epsilon == {"gradient": Fraction(9, 10), "errors": Fraction(1, 20), "labels": Fraction(1, 20)}
    assert task.features.dimension == 8
    assert task.labels.classes == ("still", "on foot", "in vehicle")
    assert task.classes == 3
    assert task.stop == StopRule(20000, Fraction(1, 20))
    assert not task.as_published
    assert find(task).name == "sgd"
    assert Price.of(find(task), task).sample_epsilon() <= 1.0


@pytest.mark.parametrize("path", sorted(Path(next(iter(crowdml.tasks.__path__))).glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_task_is_one_that_runs(path):
    task = load(path)
    assert find(task).mechanisms(task)
    assert task.title
    assert task.purpose
    assert task.collects


# Wrong keys, types and values


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name     = "activity"', 'name = "act ivity"', ["name = 'act ivity'", "letters, digits"]),
        ('name     = "activity"', "name = 3", ["name = 3", "expected a text"]),
        (
            'name     = "activity"',
            'nmae = "activity"',
            ["nmae = 'activity'", "no such key. Did you mean 'name'? Known here: name"],
        ),
        ('name     = "activity"', "", ["name is missing"]),
        ("dimension = 8", "dimension = 0", ["features.dimension = 0", "between 1 and 1000000"]),
        ("dimension = 8", "dimension = 8.5", ["features.dimension = 8.5", "expected a whole number"]),
        ("dimension = 8", "dimension = true", ["features.dimension = True", "expected a whole number"]),
        ("dimension = 8", "dim = 8", ["features.dim = 8", "no such key", "Known here: dimension, norm, kind"]),
        ("dimension = 8", "", ["features.dimension is missing"]),
        ('kind = "vector"', 'kind = "vecotr"', ["features.kind = 'vecotr'", "vector, accelerometer-spectrum"]),
        (
            'kind = "vector"',
            'kind = "accelerometer-spectrum"',
            ["features.dimension = 8", "64 numbers", "does not fit"],
        ),
        (
            'norm = { kind = "l2", bound = 1.0 }',
            'norm = "l2"',
            ["features.norm = 'l2'", "expected a table", "kind, bound"],
        ),
        ('norm = { kind = "l2", bound', 'norm = { kind = "l3", bound', ["features.norm.kind = 'l3'", "l1, l2"]),
        ("bound = 1.0", "bound = -1.0", ["features.norm.bound = -1", "above 0"]),
        ('["still", "on foot", "in vehicle"]', '["still"]', ["labels.classes = ['still']", "at least two different"]),
        ('["still", "on foot", "in vehicle"]', '["a", "b", "a"]', ["labels.classes = ['a', 'b', 'a']", "different"]),
        ('["still", "on foot", "in vehicle"]', '"still"', ["labels.classes = 'still'", "expected a list of texts"]),
        ('["still", "on foot", "in vehicle"]', "[1, 2]", ["labels.classes = 1", "expected a text"]),
        ('kind = "softmax"', 'kind = "sofmtax"', ["sofmtax", "linear, logistic", "softmax, svm"]),
        ('kind = "softmax"', "", ["model.kind is missing", 'kind = "softmax"']),
        ('kind = "softmax"', 'kind = "svm"', ["svm", "exactly 2 classes, not 3"]),
        ("l2 = 0.01", "l2 = -0.5", ["model.l2 = -0.5", "0 or more"]),
        ("l2 = 0.01", "l2 = true", ["model.l2 = True", "a number"]),
        ("l2 = 0.01", "layers = 3", ["layers", "Its settings are bias"]),
        ('kind = "sgd"', 'kind = "admn"', ["protocol.kind = 'admn'", "choose one of", "sgd"]),
        ("batch = 20", "batch = 0", ["protocol.batch = 0", "between 1 and 100000"]),
        ("batch = 20", "", ["protocol.batch is missing"]),
        ("batch = 20", "batches = 20", ["protocol.batches = 20", "no such key", "batch, step, buffer"]),
        ("buffer = 200", "buffer = 19", ["protocol.buffer = 19", "between 20 and"]),
        ("held_out = 2", "held_out = 20", ["protocol.held_out = 20", "between 0 and 19"]),
        ("c = 30.0", "c = 0.0", ["protocol.step.c = 0", "above 0"]),
        ('"1/sqrt(t)"', '"1/t^2"', ["protocol.step.schedule = '1/t^2'", "1/sqrt(t), 1/t, constant"]),
        ("radius = 200.0", "radius = 0", ["protocol.radius = 0", "above 0"]),
        ('update = "sgd"', 'update = "adam"', ["protocol.update = 'adam'", "sgd, adagrad, rmsprop, momentum, average"]),
        (
            '"discrete-gaussian"',
            '"gaussian"',
            ["privacy.mechanism = 'gaussian'", "discrete-gaussian, discrete-laplace, skellam, none"],
        ),
        ('"discrete-gaussian"', '"discrete-laplace"', ['needs features.norm.kind = "l1"', '"discrete-gaussian"']),
        ("gradient = 0.9", "gradient = -0.9", ["privacy.epsilon.gradient = -0.9", "above 0"]),
        ("gradient = 0.9, ", "", ["privacy.epsilon.gradient is missing", "one check-in"]),
        ("errors = 0.05", "error = 0.05", ["privacy.epsilon.error", "errors, gradient, labels"]),
        ("gradient = 0.9", 'gradient = "much"', ["privacy.epsilon.gradient = 'much'", "expected a number"]),
        ("gradient = 0.9", "gradient = 1e-9", ["privacy.epsilon.gradient", "so small", "Raise it"]),
        ("delta = 1e-6", "delta = 1.5", ["privacy.delta = 1.5", "1e-6"]),
        ("delta = 1e-6", "delta = 0", ["privacy.delta = 0", "discrete-laplace"]),
        (
            "epsilon = 1.0, samples",
            "epsilon = 0.5, samples",
            ["privacy.budget.epsilon = 0.5", "a sample pays", "raise the budget"],
        ),
        ("samples = 2000", "samples = 19", ["privacy.budget.samples = 19", "takes 20 samples", "Lower protocol.batch"]),
        ("samples = 2000", "samples = 0", ["privacy.budget.samples = 0", "between 1 and"]),
        ('unit = "sample"', 'unit = "person"', ["privacy.unit = 'person'", "sample, device"]),
        ('unit = "sample"', "grid = 0.3", ["privacy.grid = 0.3", "power of two"]),
        ('unit = "sample"', "grid = 0.0000001", ["privacy.grid = 1e-07", "power of two"]),
        ('unit = "sample"', "grid = 0.00000762939453125", ["privacy.grid = 7.62939e-06", "too fine", "or coarser"]),
        ("steps = 20000", "steps = 0", ["stop.steps = 0", "between 1 and"]),
        ("error = 0.05\n", "error = 1.5\n", ["stop.error = 1.5", "between 0 and 1"]),
        ("[protocol]", "[protcol]", ["[protcol]: no such table. Did you mean 'protocol'? Known here: name,"]),
        ("epsilon = {", "epsilno = {", ["[privacy.epsilno]: no such table. Did you mean 'epsilon'?"]),
        (
            "epsilon = { gradient = 0.9, errors = 0.05, labels = 0.05 }",
            "epsilon = 1",
            ["privacy.epsilon = 1: expected a table, such as epsilon = { gradient = 1 }."],
        ),
        ('kind = "sgd"', 'kind = "sdg"', ["protocol.kind = 'sdg'", "Did you mean 'sgd'?"]),
        ('kind = "softmax"', 'kind = "sofmax"', ["there is no model 'sofmax'. Did you mean 'softmax'?"]),
        ("[stop]", "[stopp]", ["[stopp]: no such table. Did you mean 'stop'?"]),
        ("[stop]", "[masks]\ncohort = 3\n[stop]", ["[masks]: no such table."]),
        ("[stop]", "[masking]\ncohort = 3\n[stop]", ["masking.minimum is missing"]),
        ("[stop]", "[masking]\ncohort = 9\nminimum = 9\n[stop]", ['"skellam" does', "leave [masking] out"]),
        (
            "[stop]",
            "[masking]\ncohort = 10\nminimum = 6\ncolluders = 1\n[stop]",
            ["masking.minimum = 6", "at least 7 must survive"],
        ),
        ('"discrete-gaussian"', '"skellam"', ["needs [masking]"]),
        ("[privacy]", "[privacy]\nclip = 3", ["privacy.clip = 3", "no such key", "mechanism, epsilon, delta, budget"]),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_what_is_allowed(old, new, words):
    assert old in WHOLE
    said = refused(WHOLE.replace(old, new, 1), *words)
    assert said.count("\n") == 0


def test_the_error_names_the_file():
    with pytest.raises(TaskError, match=r"^study.toml: name = 3"):
        parse(WHOLE.replace('"activity"', "3"), "study.toml")


@pytest.mark.parametrize(
    "text",
    [
        "name = ",
        "[features",
        "name = 'a'\nname = 'b'",
        "x = nan",
        "x = 1e99999999999",
        "\x00",
        "[" * 5000,
        "a = " + "[" * 5000,
    ],
)
def test_what_is_no_toml_is_refused_in_one_sentence(text):
    with pytest.raises(TaskError, match=r"study.toml is not a task file") as caught:
        parse(text, "study.toml")
    assert "docs/task.md" in str(caught.value)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e-400", "1" + "0" * 400, "inf", "nan", "1e999999999"])
@pytest.mark.parametrize(
    "key", ["c = 30.0", "l2 = 0.01", "radius = 200.0", "bound = 1.0", "delta = 1e-6", "gradient = 0.9"]
)
def test_a_number_that_no_computer_holds_is_refused(key, number):
    refused(WHOLE.replace(key, f"{key.split(' = ')[0]} = {number}"), "study.toml")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"There is no task file .*absent.toml.*crowdml task list"):
        load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match=r"binary.toml cannot be read as a task file"):
        load(tmp_path / "binary.toml")
    with pytest.raises(TaskError, match="cannot be read as a task file"):
        load(tmp_path)


# Hash


def test_equal_tasks_have_equal_hashes_whatever_their_layout():
    shuffled = WHOLE.replace('kind = "vector"\ndimension = 8', 'dimension = 8\nkind = "vector"')
    spaced = WHOLE.replace("delta = 1e-6", "delta   =  0.000001  # far below one over the samples")
    default = WHOLE.replace('kind = "vector"\n', "")
    for text in (shuffled, spaced, default):
        assert parse(text) == parse(WHOLE)
        assert hash(parse(text)) == hash(parse(WHOLE))
        assert parse(text).hash == parse(WHOLE).hash
    assert len(parse(WHOLE).hash) == 32


def test_the_hash_of_a_task_never_changes():
    """It is in consents and charges: a change here makes every task in the world a new one."""
    pinned = parse(task_text())
    assert pinned.hash.hex() == "2cafe03133d61a511a70e8d141640e9d6f9640159ba6a7b7b62bcc1c57ec6657"
    assert b'"gradient":0.9' in parse(WHOLE).canonical  # an exact decimal


def test_a_task_comes_back_from_its_published_bytes_and_from_no_others():
    task = parse(WHOLE)
    assert from_canonical(task.canonical) == task
    c = task.canonical
    odd = [c.replace(b"0.9", number) for number in (b"0.90", b"1e999999999", b"NaN", b"1" + b"0" * 400, b"null")]
    for data in (c + b" ", *odd, b"{}", b"[1", b"\xff", b"[" * 5000, b"null", b"3", b'{"name":3}'):
        with pytest.raises(TaskError):
            from_canonical(data)


def test_a_number_without_a_finite_decimal_form_is_refused():
    with pytest.raises(TaskError, match="1/3"):
        _ = parse(WHOLE).with_(model={"l2": Fraction(1, 3)}).canonical


EDITS = [
    ("c = 30.0", "c = 30.000001"),
    ("batch = 20", "batch = 21"),
    ('"still"', '"Still"'),
    ("l2 = 0.01", "l2 = 0.02"),
    ("title    = ", "title = 'x' # "),
    ("gradient = 0.9", "gradient = 0.89"),
    ("steps = 20000", "steps = 20001"),
    ("delta = 1e-6", "delta = 1e-7"),
    ('name     = "activity"', 'name = "activity2"'),
    ('name     = "activity"', 'as_published = true\nname = "activity"'),
]


def test_every_edit_makes_another_task():
    tasks = [parse(WHOLE), *(parse(WHOLE.replace(old, new)) for old, new in EDITS)]
    assert len({task.hash for task in tasks}) == len(tasks)
    assert len(set(tasks)) == len(tasks)
    assert parse(WHOLE) != "a task"


def test_changing_sections_keeps_the_rest_and_makes_a_new_task():
    task = parse(WHOLE)
    changed = task.with_(protocol={"batch": 30}, name="other")
    assert (changed.protocol["batch"], changed.protocol["radius"], changed.name) == (30, 200, "other")
    assert changed.privacy == task.privacy
    assert changed != task
    assert changed.with_(protocol={"batch": 20}, name="activity") == task
    with pytest.raises(TaskError, match=r"there is no section 'protcol'.*protocol"):
        task.with_(protcol={})


def test_a_task_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(WHOLE).name = "other"


# Fuzz

LINES = WHOLE.strip().splitlines()
scraps = st.one_of(
    st.sampled_from(
        [
            "0",
            "-1",
            "1e308",
            "1e-308",
            "5e-324",
            "inf",
            "-nan",
            "true",
            "''",
            '"l1"',
            "[]",
            "[[1]]",
            "{}",
            "{a = 1}",
            "1979-05-27",
            "07:32:00",
            "0xff",
            "1e5",
            "99999999999999999999",
            '"discrete-laplace"',
            '"none"',
            '"number"',
            '"linear"',
            "0.5",
            "2",
        ]
    ),
    st.integers(-(10**30), 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.text(max_size=8).map(lambda text: '"' + "".join(c for c in text if c.isprintable() and c not in '"\\') + '"'),
)


@st.composite
def edited(draw):
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["value", "value", "inner", "drop", "twice", "swap", "garbage"]))
        if how == "value" and "=" in lines[at]:
            lines[at] = lines[at].split("=")[0] + "= " + draw(scraps)
        elif how == "inner" and "{" in lines[at]:
            parts = lines[at].split(",")
            place = draw(st.integers(0, len(parts) - 1))
            parts[place] = (
                parts[place].rsplit("=", 1)[0] + "= " + draw(scraps) + (" }" if place == len(parts) - 1 else "")
            )
            lines[at] = ",".join(parts)
        elif how == "drop":
            lines.pop(at)
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines.insert(at, draw(st.text(max_size=12)))
    return "\n".join(lines)


@given(edited())
@example(WHOLE.replace("l2 = 0.01", "l2 = 1979-05-27"))
@example(WHOLE.replace("batch = 20", "batch = 07:32:00"))
@example(WHOLE.replace("l2 = 0.01", "width = {}"))
@example(WHOLE.replace("delta = 1e-6", "delta = 5e-324"))
@example(WHOLE.replace("gradient = 0.9", "gradient = 1e20"))
@example(WHOLE.replace("bound = 1.0", "bound = 1e25"))
@example(WHOLE.replace("bound = 1.0", "bound = 1e-25"))
@example(WHOLE.replace("labels = 0.05", "labels = 1e-20"))
@settings(max_examples=300, deadline=None)
def test_no_edit_of_a_task_file_raises_anything_but_a_task_error(text):
    try:
        task = parse(text)
        priced = Price.of(find(task), task).sample_epsilon()
    except TaskError as error:
        assert str(error)  # noqa: PT017  # an accepted task is fine too
    else:
        assert isinstance(task, Task)
        assert not math.isnan(priced)


@pytest.mark.parametrize("key", ["title", "purpose", "collects"])
@pytest.mark.parametrize("code", ["001B", "0007", "000D", "007F", "009B", "202E", "2066", "200F", "2028"])
def test_a_text_with_a_character_that_a_terminal_obeys_is_refused(key, code):
    named = WHOLE.replace(f"{key} ", f'{key} = "Nothing leaves.\\u{code} All does." #', 1)
    refused(named, key, f"U+{code}")


def test_a_class_with_a_control_character_is_refused():
    refused(WHOLE.replace('"still"', '"st\\u001b[8mill"'), "labels.classes", "U+001B")


def test_a_title_and_a_class_are_one_line_and_the_longer_texts_may_have_several():
    refused(WHOLE.replace("What is the owner", "What\\nis the owner"), "title", "one line")
    refused(WHOLE.replace('"still"', '"st\\till"'), "labels.classes", "one line")
    assert "\n" in parse(WHOLE.replace("A study.", "A study.\\n\\tOf two lines.")).purpose


def test_published_bytes_with_a_lone_surrogate_are_refused_in_a_sentence():
    with pytest.raises(TaskError, match="U\\+D800"):
        from_canonical(parse(WHOLE).canonical.replace(b"A study.", b"A \\ud800study."))


# [masking]


def test_keys_that_came_later_leave_old_hashes_as_they_were():
    task = parse(WHOLE)
    assert b"masking" not in task.canonical
    assert b"uses" not in task.canonical
    assert parse(WHOLE.replace("[stop]", "uses = 1\n[stop]")).hash == task.hash
    assert parse(WHOLE.replace("[stop]", "uses = 2\n[stop]")).hash != task.hash
    assert find(from_canonical(task.canonical)) is not None


def test_a_masked_task_is_published_with_all_of_its_terms_and_comes_back():
    task = parse(masked_text(more="floor = 30.0"))
    masking = task.masking
    assert (masking.cohort, masking.minimum, masking.colluders, masking.honest) == (6, 5, 1, 4)
    assert (masking.window, masking.lease, masking.floor) == (60, 30, 30)
    again = from_canonical(task.canonical)
    assert again == task
    assert again.masking == masking
    changed = [dataclasses.replace(masking, **one) for one in ({"minimum": 6}, {"colluders": 0}, {"floor": None})]
    assert len({task.with_(masking=each).hash for each in changed} | {task.hash}) == 4


@pytest.mark.parametrize(
    ("masking", "words"),
    [
        ({"cohort": 2}, ["masking.cohort = 2", "between 3 and 1048576"]),
        ({"cohort": 2_000_000}, ["masking.cohort = 2000000"]),
        ({"minimum": 7}, ["masking.minimum = 7", "between 3 and 6"]),
        ({"cohort": 10, "minimum": 6, "colluders": 0}, ["masking.minimum = 6", "at least 7 must survive"]),
        ({"colluders": 4}, ["masking.colluders = 4", "between 0 and 3"]),
        ({"colluders": -1}, ["masking.colluders = -1"]),
        ({"more": "window = 0.0"}, ["masking.window = 0"]),
        ({"more": "lease = -1"}, ["masking.lease = -1"]),
        ({"more": "floor = 0.0"}, ["masking.floor = 0", "above 0"]),
        ({"more": "floor = 0.5"}, ["masking.floor = 0.5", "if everyone else colludes"]),
        ({"more": "quorum = 3"}, ["masking.quorum = 3", "no such key"]),
        ({"mechanism": "discrete-gaussian"}, ['"skellam" does', "leave [masking] out"]),
        ({"mechanism": "discrete-laplace", "norm": "l1"}, ["shares of noise must add up"]),
    ],
)
def test_what_is_wrong_with_masking_is_said_by_key_and_value(masking, words):
    refused(masked_text(**masking), *words)


def test_a_masked_task_is_not_as_published():
    refused("as_published = true\n" + masked_text(), "as_published = true with [masking]")


@pytest.mark.parametrize(("uses", "words"), [("0", "between 1 and 100000"), ("1.5", "a whole number")])
def test_how_often_a_sample_serves_is_a_whole_number(uses, words):
    refused(WHOLE.replace("[stop]", f"uses = {uses}\n[stop]"), "privacy.uses", words)


def test_skellam_noise_needs_a_delta():
    refused(masked_text(epsilon="{ gradient = 1.0 }\ndelta = 0.0"), "privacy.delta = 0: Skellam")


def test_a_spectrum_has_as_many_numbers_here_as_where_it_is_computed():
    from crowdml.features.spectrum import BINS
    from crowdml.task import SPECTRUM

    assert SPECTRUM == BINS
