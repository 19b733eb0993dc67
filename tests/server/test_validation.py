"""The server watches a model on rows of the operator's own: exactly where they are public, else through a mechanism."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import tracemalloc
import zipfile
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import make_task, serving
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml, refused  # found by the line above

from crowdml.arrays import Samples
from crowdml.errors import CrowdmlError, DataError, TaskError
from crowdml.privacy.losses import Pure
from crowdml.privacy.noise import Silence
from crowdml.privacy.sensitivity import L1, Adjacency
from crowdml.protocols import find, settled
from crowdml.server import validation
from crowdml.server.export import export_model, model_card, model_file
from crowdml.server.transcript import write_transcript
from crowdml.server.validation import (
    check_terms,
    evaluate,
    is_due,
    keep_rows,
    mechanism_of,
    read_rows,
    unpack_rows,
    watched,
)
from crowdml.storage.server import Store
from crowdml.storage.server.looks import Look, Terms, Validation, add_look, validations
from crowdml.storage.server.looks import rows_of as kept_rows
from crowdml.task import Task, parse

AT = "2026-01-01T00:00:00+00:00"
TENTH = Fraction(1, 10)


@dataclass(frozen=True)
class Noted(Silence):
    """Adds nothing, and notes how much it was asked for."""

    scales: list[Fraction] = field(default_factory=list)

    def discrete_laplace(self, scale: Fraction, like: Any) -> Any:
        self.scales.append(scale)
        return super().discrete_laplace(scale, like)


TEXT = """
name = "small"
features = {{ dimension = 3, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ {labels} }}
model = {{ {model} }}
protocol = {{ {protocol} }}
[privacy]
mechanism = "{mechanism}"
epsilon = {{ {epsilon} }}
delta = 1e-6
{rest}
"""
CLASSES = {2: 'classes = ["no", "yes"]', 3: 'classes = ["a", "b", "c"]', 0: 'kind = "number", bound = 2.0'}
SGD = 'kind = "sgd", batch = 5, step = { c = 1.0 }, clip = 3.0'
LOCAL = 'kind = "local_updates", batch = 6, rate = { c = 0.5 }, clip = 1.0'
GRAM = 'kind = "gram", batch = 6, map = { kind = "cosine", features = 8, seed = 1 }'
MASKS = "budget = { epsilon = 1.0, samples = 6 }\n[masking]\ncohort = 10\nminimum = 8\n"


def make(model: str, classes: int, protocol: str = SGD, row: str = "gradient", masked: str = "") -> Task:
    return settled(
        parse(
            TEXT.format(
                labels=CLASSES[classes], model=model, protocol=protocol, epsilon=f"{row} = 1.0", rest=masked,
                mechanism="skellam" if masked else "discrete-gaussian",
            )
        )
    )  # fmt: skip


TASKS = {
    "softmax": make('kind = "softmax"', 3),
    "logistic": make('kind = "logistic"', 2),
    "svm": make('kind = "svm", bias = true', 2),
    "linear": make('kind = "linear"', 0),
    "mlp": make('kind = "mlp", hidden = [4]', 3, LOCAL, "update"),
    "mlp of a number": make('kind = "mlp", hidden = [4]', 0, LOCAL, "update"),
    "softmax in cohorts": make('kind = "softmax"', 3, SGD.replace("batch = 5", "batch = 6"), masked=MASKS),
    "gram": make('kind = "ridge"', 3, GRAM, "moments", MASKS),
}  # fmt: skip


def rows_of(task: Task, count: int = 40, seed: int = 1) -> Samples:
    draw = np.random.default_rng(seed)
    y = draw.integers(task.classes, size=count) if task.classes else draw.uniform(-2, 2, size=count)
    return Samples(draw.normal(size=(count, 3)).astype(np.float32), y.astype(np.float32))


def weights_of(task: Task, seed: int = 2) -> Any:
    start = np.asarray(find(task).model(task, find(task).server.start(task, validation_context()).state))
    return np.random.default_rng(seed).normal(size=start.shape).astype(np.float32)


def validation_context() -> Any:
    from crowdml.messages import SERVER
    from crowdml.protocol import Context

    return Context(me=SERVER)


def look(task: Task, weights: Any, rows: Samples, epsilon: Fraction | None = None, noise: Any = None) -> Any:
    return evaluate(task, weights, rows, 1, AT, epsilon, noise or Silence())


# --- what is counted ---


@pytest.mark.parametrize("name", TASKS)
def test_public_rows_are_looked_at_as_the_exported_model_would(name: str):
    task = TASKS[name]
    rows, weights = rows_of(task), weights_of(task)
    seen = look(task, weights, rows)
    assert seen.loss is None
    inside = rows.x / np.maximum(1, np.linalg.norm(rows.x, axis=1, keepdims=True))
    if name == "gram":
        said = find(task).predict(task, weights, inside.astype(np.float32))
    else:
        said = find_model(task).predict(weights, inside.astype(np.float32))
    if task.classes:
        assert seen.value == int((said != rows.y).sum())
        assert 0 < seen.value < 40
    else:
        expected = abs(np.clip(said, -2, 2) - rows.y).sum()
        assert float(seen.value * seen.step) == pytest.approx(expected, abs=1e-3)


def find_model(task: Task) -> Any:
    from crowdml.models import read_model

    return read_model(task.model, 3, task.classes, task.labels.bound, ("l1", "l2"))


@pytest.mark.parametrize("name", TASKS)
def test_private_rows_come_to_the_same_but_for_the_noise_and_a_step_a_row(name: str):
    task = TASKS[name]
    rows, weights = rows_of(task), weights_of(task)
    exact, seen = look(task, weights, rows), look(task, weights, rows, TENTH)
    assert seen.loss == Pure(TENTH)
    if task.classes:
        assert (seen.value, seen.step) == (exact.value, 1)
    else:
        assert abs(seen.value * seen.step - exact.value * exact.step) <= 40 * seen.step


def test_the_noise_of_a_count_is_one_over_epsilon_and_of_distances_two_bounds_over_epsilon():
    for task, wanted in ((TASKS["softmax"], 10), (TASKS["linear"], 2 * 2 * 10)):
        noise = Noted()
        seen = look(task, weights_of(task), rows_of(task), TENTH, noise)
        assert noise.scales == [wanted / seen.step]
        assert mechanism_of(task, TENTH, 40).loss == Pure(TENTH)
        assert mechanism_of(task, TENTH, 40).sensitivity == L1(wanted / 10 / seen.step, Adjacency.REPLACE_SAMPLE)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TASKS)), st.integers(0, 39), st.integers(0, 10**6), st.floats(0.1, 100))
def test_replacing_a_row_moves_a_look_by_at_most_its_sensitivity(name: str, place: int, seed: int, size: float):
    task = TASKS[name]
    rows, weights = rows_of(task, seed=seed), size * weights_of(task, seed)
    other = rows_of(task, seed=seed + 1)
    x, y = rows.x.copy(), rows.y.copy()
    x[place], y[place] = other.x[place] * size, other.y[place]
    before, after = (look(task, weights, each, TENTH).value for each in (rows, Samples(x, y)))
    assert abs(before - after) <= mechanism_of(task, TENTH, 40).sensitivity.bound


def test_distances_reach_from_nothing_to_twice_the_bound_whatever_the_model_says():
    task = TASKS["linear"]
    x = np.ones((4, 3), np.float32)
    for weights, label, wanted in ((1e6, -2.0, 4.0), (np.nan, 0.0, 0.0), (1e6, 2.0, 0.0)):
        rows = Samples(x, np.full(4, label, np.float32))
        for epsilon in (None, Fraction(1)):
            seen = look(task, np.full(find_model(task).shape, weights, np.float32), rows, epsilon)
            assert float(seen.value * seen.step) / 4 == pytest.approx(wanted, abs=2e-3)


# --- when ---


def state(newest: int | None, spent: str = "0", terms: Terms | None = None, halted: str | None = None) -> Validation:
    found = terms or Terms("rows", TENTH, Fraction(1))
    return Validation(bytes(32), 1, 40, 3, found, AT, halted, Fraction(spent), newest)


def test_looks_follow_versions_and_states_and_nothing_else():
    assert not is_due(state(None), 0, stopped=True), "nobody has given anything yet"
    assert is_due(state(None), 1, stopped=False)
    assert not is_due(state(3), 3, stopped=True), "never twice at one version"
    assert is_due(state(3), 4, stopped=False)
    often = Terms("rows", TENTH, Fraction(1), every=10)
    assert not is_due(state(3, terms=often), 12, stopped=False)
    assert is_due(state(3, terms=often), 13, stopped=False)
    assert is_due(state(3, terms=often), 4, stopped=True), "the last version is looked at"
    assert not is_due(state(1000), 1049, stopped=False)
    assert is_due(state(1000), 1050, stopped=False)
    assert not is_due(state(3, halted="restored"), 9, stopped=True)


def test_the_last_look_that_a_budget_allows_is_kept_for_the_end():
    assert not is_due(state(3, "0.9"), 9, stopped=False)
    assert is_due(state(3, "0.9"), 9, stopped=True)
    assert not is_due(state(3, "1"), 9, stopped=True)


def test_a_million_versions_have_some_hundred_looks():
    public, newest, looks = Terms("rows", None, None), None, 0
    for version in range(1, 1_000_001):
        if is_due(state(newest, terms=public), version, stopped=False):
            newest, looks = version, looks + 1
    assert 200 < looks < 400


# --- which rows ---


def test_rows_are_read_from_files_and_data_sets_and_no_refusal_shows_one(tmp_path: Path):
    task, path = TASKS["softmax"], tmp_path / "rows.csv"
    path.write_text("p,q,r,label\n0.25,0.5,0.125,b\n1,2,3,2\n")
    rows = read_rows(task, str(path))
    np.testing.assert_array_equal(rows.x, np.array([[0.25, 0.5, 0.125], [1, 2, 3]], np.float32))
    np.testing.assert_array_equal(rows.y, np.array([1, 2], np.float32))
    np.savez(tmp_path / "rows.npz", x=rows.x, y=np.array(["b", "c"]))
    again = read_rows(task, str(tmp_path / "rows.npz"))
    assert (again.x.tolist(), again.y.tolist()) == (rows.x.tolist(), rows.y.tolist())
    for text, wanted in (
        ("0.77,0.5,b\n", "line 1: 3 fields"),
        ("0.77,0.5,0.1,d\n", "line 1: a field is no finite number, or the label"),
        ("0.77,0.5,0.1,a\n0.77,x,0.1,b\n", "line 2: a field"),
        ("0.77,0.5,0.1,a\n0.77,inf,0.1,b\n", "row 2: a field"),
        ("0.77,0.5,0.1,7\n", "row 1: a field"),
        ("0.77,0.5,0.1,a\n\n0.77,0.5,0.1,b\n", "line 2: it is blank, and the task takes 3 numbers and a label"),
        ("0.77,0.5,0.1,a\n\n", "line 2: it is blank"),
        ("x,y,z,1\n0.77,0.5,0.1,a\n", "line 1: a field is no finite number"),
        ("x,z,label\n0.77,0.5,0.1,a\n", "line 1: 3 fields"),
        ('0.77,0.5,0.1,"a\n0.77,0.5,0.1,b"\n', "line 1: not in UTF-8, or its quotes do not close"),
        ("0.77,0.5,0.1,a\n0.77,\udcff,0.1,b\n", "line 2: not in UTF-8"),
        ("", "has no rows"),
    ):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=wanted) as error:
            read_rows(task, str(path))
        assert "0.77" not in str(error.value)
    with pytest.raises(DataError, match="cannot be read: FileNotFoundError"):
        read_rows(task, str(tmp_path / "none.csv"))
    with pytest.raises(DataError, match=r"no file that ends in \.csv or \.npz, and no data set"):
        read_rows(task, "nothing")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04nonsense")
    with pytest.raises(DataError, match="cannot be read as an NPZ file"):
        read_rows(task, str(tmp_path / "bad.npz"))
    with pytest.raises(DataError, match="10 classes, and task"):
        read_rows(task, "digits")


def _saved(**arrays: Any) -> bytes:
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def _one_array() -> bytes:
    made = io.BytesIO()
    np.save(made, np.zeros((2, 3)))
    return made.getvalue()


def _locked() -> bytes:
    """As under a password: the flag is in both heads of each member."""
    made = bytearray(_saved(x=np.zeros((2, 3)), y=np.zeros(2)))
    for mark, flag in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        for found in re.finditer(re.escape(mark), bytes(made)):
            made[found.start() + flag] |= 1
    return bytes(made)


def _endless() -> bytes:
    """A head that promises more than any machine has."""
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999, 3), }\n"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
        file.writestr("y.npy", b"")
    return made.getvalue()


def _head_without_end() -> bytes:
    """A head of the second version, which says itself how long it is: 1 GB, of spaces."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", b"\x93NUMPY\x02\x00" + (10**9).to_bytes(4, "little") + b" " * 10**6)
        file.writestr("y.npy", b"")
    return made.getvalue()


def _packed(x: tuple[int, ...], y: tuple[int, ...], **more: Any) -> bytes:
    """Zeros, packed: the arrays are made in a stream, so that this takes no memory either."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, shape in (("x", x), ("y", y)):
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": shape})
                for _ in range(min(4, int(np.prod(shape)) * 8 // 2**20 + 1)):
                    member.write(bytes(2**20))
        for name, array in more.items():
            file.writestr(f"{name}.npy", array)
    return made.getvalue()


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (_packed((180_000_000, 3), (180_000_000,)), "an array x of 180,000,000 x 3 entries of 8 bytes"),
        (_packed((10, 2**24), (10,)), "an array x of 10 x 16,777,216 entries of 8 bytes; at most"),
        (_packed((2, 3), (2**40,)), "an array y of 1,099,511,627,776 entries of 8 bytes"),
        (_packed((2, 3), (2,), z=b""), "cannot be read as an NPZ file with arrays x and y: it has 3 members"),
        (_endless(), "an array x of 999,999,999,999 x 3 entries of 8 bytes"),
        (_head_without_end(), "cannot be read as an NPZ file"),
    ],
    ids=["many rows", "wide rows", "many labels", "a third array", "more than there is memory", "a long head"],
)
def test_an_npz_file_that_would_unpack_to_too_much_is_refused_before_it_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, wanted: str
):
    """Review 2, network L2: 4.2 MB on disk took 4.3 GB and 40 s before it was refused."""
    path = tmp_path / "rows.npz"
    path.write_bytes(data)
    asked: list[int] = []
    read = zipfile.ZipExtFile.read

    def noted(member: zipfile.ZipExtFile, size: int | None = -1) -> bytes:
        asked.append(-1 if size is None else size)
        return read(member, size)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", noted)
    with pytest.raises(DataError, match=wanted):
        read_rows(TASKS["softmax"], str(path))
    assert all(0 <= size <= 2**20 for size in asked)


def test_a_csv_file_of_too_many_rows_or_too_long_a_line_is_refused_before_it_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Review 2, network L2."""
    path = tmp_path / "rows.csv"
    path.write_text("0.1,0.2,0.3,a\n" * 9 + "x" * 10)
    monkeypatch.setattr(validation, "MOST_ROWS", 8)
    with pytest.raises(DataError, match=r"has more than 8 rows of 3 numbers; at most 8 rows and"):
        read_rows(TASKS["softmax"], str(path))
    path.write_text("0" * (2**20 + 64 * 4 + 1))
    with pytest.raises(DataError, match=r"has a line of more than 1,048,832 bytes; at most"):
        read_rows(TASKS["softmax"], str(path))


def test_the_rows_of_a_packed_array_take_little_more_memory_than_what_is_kept_of_them(tmp_path: Path):
    """Review 3, rows 9: 33 kB on disk took 626 MB, all of them as float64 in between."""
    path, x = tmp_path / "rows.npz", np.ones((2**16, 3), np.uint8)
    np.savez_compressed(path, x=x, y=np.zeros(len(x), np.uint8))
    kept = 4 * x.size
    tracemalloc.start()
    try:
        rows = read_rows(TASKS["softmax"], str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (rows.x.dtype, rows.x.tolist()[-1]) == (np.float32, [1, 1, 1])
    assert peak < 2.6 * kept, f"{peak / kept:.1f} times as much as is kept"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_rows_of_a_data_set_are_the_same_rows_for_tasks_with_another_norm(tmp_path: Path, name: str):
    """Review 3, rows 3: charged rows of a task in l2 were taken as public ones of a task in l1."""
    columns, classes = {"digits": (64, 10), "synthetic": (20, 5)}[name]
    text = TEXT.format(
        labels=f"classes = {[str(each) for each in range(classes)]}", model='kind = "softmax"', protocol=SGD,
        epsilon="gradient = 1.0", rest="", mechanism="discrete-gaussian",
    ).replace("dimension = 3", f"dimension = {columns}")  # fmt: skip
    tasks = [settled(parse(text.replace('kind = "l2"', f'kind = "{norm}"'))) for norm in ("l2", "l1")]
    one, two = (read_rows(task, name) for task in tasks)
    assert not np.array_equal(one.x, two.x)
    np.testing.assert_allclose(np.linalg.norm(one.x, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.abs(two.x).sum(axis=1), 1, atol=1e-5)
    charged = Terms(name, TENTH, Fraction(1))
    with Store(tmp_path / "server.sqlite") as store:
        for task in tasks:
            store.add_task(task.canonical, task.name, AT, "running")
        found = keep_rows(store, tasks[0], one, charged, AT)
        with pytest.raises(CrowdmlError, match=f"{len(one):,} of these rows were attached as charged ones"):
            keep_rows(store, tasks[1], two, Terms(name, None, None), AT)
        add_look(store, tasks[0].hash, found.rows, Look(1, AT, 5, Fraction(1), Pure(TENTH)))
        again = keep_rows(store, tasks[1], two, charged, AT)
        assert (again.spent, again.left) == (TENTH, 9), "a look for one task is a loss for both"
        for task, rows in zip(tasks, (one, two), strict=True):
            kept = kept_rows(store, validations(store)[task.hash].rows)
            np.testing.assert_array_equal(unpack_rows(kept or b"", len(rows), columns).x, rows.x)


@pytest.mark.parametrize(
    "data",
    [b"", _one_array(), _locked(), _saved(x=np.zeros((2, 3)), y=np.zeros(2))[:200]],
    ids=["empty", "one array", "under a password", "cut off"],
)
def test_a_file_that_is_no_npz_is_refused_in_a_sentence(tmp_path: Path, data: bytes):
    path = tmp_path / "rows.npz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"cannot be read as an NPZ file .* Nothing was written"):
        read_rows(TASKS["softmax"], str(path))


def test_names_are_no_labels_of_a_task_that_learns_a_number(tmp_path: Path):
    path = tmp_path / "rows.npz"
    path.write_bytes(_saved(x=np.zeros((2, 3)), y=np.array(["high", "low"])))
    with pytest.raises(DataError, match="y has a label for each row"):
        read_rows(TASKS["linear"], str(path))


def test_a_task_without_a_model_on_the_server_has_nothing_to_validate():
    from importlib import resources

    for name in ("traffic",):
        task = settled(parse(resources.files("crowdml.tasks").joinpath(f"{name}.toml").read_text()))
        with pytest.raises(TaskError, match="counts labels"):
            read_rows(task, "scats")


@pytest.mark.parametrize(
    ("epsilon", "budget", "every", "wanted"),
    [("0.0001", "1", 1, "the least is 0.001"), ("0.1", "0.05", 1, "allows no look"), ("0.1", None, 1, "of none"),
     ("0.1", "1", 0, "the least is 1")],
)  # fmt: skip
def test_terms_that_allow_no_look_are_refused(epsilon: str, budget: str | None, every: int, wanted: str):
    terms = Terms("rows", Fraction(epsilon), None if budget is None else Fraction(budget), every)
    with pytest.raises(CrowdmlError, match=wanted):
        check_terms(TASKS["softmax"], terms, 40)


def test_distances_whose_noise_would_drown_every_grid_are_refused():
    with pytest.raises(DataError, match="no grid is fine enough"):
        check_terms(TASKS["linear"], Terms("rows", Fraction(1, 1000), Fraction(1)), 1_000_000_000)
    check_terms(TASKS["linear"], Terms("rows", Fraction(1, 1000), Fraction(1)), 1000)


# --- a server that looks ---

SECRET = 0.71828


def write(path: Path, task: Task, count: int = 30) -> Path:
    """Rows with a number that is nowhere else."""
    draw = np.random.default_rng(5)
    width = task.features.dimension
    lines = [",".join([f"{SECRET}", *(f"{draw.normal():.5f}" for _ in range(width - 1)), "ab"[n % 2]])
             for n in range(count)]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def give(server: Any, device: Any, task: Task, times: int = 1) -> None:
    for _ in range(times):
        gradient = np.random.default_rng(device.seq).integers(-99, 99, size=(8, 2)).astype(np.int32)
        assert device.check_in(task, gradient=gradient).status == 202


def seen_by(store: Store, task: Task) -> Any:
    found = watched(store, task)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_looks_are_charged_before_they_are_shown_and_a_restart_neither_redraws_nor_forgets(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
):
    database = request.getfixturevalue("postgresql_url") if kind == "postgresql" else None
    task, folder = make_task("looks", steps=6), tmp_path / "server"
    where = ("--database", database) if database else ("--folder", str(folder))
    rows = write(tmp_path / "own.csv", task)
    with serving(folder, task, database=database) as server:
        device = server.device()
        words = ("task", "validate", task.name, str(rows), "--epsilon", "0.5", "--budget", "1.5", *where, "--json", "-")
        told = crowdml(*words).json["validation"]
        assert (told["kind"], told["rows"], told["looks_left"], told["looks"]) == ("charged", 30, 3, [])
        give(server, device, task)
        server.run(server.hub.look())
        first = seen_by(server.hub.store, task).shown
        assert [each.version for each in first] == [1]
        server.run(server.hub.look())
        assert seen_by(server.hub.store, task).shown == first
        give(server, device, task)
    with serving(folder, task, database=database) as server:
        device.line = server.line()
        server.run(server.hub.look())
        found = seen_by(server.hub.store, task)
        assert found.shown[:1] == first, "the same value, not another draw"
        assert [each.version for each in found.shown] == [1, 2]
        assert found.found.spent == 1
        give(server, device, task, 3)
        server.run(server.hub.look())
        assert seen_by(server.hub.store, task).state == "last"
        assert len(seen_by(server.hub.store, task).shown) == 2, "the third look is for the end"
        give(server, device, task)
        server.run(server.hub.look())
        found = seen_by(server.hub.store, task)
        assert [each.version for each in found.shown] == [1, 2, 6]
        assert (found.state, found.found.spent, found.found.left) == ("spent", Fraction(3, 2), 0)
        (row,) = crowdml("task", "list", *where, "--json", "-").json["tasks"]
        assert row["why"].startswith("6 check-ins")
        assert row["validation"]["epsilon_spent"] == row["validation"]["epsilon_budget"] == 1.5
        assert row["validation"]["state"] == "spent"
        assert [each["version"] for each in row["validation"]["looks"]] == [1, 2, 6]
        shown = crowdml("task", "list", *where).out
        assert "This protects one row of the operator's own data" in " ".join(shown.split())


def test_no_row_is_in_a_log_a_page_an_export_or_a_transcript_and_a_backup_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    task, folder = make_task("hides"), tmp_path / "server"
    rows, needle = write(tmp_path / "own.csv", task), np.float32(SECRET).tobytes()
    folder_words = ("--folder", str(folder))
    caplog.set_level(logging.DEBUG)
    with serving(folder, task) as server:
        device = server.device()
        crowdml("task", "validate", task.name, str(rows), "--epsilon", "1", "--budget", "9", *folder_words)
        give(server, device, task)
        server.run(server.hub.look())
        line, study = server.line(), f"/studies/{task.hash.hex()[:12]}"
        said = [line.ask("GET", path).body for path in (
            study, f"{study}/figures.json", f"{study}/plots/accuracy.svg", "/metrics", "/v1/tasks",
            f"/v1/tasks/{task.hash.hex()}", f"/v1/tasks/{task.hash.hex()}/publication")]  # fmt: skip
        figures = json.loads(said[1])
        assert figures["accuracy"]["x"] == [1]
        assert b"own.csv" not in b"".join(said), "what the operator calls the file is theirs"
        store = server.hub.store
        model = export_model(store, task.hash)
        card = model_card(model, "model.safetensors")
        assert "## Validation" in card
        assert "ε = 1 a look" in card
        with (tmp_path / "transcript").open("wb") as file:
            write_transcript(store, task.hash, file)
        said += [model_file(model), card.encode(), (tmp_path / "transcript").read_bytes(), caplog.text.encode()]
        store.backup(tmp_path / "backup.sqlite")
    for each in said:
        assert needle not in each
        assert str(SECRET).encode() not in each
    assert needle in (tmp_path / "backup.sqlite").read_bytes()
    again = ("--folder", str(tmp_path / "again"))
    back = crowdml("restore", str(tmp_path / "backup.sqlite"), *again)
    assert "Private rows of 1 task are not looked at any more" in " ".join((back.out + back.err).split())
    (row,) = crowdml("task", "list", *again, "--json", "-").json["tasks"]
    assert (row["validation"]["state"], row["validation"]["epsilon_spent"]) == ("halted", 1.0)
    said = crowdml("backup", str(tmp_path / "more.sqlite"), *folder_words)
    assert "and the rows that tasks are validated on" in " ".join((said.out + said.err).split())
    crowdml("task", "validate", task.name, "--off", *folder_words)
    with Store(folder / "server.sqlite") as store:
        assert validations(store) == {}
        store.check()
        store.backup(tmp_path / "after.sqlite")
    assert needle not in (tmp_path / "after.sqlite").read_bytes(), "what is erased is overwritten"


def test_a_look_that_fails_is_told_by_its_kind_alone_and_check_ins_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    task = make_task("fails")
    with serving(tmp_path / "server", task) as server:
        device = server.device()
        rows = read_rows(task, str(write(tmp_path / "own.csv", task)))
        keep_rows(server.hub.store, task, rows, Terms("own", None, None), AT)

        def fail(*_: Any) -> None:
            raise ValueError(f"cannot add {SECRET}")

        monkeypatch.setattr("crowdml.server.hub.evaluate", fail)
        give(server, device, task)
        server.run(server.hub.look())
        monkeypatch.undo()
        server.run(server.hub.look())
        assert seen_by(server.hub.store, task).shown == (), "this version is not tried again"
        give(server, device, task)
        server.run(server.hub.look())
        assert [each.version for each in seen_by(server.hub.store, task).shown] == [2]
    assert "version 1 was not looked at: ValueError" in caplog.text
    assert str(SECRET) not in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("DATA",), "Whose rows are they?"),
        (("DATA", "--public", "--epsilon", "1"), "Whose rows are they?"),
        (("DATA", "--epsilon", "1"), "Whose rows are they?"),
        (("--off", "--public"), "Name DATA"),
        ((), "Name DATA"),
        (("DATA", "--epsilon", "much", "--budget", "1"), "is not a finite number"),
    ],
)
def test_the_operator_says_whose_rows_they_are(tmp_path: Path, words: tuple[str, ...], said: str):
    task = make_task("whose")
    with Store(tmp_path / "server.sqlite") as store:
        store.add_task(task.canonical, task.name, AT, "running")
    rows = str(write(tmp_path / "own.csv", task))
    given = [rows if word == "DATA" else word for word in words]
    assert said in refused("task", "validate", task.name, *given, "--folder", str(tmp_path))


def test_public_rows_are_looked_at_exactly_as_often_as_one_likes(tmp_path: Path):
    task = make_task("public")
    with serving(tmp_path / "server", task) as server:
        device = server.device()
        path = write(tmp_path / "own.csv", task)
        crowdml("task", "validate", task.name, str(path), "--public", "--folder", str(tmp_path / "server"))
        give(server, device, task, 2)
        server.run(server.hub.look())
        found = seen_by(server.hub.store, task)
        assert (found.state, found.found.left, found.found.spent) == ("looks", None, 0)
        (shown,) = found.shown
        runner = server.hub.runners[task.hash]
        exact = look(task, runner.fold.weights, read_rows(task, str(path)))
        assert shown.figure.value == 1 - exact.value / 30 == shown.figure.low == shown.figure.high
        assert "belong to nobody in the study" in found.promise()
        assert replace(found, shown=()).text() == "no look yet"
