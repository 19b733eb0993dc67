"""Everything that has a name has its place in the documentation, and no link leads nowhere."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping

import click
import pytest
from pages import PAGES, REFERENCE, ROOT, Page

from crowdml import protocols
from crowdml.cli import cli
from crowdml.datasets import NAMES
from crowdml.messages import KINDS as MESSAGES
from crowdml.models.make import KINDS as MODELS
from crowdml.models.make import LINEAR_SETTINGS
from crowdml.privacy.mechanisms import KINDS as ALONE
from crowdml.privacy.moments import KINDS as OF_MOMENTS
from crowdml.privacy.polynomials import KINDS as OF_POLYNOMIALS
from crowdml.protocols import admm, gram, local_updates, proportions, secprobe, sgd
from crowdml.task import Task, find_task

DOCUMENTED: set[str] = set().union(*(page.names for page in REFERENCE))


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command, by the words that call it."""
    yield name, command
    if isinstance(command, click.Group):
        for word, inner in sorted(command.commands.items()):
            yield from commands(inner, f"{name} {word}")


COMMANDS = dict(commands(cli, "crowdml"))


def settings(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key of a task file that a dataclass reads, dotted; a table is a key too."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name
        inner = next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        if inner is not None:
            yield from settings(typing.cast(type, inner), f"{prefix}{name}.")


SETTINGS = [
    *settings(Task),
    *settings(sgd.Settings, "protocol."),
    *settings(admm.Settings, "protocol."),
    *settings(gram.Settings, "protocol."),
    *settings(local_updates.Settings, "protocol."),
    *settings(proportions.Settings, "protocol."),
    *settings(secprobe.Settings, "protocol."),
    *settings(proportions.Clusters, "model."),
    *(f"model.{name}" for name in ("kind", "l1", "l2", "c", *LINEAR_SETTINGS)),
    *(f"privacy.epsilon.{row}" for row in sgd.mechanisms(find_task("activity"))),
    *(f"privacy.epsilon.{row}" for row in admm.mechanisms(find_task("admm-adult"))),
    *(f"privacy.epsilon.{row}" for row in gram.mechanisms(find_task("gram-mnist"))),
    "privacy.epsilon.counts",
]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "crowdml"])
def test_every_command_has_a_heading_or_a_row(command: str):
    assert command in DOCUMENTED, f"docs say nothing of `{command}`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_explained(command: str):
    explained = set(re.findall(r"--[a-z][a-z0-9-]*", "".join(page.text for page in REFERENCE)))
    for parameter in COMMANDS[command].params:
        long = {name for name in parameter.opts if name.startswith("--")} - {"--version"}
        assert not long or long & explained, f"{command} {' '.join(long)} is nowhere explained"


@pytest.mark.parametrize("setting", dict.fromkeys(SETTINGS))
def test_every_setting_of_a_task_file_has_a_heading_or_a_row(setting: str):
    assert setting in DOCUMENTED


@pytest.mark.parametrize("protocol", protocols.PROTOCOLS.ours)
def test_every_protocol_is_named_where_tasks_choose_it(protocol: str):
    assert any(f'"{protocol}"' in page.prose for page in REFERENCE)


@pytest.mark.parametrize("kind", [kind for kind, of in MESSAGES.items() if of.__module__.startswith("crowdml.")])
def test_every_message_kind_has_a_heading_or_a_row(kind: str):
    assert kind in DOCUMENTED


@pytest.mark.parametrize("mechanism", [*ALONE, *OF_MOMENTS, *OF_POLYNOMIALS])
def test_every_mechanism_has_a_heading_or_a_row(mechanism: type):
    kind = next(field.default for field in dataclasses.fields(mechanism) if field.name == "kind")
    assert kind in DOCUMENTED


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_heading_or_a_row(model: str):
    assert model in DOCUMENTED


@pytest.mark.parametrize("dataset", NAMES)
def test_every_data_set_has_a_heading_or_a_row(dataset: str):
    assert dataset in DOCUMENTED


def test_every_figure_has_a_heading_or_a_row():
    from crowdml.experiments.registry import FIGURES  # imports JAX

    names: list[str] = list(FIGURES) if isinstance(FIGURES, Mapping) else [figure.id for figure in FIGURES]
    missing = [name for name in names if name not in DOCUMENTED]
    assert not missing, f"docs say nothing of {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Page):
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        place = (page.path.parent / target).resolve() if target else page.path
        assert place.exists(), f"{page.name} links to {link}, which is not there"
        if anchor:
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in Page(place).headings}
            assert anchor in anchors, f"{page.name} links to {link}, and there is no such heading"


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.name)
def test_every_page_can_be_reached_from_the_index(page: Page):
    reached, waiting = set(), [ROOT / "README.md", ROOT / "docs" / "README.md"]
    while waiting:
        path = waiting.pop().resolve()
        path = path / "README.md" if path.is_dir() else path
        if path in reached or path.suffix != ".md" or not path.exists():
            continue
        reached.add(path)
        waiting += [path.parent / link.partition("#")[0] for link in Page(path).links if not re.match(r"[a-z]+:", link)]
    assert page.path in reached, f"no page links to {page.name}: add it to docs/README.md"
