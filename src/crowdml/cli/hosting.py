"""What an operator does beside `crowdml serve`: start and stop tasks, export, replay, back up and restore."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import MANY, Whole
from crowdml.cli.output import OutputError, Report, artefact_option, json_option, plugin_option, size_text, whole_file
from crowdml.cli.task import naming, task
from crowdml.task import find_task
from crowdml.texts import count_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from crowdml.storage.server import Store

folder_option = click.option(
    "--folder",
    default="crowdml-server",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The server's folder.",
)
database_option = click.option(
    "--database", default=None, help="URL of a database, postgresql://..., instead of SQLite in the folder."
)


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    return folder_option(database_option(json_option(command)))


def open_store(folder: Path, database: str | None) -> Store:
    """The server's store, which has to be there; the server may run meanwhile."""
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store, StoreError

    path = folder / DATABASE
    if database is None and not path.is_file():
        raise StoreError(f"there is no server in {folder}: {path} is missing. Name its --folder.")
    return Store(database or path)


@task.command("start", short_help="Host a task on a server, or start it again.")
@click.argument("name", metavar="TASK")
@click.option(
    "--closed/--open",
    default=None,
    help="Whether only devices that joined may read the model and the task. Default: unchanged; new tasks are open.",
)
@artefact_option
@plugin_option
@store_options
def start(name: str, closed: bool | None, folder: Path, database: str | None, json_path: str | None) -> None:
    """Host TASK (a file or a shipped name), or start a paused or stopped one again. The server may be running."""
    from crowdml.protocols import settled
    from crowdml.server.artefacts import keep_artefacts
    from crowdml.server.export import find_hash
    from crowdml.server.hub import check_hosted, utc_now

    def host(store: Store) -> bytes:
        known = [each for each in store.tasks() if each.name == name]
        if len(known) == 1 and not Path(name).is_file():
            return known[0].hash
        if any(each.hash.hex().startswith(name) for each in store.tasks()) and len(name) >= 8:
            return find_hash(store, name)
        with naming(name):
            given = settled(find_task(name))
            check_hosted(given)
        keep_artefacts(store, given)  # before a server that runs finds the task
        return store.add_task(given.canonical, given.name, utc_now(), "draft", closed=bool(closed))

    _change("start", name, folder, database, json_path, closed, host)


@task.command("stop", short_help="End a task: accept no more check-ins.")
@click.argument("name", metavar="TASK")
@plugin_option
@store_options
def stop(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """End TASK (its name on the server): devices are told, and their check-ins are refused. The model stays."""
    _change("stop", name, folder, database, json_path)


@task.command("pause", short_help="Accept no check-ins for a task until it is resumed.")
@click.argument("name", metavar="TASK")
@plugin_option
@store_options
def pause(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """Pause TASK: devices keep what they have paid for, wait, and ask again. The model stays."""
    _change("pause", name, folder, database, json_path)


@task.command("resume", short_help="Resume a task that was paused.")
@click.argument("name", metavar="TASK")
@plugin_option
@store_options
def resume(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """Resume TASK after a pause. Devices come back by themselves."""
    _change("resume", name, folder, database, json_path)


def _change(
    change: str,
    name: str,
    folder: Path,
    database: str | None,
    json_path: str | None,
    closed: bool | None = None,
    host: Callable[[Store], bytes] | None = None,
) -> None:
    """Ask the task of this name, or the one that `host` adds, for a change of its state."""
    from crowdml.server.artefacts import keep_artefacts
    from crowdml.server.export import find_hash
    from crowdml.server.hosting import CHANGES, next_state
    from crowdml.server.hub import check_hosted, utc_now, why_ended
    from crowdml.task import from_canonical

    report = Report(json_path)
    with open_store(folder, database) as store:
        hash_ = find_hash(store, name) if host is None else host(store)
        standing = store.task(hash_)
        assert standing is not None
        canonical = standing.canonical
        if CHANGES[change][0] == "running":  # one that an earlier version accepted may be refused by now
            named = from_canonical(canonical)
            keep_artefacts(store, named)
            check_hosted(named)
        state = next_state(change, standing.name, standing.state, lambda: why_ended(store, canonical))
        if closed is not None:  # before it runs: a closed task is never open, not even for a moment
            store.set_closed(hash_, closed, utc_now())
            store.record("closed" if closed else "opened", utc_now(), "by the command line", hash_)
        store.set_state(hash_, state, utc_now())
        store.record(state, utc_now(), "by the command line", hash_)
        found = store.task(hash_)
    assert found is not None
    whom = ", for those who joined it alone" if found.closed else ""
    report.line(f"Task {found.name} ({hash_.hex()[:12]}) is {state}{whom}.")
    report.finish({"name": found.name, "hash": hash_.hex(), "state": state, "closed": found.closed})


@task.command("validate", short_help="Measure a task's accuracy on your own data.")
@click.argument("name", metavar="TASK")
@click.argument("data", required=False, metavar="DATA")
@click.option("--public", is_flag=True, help="The rows belong to no participant: accuracies are exact and free.")
@click.option("--epsilon", default=None, metavar="E", help="The rows are private: what one evaluation costs each row.")
@click.option("--budget", default=None, metavar="E", help="Total that evaluations may cost each row, over all tasks.")
@click.option("--every", type=Whole(1, MANY), default=1, show_default=True, metavar="N",
              help="Least number of versions between two evaluations.")  # fmt: skip
@click.option(
    "--new-rows", is_flag=True, help="Confirm that crowdml used none of these rows before it kept a list of rows."
)
@click.option("--label", metavar="COLUMN", help="Of a CSV file: the column of labels. Default: the last.")
@click.option("--ignore", metavar="COLUMN", multiple=True, help="Of a CSV file: a column to leave out. Repeatable.")
@click.option("--off", is_flag=True, help="Stop evaluating, and erase the rows. Charges stay in the ledger.")
@plugin_option
@store_options
def validate(
    name: str,
    data: str | None,
    public: bool,
    epsilon: str | None,
    budget: str | None,
    every: int,
    new_rows: bool,
    label: str | None,
    ignore: tuple[str, ...],
    off: bool,
    folder: Path,
    database: str | None,
    json_path: str | None,
) -> None:
    """Evaluate the models of TASK (its name on the server) on DATA: FILE.csv, FILE.npz, or a data set's test rows.

    The server does this from now on, and shows the accuracy on the task's page. Rows of no participant need --public;
    private rows need --epsilon and --budget.
    """
    from crowdml.privacy.losses import exact
    from crowdml.server.export import find_hash
    from crowdml.server.hub import utc_now
    from crowdml.server.validation import keep_rows, read_rows, watched
    from crowdml.storage.server.looks import Terms, detach
    from crowdml.task import from_canonical

    report = Report(json_path)
    if off != (data is None) or (off and (public or epsilon or budget)):
        raise OutputError("Name DATA to look at, or say --off alone.")
    if not off and (public == (epsilon is not None) or (epsilon is None) != (budget is None)):
        raise OutputError(
            "Whose rows are they? Say --public if they belong to no participant, else --epsilon and --budget."
        )
    with open_store(folder, database) as store:
        hash_ = find_hash(store, name)
        stored = store.task(hash_)
        assert stored is not None
        if data is None:
            was = detach(store, hash_)
            store.record("not validated", utc_now(), "by the command line", hash_)
            report.line(f"Task {stored.name} is not validated{' any more' if was else ''}.")
            report.finish({"name": stored.name, "hash": hash_.hex(), "validation": None})
            return
        found = from_canonical(stored.canonical)
        paid = None if epsilon is None else exact(epsilon), None if budget is None else exact(budget)
        terms = Terms(Path(data).name, *paid, every)
        rows = read_rows(found, data, label, ignore)
        count = keep_rows(store, found, rows, terms, utc_now(), new_rows=new_rows).count
        store.record("validated", utc_now(), f"on {count:,} rows of {Path(data).name}", hash_)
        seen = watched(store, found)
    assert seen is not None
    report.line(f"Task {stored.name} is validated on {count:,} rows of {Path(data).name}. {seen.promise()}")
    left = seen.found.left
    if left is not None:
        report.line(f"{count_text(left, 'look')} left; the last is kept for the end of the task.")
    report.finish({"name": stored.name, "hash": hash_.hex(), "validation": seen.plain()})


@task.command("export", short_help="Export a model, or its transcript.")
@click.argument("name", metavar="TASK")
@click.option(
    "--model", "model_path", metavar="FILE.safetensors", default=None,
    help="The weights, with a model card. A histogram may be .json or .csv.",
)  # fmt: skip
@click.option("--onnx", "onnx_path", metavar="FILE.onnx", default=None, help="The model as ONNX, with a model card.")
@click.option(
    "--transcript", "transcript_path", metavar="FILE", default=None, help="The transcript for `crowdml replay`."
)
@plugin_option
@store_options
def export(
    name: str,
    model_path: str | None,
    onnx_path: str | None,
    transcript_path: str | None,
    folder: Path,
    database: str | None,
    json_path: str | None,
) -> None:
    """Export the model of TASK (its name on the server), or the transcript that rebuilds it. The server may run."""
    from crowdml.server.export import export_model, find_hash, write_model
    from crowdml.server.transcript import write_transcript

    if model_path is None and onnx_path is None and transcript_path is None:
        raise OutputError("Nothing to export: name a file with --model, --onnx, --transcript or several of them.")
    for path, endings in ((model_path, (".safetensors", ".json", ".csv")), (onnx_path, (".onnx",))):
        if path is not None and not path.endswith(endings):
            raise OutputError(f"{path}: this model file ends in {' or '.join(endings)}.")
    models = [path for path in (model_path, onnx_path) if path is not None]
    report = Report(json_path)
    result: dict[str, Any] = {}
    with open_store(folder, database) as store:
        hash_ = find_hash(store, name)
        if models:
            model = export_model(store, hash_)
            card = write_model(model, [Path(path) for path in models], whole_file)
            report.line(f"Model: {', '.join(models)}, version {model.version}; its card: {card}")
            result |= {"model": model_path, "onnx": onnx_path, "card": str(card), "version": model.version,
                       "check_ins": model.check_ins,
                       "devices": model.devices, "epsilon_sample": model.paid.sample,
                       "epsilon_device": model.paid.device, "delta": model.task.privacy.delta}  # fmt: skip
        if transcript_path is not None:
            with whole_file(Path(transcript_path)) as draft, draft.open("wb") as file:
                done = write_transcript(store, hash_, file)
            many = done.check_ins - done.first
            kept = f"{many:,} {'entry' if many == 1 else 'entries'} of the journal"
            report.line(f"Transcript: {transcript_path}, {kept} up to version {done.version}")
            result |= {"transcript": transcript_path, "first": done.first, "check_ins": done.check_ins,
                       "version": done.version, "publication": done.hash}  # fmt: skip
    report.finish({"name": name, "hash": hash_.hex(), **result})


@click.command(short_help="Rebuild published weights bit for bit.")
@click.argument("transcript", type=click.Path(path_type=Path))
@click.option("--out", default=None, metavar="FILE", help="Write the bytes of the publication.")
@plugin_option
@json_option
def replay(transcript: Path, out: str | None, json_path: str | None) -> None:
    """Rebuild the published weights from TRANSCRIPT, bit for bit. It holds no identities or times."""
    from crowdml.server.transcript import replay as fold_again

    report = Report(json_path)
    done = fold_again(transcript)
    if out is not None:
        with whole_file(Path(out)) as draft:
            draft.write_bytes(done.body)
    report.line(
        f"Task {done.name} ({done.task.hex()[:12]}): entries {done.first + 1:,} to {done.check_ins:,} of the journal "
        f"lead to version {done.version}, exactly as published."
    )
    report.line(f"sha256 of the publication {done.hash}")
    report.finish({"name": done.name, "hash": done.task.hex(), "first": done.first, "check_ins": done.check_ins,
                   "version": done.version, "publication": done.hash, "stopped": done.reason})  # fmt: skip


@click.command(short_help="Copy a server's database while it serves.")
@click.argument("file", type=click.Path(path_type=Path))
@store_options
def backup(file: Path, folder: Path, database: str | None, json_path: str | None) -> None:
    """Copy the server's database, as of one moment, to FILE. The server may be running."""
    from crowdml.storage.server import file_hash
    from crowdml.storage.server.looks import validations

    report = Report(json_path)
    with open_store(folder, database) as store:
        size, has_rows = store.backup(file), bool(validations(store))
    digest = file_hash(file)
    what = "the server's key" + (" and the rows that tasks are validated on" if has_rows else "")
    report.line(f"Backup: {file}, {size_text(size)}. It holds {what}: keep it as safe as the server.")
    report.line(f"sha256 {digest}")
    report.print("Keep this number elsewhere: `crowdml restore --sha256` tells by it whether anything was changed.")
    report.finish({"path": str(file), "bytes": size, "sha256": digest})


@click.command(short_help="Put a backup into an empty server folder.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sha256", default=None, metavar="HEX", help="The hash that `crowdml backup` printed, to check FILE.")
@store_options
def restore(file: Path, sha256: str | None, folder: Path, database: str | None, json_path: str | None) -> None:
    """Put the backup FILE into an empty server folder, and check everything in it."""
    from crowdml.server.checks import check_store
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store
    from crowdml.storage.server import restore as put_back
    from crowdml.storage.server.looks import validations

    report = Report(json_path)
    if database is not None:
        raise OutputError("A backup is restored into a folder. PostgreSQL has its own tool: pg_restore.")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lengths: dict[bytes, int] = {}

    def check(copy: Path) -> None:
        with Store(copy) as store:
            lengths.update(check_store(store))

    try:
        put_back(file, folder / DATABASE, sha256=sha256, check=check)
    except BaseException:
        for each in made:  # what was made for nothing goes again
            with contextlib.suppress(OSError):
                each.rmdir()
        raise
    with Store(folder / DATABASE) as store:
        halted = [found for found in validations(store).values() if found.halted is not None]
    tasks, check_ins = count_text(len(lengths), "task"), count_text(sum(lengths.values()), "check-in")
    report.line(f"Restored {tasks} with {check_ins} to {folder}.")
    if halted:
        report.line(
            f"Private rows of {count_text(len(halted), 'task')} are not looked at any more: what looks have cost since "
            "the backup is not known. Attach them again with `crowdml task validate`, and a budget with room for that."
        )
    report.finish(
        {
            "folder": str(folder),
            "halted": [found.task.hex() for found in halted],
            "check_ins": {hash_.hex(): count for hash_, count in lengths.items()},
        }
    )
