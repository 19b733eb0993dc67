"""Validation by an upload in the portal. Review 2, users: operator 8."""

from __future__ import annotations

import io
import re
import threading
import urllib.request
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from crowd import Crowd, Page
from desk import Desk, set_up, token_of

from crowdml.server.portal import validating, visits
from crowdml.storage.server.looks import Terms, rows_of, validations
from crowdml.storage.server.schema import validation_rows

ROWS = "".join(f"{','.join(['0.5'] * 64)},{label}\n" for label in ("still", "on foot", "in vehicle", "still"))
SECRET = "0.123456789"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read again at every look at a page."""
    monkeypatch.setattr("crowdml.server.portal.cache.FRESH", -1.0)


def send(
    desk: Desk, path: str, name: str, data: bytes, others: dict[str, tuple[str, bytes]] | None = None, **fields: str
) -> Page:
    """A form with files, as a browser sends it: rows, and others by the names of their fields."""
    mark = "----a-browsers-own-mark"
    fields = {"form-token": token_of(desk.page), **fields}
    body = b"".join(
        f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in fields.items()
    )
    for field, (file, rows) in {"rows": (name, data), **(others or {})}.items():
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{field}"; filename="{file}"\r\n'
        body += f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + rows + b"\r\n"
    body += f"--{mark}--\r\n".encode()
    request = urllib.request.Request(desk.browser.base + path, body, method="POST")
    request.add_header("Content-Type", f"multipart/form-data; boundary={mark}")
    desk.page = desk.browser._ask(request, {})
    return desk.page


def page_of(crowd: Crowd) -> str:
    return f"/operator/tasks/{crowd.task.hash.hex()[:12]}"


def test_public_rows_are_sent_looked_at_and_taken_back(crowd: Crowd):
    """The same terms and the same rows as the command keeps."""
    desk, path, store = set_up(crowd), page_of(crowd), crowd.running.hub.store
    desk.get(path)
    made = send(desk, f"{path}/validate", "shapes.csv", ROWS.encode(), whose="public", every="2")
    assert "The server evaluates the model on these rows from now on." in made.text
    found = validations(store)[crowd.task.hash]
    assert (found.count, found.dimension, found.terms) == (4, 64, Terms("shapes.csv", None, None, 2))
    assert "4 rows of shapes.csv" in made.text
    crowd.check_in(crowd.device())
    crowd.running.run(crowd.running.hub.look())
    assert "Newest version evaluated" in desk.get(path).text
    gone = desk.post(f"{path}/validate/off")
    assert "Nobody looks any more, and the rows are erased." in gone.text
    assert validations(store) == {}
    said = [(event.kind, event.detail) for event in store.events() if "validated" in event.kind]
    assert said == [("not validated", "by anna"), ("validated", "anna: on 4 rows of shapes.csv")]


def test_private_rows_of_an_npz_file_have_their_price(crowd: Crowd):
    file = io.BytesIO()
    np.savez(file, x=np.full((5, 64), 0.5), y=np.asarray([0, 1, 2, 0, 1]))
    desk, path = set_up(crowd), page_of(crowd)
    desk.get(path)
    terms = {"whose": "private", "epsilon": "0.1", "budget": "1", "every": "1"}
    made = send(desk, f"{path}/validate", "patients.npz", file.getvalue(), **terms)
    assert made.status == 200, made.text
    found = validations(crowd.running.hub.store)[crowd.task.hash]
    assert found.terms == Terms("patients.npz", Fraction(1, 10), Fraction(1))
    assert len(rows_of(crowd.running.hub.store, found.rows) or b"") > 0
    assert "ε = 0.1 a look" in made.text


def test_beside_rows_that_nobody_knows_the_page_asks_whether_these_are_new(crowd: Crowd):
    """Review 3, rows 10: the box is there once it is needed, and is what --new-rows is."""
    desk, path, store = set_up(crowd), page_of(crowd), crowd.running.hub.store
    with store.writing() as connection:  # as version 0.1 left them
        erased = {"hash": bytes(64), "kind": "charged", "count": 5, "dimension": 64}
        connection.execute(validation_rows.insert().values(erased))
    assert 'name="new_rows"' not in desk.get(path).text
    page = send(desk, f"{path}/validate", "shapes.csv", ROWS.encode(), whose="public")
    assert page.status == 422
    assert "an earlier version looked at 1 set of rows without noting them one by one" in page.text
    assert re.search(r'<input type="checkbox" name="new_rows" value="yes">', page.text)
    assert validations(store) == {}
    made = send(desk, f"{path}/validate", "shapes.csv", ROWS.encode(), whose="public", new_rows="yes")
    assert "The server evaluates the model on these rows from now on." in made.text
    assert validations(store)[crowd.task.hash].count == 4


@pytest.mark.parametrize(
    ("name", "data", "fields", "said"),
    [
        ("", b"", {}, "Choose a file with rows"),
        ("rows.txt", ROWS.encode(), {}, "does not end in .csv or .npz"),
        ("rows.csv", b"", {}, "rows.csv has no rows"),
        ("rows.csv", ROWS.encode() + f"{SECRET},flying\n".encode(), {}, "rows.csv, line 5: 2 fields"),
        ("rows.csv", ROWS.replace("on foot", f"{SECRET}x").encode(), {}, "rows.csv, line 2: a field is no finite"),
        ("rows.npz", b"no file of that kind", {}, "rows.npz cannot be read as an NPZ file"),
        ("rows.csv", ROWS.encode(), {"whose": ""}, "Say whose rows they are"),
        ("rows.csv", ROWS.encode(), {"whose": "private"}, "Fill this in."),
        ("rows.csv", ROWS.encode(), {"whose": "private", "epsilon": "0,5", "budget": "1"}, "write 0.5, with a point"),
        ("rows.csv", ROWS.encode(), {"whose": "private", "epsilon": "1e999999", "budget": "1"}, "is no number above 0"),
        ("rows.csv", ROWS.encode(), {"whose": "private", "epsilon": "2", "budget": "1"}, "allows no look"),
        ("rows.csv", ROWS.encode(), {"every": "0"}, "is no whole number from 1"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_said_next_to_their_field_and_nothing_is_written(
    crowd: Crowd, name: str, data: bytes, fields: dict[str, str], said: str
):
    desk, path = set_up(crowd), page_of(crowd)
    desk.get(path)
    page = send(desk, f"{path}/validate", name, data, **{"whose": "public", **fields})
    assert page.status == 422
    (shown,) = re.findall(r'class="flaw" id="flaw-\w+">([^<]*)<', page.text)
    assert said in shown
    assert SECRET not in page.text
    assert "/tmp" not in shown
    assert validations(crowd.running.hub.store) == {}


def test_an_upload_of_another_site_or_of_too_much_changes_nothing(crowd: Crowd, monkeypatch: pytest.MonkeyPatch):
    desk, path = set_up(crowd), page_of(crowd)
    desk.get(path)
    forged = send(desk, f"{path}/validate", "rows.csv", ROWS.encode(), **{"whose": "public", "form-token": "0" * 64})
    assert forged.status == 403
    monkeypatch.setattr(visits, "LARGEST_UPLOAD", 1000)
    desk.get(path)
    assert send(desk, f"{path}/validate", "rows.csv", ROWS.encode(), whose="public").status == 413
    assert validations(crowd.running.hub.store) == {}


def test_rows_are_parsed_beside_the_event_loop(crowd: Crowd, monkeypatch: pytest.MonkeyPatch):
    seen: list[threading.Thread] = []
    real = validating.read_rows

    def watching(*given: Any) -> Any:
        seen.append(threading.current_thread())
        return real(*given)

    monkeypatch.setattr(validating, "read_rows", watching)
    desk, path = set_up(crowd), page_of(crowd)
    desk.get(path)
    send(desk, f"{path}/validate", "rows.csv", ROWS.encode(), whose="public")
    assert seen
    assert crowd.running.thread not in seen
