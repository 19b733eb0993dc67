"""`crowdml simulate` for tasks that only count: how far the crowd's noisy histogram is from the true one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crowdml.cli.output import Report, make_table, size_text
from crowdml.texts import epsilon_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from crowdml.datasets import Dataset
    from crowdml.protocol import Noisy
    from crowdml.sim.studies import Study
    from crowdml.task import Task


def simulate_counts(
    report: Report,
    task: Task,
    data: Dataset,
    *,
    population: str,
    devices: int,
    dropout: float,
    seed: int | None,
    trials: int,
    expect: Callable[[int], None],
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Every trial deals the rows out anew. The first is shown; over several, the mean error of a share."""
    import numpy as np

    from crowdml.protocols import settled
    from crowdml.sim.studies import simulate
    from crowdml.sim.trial import Deal

    x, y = data.x_train, data.y_train
    study = simulate(
        task, x, y, devices=Deal(population, devices, data.groups), trials=trials, seed=seed, dropout=dropout,
        engine="events", expect=expect, tick=tick,
    )  # fmt: skip
    found = [counts(study, number, y) for number in range(trials)]
    noisy, truth = found[0]
    errors = [float(np.abs(np.asarray(each.counts) - true).mean() / max(1, each.samples)) for each, true in found]
    reach = 1.96 * noisy.variance**0.5 / max(1, noisy.samples)
    paid = study.paid
    labels = [
        {
            "class": name,
            "share": count / max(1, noisy.samples),
            "reach": reach,
            "true": int(true) / max(1, noisy.samples),
        }
        for name, count, true in zip(task.labels.classes, noisy.counts, truth.tolist(), strict=True)
    ]
    result: dict[str, Any] = {
        "id": f"simulate/{task.name}",
        "task": settled(task).hash.hex(),
        "data": data.name,
        "devices": len(np.unique(study.runs[0].schedule.device)),
        "population": population,
        "trials": trials,
        "seed": study.seed,
        "samples": noisy.samples,
        "error": float(np.mean(errors)),
        **paid.plain,
        "delta": float(task.privacy.delta),
        "check_ins": study.check_ins,
        "rounds": None if study.rounds is None else study.rounds - study.abandoned,
        "bytes_up": study.bytes_up,
        "bytes_down": study.bytes_down,
        "seconds": study.seconds,
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
                    "unit": "sample", "epsilon": paid.sample, "epsilon_alone": paid.sample_alone, "claimed": None,
                    "delta": float(task.privacy.delta), "as_published": False,
                },
            }
        ],
    }  # fmt: skip
    _show(report, task, result)
    report.plotted(lambda path: _plot(path, task, result))
    return result


def counts(study: Study, trial: int, y: Any) -> tuple[Noisy, Any]:
    """The crowd's noisy counts in a trial, and how often each label y [n] occurred among the samples behind them."""
    import numpy as np

    from crowdml.protocols import find
    from crowdml.sim.layout import Holding

    run, task = study.runs[trial], study.task
    tally = find(task).progress(task, run.state)
    assert tally is not None
    assert tally.labels is not None
    told = run.schedule.heard
    rows = Holding(y, y, study.populations[trial]).rows(told.device[:, None], told.samples)
    return tally.labels, np.bincount(y[rows].reshape(-1), minlength=task.classes or 0)


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
