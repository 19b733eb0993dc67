"""Drafts: tasks that an operator looks at before anybody else does. Priced, simulated, then started or discarded.

A draft is a task file in the settings, under the hash that its task will have. It is not hosted: no device sees it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from crowdml.datasets.tables import share_of
from crowdml.errors import DataError, TaskError
from crowdml.price import Price
from crowdml.protocols import find, refusal, remarks_on
from crowdml.server.estimates import Estimate
from crowdml.server.histograms import is_histogram
from crowdml.server.hub import check_hosted
from crowdml.server.portal import task_form
from crowdml.server.portal.forms import NO_TEXT
from crowdml.server.portal.simulation import (
    USUAL_DEVICES,
    USUAL_TRIALS,
    Asked,
    Simulation,
    SimulationRefused,
    Simulations,
    fitting_crowd,
    has_jax,
    suitable_data,
)
from crowdml.server.portal.studies import find_price
from crowdml.server.portal.validating import LONGEST_NAME
from crowdml.server.portal.visits import LARGEST_UPLOAD, Visit, uploaded, visited
from crowdml.storage.server import Store
from crowdml.storage.server.operating import remove_setting, settings_like
from crowdml.suggest import expected_crowd, outlook, too_few
from crowdml.task import Task, parse, shipped_text
from crowdml.task import shipped as all_shipped
from crowdml.texts import number_text
from crowdml.wire.problems import Problem

PREFIX = "draft/"
MOST = 200


@dataclass(frozen=True)
class Draft:
    """`text` is the file as it was written; `task` what it says, in its published form."""

    text: str
    task: Task
    by: str
    at: str
    from_form: bool
    by_rule: frozenset[str] | None = None
    """Fields that were left empty, so that a rule made their values; None: nobody kept it (drafts of version 0.1)."""
    devices: int | None = None
    """How many devices the operator expects; None: nobody said so."""

    @property
    def rules(self) -> dict[str, str]:
        """What rules made of fields that were left empty."""
        return task_form.begin_from(parse(self.text), self.by_rule)[1] if self.from_form else {}

    @property
    def id(self) -> str:
        return self.task.hash.hex()[:12]

    @property
    def path(self) -> str:
        return f"/operator/drafts/{self.id}"


def all_drafts(store: Store) -> list[Draft]:
    """Newest first; one that this version cannot read is left out."""
    found: list[Draft] = []
    for value in settings_like(store, PREFIX).values():
        plain = json.loads(value)
        try:
            task = task_form.check_text(plain["text"])
        except TaskError:
            continue
        rules = frozenset(plain["by_rule"]) if "by_rule" in plain else None
        found.append(Draft(plain["text"], task, plain["by"], plain["at"], plain["form"], rules, plain.get("devices")))
    return sorted(found, key=lambda draft: draft.at, reverse=True)


async def _keep(visit: Visit, text: str, task: Task, values: dict[str, str] | None = None) -> Draft:
    """`values`: the fields of a draft that was made by the form."""
    by_rule = None if values is None else await visit.read(task_form.by_rule, values)
    devices = None if values is None else int(values[task_form.DEVICES].replace(",", ""))
    draft = Draft(text, task, visit.name, visit.hub.clock(), by_rule is not None, by_rule, devices)
    plain: dict[str, Any] = {"text": text, "by": draft.by, "at": draft.at, "form": draft.from_form}
    plain |= {} if by_rule is None else {"by_rule": sorted(by_rule), "devices": devices}
    if len(await visit.read(settings_like, visit.store, PREFIX)) >= MOST:
        raise Problem("conflict", f"There are {MOST} drafts already. Discard some of them.")
    name = f"{PREFIX}{task.hash.hex()}"
    await visit.hub.write(visit.store.set_setting, name, json.dumps(plain, ensure_ascii=False).encode())
    await visit.record("drafted", task.name)
    return draft


async def _find(visit: Visit) -> Draft:
    name = visit.request.path_params["draft"]
    for draft in await visit.read(all_drafts, visit.store):
        if len(name) >= 12 and draft.task.hash.hex().startswith(name):
            return draft
    raise Problem("unknown-task", "No such draft here.")


# --- write one ---


@visited
async def by_form(visit: Visit) -> Response:
    """GET, POST /operator/tasks/new: a task by a form that explains each choice."""
    if visit.request.method != "POST":
        values, rules = await _beginning(visit)
        return _form_page(visit, values, {}, rules=rules)
    values = {key: visit.form.get(key, "") for key in task_form.fields()}
    found = await visit.read(task_form.flaws_of, values)
    if not found:
        text, _ = await visit.read(task_form.task_text, values)
        try:
            task = await visit.read(_checked, text)
            return visit.go((await _keep(visit, text, task, values)).path)
        except TaskError as error:
            found[task_form.field_of(str(error)) or ""] = str(error)
    flaws = {key: task_form.in_fields(_about(key, _plain(sentence))) for key, sentence in found.items()}
    return _form_page(visit, task_form.prefilled(values), flaws, 422)


def _form_page(
    visit: Visit, values: dict[str, str], flaws: dict[str, str], status: int = 200, rules: dict[str, str] | None = None
) -> Response:
    """`rules`: what a rule made of fields that are empty."""
    return visit.page(
        "new.html",
        status,
        sections=task_form.sections(),
        values=values,
        flaws=flaws,
        shipped=shipped(),
        labels=_labels(),
        rules=rules or {},
    )


def _labels() -> dict[str, str]:
    return {key: field.label for key, field in task_form.fields().items()}


async def _beginning(visit: Visit) -> tuple[dict[str, str], dict[str, str]]:
    """The fields to start with, of a draft, of a shipped task, or the defaults; and what rules made of empty ones."""
    if name := visit.request.query_params.get("from"):
        if shipped().get(name) == "new":
            return task_form.begin_from(parse(shipped_text(name)))
        for draft in await visit.read(all_drafts, visit.store):
            if draft.id == name:
                return task_form.begin_from(parse(draft.text), draft.by_rule, draft.devices)
    return task_form.defaults(), {}


@visited
async def by_file(visit: Visit) -> Response:
    """GET, POST /operator/tasks/file: a task by its file, chosen or pasted."""
    if visit.request.method != "POST":
        name = visit.request.query_params.get("from", "")
        text = shipped_text(name) if name in shipped() else ""
        for draft in await visit.read(all_drafts, visit.store):
            text = draft.text if draft.id == name else text
        return visit.page("file.html", text=text, flaw="")
    chosen, text = visit.form.get("file", "").strip(), visit.form.get("text", "").strip()
    if NO_TEXT in chosen:
        flaw = "This is no text file. Choose a task file, which ends in .toml."
        return visit.page("file.html", 422, text=text, flaw=flaw)
    if not chosen and not text:
        return visit.page("file.html", 422, text="", flaw="Choose a task file, or paste its text.")
    text = (chosen or text).replace("\r\n", "\n") + "\n"
    try:
        task = await visit.read(_checked, text)
    except TaskError as error:
        return visit.page("file.html", 422, text=text, flaw=_plain(error))
    return visit.go((await _keep(visit, text, task)).path)


def _checked(text: str) -> Task:
    task = task_form.check_text(text)
    check_hosted(task)
    return task


def _plain(error: TaskError | str) -> str:
    return str(error).removeprefix("the task: ")


def _about(key: str, sentence: str) -> str:
    """A refusal next to its field, where key and value stand already."""
    before, _, after = sentence.partition(": ")
    short = after if before.startswith((f"{key} =", "task '")) and after else sentence
    return short[:1].upper() + short[1:]


@lru_cache
def shipped() -> dict[str, str]:
    """Names of the tasks that come with the package, and where to begin from each: what the form lacks is in a file."""
    return {name: "new" if task_form.says_all_of(parse(shipped_text(name))) else "file" for name in all_shipped()}


# --- look at it, try it, start it ---


@visited
async def page(visit: Visit) -> Response:
    """GET /operator/drafts/{draft}: the price, the exact file, and what a simulation says."""
    draft = await _find(visit)
    return await _page(visit, draft, {})


async def _page(visit: Visit, draft: Draft, flaws: dict[str, str], status: int = 200) -> Response:
    runs, hosted = simulations(visit.request), visit.hub.runners.get(draft.task.hash)
    run = runs.of(draft.id)
    price, datasets = await find_price(draft.task), await visit.read(suitable_data, draft.task)
    crowds = {name: fitting_crowd(draft.task, name, draft.devices) for name in datasets}
    fewest = 1 if draft.task.masking is None else draft.task.masking.minimum
    first = next((name for name in datasets if crowds[name] >= fewest), datasets[0] if datasets else "")
    asked = run.asked if run is not None else Asked(first, crowds.get(first, USUAL_DEVICES), USUAL_TRIALS)
    many = crowds.get(first, USUAL_DEVICES) if asked.devices is None else asked.devices
    form = {
        "data": asked.data,
        "devices": str(many),
        "trials": str(asked.trials),
        "times": str(USUAL_TRIALS),
        **visit.form,
    }
    return visit.page(
        "draft.html",
        status,
        draft=draft,
        task=draft.task,
        price=price,
        warnings=[*_warnings(price), *await visit.read(_too_small, draft)],
        canonical=draft.task.canonical.decode(),
        has_jax=has_jax(),
        is_histogram=is_histogram(draft.task),
        keeps=find(draft.task).keeps(draft.task),
        remarks=remarks_on(draft.task),
        run=run,
        crowd_says=_crowd_says(run),
        busy=runs.running() not in (None, draft.id),
        crowds=crowds,
        most=LARGEST_UPLOAD // 2**20,
        rules=draft.rules,
        labels=_labels(),
        form=form,
        flaws=flaws,
        hosted=hosted is not None,
        ended=None if hosted is None else hosted.reason,
        batch=find(draft.task).batch(draft.task),
    )


def _warnings(price: Price) -> list[str]:
    """What somebody who has run many studies would say before it starts."""
    said: list[str] = []
    task, sample = price.task, price.whole.sample
    refused = refusal(task)
    if refused is not None:
        said.append(f"No server runs this: {refused.sentence}")
    if math.isinf(sample):
        said.append("There is no noise: this protects nobody, and no server runs it.")
    elif sample > 8:
        weak = f"ε = {number_text(sample)} for a sample is a weak guarantee."
        said.append(f"{weak} Studies of people usually stay at or below 4.")
    if price.check_ins is None:
        said.append("There is no budget: a device gives until its owner's own budget stops it. Say how much is enough.")
    rows = {name for name, _, _ in find(task).rows()}
    if "errors" in rows - set(task.privacy.epsilon):
        said.append("No error count leaves, so nobody sees how well the model does while it learns.")
    if not task.purpose or not task.collects:
        said.append("Participants read purpose and collects before they join; without them they have little to go by.")
    return said


def _too_small(draft: Draft) -> list[str]:
    """Why the crowd that is expected is too small for the task, or for its price, where it is."""
    crowd = expected_crowd(draft.task, draft.devices)
    if crowd is None:
        return []
    told = too_few(draft.task, crowd) or ((found := outlook(draft.task, crowd)) and found.sentence)
    return [f"{crowd.text}: {told}"] if told else []


def _crowd_says(run: Simulation | None) -> Estimate | None:
    """The error rate as a server would see it in a simulated run, where devices count errors."""
    said = (run.result or {}).get("crowd_says") if run is not None else None
    return None if not said else Estimate.around(float(said["error"]), float(said["error_sd"]))


@visited
async def simulate(visit: Visit) -> Response:
    """POST /operator/drafts/{draft}/simulate: in a process of its own."""
    draft = await _find(visit)
    if is_histogram(draft.task):
        raise Problem("conflict", "This task counts labels: there is no model to try on a simulated crowd.")
    try:
        asked = Asked(visit.form.get("data", ""), _count(visit.form, "devices"), _count(visit.form, "trials"))
        simulations(visit.request).start(draft.id, draft.text, asked)
    except SimulationRefused as error:
        return await _page(visit, draft, {error.about: str(error)}, 422)
    await visit.record("simulated", draft.task.name)
    return visit.go(f"{draft.path}#simulation")


@uploaded
async def simulate_own(visit: Visit) -> Response:
    """POST /operator/drafts/{draft}/simulate/own: on a table of the operator's own, which is deleted afterwards."""
    draft, upload, form = await _find(visit), visit.files.get("rows"), visit.form
    if is_histogram(draft.task):
        raise Problem("conflict", "This task counts labels: there is no model to try on a simulated crowd.")
    try:
        if upload is None or not upload.name:
            raise SimulationRefused("Choose a file with a table.", "rows")
        crowd = _count(form, "crowd") if form.get("crowd", "").strip() else None
        named = [(key, form.get(key, "").strip()) for key in ("label", "device")]
        named += [("ignore", each.strip()) for each in form.get("ignore", "").split(",")]
        others = _others(visit)
        named.append(("test", _share(form, "test" in others)))
        columns = tuple(f"--{key}={value}" for key, value in named if value)
        asked = Asked(upload.name[-LONGEST_NAME:], crowd, _count(form, "times"), columns)
        simulations(visit.request).start(draft.id, draft.text, asked, upload.data, others)
    except SimulationRefused as error:
        about = {"devices": "crowd", "trials": "times", "data": "rows"}.get(error.about, error.about)
        return await _page(visit, draft, {about: str(error)}, 422)
    await visit.record("simulated", draft.task.name)
    return visit.go(f"{draft.path}#simulation")


def _others(visit: Visit) -> dict[str, tuple[str, bytes]]:
    """The files beside the table that the form brings: rows to test on, and public rows."""
    sent = {what: visit.files.get(f"{what}-file") for what in ("test", "public")}
    return {what: (each.name[-LONGEST_NAME:], each.data) for what, each in sent.items() if each and each.name}


def _share(form: Any, has_file: bool) -> str:
    """The share of the rows to test on, as it was written; empty where nobody names one."""
    given = form.get("test", "").strip()
    try:
        found = None if not given else share_of(given.replace(",", "."))
    except DataError:
        raise SimulationRefused(f"{given[:20]!r} is no share of the rows: write 0.3, for example.", "test") from None
    if found is not None and has_file:
        raise SimulationRefused("Say a share of the rows, or choose a file: one of the two.", "test")
    return "" if found is None else f"{found:g}"


def _count(form: Any, name: str) -> int:
    given = form.get(name, "").strip().replace(",", "")
    if not given.isdecimal() or len(given) > 9:
        raise SimulationRefused(f"{given[:20]!r} is no whole number.", name)
    return int(given)


@visited
async def cancel(visit: Visit) -> Response:
    """POST /operator/drafts/{draft}/cancel: end its simulation."""
    draft = await _find(visit)
    await simulations(visit.request).cancel(draft.id)
    return visit.go(draft.path, "cancelled")


@visited
async def start(visit: Visit) -> Response:
    """POST /operator/drafts/{draft}/start: from now on devices may join. The task never changes again."""
    draft = await _find(visit)
    hub, hash_ = visit.hub, draft.task.hash
    closed, known = visit.form.get("closed") == "yes", hub.runners.get(hash_)
    if known is not None and known.reason is not None:
        return await _page(visit, draft, {}, 409)
    try:
        await hub.add_task(draft.task, "paused", closed=closed)
    except TaskError as error:  # a draft that an earlier version accepted
        return await _page(visit, draft, {"start": _plain(error)}, 422)
    if closed and known is not None:
        await hub.set_closed(hash_, True)
    await hub.change(hash_, "start", f"by {visit.name}")
    await hub.write(remove_setting, visit.store, f"{PREFIX}{hash_.hex()}")
    return visit.go(f"/operator/tasks/{draft.id}", "started")


@visited
async def discard(visit: Visit) -> Response:
    """POST /operator/drafts/{draft}/discard."""
    draft = await _find(visit)
    await simulations(visit.request).cancel(draft.id)
    await visit.hub.write(remove_setting, visit.store, f"{PREFIX}{draft.task.hash.hex()}")
    await visit.record("discarded", draft.task.name)
    return visit.go("/operator", "discarded")


def simulations(request: Request) -> Simulations:
    """Those of this server."""
    state = request.app.state
    if not hasattr(state, "simulations"):
        state.simulations = Simulations(state.hub.ending)
    return state.simulations
