"""Live pages: news as they come, a bounded number of them, and an end when the server stops."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path

from crowd import Crowd, open_crowd

from crowdml.server.portal.live import MOST_OF_ONE


class Listener:
    """Reads a stream of events, one at a time."""

    def __init__(self, crowd: Crowd, path: str, language: str = "en") -> None:
        host, _, port = crowd.base.removeprefix("http://").partition(":")
        self.line = http.client.HTTPConnection(host, int(port), timeout=30)
        self.line.request("GET", path, headers={"Accept": "text/event-stream", "Accept-Language": language})
        self.answer = self.line.getresponse()

    def next(self) -> dict[str, object]:
        """The next news; lines that only say that the server is there are passed over."""
        while True:
            line = self.answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    def close(self) -> None:
        self.line.close()


def test_numbers_come_at_once_and_again_when_they_change(crowd: Crowd):
    with closing(Listener(crowd, f"{crowd.path}/live")) as stream:
        assert stream.answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert stream.answer.getheader("cache-control") == "no-store"
        first = stream.next()
        assert (first["check_ins"], first["state_text"], first["error"]) == ("0", "Running", "no check-in yet")
        crowd.check_in(crowd.device())
        news = stream.next()
        while news["index"] != 1:
            news = stream.next()
        assert (news["check_ins"], news["devices"]) == ("1", "1")


def test_news_are_in_the_readers_language(crowd: Crowd):
    with closing(Listener(crowd, f"{crowd.path}/live", "de")) as stream:
        assert stream.next()["state_text"] == "Läuft"


def test_a_closed_study_tells_nothing_of_how_it_goes(crowd: Crowd):
    crowd.running.hub.store.set_closed(crowd.task.hash, True, "2026-01-01T00:00:00+00:00")
    with closing(Listener(crowd, f"{crowd.path}/live")) as stream:
        assert set(stream.next()) == {"state", "state_text", "check_ins", "devices"}


def test_too_many_live_pages_of_one_address_are_refused_until_one_closes(crowd: Crowd):
    open_pages = [Listener(crowd, f"{crowd.path}/live") for _ in range(MOST_OF_ONE)]
    for each in open_pages:
        each.next()
    refused = crowd.running.line().ask("GET", f"{crowd.path}/live")
    assert (refused.slug, refused.headers["retry-after"]) == ("busy", "60")
    open_pages.pop().close()
    while True:  # the server notices at its next look
        again = Listener(crowd, f"{crowd.path}/live")
        open_pages.append(again)
        if again.answer.status == 200:
            break
        again.close()
    for each in open_pages:
        each.close()


def test_a_stop_ends_live_pages_cleanly_and_does_not_wait_for_them(tmp_path: Path):
    with open_crowd(tmp_path / "data") as crowd:
        stream = Listener(crowd, f"{crowd.path}/live")
        stream.next()
        crowd.running.started.stop()
        rest = stream.answer.read()  # raises where the stream was cut off
        assert rest in (b"", b"\n")
        stream.close()


def test_whoever_asks_for_the_head_of_a_live_page_gets_it_and_no_stream(crowd: Crowd):
    answer = crowd.running.line().ask("HEAD", f"{crowd.path}/live")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_an_unknown_study_has_no_live_page(crowd: Crowd):
    assert crowd.running.line().ask("GET", "/studies/000000000000/live").slug == "unknown-task"
