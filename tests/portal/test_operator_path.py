"""An operator's whole path in a real Chromium: from the printed address to a model, and everything looked at."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from desk import PASSWORD
from device import Running, serving
from screens import DESKTOP, PHONE, Window, chromium, window

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet, Summary
from crowdml.device.folder import Folder, consent_to
from crowdml.device.joining import choose_task, fetch_task, list_tasks
from crowdml.device.member import Clock
from crowdml.device.sources import deal_sources
from crowdml.price import Price
from crowdml.server.limits import Limits

PICTURES = Path(__file__).resolve().parent.parent.parent / "out" / "screenshots"
LOOKS = (("desktop-light", DESKTOP, False), ("desktop-dark", DESKTOP, True),
         ("phone-light", PHONE, False), ("phone-dark", PHONE, True))  # fmt: skip
MANY = Limits(device_rate=1e6, device_burst=1e6)
DEVICES = 12

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("there is no Chromium here")
        yield found


@pytest.fixture
def server(tmp_path: Path, database: str | None) -> Iterator[Running]:
    with serving(tmp_path / "data", limits=MANY, invite=0, database=database) as running:
        yield running


def violations(page: Any) -> list[str]:
    """What axe finds on the page, WCAG A and AA and its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{page.url} {each['id']}: {[node['html'][:160] for node in each['nodes']][:3]}" for each in found]


def look_around(at: Window, name: str) -> None:
    """Pictures at both widths in both colours, no sideways scrolling, and nothing that axe minds."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for look, (width, height), dark in LOOKS:
        at.page.set_viewport_size({"width": width, "height": height})
        at.page.emulate_media(color_scheme="dark" if dark else "light")
        at.whole(PICTURES / f"operator-{name}-{look}.png")
        assert at.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is too wide for {look}"
        assert not violations(at.page)
    at.page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    at.page.emulate_media(color_scheme="light")


async def crowd_of(address: str, code: str, folder: Path) -> Summary:
    """Real devices, with real ledgers, over real HTTP, on digits 0 to 2."""
    client, home, clock = Client(address), Folder(folder), Clock()
    try:
        with home.locked():
            chosen = choose_task(await list_tasks(client), None)
            task, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
            home.accept(task, replace(consent_to(Price.of(protocol, task)), by="a test", at=clock.utc()))
            fleet = Fleet(home, client, task, protocol, devices=DEVICES, single=False, clock=clock)
            readers = deal_sources("shard:digits012", task, DEVICES)
            await fleet.enrol(code, None)
            return await fleet.run(lambda number: readers[number])
    finally:
        await client.close()


def fill(page: Any, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f'[name="{name.replace("__", ".")}"]').fill(value)


def test_an_operator_sets_up_writes_a_task_invites_watches_revokes_and_takes_the_model_home(
    browser: Any, server: Running, tmp_path: Path
):
    base = server.started.address
    assert server.started.setup is not None
    with window(browser, base, DESKTOP, accept_downloads=True) as at:
        page = at.page

        # the first account, by the printed address
        page.goto(server.started.setup)
        look_around(at, "setup")
        fill(page, name="anna", password=PASSWORD, again=PASSWORD)
        page.get_by_role("button", name="Make the account").click()
        page.get_by_role("heading", name="Overview").wait_for()
        look_around(at, "overview-empty")

        # a task by the form; what is wrong stands next to its field, and nothing typed is lost
        page.get_by_role("link", name="New task").click()
        look_around(at, "new")
        fill(page, name="my digits", title="Which digit is this: 0, 1 or 2?", features__dimension="64",
             purpose="Show a small crowd learning.", collects="Pictures of digits, 8 by 8 pixels. They stay here.",
             labels__classes="0\n1\n2", crowd__devices="40", protocol__batch="8", privacy__epsilon__gradient="2.0",
             privacy__epsilon__errors="0.5", privacy__epsilon__labels="0.5",
             privacy__budget__epsilon="3.0", privacy__budget__samples="400")  # fmt: skip
        page.locator('[name="privacy.mechanism"]').select_option("discrete-gaussian")
        page.get_by_role("button", name="Check and price it").click()
        assert page.locator("#flaw-name").inner_text().startswith("Letters, digits")
        assert page.locator('[name="labels.classes"]').input_value() == "0\n1\n2"
        look_around(at, "new-refused")
        fill(page, name="digits012")
        page.get_by_role("button", name="Check and price it").click()

        # the price, and what it is exactly
        page.get_by_role("heading", name="The price").wait_for()
        assert "all 50 check-ins" in page.content()
        assert re.search(r"[0-9a-f]{64}", page.content())
        assert server.hub.hosted() == [], "nothing is public yet"
        look_around(at, "draft")

        # simulate it, in a process of its own
        page.locator("#data").select_option("digits012")
        fill(page, devices="20", trials="2")
        page.get_by_role("button", name="Simulate").click()
        page.get_by_text("Expected accuracy at 20 devices").wait_for(timeout=240_000)
        assert "over 2 trials" in page.content()
        look_around(at, "draft-simulated")

        # start it
        page.get_by_role("button", name="Start the task").click()
        page.get_by_text("The task runs. Devices with an invitation may join now.").wait_for()
        (hosted,) = server.hub.hosted()
        assert hosted.state == "running"

        # invite with cards to print
        page.get_by_role("link", name="Invite devices").click()
        look_around(at, "invite")
        fill(page, label="Class 7b", number="3", uses=str(DEVICES), ends="7d", rate="1000")
        page.get_by_label("I know; only this machine").check()
        page.get_by_role("button", name="Make the codes").click()
        page.get_by_role("button", name="Print the cards").wait_for()
        assert page.locator(".qr-card svg").count() == 3
        look_around(at, "sheet")
        page.emulate_media(media="print")
        page.pdf(path=str(PICTURES / "operator-sheet.pdf"), format="A4")
        page.emulate_media(media="screen")
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save as CSV").click()
        rows = Path(saved.value.path()).read_text().splitlines()
        assert rows[0] == "label,code,url,command"
        assert len(rows) == 4
        code = rows[1].split(",")[1]

        # devices join and give
        with ThreadPoolExecutor(1) as beside:  # the browser's own loop runs in this thread
            summary = beside.submit(asyncio.run, crowd_of(base, code, tmp_path / "fleet")).result(120)
        assert summary.check_ins == hosted_check_ins(server) > DEVICES

        # health
        page.goto(f"{base}/operator")
        page.locator("#overview table").first.wait_for()
        page.get_by_text("From the signed totals of").wait_for()
        look_around(at, "overview")
        page.get_by_role("link", name="digits012").first.click()
        page.get_by_role("heading", name="Actions").wait_for()
        assert "updates (median)" in page.content()
        look_around(at, "task")
        page.goto(f"{base}/operator/devices?search=7b")
        assert page.locator("tbody tr").count() == DEVICES
        look_around(at, "devices")

        # revoke one, after a question
        page.locator("tbody a").first.click()
        look_around(at, "device")
        page.locator("summary", has_text="Revoke").click()
        page.get_by_role("button", name="Yes, revoke this device").click()
        page.get_by_text("nothing more is taken from it").wait_for()
        assert len(server.hub.keys) == DEVICES - 1
        page.goto(f"{base}/operator/invitations")
        look_around(at, "invitations")
        page.goto(f"{base}/operator/settings")
        look_around(at, "settings")

        # the model, then stop
        page.goto(f"{base}/operator/tasks/{hosted.task.hash.hex()[:12]}")
        with page.expect_download() as saved:
            page.get_by_role("link", name="Weights (safetensors)").click()
        data = Path(saved.value.path()).read_bytes()
        assert hosted.task.hash.hex().encode() in data
        page.locator("summary", has_text="Stop").click()
        page.get_by_role("button", name="Yes, stop it").click()
        page.get_by_text("The task is stopped. Its model stays.").wait_for()
        assert server.hub.states[hosted.task.hash] == "stopped"
        page.get_by_role("button", name="Log out anna").click()
        page.get_by_role("heading", name="Log in").wait_for()
        look_around(at, "login")
        assert not at.outside, "every request stays on this server"
        assert not [each for each in at.complaints if "422" not in each], at.complaints
    said = {event.kind: event.detail for event in server.hub.store.events()}
    assert {"drafted", "simulated", "running", "invited", "revoked", "downloaded", "stopped", "operator"} <= set(said)
    assert all("anna" in said[kind] for kind in ("drafted", "running", "invited", "revoked", "downloaded", "stopped"))


def hosted_check_ins(server: Running) -> int:
    return server.hub.hosted()[0].check_ins
