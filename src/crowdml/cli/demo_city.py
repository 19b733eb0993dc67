"""`crowdml demo --task traffic`: devices that teach each other, each with a terminal of its own to look at."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from crowdml.cli.demo import NotKept, keep_serving, watched
from crowdml.cli.output import Report, make_table, size_text
from crowdml.texts import epsilon_text

if TYPE_CHECKING:
    from crowdml.demo.city import Ended, Sight
    from crowdml.task import Task

WHY = (
    "Each device holds its own readings, and hears from its nearest neighbours how often each class occurred, with "
    "noise. Readings, models and predictions stay with their owners (docs/protocols/proportions.md).",
    "The guarantee protects one measurement, not a person.",
)


def demo_city(report: Report, task: Task, devices: int, seconds: float, seed: int, *, keep: bool) -> None:
    """Serve, join, exchange, kill two, prove; and show it."""
    from crowdml.demo.city import City, set_scene
    from crowdml.demo.process import in_own_folder, run_until_signal

    began, scene = time.perf_counter(), set_scene(task, devices, seed)
    report.aside.print(
        f"A server that relays, and {devices} devices at places of a city ({scene.data} readings), each a process of "
        "its own. They say how often each class occurred, with noise, and nothing else.",
        soft_wrap=True,
    )
    with in_own_folder(lambda folder: City(folder, scene, seconds)) as city:
        with watched(report, terminals, lambda _: None, transient=False) as (city.show, city.say):
            ended = run_until_signal(city.run())
        _show(report, ended)
        report.plotted(lambda path: _plot(path, ended))
        report.finish(_result(ended, seed, time.perf_counter() - began))
        if not ended.proof.holds:
            raise NotKept
        if keep:
            keep_serving(report, city.server)


def terminals(sights: list[Sight]) -> Any:
    """Each device's place, and the last line on its own terminal: what it predicts, and how often it was right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1), show_header=False)
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column(no_wrap=True, min_width=34)
    table.add_column(overflow="ellipsis", no_wrap=True, min_width=10)
    styles = {"killed with -9": "bold red", "back": "green", "done": "dim"}
    for sight in sights:
        there = sight.said and sight.state in ("at work", "back", "done")
        said, right, *_ = [*sight.said.split(" · "), ""] if there else [sight.state, ""]
        style = styles.get(sight.state, "")
        table.add_row(Text(sight.name, style), Text(said, style), Text(right.removesuffix(" so far"), style))
    return table


def _show(report: Report, ended: Ended) -> None:
    scene, proof = ended.scene, ended.proof
    right, guessed = ended.total("letters", "right"), ended.total("letters", "guessed")
    table = make_table("", "", title="Devices that teach each other", numbers=False)
    table.show_header = False
    for name, value in (
        ("devices, each with its nearest", f"{scene.devices}, {scene.task.protocol['peers']}"),
        ("predicted right, before it came", f"{right / max(1, guessed):.2f} of {guessed:,.0f}"),
        ("letters heard", f"{ended.total('letters', 'heard'):,.0f}, {size_text(ended.total('letters', 'bytes'))}"),
        ("sent up, with HTTP", size_text(ended.total("bytes_up"))),
        ("sent down", size_text(ended.total("bytes_down"))),
        ("ε of a measurement", epsilon_text(max(each["epsilon_sample"] for each in ended.summaries.values()))),
        (
            "ε of the most expensive device",
            epsilon_text(max(each["epsilon_device"] for each in ended.summaries.values())),
        ),
        ("killed with -9, and back", f"{len(ended.killed)}, {len(ended.back)}"),
        ("batches that the server counted", f"{proof.journalled:,}"),
        ("  receipts not in the journal: lost", f"{proof.lost}"),
        ("  counted twice", f"{proof.counted_twice}"),
        ("journal folded again = published counts", "bit for bit" if proof.same_bits else "NO"),
    ):
        table.add_row(name, value)
    report.print(table)
    counts = make_table("class", "share", "95 %", title="Counted, with noise")
    for name, share, reach in _shares(ended):
        counts.add_row(name, f"{share:.3f}", f"± {reach:.3f}")
    report.print(counts)
    for text in WHY:
        report.console.print(text)
        report.console.print()


def _shares(ended: Ended) -> list[tuple[str, float, float]]:
    """Each class's share by the noisy counts, and how far noise takes it in 95 of 100 cases."""
    noisy = ended.counts
    reach = 1.96 * noisy.variance**0.5 / max(1, noisy.samples)
    classes = ended.scene.task.labels.classes
    return [(name, count / max(1, noisy.samples), reach) for name, count in zip(classes, noisy.counts, strict=True)]


def _result(ended: Ended, seed: int, seconds: float) -> dict[str, Any]:
    proof, summaries = ended.proof, ended.summaries.values()
    return {
        "accuracy": ended.total("letters", "right") / max(1.0, ended.total("letters", "guessed")),
        "epsilon_sample": max(each["epsilon_sample"] for each in summaries),
        "epsilon_device": max(each["epsilon_device"] for each in summaries),
        "delta": max(each["delta"] for each in summaries),
        "devices": ended.scene.devices,
        "check_ins": proof.journalled,
        "acknowledged": proof.acknowledged,
        "lost": proof.lost,
        "counted_twice": proof.counted_twice,
        "bytes_up": int(ended.total("bytes_up")),
        "bytes_down": int(ended.total("bytes_down")),
        "restarts": 0,
        "seconds": seconds,
        "learning_seconds": ended.seconds,
        "unsigned": proof.unsigned,
        "same_bits": proof.same_bits,
        "publication": proof.sha256,
        "seed": seed,
        "task": ended.scene.task.name,
        "data": ended.scene.data,
        "letters": int(ended.total("letters", "heard")),
        "letter_bytes": int(ended.total("letters", "bytes")),
        "guessed": int(ended.total("letters", "guessed")),
        "devices_killed": len(ended.killed),
        "devices_back": len(ended.back),
        "labels": [{"class": name, "share": share, "reach": reach} for name, share, reach in _shares(ended)],
    }


def _plot(path: Any, ended: Ended) -> None:
    """How often each device was right, and how often each class occurred."""
    from crowdml.cli.charts import draw_city

    places = ended.scene.task.places
    scores = [
        (places[place].name, each["letters"]["right"] / max(1, each["letters"]["guessed"]))
        for place, each in ended.summaries.items()
    ]
    sample = epsilon_text(max(each["epsilon_sample"] for each in ended.summaries.values()))
    draw_city(path, f"Devices that teach each other: ε of a measurement {sample}", scores, _shares(ended))
