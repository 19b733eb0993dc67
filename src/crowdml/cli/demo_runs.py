"""`crowdml demo --runs N`: real runs, each beside the interval where nine of ten simulated ones end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crowdml.cli.output import Report, make_table
from crowdml.demo.compare import Simulated, beside, simulate
from crowdml.demo.fleets import fleet_stage, run_fleet, simulate_fleet
from crowdml.demo.loop import DemoCrowd
from crowdml.demo.process import in_own_folder, run_until_signal
from crowdml.demo.stages import set_stage
from crowdml.errors import CrowdmlError
from crowdml.task import Task, find_task


@dataclass(frozen=True)
class Beside:
    """One real run, and where nine of ten simulated ones of the same samples end."""

    accuracy: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.accuracy <= self.high

    def plain(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "low": self.low, "high": self.high, "inside": self.inside}


def result_of(found: Sequence[Beside]) -> dict[str, Any]:
    """The JSON of `--runs`. `width`: the mean width of the intervals, in accuracy."""
    width = sum(each.high - each.low for each in found) / max(1, len(found))
    return {"runs": [each.plain() for each in found], "inside": sum(each.inside for each in found), "width": width}


Ran = tuple[float, Callable[..., Simulated | None], tuple[Any, ...]]
"""The accuracy of a real run, and the function and arguments that simulate it."""


def demo_runs(report: Report, runs: int, one: Callable[[int], Ran], trials: int, seed: int) -> None:
    """Run after run, each by `one` with a seed of its own; the simulated crowds of one are computed while the next one
    learns. Ctrl-C keeps what there is."""
    real: list[tuple[float, Any]] = []
    found: list[Beside] = []
    report.note(
        f"{runs} runs of a server and its devices, each beside {trials} simulated crowds that hold the same samples."
    )
    try:
        with beside() as pool, report.progress() as bar:
            shown = bar.add_task("runs", total=runs)
            for own in range(seed, seed + runs):
                accuracy, simulated, told = one(own)
                real.append((accuracy, pool.submit(simulated, *told)))
                _gather(report, real, found, wait=own == seed + runs - 1)
                bar.advance(shown)
    except KeyboardInterrupt:
        if not found:
            raise
        report.note(f"Interrupted: {len(found)} of {runs} runs are done.")
    _show(report, found)
    report.finish(result_of(found))


def run_demo(devices: int | None, seconds: float, trials: int, seed: int) -> Ran:
    """One run of the demo's crowd, with its kills."""
    stage = set_stage("demo", find_task("demo"), devices, seed)
    with in_own_folder(lambda folder: DemoCrowd(folder, stage, seconds, seed)) as crowd:
        proof = run_until_signal(crowd.run()).proof
    if not proof.holds:
        raise CrowdmlError(
            f"Run {seed}: what was acknowledged is not what was counted ({proof.lost} check-ins lost, "
            f"{proof.counted_twice} counted twice). Please report this."
        )
    return proof.accuracy[-1], simulate, (stage, seconds, seed, trials, proof.took)


def run_fleet_of(task: Task, data: str, devices: int | None, trials: int, seed: int) -> Ran:
    """One run of a server and a fleet, as anybody would start them."""
    stage = fleet_stage(task, data, devices, seed)
    with tempfile.TemporaryDirectory(prefix="crowdml-demo-", ignore_cleanup_errors=True) as folder:
        accuracy = run_until_signal(run_fleet(Path(folder), stage))
    return accuracy, simulate_fleet, (stage, seed, trials)


def _gather(report: Report, real: list[tuple[float, Any]], found: list[Beside], *, wait: bool) -> None:
    """Take over the intervals that are computed, in order; all of them with `wait`."""
    while len(found) < len(real) and (wait or real[len(found)][1].done()):
        accuracy, asked = real[len(found)]
        one = Beside(accuracy, *asked.result().interval)
        found.append(one)
        place = "inside" if one.inside else "OUTSIDE"
        report.note(f"run {len(found)}: {one.accuracy:.3f}, simulated {one.low:.3f} to {one.high:.3f}: {place}")


def _show(report: Report, found: Sequence[Beside]) -> None:
    table = make_table("run", "accuracy", "nine of ten simulated", "inside", title="Real runs beside simulated ones")
    for number, each in enumerate(found, 1):
        table.add_row(
            str(number), f"{each.accuracy:.3f}", f"{each.low:.3f} to {each.high:.3f}", "yes" if each.inside else "NO"
        )
    report.print(table)
    result, spread = result_of(found), max(e.accuracy for e in found) - min(e.accuracy for e in found)
    report.print(
        f"{result['inside']} of {len(found)} runs are inside. The intervals are {result['width']:.3f} wide on average; "
        f"the real runs lie {spread:.3f} apart."
    )
