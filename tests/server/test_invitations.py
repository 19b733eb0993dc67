"""Invitations in batches: what is written, what is kept, and who gets in."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from device import Device, Running, make_task, serving

from crowdml.server.hub import code_hash, utc_now
from crowdml.server.invitations import (
    BadInvitation,
    Batch,
    Card,
    batch_csv,
    check_address,
    make_batch,
    parse_end,
    qr_svg,
    sheet_html,
    sheets,
)
from crowdml.storage.server import Store
from crowdml.storage.server.operating import end_sheet

TASK, OTHER = make_task("one"), make_task("two")
NOW = "2026-05-01T12:00:00.000000+00:00"
WHERE = "https://study.example"


@pytest.fixture
def store() -> Store:
    found = Store("sqlite://")
    for task in (TASK, OTHER):
        found.add_task(task.canonical, task.name, NOW, "running")
    return found


def test_a_batch_is_as_many_codes_and_the_store_has_their_hashes_alone(store: Store):
    batch = make_batch(store, NOW, WHERE, number=50, uses=2, rate=10, tasks=[TASK.hash], label="Class 7b", by="anna")
    codes = {card.code for card in batch.cards}
    assert len(codes) == 50
    assert all(re.fullmatch(r"([0-9a-hjkmnp-tv-z]{4}-){4}[0-9a-hjkmnp-tv-z]{4}", code) for code in codes)
    kept = store.invitations()
    assert {each.code_hash for each in kept} == {code_hash(code) for code in codes}
    assert {(each.uses, each.rate, each.tasks) for each in kept} == {(2, 10, (TASK.hash,))}
    (said,) = [event.detail for event in store.events() if event.kind == "invited"]
    assert said == "anna: 50 invitations, 'Class 7b'"
    assert not [code for code in codes if code in said]


def test_a_batch_is_made_whole_or_not_at_all(store: Store):
    from crowdml.storage.server import StoreError

    with pytest.raises(StoreError):
        make_batch(store, NOW, WHERE, number=3, tasks=[TASK.hash, b"\0" * 32])
    assert store.invitations() == []


@pytest.mark.parametrize(
    ("asked", "about"),
    [
        ({"number": 0}, "number"),
        ({"number": 10_001}, "number"),
        ({"uses": 0}, "uses"),
        ({"rate": 0}, "rate"),
        ({"label": "x" * 81}, "label"),
    ],
)
def test_what_lets_nobody_in_is_refused_by_its_field(store: Store, asked: dict[str, object], about: str):
    with pytest.raises(BadInvitation) as refused:
        make_batch(store, NOW, WHERE, **asked)
    assert refused.value.about == about
    assert store.invitations() == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("30d", "2026-05-31T12:00:00.000000+00:00"),
        ("12h", "2026-05-02T00:00:00.000000+00:00"),
        ("2 w", "2026-05-15T12:00:00.000000+00:00"),
        ("2026-05-02", "2026-05-03T00:00:00.000000+00:00"),
        ("2026-05-02T08:00+02:00", "2026-05-02T06:00:00.000000+00:00"),
        ("never", None),
        ("", None),
    ],
)
def test_an_end_is_said_in_several_ways(text: str, end: str | None):
    assert parse_end(text, NOW) == end


@pytest.mark.parametrize("text", ["soon", "0d", "2026-04-30", "99999d", "2026-13-01", "-3d"])
def test_an_end_that_is_none_is_refused(text: str):
    with pytest.raises(BadInvitation):
        parse_end(text, NOW)


def test_a_csv_has_label_code_url_and_command_and_nothing_that_a_spreadsheet_computes():
    cards = tuple(Card(label, "abc", f"{WHERE}/join/abc", "crowdml join") for label in ("=1+1", "@x", 'a "b", c'))
    rows = list(csv.reader(io.StringIO(batch_csv(Batch("t", WHERE, 1, None, None, cards)))))
    assert rows[0] == ["label", "code", "url", "command"]
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'@x", 'a "b", c']


def test_a_sheet_has_a_qr_code_the_code_in_text_the_title_and_the_address_of_each(store: Store):
    batch = make_batch(store, NOW, WHERE, number=9, label="<b>", title="Who & what?", ends_at=parse_end("1d", NOW))
    page = sheet_html(batch)
    assert page.count("<svg") == page.count('class="card"') == 9
    assert "Who &amp; what?" in page
    assert "&lt;b&gt; 9 of 9" in page
    assert "For one device, until 2026-05-02 12:00 UTC" in page
    for card in batch.cards:
        assert f"<code>{card.code}</code>" in page
    assert not re.search(r"(src|href)=", page), "it needs nothing from anywhere"


def test_a_qr_code_is_the_one_that_the_text_stands_for():
    import segno

    drawn = ET.fromstring(qr_svg(f"{WHERE}/join/abc"))
    width = float(drawn.attrib["viewBox"].split()[2])
    assert width == segno.make(f"{WHERE}/join/abc", error="m", micro=False).symbol_size(border=4)[0]


def test_invitations_of_one_batch_are_listed_and_ended_together(store: Store):
    make_batch(store, NOW, WHERE, number=3, label="first", tasks=[TASK.hash, OTHER.hash])
    make_batch(store, "2026-05-01T13:00:00+00:00", WHERE, label="second")
    found = sheets(store)
    assert [(each.label, each.number, each.uses) for each in found] == [("second", 1, 1), ("first", 3, 3)]
    assert found[1].tasks == (TASK.hash, OTHER.hash)
    later = "2026-05-01T14:00:00.000000+00:00"
    assert found[1].is_open(later)
    assert end_sheet(store, found[1].code_hashes, later) == 3
    assert not sheets(store)[1].is_open(later)
    assert sheets(store)[0].is_open(later)


@pytest.mark.parametrize(
    "text", ["study.example", "ftp://x", "https://", "https://x?y", "https://a:b@x/", "javascript:x"]
)
def test_an_address_that_nobody_can_follow_is_refused(text: str):
    with pytest.raises(BadInvitation):
        check_address(text)
    assert check_address(" https://study.example:8443/x/ ") == "https://study.example:8443/x"


@pytest.fixture
def server(tmp_path: Path):
    with serving(tmp_path / "data", TASK, OTHER, invite=0) as running:
        yield running


def test_a_code_typed_in_capitals_is_the_same_code(server: Running):
    (card,) = make_batch(server.hub.store, utc_now(), WHERE, number=1, tasks=[TASK.hash]).cards
    assert Device(server.line()).enrol(card.code.upper()).status == 201


def test_a_device_comes_in_by_a_code_of_a_batch_as_often_and_as_fast_as_it_allows(server: Running):
    hub = server.hub
    batch = make_batch(hub.store, utc_now(), WHERE, number=2, uses=2, rate=1, tasks=[TASK.hash])
    first, second = (card.code for card in batch.cards)
    assert Device(server.line()).enrol(first).status == 201
    slowed = Device(server.line()).enrol(first)
    assert slowed.slug == "too-many"
    assert int(slowed.headers["retry-after"]) > 3000
    device = Device(server.line())
    assert device.enrol(second).status == 201
    assert device.check_in(OTHER).slug == "not-joined"
    assert device.check_in(TASK).status == 202
    (sheet,) = sheets(hub.store)
    end_sheet(hub.store, sheet.code_hashes, utc_now())
    assert Device(server.line()).enrol(second).slug == "invitation"
