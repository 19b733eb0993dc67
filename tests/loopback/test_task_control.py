"""Who may do what to a task: the operator starts, pauses, stops and watches; a device writes its own space alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Device, Line, Running, make_task
from device import serving as serving_by_hand
from loopback import QuickClock, joined, run, serving
from test_local_loop import asked, corners, text

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parents[1] / "portal"))
from cli_runner import crowdml  # found by the lines above
from crowd import Browser
from desk import PASSWORD, Desk

from crowdml.messages import decode
from crowdml.protocols import settled
from crowdml.server.hub import utc_now
from crowdml.server.operators import hash_password
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.wire.envelopes import PREFIX
from crowdml.wire.requests import owner_link

DEVICES, EACH = 6, 8


def soon(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.01)


# --- a device ---


def kept(server: Running, task: Task) -> Any:
    """Everything that makes a task what it is on this server."""
    stored = server.hub.store.task(task.hash)
    assert stored is not None
    return stored.canonical, stored.name, stored.state, stored.closed, stored.changed_at, server.state(task)


def test_no_path_lets_a_device_change_a_task(tmp_path: Path):
    task, other = make_task("fixed"), make_task("another")
    with serving_by_hand(tmp_path, task) as server:
        device = server.device()
        assert device.check_in(task).status == 202
        before, tasks = kept(server, task), [each.hash for each in server.hub.store.tasks()]
        whole, short = task.hash.hex(), task.hash.hex()[:12]
        paths = [
            "/v1/tasks", f"/v1/tasks/{whole}", f"/v1/tasks/{whole}/publication", f"/v1/tasks/{whole}/publications/1",
            f"/v1/tasks/{whole}/chain", f"/v1/tasks/{whole}/round", f"/v1/tasks/{whole}/places/0",
            f"/v1/tasks/{whole}/mailbox", f"/v1/tasks/{whole}/state", f"/v1/tasks/{whole}/validation",
            f"/operator/tasks/{short}/state", f"/operator/tasks/{short}/closed", "/operator/tasks/new",
            "/operator/tasks/file", f"/operator/drafts/{short}/start", f"/studies/{short}",
        ]  # fmt: skip
        for path in paths:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                for body in (other.canonical, b"to=stop&closed=yes"):
                    answer = device.signed(method, path, body)
                    assert answer.status >= 300, (method, path)
        assert kept(server, task) == before
        assert [each.hash for each in server.hub.store.tasks()] == tasks
        assert device.check_in(task).status == 202, "and it goes on as before"


def test_a_device_writes_and_reads_its_own_space_alone(tmp_path: Path):
    task = make_task("apart")
    with serving_by_hand(tmp_path, task) as server:
        mine, yours = server.device(), server.device()
        assert yours.check_in(task).status == 202
        before = server.state(task)
        theirs = yours.envelope(task)[64:]  # exactly what the other would say, signed with the wrong key
        forged = mine.send(task, mine.key.sign(PREFIX + theirs) + theirs)
        assert (forged.status, forged.slug) == (401, "signature")
        for method, path in (("POST", "withdraw"), ("GET", "statement")):
            answer = mine.signed(method, f"/v1/devices/{yours.key.id}/{path}")
            assert answer.status in (401, 403, 404), path
        link = owner_link(mine.key, int(time.time()), 900)
        page = mine.line.ask("GET", f"/device/{yours.key.id}?{link}", headers={"Accept": "text/html"})
        assert page.status in (401, 403, 404)
        assert "set-cookie" not in page.headers
        assert server.state(task) == before
        found = server.hub.store.device(yours.key.id)
        assert found is not None
        assert found.is_active
        assert yours.check_in(task).status == 202, "the other's next number is still its own"


# --- an operator, of a network that learns ---


class HeldClock(QuickClock):
    """A crowd that looks at it stands still while the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def now(self) -> float:
        self.gate.wait(60)
        return super().now()


def log_in(address: str, folder: Path) -> Desk:
    with Store(folder / "server.sqlite") as store:
        store.set_operator("anna", hash_password(PASSWORD), utc_now())
    browser = Browser(address)
    desk = Desk(browser, browser.get("/operator/login"))
    desk.post("/operator/login", name="anna", password=PASSWORD)
    assert desk.page.address.endswith("/operator"), desk.text
    return desk


@pytest.mark.parametrize("by", ["command", "button"])
def test_a_network_is_paused_and_resumed_while_it_learns_and_stopped_in_the_end(tmp_path: Path, by: str):
    task, folder, ended = settled(parse(text("controlled"))), tmp_path / "server", []
    with serving(folder, task) as server:
        home, clock = joined(tmp_path / "fleet", task), HeldClock()
        desk = log_in(server.address, folder)
        page = f"/operator/tasks/{task.hash.hex()[:12]}"

        def ask(verb: str) -> None:
            if by == "command":
                assert crowdml("task", verb, task.name, "--folder", str(folder)).code == 0
                wanted = {"pause": "paused", "resume": "running", "stop": "stopped"}[verb]
                soon(lambda: server.hub.states[task.hash] == wanted)
            else:
                desk.get(page)
                desk.post(f"{page}/state", to=verb)
                assert desk.page.status == 200

        def take_part() -> None:
            given = corners(DEVICES * EACH * 10)
            ended.append(run(home, server.address, server.code, task, given, devices=DEVICES, time_=clock))

        crowd = threading.Thread(target=take_part)
        crowd.start()
        soon(lambda: server.check_ins(task) >= DEVICES)
        clock.gate.clear()  # or it might be done before it is told to pause
        ask("pause")
        clock.gate.set()
        stood, slept = server.check_ins(task), len(clock.slept)
        soon(lambda: len(clock.slept) > slept + 3 * DEVICES)
        assert server.check_ins(task) == stood, "nothing is taken while it is paused"
        assert ">Resume</button>" in desk.get(page).text
        ask("resume")
        crowd.join(60)
        ((_, summary),) = ended
        assert summary.check_ins == DEVICES * EACH == server.check_ins(task), "each batch once"
        ask("stop")
        late = Device(Line("127.0.0.1", server.port))
        assert late.enrol(server.code).status == 201
        assert late.check_in(task).slug == "task-stopped"
        assert ">Run again</button>" in desk.get(page).text
    (row,) = crowdml("task", "list", "--folder", str(folder), "--json", "-").json["tasks"]
    assert (row["state"], row["why"]) == ("stopped", "by the command line" if by == "command" else "by anna")


def test_a_network_whose_steps_are_too_long_says_so_everywhere_and_its_last_good_version_stays(tmp_path: Path):
    task, folder = settled(parse(text("runs-away", rate=1e6, server_rate=1e6))), tmp_path / "server"
    with serving(folder, task) as server:
        run(joined(tmp_path / "fleet", task), server.address, server.code, task, corners(1200), devices=DEVICES)
        version = server.hub.find(task.hash).offer.version
        weights = decode("local/weights/1", server.hub.find(task.hash).offer.body).weights
        study = f"/studies/{task.hash.hex()[:12]}"
        said = "It has ended: the weights were no longer finite: the steps are too long"
        assert said in log_in(server.address, folder).get(f"/operator/tasks/{task.hash.hex()[:12]}").text
        assert "its model diverged" in asked(server.address, study)
        assert "sein Modell alle Grenzen verließ" in asked(server.address, f"{study}?lang=de")
    (row,) = crowdml("task", "list", "--folder", str(folder), "--json", "-").json["tasks"]
    assert row["state"] == "stopped"
    assert row["why"].startswith("the weights were no longer finite")
    assert "runs-away is stopped: the weights were no longer finite" in " ".join(
        crowdml("task", "list", "--folder", str(folder)).out.split()
    )
    with serving(folder) as server:  # a restart changes nothing of that
        offer = server.hub.find(task.hash).offer
        assert offer.version == version
        np.testing.assert_array_equal(decode(offer.kind, offer.body).weights, weights)
        assert np.isfinite(weights).all()
        assert server.hub.states[task.hash] == "stopped"
