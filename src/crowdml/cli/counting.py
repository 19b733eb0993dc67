"""`crowdml simulate` for tasks that only count: how far the crowd's noisy histogram is from the true one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from crowdml.cli.output import Report, epsilon_text, make_table, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from crowdml.datasets import Dataset
    from crowdml.sim.counting import Counts
    from crowdml.task import Task


def simulate_counts(
    report: Report,
    task: Task,
    data: Dataset,
    *,
    population: str,
    devices: int,
    dropout: float,
    seed: int,
    seeds: Sequence[int],
    expect: Callable[[int], None],
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Every trial deals the rows out anew. The first is shown; over several, the mean error of a share."""
    import numpy as np

    from crowdml.protocol import quote
    from crowdml.protocols import find, settled
    from crowdml.sim.counting import counts, held, turns
    from crowdml.sim.estimator import message_bytes, spread_out

    started, x, y = time.perf_counter(), data.x_train, data.y_train
    dealt = [held(task, x, y, spread_out(population, y, devices, each, data.groups)) for each in seeds]
    expect(sum(turns(task, each, one, dropout) for each, one in zip(dealt, seeds, strict=True)))
    runs = [counts(task, each, one, dropout=dropout, tick=tick) for each, one in zip(dealt, seeds, strict=True)]
    first, priced, (up, down) = runs[0], quote(find(task), task), message_bytes(task)
    exact, trips = task.privacy.mechanism == "none", max(int(run.trips.max(initial=0)) for run in runs)
    noisy, check_ins = first.noisy, int(first.trips.sum())
    errors = [_error(run) for run in runs]
    reach = 1.96 * noisy.variance**0.5 / max(1, noisy.samples)
    sample = float("inf") if exact else priced.sample_epsilon()
    alone = float("inf") if exact else priced.sample_epsilon_alone()
    labels = [
        {
            "class": name,
            "share": count / max(1, noisy.samples),
            "reach": reach,
            "true": int(true) / max(1, noisy.samples),
        }
        for name, count, true in zip(task.labels.classes, noisy.counts, first.true.tolist(), strict=True)
    ]
    result: dict[str, Any] = {
        "id": f"simulate/{task.name}",
        "task": settled(task).hash.hex(),
        "data": data.name,
        "devices": int((first.trips > 0).sum()),
        "population": population,
        "trials": len(runs),
        "seed": seed,
        "samples": noisy.samples,
        "error": float(np.mean(errors)),
        "epsilon_sample": sample,
        "epsilon_device": float("inf") if exact else priced.device_epsilon(trips),
        "epsilon_sample_alone": alone,
        "epsilon_device_alone": float("inf") if exact else priced.device_epsilon_alone(trips),
        "delta": float(task.privacy.delta),
        "check_ins": check_ins,
        "rounds": None if task.masking is None else first.sums,
        "bytes_up": check_ins * up,
        "bytes_down": check_ins * down,
        "seconds": time.perf_counter() - started,
        "labels": labels,
        "series": [
            {
                "key": "labels",
                "unit": "classes, in the order of the task",
                "name": task.title or task.name,
                "x": list(range(1, len(labels) + 1)),
                "y": [each["share"] for each in labels],
                "low": [each["share"] - reach for each in labels],
                "high": [each["share"] + reach for each in labels],
                "privacy": {
                    "unit": "sample", "epsilon": sample, "epsilon_alone": alone, "claimed": None,
                    "delta": float(task.privacy.delta), "as_published": False,
                },
            }
        ],
    }  # fmt: skip
    _show(report, task, result)
    report.plotted(lambda path: _plot(path, task, result))
    return result


def _error(run: Counts) -> float:
    """How far a share is from the truth, on average over classes."""
    import numpy as np

    return float(np.abs(np.asarray(run.noisy.counts) - run.true).mean() / max(1, run.noisy.samples))


def _show(report: Report, task: Task, result: dict[str, Any]) -> None:
    table = make_table("class", "share", "95 % of the noise", "true", title=f"{task.name}: {task.title}")
    for each in result["labels"]:
        table.add_row(each["class"], f"{each['share']:.4f}", f"± {each['reach']:.4f}", f"{each['true']:.4f}")
    report.print(table)
    facts = make_table("", "", numbers=False)
    facts.show_header = False
    over = f", mean of {result['trials']} trials" if result["trials"] > 1 else ""
    facts.add_row("a share is wrong by, on average", f"{result['error']:.4f}{over}")
    facts.add_row("ε of a sample", epsilon_text(result["epsilon_sample"]))
    facts.add_row("ε of the most expensive device", epsilon_text(result["epsilon_device"]))
    if task.masking is not None:
        facts.add_row("  a sample's, if everyone else colludes", epsilon_text(result["epsilon_sample_alone"]))
        facts.add_row("cohorts added up", f"{result['rounds']:,}")
    facts.add_row("devices, and samples that were counted", f"{result['devices']:,}, {result['samples']:,}")
    facts.add_row("check-ins", f"{result['check_ins']:,}")
    facts.add_row("sent up, down", f"{size_text(result['bytes_up'])}, {size_text(result['bytes_down'])}")
    facts.add_row("seconds", f"{result['seconds']:.1f}")
    report.print(facts)
    report.aside.print(f"Again: --seed {result['seed']}")


def _plot(path: Any, task: Task, result: dict[str, Any]) -> None:
    from crowdml.cli.charts import draw_shares

    price = f"ε of a sample {epsilon_text(result['epsilon_sample'])}, {result['samples']:,} samples"
    rows = [(each["class"], each["share"], each["reach"], each["true"]) for each in result["labels"]]
    draw_shares(path, f"{task.name}: {task.title}", price, rows)
