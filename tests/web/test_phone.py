"""A phone joins by scanning a code: the whole path in a real Chromium, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from phones import Crowd, Phone, chromium, phone, violations, watch
from playwright.sync_api import expect

from crowdml.protocols import settled
from crowdml.server.limits import Limits
from crowdml.storage.server import Store
from crowdml.task import Task, load, parse
from crowdml.wire.envelopes import open_signed

pytestmark = pytest.mark.browser

ACTIVITY = str(Path(__file__).resolve().parents[2] / "src/crowdml/tasks/activity.toml")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("NO CHROMIUM ON THIS MACHINE: no phone took part in anything")
        yield found


def serve(folder: Path, *tasks: Task) -> Any:
    from device import serving

    return serving(folder, *tasks, limits=Limits(device_rate=1e6, device_burst=1e6))


def small(batch: int = 2, samples: int = 40, name: str = "small") -> Task:
    """The activity task with batches that a test fills at once."""
    return settled(parse(toml_of(batch, samples, name)))


def toml_of(batch: int, samples: int, name: str) -> str:
    text = Path(ACTIVITY).read_text(encoding="utf-8")
    text = text.replace("batch = 20", f"batch = {batch}").replace("samples = 2000", f"samples = {samples}")
    text = text.replace("error = 0.05", "")  # a few noisy counts would end the study
    return text.replace('"activity"', f'"{name}"').replace("buffer = 200", f"buffer = {10 * batch}")


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    task = small()
    with serve(tmp_path / "data", task) as running:
        yield Crowd(running, task)


def join(crowd: Crowd, owner: Phone) -> None:
    owner.open(f"/join/{crowd.running.started.code}")
    owner.join()


def is_clean(owner: Phone) -> None:
    assert [said for said in owner.complaints if "Failed to load resource" not in said] == []
    assert owner.outside == []


def test_a_phone_takes_part_from_the_scanned_address_to_the_verified_receipt(tmp_path: Path, browser: Any):
    task = settled(load(ACTIVITY))
    with serve(tmp_path / "data", task) as running, phone(browser, running.started.address) as owner:
        owner.open(f"/join/{running.started.code}")
        owner.join()
        owner.say("still")
        owner.move(20)
        owner.gives(1)
        assert owner.taps <= 4
        head = running.hub.store.head(task.hash)
        assert head.index == 1
        (message,) = owner.stored("messages")
        assert bytes(message["bytes"]) == owner.posted[0]
        assert len(owner.stored("charges")) == 3
        owner.page.locator("#phone-live summary").first.tap()
        owner.page.locator("#phone-sent summary").tap()
        assert bytes.fromhex(owner.page.locator("#phone-sent pre").inner_text()) == owner.posted[0]
        is_clean(owner)


# --- what a crash, a second tab or a lost network changes ---


def test_a_check_in_that_the_network_cut_is_sent_again_byte_for_byte_and_charged_once(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.page.context.route("**/check-in", cut_once())
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        first, *again = owner.posted
        assert again
        assert all(each == first for each in again)
        assert len(owner.stored("charges")) == 3
        assert len(owner.stored("messages")) == 1
        assert crowd.running.hub.store.head(crowd.task.hash).index == 1
        is_clean(owner)


def cut_once() -> Any:
    """Lets the request reach the server, and loses the answer; only the first time."""
    seen: list[int] = []

    def cut(route: Any) -> None:
        seen.append(1)
        if len(seen) > 1:
            route.continue_()
            return
        route.fetch()
        route.abort("connectionreset")

    return cut


def test_a_tab_that_dies_between_write_and_send_sends_the_same_bytes_when_it_is_opened_again(
    crowd: Crowd, browser: Any
):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.page.context.route("**/check-in", lambda route: route.abort("internetdisconnected"))
        owner.say("on foot")
        owner.move(2)
        expect(owner.page.locator("#phone-unanswered")).to_be_visible()
        (written,) = owner.stored("messages")
        assert crowd.running.hub.store.head(crowd.task.hash).index == 0
        again = watch(owner.page.context.new_page(), crowd.base)
        owner.page.close()
        again.page.context.unroute("**/check-in")
        again.open("/phone")
        again.gives(1)
        assert bytes(written["bytes"]) == again.posted[-1]
        assert len(again.stored("charges")) == 3
        assert again.stored("samples") == []
        is_clean(again)


def test_a_tab_that_dies_while_samples_wait_goes_on_with_them(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.say("still")
        owner.move(1)
        expect(owner.page.locator("#phone-waiting")).to_have_text("1 of 2 samples for the next contribution")
        again = watch(owner.page.context.new_page(), crowd.base)
        owner.page.close()
        again.open("/phone")
        again.page.wait_for_selector("#phone-live:not([hidden])")
        expect(again.page.locator("#phone-waiting")).to_have_text("1 of 2 samples for the next contribution")
        again.say("on foot")
        again.move(1)
        again.gives(1)
        is_clean(again)


def test_two_tabs_are_one_device(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        other = watch(owner.page.context.new_page(), crowd.base)
        other.open("/phone")
        other.page.wait_for_selector("#phone-elsewhere:not([hidden])")
        owner.page.bring_to_front()
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        assert other.page.locator("#phone-live").is_hidden()
        owner.page.close()
        other.gives(1)
        other.say("still")
        other.move(2)
        other.gives(2)
        is_clean(other)


# --- what ends it, and what makes it wait ---


def test_a_spent_budget_ends_it_with_a_sentence_and_nothing_more_is_sent(tmp_path: Path, browser: Any):
    task = small(samples=4)
    with serve(tmp_path / "data", task) as running, phone(browser, running.started.address) as owner:
        join(Crowd(running, task), owner)
        owner.say("still")
        owner.move(6)
        expect(owner.page.locator("#phone-phase")).to_contain_text("The budget is spent")
        assert len(owner.posted) == 2
        assert running.hub.store.head(task.hash).index == 2
        assert owner.text("phone-left") == "0 samples of this study's budget are left."
        is_clean(owner)


def test_a_paused_task_is_waited_for_and_a_stopped_one_ends_it(crowd: Crowd, browser: Any):
    hub = crowd.running.hub
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        crowd.running.run(hub.change(crowd.task.hash, "pause"))
        owner.say("still")
        owner.move(2)
        expect(owner.page.locator("#phone-phase")).to_contain_text("The study is paused")
        assert owner.stored("charges") == []
        crowd.running.run(hub.change(crowd.task.hash, "resume"))
        owner.gives(1)
        crowd.running.run(hub.change(crowd.task.hash, "stop"))
        owner.move(2)
        expect(owner.page.locator("#phone-phase")).to_contain_text("This study has ended")
        assert len(owner.stored("charges")) == 3
        is_clean(owner)


def test_a_phone_withdraws_and_erases_itself(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        owner.tap("#phone-leave")
        owner.tap("#phone-withdraw")
        expect(owner.page.locator("#phone-phase")).to_contain_text("This phone has withdrawn")
        (membership,) = owner.stored("memberships")
        assert membership["withdrawn"] is True
        owner.tap("#phone-erase")
        owner.page.wait_for_selector("#phone-none:not([hidden])")
        assert owner.stored("identity", "crowdml-key") == []
        is_clean(owner)


def test_a_withdrawal_that_the_server_did_not_hear_goes_on_when_the_page_is_opened_again(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.page.context.route("**/withdraw", lambda route: route.abort("internetdisconnected"))
        owner.tap("#phone-leave")
        owner.tap("#phone-withdraw")
        expect(owner.page.locator("#phone-unanswered")).to_be_visible()
        again = watch(owner.page.context.new_page(), crowd.base)
        owner.page.close()
        again.page.context.unroute("**/withdraw")
        again.open(f"/join/{crowd.running.started.code}")
        expect(again.page.locator("#phone-phase")).to_contain_text("This phone has withdrawn")
        (membership,) = again.stored("memberships")
        assert membership["withdrawn"] is True
        assert again.stored("charges") == []
        is_clean(again)


def test_while_its_owner_pauses_a_label_starts_no_sensor(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.tap("#phone-pause")
        expect(owner.page.locator("#phone-phase")).to_contain_text("paused", ignore_case=True)
        owner.say("still")
        owner.move(2)
        assert owner.stored("samples") == []
        owner.tap("#phone-pause")
        expect(owner.page.locator("#phone-live")).not_to_have_attribute("data-sensing", "off")
        owner.move(2)
        owner.gives(1)


def test_an_answer_to_one_study_is_not_heard_by_the_next(tmp_path: Path, browser: Any):
    one, other = small(name="one"), small(name="other")
    with serve(tmp_path / "data", one, other) as running, phone(browser, running.started.address) as owner:
        for task in (one, other):
            join_only(owner, running.started.code, task)
        held_one, held_other = hold(owner, one), hold(owner, other)
        owner.say("still")
        owner.move(2)
        owner.page.wait_for_timeout(500)
        owner.tap("#phone-others button")
        expect(owner.page.locator("#phone-live")).to_have_attribute("data-sensing", "off")
        owner.page.evaluate("window.moved = undefined")
        owner.say("on foot")
        owner.move(2)
        owner.page.wait_for_timeout(500)
        assert [len(held_one), len(held_other)] == [1, 1]
        held_other[0].continue_()
        owner.page.wait_for_timeout(500)
        assert owner.stored("charges") == []
        held_one[0].continue_()
        owner.gives(1)
        assert {charge["task"] for charge in owner.stored("charges")} == {one.hash.hex()}
        is_clean(owner)


def hold(owner: Phone, task: Task) -> list[Any]:
    """Requests for a publication, which wait until a test lets them go on."""
    held: list[Any] = []
    owner.page.context.route(f"**/{task.hash.hex()}/publication", lambda route: held.extend([route]))
    return held


def test_a_closed_study_is_refused_before_consent(crowd: Crowd, browser: Any):
    crowd.running.run(crowd.running.hub.set_closed(crowd.task.hash, True))
    with phone(browser, crowd.base) as owner:
        owner.open(f"/join/{crowd.running.started.code}")
        expect(owner.page.locator("#phone-refusal")).to_contain_text("This study is closed")
        assert owner.page.locator("button[data-join]").is_disabled()
        assert owner.stored("memberships") == []


# --- a file ---

ROWS = """
name = "rows"
title = "Two kinds of rows"
purpose = "Learn from rows of a file."
collects = "Rows of a file."
features = { dimension = 3, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["left", "right"] }
model = { kind = "softmax" }
protocol = { kind = "%s", batch = 3, %s }
stop = { steps = 2000 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { %s = 0.9 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 60 }
"""
SGD = ("sgd", 'step = { schedule = "constant", c = 1.0 }, radius = 10.0', "gradient")
LOCAL = ("local_updates", 'local_steps = 2, rate = { schedule = "constant", c = 0.5 }', "update")
LINES = (
    b"a,b,c,kind\n0.1,0.2,0.3,left\n0.4,nothing,0.1,right\n\n0.5,0.5,0.5,right\n1,2,3,left\n0,0,0,up\n0.3,0.1,0.2,1\n"
)
"""Seven rows: a number that is none, a blank line, and a label of no class keep their places."""


@pytest.mark.parametrize("protocol", [SGD, LOCAL], ids=["sgd", "local_updates"])
def test_rows_of_a_file_are_given_once_each_whatever_stands_in_them(tmp_path: Path, browser: Any, protocol: Any):
    task = settled(parse(ROWS % protocol))
    with serve(tmp_path / "data", task) as running, phone(browser, running.started.address) as owner:
        join(Crowd(running, task), owner)
        bring(owner, LINES)
        expect(owner.page.locator("#phone-rows")).to_contain_text("7 rows are new")
        expect(owner.page.locator("#phone-rows")).to_contain_text("does not know this file")
        assert owner.stored("samples") == []
        owner.tap("#phone-new")
        owner.gives(2)
        expect(owner.page.locator("#phone-rows")).to_contain_text("A field that is no finite number: 1.")
        expect(owner.page.locator("#phone-waiting")).to_have_text("1 of 3 samples for the next contribution")
        bring(owner, LINES + b"0.1,0.1,0.1,left\n0.2,0.2,0.2,right\n")  # the file grew
        owner.gives(3)
        expect(owner.page.locator("#phone-rows")).to_contain_text(
            "7 rows of this file were read before; 2 rows are new"
        )
        assert owner.text("phone-samples") == "9 of 60"
        assert running.hub.store.head(task.hash).index == 3
        is_clean(owner)


def test_the_rest_of_a_file_stays_with_its_study_and_is_asked_for_again_after_all_was_erased(
    tmp_path: Path, browser: Any
):
    one, other = (settled(parse((ROWS % SGD).replace('"rows"', f'"{name}"'))) for name in ("one", "other"))
    lines = b"".join(b"0.%02d,0.2,0.3,left\n" % at for at in range(60))  # more than a device keeps
    with serve(tmp_path / "data", one, other) as running, phone(browser, running.started.address) as owner:
        code = running.started.code
        join_only(owner, code, other)
        join_only(owner, code, one)
        running.run(running.hub.change(one.hash, "pause"))
        bring(owner, lines)
        owner.tap("#phone-new")
        expect(owner.page.locator("#phone-phase")).to_contain_text("The study is paused")
        waiting = len(owner.stored("samples"))
        assert 0 < waiting < 60
        owner.tap("#phone-others button")
        expect(owner.page.locator("#phone-waiting")).to_contain_text("0 of 3")
        owner.page.wait_for_timeout(500)
        assert {each["task"] for each in owner.stored("samples")} == {one.hash.hex()}
        assert len(owner.stored("samples")) == waiting
        assert owner.posted == []
        owner.tap("#phone-leave")
        owner.tap("#phone-withdraw")
        owner.tap("#phone-erase")
        owner.page.wait_for_selector("#phone-none:not([hidden])")
        join_only(owner, code, other)
        bring(owner, lines)
        expect(owner.page.locator("#phone-rows")).to_contain_text("does not know this file")
        assert owner.stored("samples") == []


def join_only(owner: Phone, code: str, task: Task) -> None:
    owner.page.unroute("**/join/*")
    owner.page.route("**/join/*", only(task))
    owner.open(f"/join/{code}")
    owner.join()


def bring(owner: Phone, lines: bytes) -> None:
    owner.page.wait_for_selector("#phone-file:not([hidden])")
    owner.page.locator("#phone-source").set_input_files({"name": "rows.csv", "mimeType": "text/csv", "buffer": lines})


def test_a_file_of_another_width_is_refused_by_its_first_line(tmp_path: Path, browser: Any):
    task = settled(parse(ROWS % SGD))
    with serve(tmp_path / "data", task) as running, phone(browser, running.started.address) as owner:
        join(Crowd(running, task), owner)
        bring(owner, b"0.1,0.2,left\n")
        expect(owner.page.locator("#phone-rows")).to_contain_text("the study wants 4 fields in a line")
        assert owner.stored("samples") == []


# --- what was lost ---


def delete(owner: Phone, database: str) -> None:
    """Clear a database as a browser may, while no device is open."""
    owner.open("/static/icon.svg")
    owner.page.evaluate(
        """(name) => new Promise((resolve, reject) => {
          const request = indexedDB.deleteDatabase(name);
          request.onsuccess = resolve;
          request.onerror = reject;
        })""",
        database,
    )


def test_a_lost_record_comes_back_from_the_statement_that_the_device_signed(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.say("still")
        owner.move(4)
        owner.gives(2)
        before = crowd.running.hub.store.statement(owner.stored("identity", "crowdml-key")[0]["id"])
        delete(owner, "crowdml")
        owner.open(f"/join/{crowd.running.started.code}")
        owner.page.wait_for_selector("#phone-lost:not([hidden])")
        owner.join()
        expect(owner.page.locator("#phone-samples")).to_have_text("4 of 40")
        expect(owner.page.locator("#phone-old")).to_contain_text("lost its record")
        owner.page.evaluate("window.moved = undefined")
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        after = open_signed(crowd.running.hub.store.statement(owner.stored("identity", "crowdml-key")[0]["id"]))
        assert after.statement.samples == open_signed(before).statement.samples + 2 == 6
        assert crowd.running.hub.store.head(crowd.task.hash).index == 3


def test_a_lost_record_that_the_server_cannot_show_leaves_the_device_exhausted(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.page.context.route("**/check-in", lambda route: route.abort("internetdisconnected"))
        owner.say("still")
        owner.move(2)
        expect(owner.page.locator("#phone-unanswered")).to_be_visible()
        delete(owner, "crowdml")
        owner.page.context.unroute("**/check-in")
        owner.open(f"/join/{crowd.running.started.code}")
        owner.join()
        expect(owner.page.locator("#phone-phase")).to_contain_text("What this device has given is not known")
        assert crowd.running.hub.store.head(crowd.task.hash).index == 0


def test_a_phone_whose_key_is_gone_is_a_new_device_and_says_that_the_old_total_cannot_be_known(
    crowd: Crowd, browser: Any
):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        (old,) = {each["id"] for each in owner.stored("identity", "crowdml-key") if "id" in each}
        delete(owner, "crowdml-key")
        owner.open(f"/join/{crowd.running.started.code}")
        expect(owner.page.locator("#phone-lost")).to_contain_text("What that device gave cannot be known")
        owner.join()
        (new,) = {each["id"] for each in owner.stored("identity", "crowdml-key") if "id" in each}
        assert new != old
        expect(owner.page.locator("#phone-samples")).to_have_text("0 of 40")
        expect(owner.page.locator("#phone-old")).to_contain_text("cannot be known")
        owner.page.evaluate("window.moved = undefined")
        owner.say("still")
        owner.move(2)
        owner.gives(1)


def test_an_older_record_than_the_server_can_prove_ends_the_device_for_good(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        owner.open("/static/icon.svg")
        owner.page.evaluate(
            """() => new Promise((resolve) => {
              const request = indexedDB.open("crowdml");
              request.onsuccess = () => {
                const gone = request.result.transaction(["messages", "charges"], "readwrite");
                gone.objectStore("messages").clear();
                gone.objectStore("charges").clear();
                gone.oncomplete = () => { request.result.close(); resolve(); };
              };
            })"""
        )
        owner.open("/phone")
        expect(owner.page.locator("#phone-phase")).to_contain_text("its record was lost or is an older copy")
        assert len(owner.posted) == 1
        owner.page.reload()
        expect(owner.page.locator("#phone-phase")).to_contain_text("its record was lost or is an older copy")


# --- the sensor ---


def test_a_sensor_of_the_browsers_own_is_heard_in_real_time(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        override(owner, x=1.0, y=2.0, z=9.5)
        join(crowd, owner)
        owner.say("still")
        expect(owner.page.locator("#phone-sensing")).to_have_text("Sensing.")
        owner.gives(1, timeout=40_000)
        (message,) = owner.stored("messages")
        assert message["receipt"]


def override(owner: Phone, **reading: float) -> None:
    """Readings of the browser's emulated sensors, as DevTools sets them."""
    devtools = owner.page.context.new_cdp_session(owner.page)
    for kind in ("accelerometer", "linear-acceleration", "gyroscope"):
        devtools.send("Emulation.setSensorOverrideEnabled", {"enabled": True, "type": kind, "metadata": {}})
        devtools.send("Emulation.setSensorOverrideReadings", {"type": kind, "reading": {"xyz": reading}})


def test_a_sensor_of_zeros_a_silent_one_and_a_hidden_page_are_told_apart(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        told = owner.page.locator("#phone-sensing")
        expect(told).to_have_text("Tap what you are doing. Sensing starts then.")
        owner.say("still")
        expect(told).to_contain_text("No motion arrives")
        owner.page.evaluate(
            """() => {
              Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        expect(told).to_have_text("Not sensing: the page is hidden.")
        owner.move(1)
        assert owner.stored("samples") == []
    with phone(browser, crowd.base) as owner:
        override(owner, x=0.0, y=0.0, z=0.0)
        join(crowd, owner)
        owner.say("still")
        expect(owner.page.locator("#phone-sensing")).to_contain_text("nothing but zeros")
        assert owner.stored("samples") == []


def test_a_refused_permission_joins_nothing_and_says_what_to_do(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        owner.page.add_init_script("DeviceMotionEvent.requestPermission = async () => 'denied'")
        owner.open(f"/join/{crowd.running.started.code}")
        owner.page.wait_for_selector("#phone[data-ready]")
        owner.tap("button[data-join]")
        expect(owner.page.locator("#phone-refusal")).to_contain_text("did not allow the motion sensor")
        assert owner.stored("memberships") == []
        assert owner.stored("identity", "crowdml-key") == []


def test_a_page_without_https_says_so_before_consent(crowd: Crowd, browser: Any):
    with phone(browser, "http://study.example") as owner:
        elsewhere = lambda route: route.fulfill(  # noqa: E731
            response=route.fetch(url=route.request.url.replace("http://study.example", crowd.base))
        )
        owner.page.route("http://study.example/**", elsewhere)
        owner.open(f"/join/{crowd.running.started.code}")
        expect(owner.page.locator("#phone-refusal")).to_contain_text("not opened over HTTPS")
        assert owner.page.locator("button[data-join]").is_disabled()


def test_a_task_under_masks_says_before_consent_that_a_browser_cannot(tmp_path: Path, browser: Any):
    task = load(str(Path(ACTIVITY).parent / "digits-masked.toml"))
    with serve(tmp_path / "data", settled(task)) as running, phone(browser, running.started.address) as owner:
        owner.open(f"/join/{running.started.code}")
        expect(owner.page.locator("#phone-consent .notice")).to_contain_text("adds devices up under masks")
        assert owner.page.locator("button[data-join]").count() == 0


def test_labels_can_be_taken_back_and_no_sample_is_kept_or_dropped_for_one(tmp_path: Path, browser: Any):
    task = small(batch=4)
    with serve(tmp_path / "data", task) as running, phone(browser, running.started.address) as owner:
        join(Crowd(running, task), owner)
        owner.say("still")
        owner.move(1)
        owner.say("in vehicle")
        owner.move(2)
        expect(owner.page.locator("#phone-waiting")).to_contain_text("3 of 4")
        assert [each["y"] for each in owner.stored("samples")] == [0, 2, 2]
        owner.tap("#phone-undo")
        expect(owner.page.locator('[aria-pressed="true"]')).to_have_text("still")
        owner.page.wait_for_timeout(300)
        assert [each["y"] for each in owner.stored("samples")] == [0, 0, 0]
        owner.tap("#phone-undo")
        owner.page.wait_for_timeout(300)
        assert [each["y"] for each in owner.stored("samples")] == [-1, -1, -1]


# --- the page ---


@pytest.mark.parametrize("language", ["en-GB", "de-DE"])
def test_every_state_is_accessible_and_fits_a_narrow_phone(crowd: Crowd, browser: Any, language: str):
    from test_browser import is_as_wide_as_the_window

    with phone(browser, crowd.base, size=(320, 640), locale=language, bypass_csp=True) as owner:

        def is_fine() -> None:
            is_as_wide_as_the_window(owner.page)
            assert violations(owner.page) == []
            assert small_targets(owner.page) == []

        owner.open("/phone")
        owner.page.wait_for_selector("#phone-none:not([hidden])")
        is_fine()
        owner.open(f"/join/{crowd.running.started.code}")
        owner.page.wait_for_selector("#phone[data-ready]")
        is_fine()
        owner.join()
        is_fine()
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        owner.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        is_fine()
        other = watch(owner.page.context.new_page(), crowd.base)
        other.open("/phone")
        other.page.wait_for_selector("#phone-elsewhere:not([hidden])")
        assert violations(other.page) == []
        other.page.close()
        owner.page.bring_to_front()
        owner.tap("#phone-leave")
        is_fine()
        owner.tap("#phone-withdraw")
        owner.page.wait_for_selector("#phone-erase:not([hidden])")
        is_fine()


def small_targets(page: Any) -> list[str]:
    """Buttons of the phone's part that are smaller than 44 px either way."""
    return page.evaluate(
        """() => [...document.querySelectorAll("#phone button, #phone .button, #phone summary")]
          .filter((each) => each.checkVisibility())
          .filter((each) => { const box = each.getBoundingClientRect(); return box.width < 44 || box.height < 44; })
          .map((each) => each.textContent)"""
    )


# --- a server that dies ---


@pytest.mark.kill
def test_a_server_that_is_killed_and_started_again_counts_each_check_in_once(tmp_path: Path, browser: Any):
    from process import Server

    task = small()
    path = tmp_path / "small.toml"
    path.write_text(toml_of(2, 40, "small"), encoding="utf-8")
    server = Server(tmp_path)
    code = server.start("--task", str(path), "--invite", "5")["code"]
    try:
        with phone(browser, f"http://127.0.0.1:{server.port}") as owner:
            owner.open(f"/join/{code}")
            owner.join()
            owner.say("still")
            owner.move(2)
            owner.gives(1)
            server.kill()
            owner.move(2)
            expect(owner.page.locator("#phone-unanswered")).to_be_visible()
            server.start()
            owner.gives(2)
            server.kill()
            server.start()
            owner.move(2)
            owner.gives(3, timeout=60_000)
            assert len(owner.stored("charges")) == 9
            assert owner.outside == []
            server.stop()
        with Store(server.where) as store:
            assert store.head(task.hash).index == 3
    finally:
        server.kill()


def test_a_phone_that_joins_a_second_study_keeps_one_ledger_and_goes_on_with_either(tmp_path: Path, browser: Any):
    one, other = small(name="one"), small(name="other")
    with serve(tmp_path / "data", one, other) as running, phone(browser, running.started.address) as owner:
        code = running.started.code
        owner.open(f"/join/{code}")
        owner.page.wait_for_selector("#phone[data-ready]")
        for task in (one, other):
            owner.page.locator(f'button[data-join="{task.hash.hex()}"]').wait_for()
        owner.page.locator(f'button[data-join="{one.hash.hex()}"]:enabled').tap()
        owner.page.wait_for_selector("#phone-live:not([hidden])")
        owner.say("still")
        owner.move(2)
        owner.gives(1)
        owner.page.route("**/join/*", only(other))
        owner.open(f"/join/{code}")
        owner.join()
        owner.page.evaluate("window.moved = undefined")
        owner.say("on foot")
        owner.move(2)
        owner.gives(1)
        assert [charge["task"] for charge in owner.stored("charges")].count(other.hash.hex()) == 3
        expect(owner.page.locator("#phone-samples")).to_have_text("2 of 40")
        assert len({each["first"] for each in owner.stored("charges")}) == 2
        owner.tap("#phone-others button")
        owner.say("still")
        owner.move(2)
        owner.gives(2)
        assert running.hub.store.head(one.hash).index == 2
        assert running.hub.store.head(other.hash).index == 1
        is_clean(owner)


def only(task: Task) -> Any:
    """The page of an invitation to one study: without the buttons of the others."""

    def trim(route: Any) -> None:
        answer = route.fetch()
        found = re.sub(rf'data-join="(?!{task.hash.hex()})[0-9a-f]+"', "", answer.text())
        route.fulfill(response=answer, body=found)

    return trim


def test_a_phone_that_withdrew_joins_again_as_another_device(crowd: Crowd, browser: Any):
    with phone(browser, crowd.base) as owner:
        join(crowd, owner)
        owner.tap("#phone-leave")
        owner.tap("#phone-withdraw")
        expect(owner.page.locator("#phone-phase")).to_contain_text("This phone has withdrawn")
        (old,) = {each["id"] for each in owner.stored("identity", "crowdml-key") if "id" in each}
        owner.tap("#phone-erase")
        owner.page.wait_for_selector("#phone-none:not([hidden])")
        join(crowd, owner)
        (new,) = {each["id"] for each in owner.stored("identity", "crowdml-key") if "id" in each}
        assert new != old
        is_clean(owner)
