"""Validation in the portal: the operator sends rows of their own, public or for a charge, and can take them back.

The rows are read, checked and kept by the same functions as those of `crowdml task validate`.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crowdml.errors import CrowdmlError, DataError, FormError
from crowdml.exact import read_exact
from crowdml.server.portal.visits import LARGEST_UPLOAD, Visit
from crowdml.server.validation import keep_rows, read_rows
from crowdml.storage.server.looks import Terms, detach
from crowdml.task import Task
from crowdml.texts import hidden_control

LONGEST_NAME = 120
SUFFIXES = (".csv", ".npz")


class BadRows(FormError):  # noqa: N818  # reads as the sentence it raises
    """Rows that the server does not look at. `about` is the field that the sentence stands next to."""


@dataclass(frozen=True)
class RowsForm:
    """What the form holds, and what is wrong with it."""

    values: dict[str, str] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)
    most: int = LARGEST_UPLOAD // 2**20
    """MiB that are taken."""

    def value(self, name: str, otherwise: str = "") -> str:
        return self.values.get(name, otherwise)


async def attach_rows(visit: Visit, task: Task) -> None:
    """Look at the model with the rows in the form from now on; raises `BadRows`."""
    upload = visit.files.get("rows")
    if upload is None or not upload.name:
        raise BadRows("Choose a file with rows, .csv or .npz.", "rows")
    name = upload.name[-LONGEST_NAME:]
    if Path(name).suffix not in SUFFIXES or hidden_control(name) or name.startswith("."):
        raise BadRows(f"{name!r} does not end in .csv or .npz. Nothing was written.", "rows")
    terms = _terms(visit.form, name)
    try:
        count = await asyncio.to_thread(_keep, visit, task, upload.data, terms)
    except CrowdmlError as error:
        raise BadRows(str(error), "rows") from error
    await visit.record("validated", f"on {count:,} rows of {name}", task.hash)


def _keep(visit: Visit, task: Task, data: bytes, terms: Terms) -> int:
    """In a thread: the rows are parsed and hashed beside the event loop and beside the server's one writer."""
    with tempfile.TemporaryDirectory(prefix="crowdml-rows-") as folder:
        path = Path(folder) / terms.name
        path.write_bytes(data)
        is_new = visit.form.get("new_rows") == "yes"
        try:
            return keep_rows(
                visit.store, task, read_rows(task, str(path)), terms, visit.hub.clock(), new_rows=is_new
            ).count
        except DataError as error:  # it names the file where it lay
            raise DataError(str(error).replace(str(path), terms.name)) from None


def _terms(form: Any, name: str) -> Terms:
    whose = form.get("whose", "")
    every = form.get("every", "").strip() or "1"
    if not every.isdecimal() or len(every) > 9 or int(every) < 1:
        raise BadRows(f"{every[:20]!r} is no whole number from 1.", "every")
    if whose == "public":
        return Terms(name, None, None, int(every))
    if whose != "private":
        raise BadRows("Say whose rows they are: public, or private.", "whose")
    return Terms(name, _epsilon(form, "epsilon"), _epsilon(form, "budget"), int(every))


def _epsilon(form: Any, name: str) -> Any:
    given = form.get(name, "").strip()
    try:
        found = read_exact(given)
    except ValueError:
        found = None
    if found is None or found <= 0:
        hint = f": write {given.replace(',', '.')}, with a point" if given.count(",") == 1 else ""
        raise BadRows(f"{given[:20]!r} is no number above 0{hint}." if given else "Fill this in.", name)
    return found


async def remove_rows(visit: Visit, task: Task) -> None:
    """Look no more, and erase the rows. What was charged stays in the ledger."""
    if await visit.hub.write(detach, visit.store, task.hash):
        await visit.record("not validated", "", task.hash)
