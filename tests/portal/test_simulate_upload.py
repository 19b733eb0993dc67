"""A draft tried on a table of the operator's own."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from crowd import Crowd
from desk import set_up
from test_operator_pages import DIGITS, drafted
from test_validate_upload import send

from crowdml.server.portal.simulation import Asked, Simulation, SimulationRefused, Simulations, has_jax

pytestmark = pytest.mark.skipif(not has_jax(), reason="the simulator needs JAX")

TASK = """
name = "own"
[features]
dimension = 2
norm = { kind = "l2" }
low = -2
high = 2
[labels]
LABELS
[model]
kind = "MODEL"
[protocol]
kind = "sgd"
batch = 5
step = { c = 3.0 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 8.0 }
"""
SIDES = TASK.replace("LABELS", 'classes = ["left", "right"]').replace("MODEL", "softmax")
NUMBERS = TASK.replace("LABELS", 'kind = "number"').replace("MODEL", "linear")
LINES = [f"{('left', 'right')[n % 2]},{n},{2 * (n % 2) - 1},{n % 7 / 7:.2f}" for n in range(100)]
ROWS = "\n".join(["side,when,a,b", *LINES])


def simulated(text: str, asked: Asked, rows: bytes, others: dict[str, tuple[str, bytes]] | None = None) -> Simulation:
    """A simulation on these rows, when it is over."""

    async def go() -> Simulation:
        runs = Simulations(asyncio.Event())
        run = runs.start("draft", text, asked, rows, others)
        assert runs._task is not None
        await runs._task
        return run

    return asyncio.run(go())


def test_a_table_is_simulated_in_a_process_of_its_own_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = simulated(SIDES, Asked("own.csv", None, 1, ("--label=side", "--ignore=when")), ROWS.encode())
    assert run.stage == "done", run.error
    assert run.result is not None
    assert run.result["data"] == "own.csv"
    assert run.result["devices"] == 16
    assert run.result["accuracy"] > 0.8
    assert run.result["world"] == "fleet"
    assert list(tmp_path.iterdir()) == []


def test_rows_to_test_on_and_public_rows_come_in_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    few = "\n".join(["side,when,a,b", *LINES[:20]]).encode()
    columns = ("--label=side", "--ignore=when")
    others = {"test": ("own.csv", few), "public": ("public.csv", few)}
    run = simulated(SIDES, Asked("own.csv", None, 1, columns), ROWS.encode(), others)
    assert run.stage == "done", run.error
    assert run.asked.columns == (*columns, "--test=test-own.csv", "--public=public.csv")
    assert run.result is not None
    assert run.result["devices"] == 20, "all 100 rows are on devices"
    assert run.result["public_only"] > 0.8
    assert list(tmp_path.iterdir()) == []
    half = simulated(SIDES, Asked("own.csv", None, 1, (*columns, "--test=0.5")), ROWS.encode())
    assert half.result is not None
    assert half.result["devices"] == 10


def test_the_form_takes_a_share_and_files_and_says_what_is_wrong_with_them(crowd: Crowd):
    desk = set_up(crowd)
    path = f"{drafted(desk, DIGITS)}/simulate/own"
    for share in ("1.5", "half"):
        refused = send(desk, path, "rows.csv", b"1,2\n", times="1", test=share)
        assert refused.status == 422
        assert f"&#39;{share}&#39; is no share of the rows: write 0.3, for example." in refused.text
    file = {"test-file": ("test.csv", b"1,2\n")}
    refused = send(desk, path, "rows.csv", b"1,2\n", file, times="1", test="0.3")
    assert "Say a share of the rows, or choose a file: one of the two." in refused.text
    refused = send(desk, path, "rows.csv", b"1,2\n", {"public-file": ("public.txt", b"1")}, times="1")
    assert "&#39;public.txt&#39; does not end in .csv" in refused.text
    empty = {"test-file": ("", b""), "public-file": ("", b"")}  # as a browser sends fields that nobody filled in
    page = send(desk, path, "rows.csv", b"a,b\n1,2\n", empty, times="1", test="0,3")
    assert "Simulating a crowd of devices, 1 trials, on rows.csv" in page.text
    desk.post(f"{path.removesuffix('/simulate/own')}/cancel")


def test_what_is_wrong_with_a_table_is_said_by_its_own_name():
    run = simulated(SIDES, Asked("own.csv", None, 1, ("--label=sid",)), ROWS.encode())
    assert run.stage == "failed"
    assert run.error.startswith("own.csv has no column 'sid' for --label. Did you mean 'side'?")


def test_a_file_that_is_no_table_or_would_lie_elsewhere_is_not_read():
    for name in ("rows.exe", "../rows.csv", ".hidden.csv", "a\\b.csv", "a\x1b.csv"):
        with pytest.raises(SimulationRefused) as refused:
            Simulations(asyncio.Event()).start("draft", SIDES, Asked(name, None, 1), b"a,b\n1,2\n")
        assert refused.value.about == "rows"


def test_the_draft_takes_a_table_by_a_form_and_says_what_is_missing(crowd: Crowd):
    desk = set_up(crowd)
    path = drafted(desk, DIGITS)
    assert "Try it on a table of your own" in desk.text
    refused = send(desk, f"{path}/simulate/own", "rows.txt", b"1,2\n", times="1")
    assert refused.status == 422
    assert "does not end in .csv" in refused.text
    refused = send(desk, f"{path}/simulate/own", "rows.csv", b"1,2\n", times="many")
    assert refused.status == 422
    assert "is no whole number" in refused.text
    page = send(desk, f"{path}/simulate/own", "rows.csv", b"a,b\n1,2\n", times="1", label="c", ignore="a, b")
    assert "Simulating a crowd of devices, 1 trials, on rows.csv" in page.text
    assert "The simulation was cancelled" in desk.post(f"{path}/cancel").text


def test_a_draft_that_predicts_numbers_has_the_form_for_a_table_alone(crowd: Crowd):
    desk = set_up(crowd)
    desk.get("/operator/tasks/file")
    page = desk.post("/operator/tasks/file", text=NUMBERS)
    assert "Try it on a table of your own" in page.text
    assert 'action="/operator/drafts/' in page.text
    assert 'id="data"' not in page.text
