"""`crowdml demo`: a small simulated crowd learns, beside what it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.output import Report, epsilon_text, json_option, make_table, size_text
from crowdml.cli.task import find_task

if TYPE_CHECKING:
    from crowdml.sim.estimator import Study

DEVICES = {"digits012": 15, "digits": 47}
WHY = (
    "No device holds more than two kinds of digit, so alone it cannot learn the others; the crowd can. (Dealt out "
    "evenly, 28 digits of three kinds are so easy that a device alone beats the noisy crowd.)",
    "Ten digits do worse at the same price, nearer to chance: 3.3 times as many weights, each as noisy, and no more "
    "digits of a kind to learn them from. Noise that each device adds on its own wants thousands of devices; with "
    "1,437 digits in all there are 47.",
    "The step follows a public rule (docs/task.md); it looks at no digit. How many devices there are, and that 1/2, "
    "the middle of the pixels' range, is taken off every pixel, was settled by people who had seen these digits, and "
    "so was the split by class: no ε covers that.",
)


@dataclass(frozen=True)
class Shown:
    """One crowd of the demo: its trials, and what the same samples give in one place, or on each device alone."""

    study: Study
    accuracy: Any  # [trials, points]
    central: float
    alone: float
    alone_evenly: float

    @property
    def last(self) -> Any:
        return self.accuracy[:, -1]


@click.command()
@click.option("--trials", type=click.IntRange(1, 1000), metavar="N", default=10, help="For the spread. Default: 10.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), metavar="S", default=1, help="Of the first trial. Default: 1."
)
@click.option("--plot", "plot_path", metavar="PATH", default="out/demo.png", show_default=True)
@json_option
def demo(trials: int, seed: int, plot_path: str, json_path: str | None) -> None:
    """Watch a small crowd learn: accuracy, both epsilon totals and bytes, against training in one place and alone."""
    report = Report(json_path, plot_path)
    started = time.perf_counter()
    report.aside.print("A simulated crowd learns to tell digits apart. Every digit stays on its device.")
    with report.progress() as progress:

        def watch(title: str) -> tuple[Callable[[int], None], Callable[[int], None]]:
            bar = progress.add_task(title, total=None)
            return (
                lambda total: progress.update(bar, total=total),
                lambda done: progress.advance(bar, done),
            )

        three = _learn("digits012", trials, seed, *watch("three digits: check-ins"), *watch("  compared with"))
        ten = _learn("digits", trials, seed, *watch("ten digits: check-ins"), *watch("  compared with"))
    seconds = time.perf_counter() - started
    _show(report, three, ten)
    report.plotted(lambda path: _plot(path, three, ten))
    report.finish(_result(three, ten, seed, seconds))


def _learn(
    name: str,
    trials: int,
    seed: int,
    expect: Callable[[int], None],
    tick: Callable[[int], None],
    expect_others: Callable[[int], None],
    tick_others: Callable[[int], None],
) -> Shown:
    """The shipped task on its digits, dealt out anew in each trial; and the same digits in one place, and alone."""
    from crowdml.datasets import load
    from crowdml.features import normalise
    from crowdml.sim.estimator import simulate, spread_out

    task, data, devices = find_task(name), load(name, normalise="none"), DEVICES[name]
    x, x_test = normalise(data.x_train - 0.5, "l2"), normalise(data.x_test - 0.5, "l2")
    study = simulate(
        task,
        x,
        data.y_train,
        lambda each: spread_out("by_class", data.y_train, devices, each),
        seeds=[seed + number for number in range(trials)],
        expect=expect,
        tick=tick,
    )

    expect_others(1 + 2 * devices)

    def trained(rows: Any) -> float:
        tick_others(1)
        return _score(x[rows], data.y_train[rows], x_test, data.y_test)

    def alone(population: Any) -> float:
        scores = [trained(population.held_by(device)) for device in range(population.devices)]
        return sum(scores) / len(scores)

    even = spread_out("iid", data.y_train, devices, seed)
    accuracy = study.accuracy(x_test, data.y_test)
    return Shown(study, accuracy, trained(slice(None)), alone(study.population), alone(even))


def _score(x: Any, y: Any, x_test: Any, y_test: Any) -> float:
    """Accuracy of scikit-learn's softmax regression, without privacy; of the only answer where there is one class."""
    from sklearn.linear_model import LogisticRegression

    if len(set(y.tolist())) < 2:
        return float((y_test == y[0]).mean())
    return float(
        LogisticRegression(C=100.0, tol=1e-3, max_iter=300, fit_intercept=False).fit(x, y).score(x_test, y_test)
    )


def _show(report: Report, three: Shown, ten: Shown) -> None:
    table = make_table("", "digits 0 to 2", "ten digits", title="Accuracy on digits that no device holds")
    for name, of in (
        ("the crowd, this run", lambda shown: f"{shown.last[0]:.2f}"),
        (f"mean of {len(three.last)} trials", lambda shown: f"{shown.last.mean():.2f}"),
        ("lowest to highest", lambda shown: f"{shown.last.min():.2f} to {shown.last.max():.2f}"),
        ("all digits in one place, no privacy", lambda shown: f"{shown.central:.2f}"),
        ("each device alone, nothing sent", lambda shown: f"{shown.alone:.2f}"),
        ("  were the digits dealt out evenly", lambda shown: f"{shown.alone_evenly:.2f}"),
        ("chance", lambda shown: f"{1 / shown.study.task.classes:.2f}"),
    ):
        table.add_row(name, of(three), of(ten))
    table.add_section()
    for name, of in (
        ("devices, with digits each", lambda study: f"{study.population.devices}, {study.population.rows.shape[1]}"),
        ("check-ins", lambda study: f"{study.check_ins}"),
        ("ε of the dearest sample", lambda study: epsilon_text(study.cost.epsilon_sample)),
        ("ε of the dearest device", lambda study: epsilon_text(study.cost.epsilon_device)),
        ("δ of both", lambda study: f"{study.cost.delta:g}"),
        ("bytes sent up", lambda study: size_text(study.bytes_up)),
        ("bytes sent down", lambda study: size_text(study.bytes_down)),
    ):
        table.add_row(name, of(three.study), of(ten.study))
    report.print(table)
    for text in WHY:
        report.console.print(text)
        report.console.print()


def _result(three: Shown, ten: Shown, seed: int, seconds: float) -> dict[str, Any]:
    study = three.study
    return {
        "accuracy": three.last[0],
        "epsilon_sample": study.cost.epsilon_sample,
        "epsilon_device": study.cost.epsilon_device,
        "delta": study.cost.delta,
        "devices": study.population.devices,
        "check_ins": study.check_ins,
        "acknowledged": study.check_ins,
        "lost": 0,
        "counted_twice": 0,
        "bytes_up": study.bytes_up,
        "bytes_down": study.bytes_down,
        "restarts": 0,
        "seconds": seconds,
        "simulated": True,
        "seed": seed,
        **_spread(three),
        "ten_digits": {"accuracy": ten.last[0], **_spread(ten)},
    }


def _spread(shown: Shown) -> dict[str, Any]:
    return {
        "trials": len(shown.last),
        "accuracy_mean": shown.last.mean(),
        "accuracy_low": shown.last.min(),
        "accuracy_high": shown.last.max(),
        "centralised": shown.central,
        "alone": shown.alone,
        "alone_dealt_evenly": shown.alone_evenly,
    }


def _plot(path: Any, three: Shown, ten: Shown) -> None:
    from crowdml.cli.charts import Curve, draw
    from crowdml.sim.estimator import describe_cost

    curves = [
        Curve(
            f"{title}: {shown.study.population.devices} devices, {shown.study.population.rows.shape[1]} digits each",
            shown.study.points,
            shown.accuracy,
            (("all in one place, no privacy", shown.central), ("each device alone", shown.alone)),
            1 / (shown.study.task.classes or 1),
        )
        for title, shown in (("Digits 0 to 2", three), ("Ten digits", ten))
    ]
    draw(path, f"A simulated crowd, {describe_cost(three.study.cost)}", curves)
