"""What a device's owner reads on a terminal: titles, local times, numbers for people, a budget with what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from cli_runner import crowdml, refused

from crowdml.device.folder import Folder, Server, consent_to
from crowdml.price import Price
from crowdml.privacy.losses import ZCDP, Pure, Total
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocols import find, settled
from crowdml.storage import Budget, Charge
from crowdml.task import find_task
from crowdml.texts import local_time

TASK = settled(find_task("digits012"))
PAID = Fraction(311, 1000)


@pytest.fixture
def zone() -> Iterator[Callable[[str], None]]:
    """Sets the clock of whoever reads to a time zone, until the test ends."""
    with pytest.MonkeyPatch.context() as patch:

        def move(name: str) -> None:
            patch.setenv("TZ", name)
            time.tzset()

        yield move
    time.tzset()


@pytest.fixture
def home(tmp_path: Path, zone: Callable[[str], None]) -> Folder:
    """A device in Berlin that joined `digits012` and gave one check-in of 28 samples."""
    zone("Europe/Berlin")
    made = Folder(tmp_path / "device")
    made.make()
    made.key()
    made.accept(TASK, consent_to(Price.of(find(TASK), TASK)))
    with made.ledger() as ledger:
        span = ledger.take_serials(28)
        charge = Charge(
            TASK.hash, "gradient", ZCDP(PAID), ZCDP(PAID * 28), Observer.ANYONE, Adjacency.REPLACE_SAMPLE,
            span[0], span[-1], "2026-11-17T03:37:01.300424+00:00",
        )  # fmt: skip
        ledger.charge(TASK.hash, [charge], [Budget(Fraction(10), 1e-6, 1000)])
    made.pin(Server("http://127.0.0.1:1", "00" * 32))
    return made


def said(home: Folder, *arguments: str) -> str:
    done = crowdml(*arguments, "--folder", str(home.path))
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    return " ".join(done.out.split())


def test_the_ledger_has_titles_local_times_and_an_epsilon_for_everything(home: Folder):
    """Review 2, users: owner 9 and 15. It had a hash, `zcdp 0.311` and a time in UTC to the microsecond."""
    shown = said(home, "ledger")
    assert "Which digit is this: 0, 1 or 2?" in shown
    assert "2026-11-17 04:37 gradient 0-27 4 anyone" in shown
    assert "(δ = 10⁻⁶), in 1 charge on 28 samples." in shown
    for word in (TASK.hash.hex()[:8], "zcdp", "e+0", "1e-06", "dearest", "+00:00"):
        assert word not in shown
    (charge,) = crowdml("ledger", "--folder", str(home.path), "--json", "-").json["charges"]
    assert (charge["loss"], charge["charged_at"]) == ("zcdp 311/1000", "2026-11-17T03:37:01.300424+00:00")
    assert (charge["task"], charge["title"]) == (TASK.hash.hex(), TASK.title)


def test_the_ledger_and_budget_show_have_the_owners_budget_with_what_is_left(home: Folder):
    """Review 2, users: owner 9 and 10."""
    for command in (("ledger",), ("budget", "show")):
        command_line = f"crowdml budget set --epsilon 1 --samples 2000 --folder {home.path}"
        shown = crowdml(*command, "--folder", str(home.path)).out
        assert "so only each study's own budget applies. Set one with, for example, `crowdml" in " ".join(shown.split())
        assert "".join(command_line.split()) in "".join(shown.split())
    assert crowdml("budget", "show", "--folder", str(home.path), "--json", "-").json["budget"] is None
    said(home, "budget", "set", "--epsilon", "8", "--samples", "2000")
    whole = (
        "Your budget over all studies: any one sample pays at most ε = 8; at most 2,000 samples (1,972 left); the "
        "device as a whole is not capped. All at δ = 10⁻⁶."
    )
    for command in (("ledger",), ("budget", "show")):
        assert whole in said(home, *command)
    shown = crowdml("budget", "show", "--folder", str(home.path), "--json", "-").json["budget"]
    assert (shown["epsilon"], shown["samples"], shown["samples_left"]) == (8.0, 2000, 1972)


def test_a_budget_is_changed_in_one_number_and_keeps_the_others(home: Folder):
    """Review 2, users: owner 10."""
    command = f"crowdml budget set --epsilon 6 --samples 2000 --folder {home.path}"
    assert f"There is no budget yet, so say --samples, too: {command}." in refused(
        "budget", "set", "--epsilon", "6", "--folder", str(home.path)
    )
    said(home, "budget", "set", "--epsilon", "8", "--samples", "2000", "--device-epsilon", "500")
    said(home, "budget", "set", "--epsilon", "6")
    assert home.budget is not None
    assert (home.budget.epsilon, home.budget.samples, home.budget.device_epsilon) == ("6", 2000, "500")
    said(home, "budget", "set", "--samples", "3000", "--device-epsilon", "none")
    assert (home.budget.epsilon, home.budget.samples, home.budget.device_epsilon) == ("6", 3000, None)
    assert "Say what to change" in refused("budget", "set", "--folder", str(home.path))


@pytest.mark.parametrize("text", ["abc", "1e20", "1000001", "-1", "nan", "1/0"])
def test_an_epsilon_that_a_person_types_is_a_number_up_to_a_million(home: Folder, text: str):
    """A newcomer's trial, owner 11: 1e20 was taken, and 'abc' was said not to lie between 1e-30 and 1e+30."""
    for option in ("--epsilon", "--device-epsilon"):
        why = refused(
            "budget", "set", "--epsilon", "1", "--samples", "9", f"{option}={text}", "--folder", str(home.path)
        )
        assert f"{option} '{text}' is not a number from 0 to 1,000,000. Write it as 1, 0.5 or 1/2." in why
    assert home.budget is None


def test_a_device_cap_says_why_less_is_left_than_the_difference(home: Folder):
    """A newcomer's trial, owner 8: 39.14 of 200 were left after 134.3 was paid."""
    said(home, "budget", "set", "--epsilon", "8", "--samples", "2000", "--device-epsilon", "200")
    shown = said(home, "budget", "show")
    found = crowdml("budget", "show", "--folder", str(home.path), "--json", "-").json["budget"]
    assert "was paid, because it must hold whatever is asked next)" in shown
    assert found["device_epsilon_left"] < 200


def test_a_budget_below_what_is_spent_says_so(home: Folder):
    """Review 2, users: owner 10. A budget of 2 after 4 was paid was taken without a word."""
    assert "already" not in said(home, "budget", "set", "--epsilon", "8", "--samples", "2000")
    shown = said(home, "budget", "set", "--epsilon", "2")
    assert "Samples that were given have paid up to ε = 4 already. That is more, and cannot be taken back." in shown
    assert f"A check-in of {TASK.title!r} costs a sample ε = 4: that study gets nothing more" in shown


def test_the_link_to_the_owners_page_is_said_to_open_once(home: Folder):
    """Review 2, users: owner 11."""
    shown = crowdml("ledger", "--web", "--no-open", "--folder", str(home.path)).out
    assert "It opens once, within the next 10 minutes." in " ".join(shown.split())


def test_task_check_has_numbers_for_people_and_exact_ones_for_programs():
    """Review 2, users: owners and operators read `sigma 1.469e+04` and `zcdp 0.311`."""
    shown = crowdml("task", "check", "digits012").out
    assert "σ = 14,689 steps" in shown
    assert "At δ = 10⁻⁶" in shown
    for word in ("e+0", "zcdp", "1e-06"):
        assert word not in shown
    (row,) = crowdml("task", "check", "digits012", "--json", "-").json["rows"]
    assert row["loss"].startswith("zcdp ")
    assert row["noise_steps"] == pytest.approx(14_689, abs=1)
    assert row["epsilon"] == pytest.approx(4, abs=1e-3)


def test_no_number_that_a_person_reads_has_an_exponent():
    from crowdml.texts import epsilon_text

    assert [epsilon_text(each) for each in (26_053.4, 0.31123, 4.0, 1.5, 123456789.0)] == [
        "26,053", "0.3112", "4", "1.5", "1.235 × 10⁸",
    ]  # fmt: skip
    assert epsilon_text(float("inf")) == "none: no noise"
    assert epsilon_text(Total.of([Pure(Fraction(1, 20))]).epsilon(1e-6)) == "0.05"


def test_a_moment_of_a_record_is_shown_by_the_readers_clock(zone: Callable[[str], None]):
    for name, shown in (("Europe/Berlin", "2026-07-01 14:00"), ("America/New_York", "2026-07-01 08:00")):
        zone(name)
        assert local_time("2026-07-01T12:00:00+00:00") == shown
