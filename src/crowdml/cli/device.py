"""`crowdml join`, `fleet`, `predict` and `leave`: a device and its owner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from crowdml.cli.numbers import MANY, Number, Whole
from crowdml.cli.output import OutputError, Report, json_option, make_table, plugin_option, size_text
from crowdml.errors import CrowdmlError
from crowdml.texts import count_text, epsilon_text, number_text, one_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from crowdml.device.client import Client
    from crowdml.device.fleet import Fleet, Rates, Summary
    from crowdml.device.folder import Consent, Folder
    from crowdml.device.joining import Invited
    from crowdml.device.sources import SampleSource
    from crowdml.price import Price
    from crowdml.task import Task
    from crowdml.turn import Tamper

T = TypeVar("T")

REFUSALS = {"refused", "revoked", "withdrawn"}
"""Endings by which a server sends a device away: no success, for whoever started it."""

GO_ON = "interrupted. What waits is kept: start the same command to go on."

CANNOT_UNDO = (
    "What this device gave is in the model and stays there: it was blurred before it left, and nobody can take it out. "
    "The server erases the device's key, times and statements, and keeps its spent totals under a hash. "
    "The folder with the device's own key, ledger and waiting samples is erased: a later join is a new device. "
    "Do not give the same samples again then: nothing would remember what they paid."
)

SHOWN_TO_OTHERS = (
    "This is for you alone. It comes from this device's own samples, without noise: to show it to others, or to act on "
    "it where they can see it, would be a release that nobody charged."
)

FOLDER = "crowdml-device"
folder_option = click.option(
    "--folder", default=FOLDER, show_default=True, type=click.Path(path_type=Path), help="The device's folder."
)
ca_option = click.option(
    "--ca",
    "--certificate",
    "ca",
    type=click.Path(exists=True, dir_okay=False),
    help="Certificates to trust instead of the system's, such as the server's own authority. Kept in the folder.",
)
task_option = click.option("--task", "wanted", metavar="NAME", help="The task, by name or hash, if several run.")
yes_option = click.option("--yes", is_flag=True, help="Accept the task's promise and price without being asked.")
most_option = click.option("--check-ins", "most", type=Whole(1, MANY), help="Stop after this many check-ins.")
fleet_most_option = click.option(
    "--check-ins", "most", type=Whole(1, MANY), help="Stop each device after this many check-ins."
)
seconds_option = click.option("--seconds", type=Number(0, MANY), help="Stop after this many seconds.")
new_data_option = click.option(
    "--new-data", is_flag=True, help="After a lost ledger: confirm that no row of this source was ever given."
)
header_option = click.option(
    "--header",
    type=click.Choice(["yes", "no"]),
    help="Whether the first line of a CSV file is a header. Default: yes if none of its fields is a number.",
)
label_option = click.option("--label", metavar="COLUMN", help="Of a CSV file: the column of labels. Default: the last.")
ignore_option = click.option("--ignore", metavar="COLUMN", multiple=True, help="Of a CSV file: a column to leave out.")
liars_option = click.option(
    "--liars",
    "share",
    type=Number(0, 1),
    metavar="P",
    help="To test a study of your own: this share of the devices lies, as --attack says.",
)
attack_option = click.option(
    "--attack",
    metavar="NAMES",
    help="What liars do: sign-flip, label-flip... Several, with commas between, take turns.",
)
seed_option = click.option(
    "--seed", type=Whole(0, 2**63 - 1), help="The seed of the data set 'synthetic'; for no other source."
)


@click.command(short_help="Join a study as a device, and take part.")
@click.argument("link")
@click.argument("code", required=False)
@click.option(
    "--source",
    required=True,
    help="shard:NAME, csv:PATH, ndjson:PATH or python:MODULE:FUNCTION; csv:- and ndjson:- read stdin.",
)
@header_option
@label_option
@ignore_option
@click.option("--shard", metavar="I/N", help="Read every N-th row of the source, starting at row I (counted from 0).")
@click.option("--place", metavar="NAME", help="The place of this device, by name or number, in a task with places.")
@click.option("--listen", metavar="HOST:PORT", help="Also accept messages directly from peers on this network.")
@click.option(
    "--peer", "peers", metavar="NAME=URL", multiple=True, help="Also send messages directly to the peer at this place."
)
@folder_option
@task_option
@yes_option
@click.option("--hours", metavar="HH:MM-HH:MM", help="Run only during these hours, local time.")
@click.option("--on-mains", is_flag=True, help="Run only on mains power.")
@click.option("--unmetered", metavar="COMMAND", help="Run only while this command succeeds, such as a network test.")
@ca_option
@most_option
@seconds_option
@new_data_option
@seed_option
@plugin_option
@json_option
def join(
    link: str,
    code: str | None,
    source: str,
    header: str | None,
    label: str | None,
    ignore: tuple[str, ...],
    shard: str | None,
    place: str | None,
    listen: str | None,
    peers: tuple[str, ...],
    folder: Path,
    wanted: str | None,
    yes: bool,
    hours: str | None,
    on_mains: bool,
    unmetered: str | None,
    ca: str | None,
    most: int | None,
    seconds: float | None,
    new_data: bool,
    seed: int | None,
    json_path: str | None,
) -> None:
    """Join a study by the LINK of an invitation: read its promise and price, accept, and take part.

    LINK is https://.../join/CODE. You can also give the server's address and the CODE.
    """
    from crowdml.device.conditions import Conditions, parse_hours
    from crowdml.device.files import Share, parse_share
    from crowdml.device.folder import Folder
    from crowdml.device.joining import read_link
    from crowdml.device.places import find_place
    from crowdml.device.sources import open_source
    from crowdml.protocols import find

    report = Report(json_path)
    url, code = read_link(link, code)
    conditions = Conditions(None if hours is None else parse_hours(hours), on_mains, unmetered)
    share = Share() if shard is None else parse_share(shard)
    home = Folder(folder)
    attempt, rows = Attempt(home), RowCheck(report, source, home)

    def prepare(task: Task) -> tuple[SampleSource, int]:
        where = find_place(task, find(task), place, home.place(task.hash))
        columns: Any = {"header": _yes_or_no(header), "label": label, "ignore": ignore}
        reader = open_source(source, task, share, seed=seed, tell=report.line, **columns)
        rows.look_at(task, [reader])
        return reader, where

    async def work(client: Client) -> Summary:
        fleet, (reader, where) = await _welcome(
            report, client, home, wanted, yes, code, ca, attempt, devices=1, single=True, prepare=prepare
        )
        fleet.conditions, fleet.tell, fleet.new_data = conditions, _teller(report), new_data
        fleet.place = where
        if listen is not None or peers:
            _open_to_peers(fleet, listen, peers)
            fleet.say = report.line
        if reader.name is None:
            report.line(
                "This source has no place to come back to: every sample that arrives is charged as a new one, also one "
                "that was given before."
            )
        await fleet.enrol(code, ca)
        at = "" if where < 0 else f", at {one_line(fleet.task.places[where].name)}"
        report.line(f"Joined as device {fleet.all_keys()[0][1].id}{at}.")
        return await fleet.run(lambda _: reader, seconds=seconds, most=most)

    with attempt.joining():
        summary = _run(url, ca or home.authority, 4, work)
    refused = bool(REFUSALS & set(summary.endings))
    if not refused:
        report.line(summary.reason)
    report.print(_spent(summary, "this device"))
    report.finish(_plain(summary))
    if refused:
        raise OutputError(summary.reason)
    rows.check_given(summary)


@click.command(short_help="Run many real devices in one process.")
@click.argument("link")
@click.argument("code", required=False)
@click.option(
    "--devices", type=Whole(1, 100_000), help="Number of devices. Default: 100, or those that --device names."
)
@click.option("--source", required=True, help="shard:NAME, csv:PATH or ndjson:PATH; the devices share its rows.")
@header_option
@label_option
@ignore_option
@click.option("--device", metavar="COLUMN", help="Of a CSV file: the column that says which device holds a row.")
@click.option(
    "--folder", default="crowdml-fleet", show_default=True, type=click.Path(path_type=Path), help="The fleet's folder."
)
@task_option
@yes_option
@click.option("--connections", default=64, show_default=True, type=Whole(1, 4096), help="Most open connections.")
@ca_option
@fleet_most_option
@seconds_option
@new_data_option
@seed_option
@liars_option
@attack_option
@plugin_option
@json_option
def fleet(
    link: str,
    code: str | None,
    devices: int | None,
    source: str,
    header: str | None,
    label: str | None,
    ignore: tuple[str, ...],
    device: str | None,
    folder: Path,
    wanted: str | None,
    yes: bool,
    connections: int,
    ca: str | None,
    most: int | None,
    seconds: float | None,
    new_data: bool,
    seed: int | None,
    share: float | None,
    attack: str | None,
    json_path: str | None,
) -> None:
    """Run many real devices in one process, for trials and load tests. LINK must be an invitation for that many.

    LINK is https://.../join/CODE. You can also give the server's address and the CODE.
    """
    from crowdml.attacks import read_attackers
    from crowdml.device.folder import Folder
    from crowdml.device.joining import read_link
    from crowdml.device.places import needs_place
    from crowdml.device.sources import deal_sources, holders_in
    from crowdml.protocols import find

    report = Report(json_path)
    if device is not None and devices is not None:
        raise OutputError("--device says who holds each row, so how many devices there are, too. Leave out --devices.")
    url, code = read_link(link, code)
    devices = devices or 100 if device is None else holders_in(source, device)
    home = Folder(folder)
    attempt, rows = Attempt(home), RowCheck(report, source, home, uneven=device is not None)

    def prepare(task: Task) -> tuple[list[SampleSource], dict[int, Tamper]]:
        attackers = read_attackers(task, share, attack)
        lying = {} if attackers is None else attackers.live(task, devices)
        if needs_place(task, find(task)) and devices > len(task.places):
            raise OutputError(
                f"Task {task.name!r} lists {len(task.places)} places, and each takes one device. Nothing was sent. Say "
                f"--devices {len(task.places)} or fewer."
            )
        columns: Any = {"header": _yes_or_no(header), "label": label, "ignore": ignore, "device": device}
        readers = deal_sources(source, task, devices, seed=seed, tell=report.line, **columns)
        rows.look_at(task, readers)
        return readers, lying

    async def work(client: Client) -> Summary:
        crowd, (readers, lying) = await _welcome(
            report, client, home, wanted, yes, code, ca, attempt, devices=devices, single=False, prepare=prepare
        )
        crowd.new_data, crowd.say, crowd.liars = new_data, report.note, lying
        if lying:
            report.line(f"{len(lying)} of {devices} devices of this fleet lie ({attack}), to test a study of your own.")
        with report.progress() as bar:
            shown = bar.add_task("devices enrolled", total=devices)
            await crowd.enrol(code, ca, lambda n: bar.advance(shown, n))
        return await _watched(report, crowd, lambda number: readers[number], seconds, most)

    with attempt.joining():
        summary = _run(url, ca or home.authority, connections, work)
    table = make_table("", f"{summary.devices} devices")
    for name, value in (
        ("check-ins", f"{summary.check_ins:,}"),
        ("a second", f"{summary.per_second:.1f}"),
        ("half of them within", f"{1000 * summary.p50:.0f} ms"),
        ("99 of 100 within", f"{1000 * summary.p99:.0f} ms"),
        ("asked again", f"{summary.retries:,}"),
        ("refused", f"{summary.refused:,}"),
        ("bytes sent up", size_text(summary.bytes_up)),
        ("bytes sent down", size_text(summary.bytes_down)),
        ("stopped by", ", ".join(f"{kind} {count}" for kind, count in summary.endings.items())),
        *([("devices that lied, for a test", f"{summary.liars:,}")] if summary.liars else []),
        ("rows that could not be used", f"{sum(summary.unreadable.values()):,}"),
    ):
        table.add_row(name, value)
    report.print(table)
    report.print(_spent(summary, "the device that paid most"))
    report.finish(_plain(summary))
    if set(summary.endings) <= REFUSALS:
        raise OutputError(summary.reason)
    rows.check_given(summary)


@click.command(short_help="Ask a device for its next prediction.")
@folder_option
@click.option("--task", "wanted", metavar="NAME", help="Which task, by name or hash, if the device has several.")
@plugin_option
@json_option
def predict(folder: Path, wanted: str | None, json_path: str | None) -> None:
    """Ask a device with peers for its next prediction, from its own samples and its peers' messages. Sends nothing."""
    from crowdml.device.folder import Folder
    from crowdml.device.learning import outlook, recall
    from crowdml.protocols import find

    report, home = Report(json_path), Folder(folder)
    known = {hash_: each for hash_, each in home.consents().items() if wanted in (None, each.name) or hash_ == wanted}
    if not home.joined or home.is_fleet or len(known) != 1:
        raise OutputError(
            f"{folder} is not the folder of one device with {'one task' if wanted is None else f'task {wanted!r}'}. "
            "Name the device's --folder, and where it has several tasks one of them with --task."
        )
    task = home.consented(bytes.fromhex(next(iter(known))))
    with home.ledger() as ledger:
        learner, post, state = recall(ledger, task, find(task))
    learner.learn(state)
    forecast = learner.forecast()
    if forecast is None:
        raise OutputError("This device has given no batch yet, and learned nothing. Let `crowdml join` run first.")
    report.line(outlook(task, forecast, learner.score, post))
    report.print(SHOWN_TO_OTHERS)
    report.finish(
        {"next": task.labels.classes[forecast.label], "votes": forecast.votes, "models": forecast.models,
         "weight": forecast.weight, "right": learner.score.right, "guessed": learner.score.guessed,
         "heard": post.heard, "bytes": post.size,
         "refused": dict(post.refused)}
    )  # fmt: skip


@click.command()
@folder_option
@click.option("--yes", is_flag=True, help="Leave without being asked.")
@click.option("--even-if-unreachable", is_flag=True, help="Erase the folder even if the server cannot be reached.")
@json_option
def leave(folder: Path, yes: bool, even_if_unreachable: bool, json_path: str | None) -> None:
    """Leave a study: tell the server, and erase the device's folder. Says first what cannot be undone."""
    from crowdml.device.client import Unreachable
    from crowdml.device.folder import Folder
    from crowdml.device.joining import withdraw
    from crowdml.device.member import Clock

    report, home = Report(json_path), Folder(folder)
    server = home.server
    if server is None:
        raise OutputError(f"{folder} has joined nothing: there is nothing to leave. Name the device's --folder.")
    report.print(CANNOT_UNDO)
    if not yes:
        _ask("Leave?", "Nothing was changed.")
    told = True

    async def work(client: Client) -> None:
        await withdraw(client, home.key(), Clock())

    with home.locked():
        try:
            _run(server.url, home.authority, 1, work)
        except Unreachable as error:
            if not even_if_unreachable:
                raise OutputError(
                    f"{error} The server was not told and nothing was erased. Try again later, or erase the folder all "
                    "the same with --even-if-unreachable: nothing more is sent then, and the server keeps what it "
                    "knows of the device."
                ) from error
            told = False
        home.erase()
    report.line("Left. " + ("The server was told." if told else "The server could not be told."))
    report.finish({"left": True, "server_told": told})


# --- what they share ---


class Attempt:
    """An attempt to join. One that fails before the server may know the device leaves nothing behind."""

    def __init__(self, home: Folder) -> None:
        self.home = home
        self.fleet: Fleet | None = None
        self.accepted: str | None = None
        """The hash of a task that was accepted in this attempt, and not before."""

    @contextmanager
    def joining(self) -> Generator[None]:
        with self.home.locked():  # and so nobody else is at work in this folder
            new = self.home.untouched
            try:
                yield
            except BaseException as error:
                known = self.home.joined or (self.fleet is not None and self.fleet.asked)
                if new and not known and self.home.path.exists():
                    self.home.erase()  # what the server may have heard of is kept, to go on from
                elif self.accepted is not None and not (self.fleet is not None and self.fleet.asked):
                    self.home.forget(self.accepted)
                if isinstance(error, KeyboardInterrupt) and self.home.joined:
                    raise KeyboardInterrupt(GO_ON) from None
                raise


def _yes_or_no(given: str | None) -> bool | None:
    return None if given is None else given == "yes"


class RowCheck:
    """What an owner hears of the rows before they decide: too few of them, and those that cannot be used."""

    def __init__(self, report: Report, source: str, home: Folder, *, uneven: bool = False) -> None:
        self._report, self._source, self._home, self._is_new = report, source, home, not home.joined
        self._uneven = uneven
        self._too_few: CrowdmlError | None = None

    def look_at(self, task: Task, readers: list[SampleSource]) -> None:
        """Refuse too few rows before anything is sent. A device that has joined sends first what still waits."""
        from crowdml.device.rows import Faults, clipped_text
        from crowdml.device.sources import LOOKED_THROUGH, check_enough
        from crowdml.protocols import find

        batch = find(task).batch(task)
        few = sum((each.count or 0) < batch for each in readers) if self._uneven else 0
        if 0 < few < len(readers):
            self._report.print(
                f"{few:,} of {len(readers):,} devices hold fewer rows than the {batch:,} that a check-in takes: "
                "they give nothing."
            )
            readers = [each for each in readers if (each.count or 0) >= batch]
        try:
            check_enough(self._source, readers, batch)
        except CrowdmlError as error:
            if self._is_new or not self._waits(task):
                raise
            self._too_few = error
        if not self._is_new:
            return
        tried, faults = 0, Faults()
        for reader in readers:
            more, found = reader.look_through(max(1, LOOKED_THROUGH // len(readers)))
            tried += more
            faults.take(found)
        if faults.total:
            hint = " If the first line is a heading, say --header yes." if faults.first_line else ""
            self._report.print(
                f"{faults.total:,} of {count_text(tried, 'row')} cannot be used: {faults}. Such rows count as empty "
                f"samples and cost as much as others; nobody but you is told.{hint}"
            )
        if faults.clipped:
            self._report.print(clipped_text(faults.clipped))

    def _waits(self, task: Task) -> bool:
        """Whether a folder that joined may have something to do without new samples."""
        from crowdml.protocols import find

        if self._home.lost or find(task).peers is not None:
            return True
        with self._home.ledger() as ledger:
            books = [ledger.of(number) for number in ledger.devices()]
            rounds = [book.round(task.hash) for book in books]
            return any(each is not None and each.body is not None for each in rounds) or any(
                book.resend(task.hash) or book.waiting(task.hash) for book in books
            )

    def check_given(self, summary: Summary) -> None:
        """Fail where a device had too few rows to give anything of them."""
        if self._too_few is not None and not summary.check_ins:
            raise self._too_few


def _run(url: str, ca: str | None, connections: int, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Run with a client, which is closed in the end."""
    import asyncio

    from crowdml.device.client import Client, Limits

    async def whole() -> T:
        client = Client(url, ca=ca, limits=Limits(connections=connections))
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(whole())


async def _welcome(
    report: Report,
    client: Client,
    home: Folder,
    wanted: str | None,
    yes: bool,
    code: str,
    ca: str | None,
    attempt: Attempt,
    *,
    devices: int,
    single: bool,
    prepare: Callable[[Task], T],
) -> tuple[Fleet, T]:
    """Find the task, show its promise and price, ask, and note the consent. What was accepted before is not asked.

    A code that admits to nothing is refused before anything is read or sent; nothing is used up by finding that out.
    `prepare` opens the source for the task before anything is shown: a price for rows that do not fit says nothing.
    A closed task is shown to those alone who joined: its device enrols first, and withdraws where its owner declines.
    """
    import getpass
    from dataclasses import replace

    from crowdml.device.client import Unreachable
    from crowdml.device.fleet import Fleet
    from crowdml.device.folder import consent_to
    from crowdml.device.joining import choose_task, enrol_device, fetch_artefacts, fetch_task, pinned, withdraw
    from crowdml.device.member import Clock
    from crowdml.price import Price
    from crowdml.wire.problems import Problem

    clock, early, invited = Clock(), None, None
    known = home.consents()
    remembered = [hash_ for hash_, each in known.items() if wanted in (None, each.name) or hash_ == wanted]
    if not home.joined or wanted is None or len(remembered) != 1:
        try:
            invited = await _admitted(client, home, code, devices, single=single)
            remembered = [each.hash for each in invited.tasks if each.hash in remembered]
        except (Unreachable, Problem):
            if not home.joined or len(remembered) != 1:
                raise  # else the enrolment says it, for the study that this folder has joined
    if invited is None or (home.joined and len(remembered) == 1):
        task, protocol = home.accepted(bytes.fromhex(remembered[0]))
    else:
        chosen = choose_task(invited.tasks, wanted)
        hash_ = bytes.fromhex(chosen.hash)
        try:
            task, protocol = await fetch_task(client, hash_)
        except Problem as problem:
            if problem.slug != "closed":
                raise
            report.line("This task is closed: its server shows it to devices that joined. Joining, to see it first.")
            early = home.key(None if single else 0)
            if not home.joined:
                home.ledger().close()
                pinned(home, client, (await enrol_device(client, early, code, hash_))[0], ca)
            task, protocol = await fetch_task(client, hash_, early, clock)
    named = invited.run_by if invited is not None else ""
    price = Price.of(protocol, task)
    shown = replace(consent_to(price), run_by=f"{named} ({client.url})" if named else client.url)
    try:
        await fetch_artefacts(client, home, task)
        prepared = prepare(task)
        if shown.task not in known:
            _show(report, shown, price, home, single=single)
            if not yes:
                _ask("Take part?", "Nothing was sent.")
    except CrowdmlError:
        if early is not None and not known:
            await withdraw(client, early, clock)
            home.erase()
        raise
    if shown.task not in known:
        by = "--yes" if yes else getpass.getuser()
        attempt.accepted = shown.task
        home.accept(task, replace(shown, by=by, at=clock.utc()))
    attempt.fleet = Fleet(home, client, task, protocol, devices=devices, single=single, clock=clock)
    return attempt.fleet, prepared


async def _admitted(client: Client, home: Folder, code: str, devices: int, *, single: bool) -> Invited:
    """What the code admits to. For a folder that joined already a used-up code still opens what it opened then."""
    from crowdml.device.joining import Invited, admitted_tasks, check_invitation
    from crowdml.wire.problems import Problem

    try:
        invited = await check_invitation(client, code)
    except Problem as problem:
        if problem.slug != "invitation" or not home.joined:
            raise
        return Invited(tuple(await admitted_tasks(client, home.key(None if single else 0), code)))
    if invited.left is not None and invited.left < devices and not home.joined:
        raise OutputError(
            f"The code lets in {count_text(invited.left, 'more device')}, and these are {devices:,}. Nothing was sent. "
            f"Say --devices {invited.left}, or ask for an invitation for as many."
        )
    return invited


def _show(report: Report, shown: Consent, price: Price, home: Folder, *, single: bool = True) -> None:
    """The study, its promise and its price, as the device's owner reads them before they decide."""
    report.heading(shown.title or shown.name)
    for name, text in (("Purpose", shown.purpose), ("Run by", shown.run_by), ("It reads", shown.collects)):
        if text:
            report.print(f"{name}: {one_line(text)}")
    report.print("What leaves this device:")
    for promise in shown.promises:
        report.print(f" - {one_line(promise)}")
    for sentence in price.sentences:
        report.print(sentence)
    leave = f", and leave for good with `crowdml leave --folder {one_line(str(home.path))}`" if single else ""
    report.print(f"You can stop at any time with Ctrl-C{leave}. What was given until then stays in the model.")
    report.line(f"Task {shown.name}, by its sha256:\n{shown.task}")


def _ask(question: str, otherwise: str) -> None:
    if not sys.stdin.isatty():
        raise OutputError(f"Nobody is there to answer. {otherwise} Run it in a terminal, or say --yes.")
    if not click.confirm(question, err=True):
        raise OutputError(f"Not accepted. {otherwise}")


def _open_to_peers(fleet: Fleet, listen: str | None, peers: tuple[str, ...]) -> None:
    from crowdml.device.peering import parse_listen, parse_peers

    linked = () if fleet.protocol.peers is None else fleet.protocol.peers(fleet.task)
    if not linked:
        raise OutputError(f"--listen and --peer: devices of task {fleet.task.name!r} have no peers. Leave them out.")
    fleet.listen = None if listen is None else parse_listen(listen)
    fleet.peers = parse_peers(peers, fleet.task, frozenset(linked[fleet.place]))


def _teller(report: Report) -> Callable[[str], None]:
    """Says what keeps a device waiting; its single steps are of no interest."""

    def tell(text: str) -> None:
        if " " in text and text != "checked out":
            report.note(text)

    return tell


async def _watched(report: Report, crowd: Fleet, sources: Any, seconds: float | None, most: int | None) -> Summary:
    """Run a fleet with its rates on stderr, where a terminal is there."""
    if not report.aside.is_terminal:
        return await crowd.run(sources, seconds=seconds, most=most)
    from rich.live import Live

    with Live(console=report.aside, transient=True, refresh_per_second=4) as live:
        return await crowd.run(
            sources, seconds=seconds, most=most, report=lambda rates: live.update(_rates_table(rates))
        )


def _rates_table(rates: Rates) -> Any:
    table = make_table("seconds", "at work", "check-ins", "a second", "p50", "p99", "asked again", "refused")
    table.add_row(
        f"{rates.seconds:.0f}",
        f"{rates.at_work} of {rates.devices}",
        f"{rates.check_ins:,}",
        f"{rates.per_second:.0f}",
        f"{1000 * rates.p50:.0f} ms",
        f"{1000 * rates.p99:.0f} ms",
        f"{rates.retries:,}",
        f"{rates.refused:,}",
    )
    return table


def _spent(summary: Summary, device: str) -> str:
    sample, whole = summary.epsilon_sample_alone, summary.epsilon_device_alone
    is_masked = sample > summary.epsilon_sample or whole > summary.epsilon_device
    return (
        f"{count_text(summary.check_ins, 'check-in')}. Over everything given to this server from this folder any one "
        f"sample has paid at most ε = {epsilon_text(summary.epsilon_sample)}, {device} ε = "
        f"{epsilon_text(summary.epsilon_device)} (δ = {number_text(summary.delta)})."
        + (f" If everyone else colludes: {epsilon_text(sample)} and {epsilon_text(whole)}." if is_masked else "")
    )


def _plain(summary: Summary) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(summary)
