"""Numbers that people type: every option is bounded, and none takes NaN or a number that never ends."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import click
import pytest
from cli_runner import crowdml

from crowdml.cli import cli
from crowdml.cli.numbers import Number, Whole
from crowdml.errors import GuaranteeError
from crowdml.exact import read_exact
from crowdml.privacy.losses import exact

HUGE = ["1e99999999", "-1e99999999", "1e-99999999", "nan", "inf", "-inf", "1e31", "1/0", "9" * 5000, "1e", "", "0x1"]


def numbers(command: click.Command, path: str = "crowdml") -> Iterator[tuple[str, click.Parameter]]:
    """Every parameter of every command that is a number."""
    for each in command.params:
        if isinstance(each.type, (click.types.FloatParamType, click.types.IntParamType)):
            yield f"{path} {each.opts[0]}", each
    for name, inner in getattr(command, "commands", {}).items():
        yield from numbers(inner, f"{path} {name}")


def test_every_number_of_every_command_has_a_least_and_a_largest_value():
    """Review 2, network finding L8: `serve --pace nan` passed click's range, and every check-out was a 500."""
    found = dict(numbers(cli))
    assert len(found) > 30
    loose = [name for name, each in found.items() if not isinstance(each.type, (Number, Whole))]
    assert loose == []


@pytest.mark.parametrize("option", ["--pace", "--address-rate", "--device-rate", "--free-space"])
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "1e99999999"])
def test_a_number_that_is_not_finite_is_refused_before_a_server_starts(option: str, text: str):
    answer = crowdml("serve", option, text)
    assert answer.code == 2
    assert "finite" in answer.err or "range" in answer.err


def test_a_whole_number_of_thousands_of_digits_is_refused_in_a_sentence():
    answer = crowdml("simulate", "digits", "--seed", "9" * 5000)
    assert answer.code == 2
    assert "5,000 characters" in answer.err
    assert len(answer.err) < 500


@pytest.mark.parametrize("text", HUGE)
def test_an_exact_number_out_of_range_is_refused_before_it_is_written_out(text: str):
    """Review 2, network finding L8: `--epsilon 1e99999999` hung `task validate` and `budget set`."""
    with pytest.raises(GuaranteeError, match="is not a finite number"):
        exact(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", Fraction(1, 10)), ("1/3", Fraction(1, 3)), ("0e99999999", Fraction(0)), ("-2.5e-3", Fraction(-1, 400))],
)
def test_an_exact_number_is_the_one_that_its_writer_meant(text: str, value: Fraction):
    assert read_exact(text) == exact(text) == value


def test_a_budget_that_never_ends_is_refused_and_one_at_the_bounds_is_kept(tmp_path):
    where = ("--folder", str(tmp_path), "--samples", "10", "--before-joining")
    for text in ("1e99999999", "nan"):
        answer = crowdml("budget", "set", "--epsilon", text, *where)
        assert answer.code == 1
        assert "is not a number from 0 to 1,000,000." in answer.err
        assert not (tmp_path / "budget.json").exists()
    for text in ("1e6", "1e-30"):
        assert crowdml("budget", "set", "--epsilon", text, *where).code == 0
