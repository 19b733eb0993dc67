"""How large a task's messages may be: what no server takes is refused before it is hosted, and before it is made."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import msgpack
import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / "cli")]

from cli_runner import refused  # noqa: E402  # found by the line above
from device import make_task, serving  # noqa: E402

from crowdml.errors import TaskError  # noqa: E402
from crowdml.protocols import find, settled  # noqa: E402
from crowdml.server.hub import check_hosted  # noqa: E402
from crowdml.server.limits import Limits  # noqa: E402
from crowdml.server.sizes import check_sizes, largest_check_in  # noqa: E402
from crowdml.task import Task, find_task, parse  # noqa: E402
from crowdml.wire.packing import binary_head  # noqa: E402

TEXT = """
name = "large"
title = "A task with many weights"
features = {{ dimension = {dimension}, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = {classes} }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 1, step = {{ schedule = "constant", c = 1.0 }} }}
privacy = {{ mechanism = "discrete-gaussian", epsilon = {{ gradient = 1.0 }}, delta = 1e-6 }}
"""


def large_text(dimension: int, classes: int) -> str:
    return TEXT.format(dimension=dimension, classes=[str(number) for number in range(classes)])


def large(dimension: int, classes: int) -> Task:
    return settled(parse(large_text(dimension, classes)))


def test_a_task_whose_check_in_does_not_fit_is_refused_before_it_is_hosted(tmp_path: Path):
    """Review 2, network finding M2: it was hosted, and every check-in was charged and answered with 413."""
    with pytest.raises(TaskError, match=r"has up to 4,8\d\d,\d\d\d bytes, and a server takes at most 4,194,304"):
        check_hosted(large(600_000, 2))
    (tmp_path / "large.toml").write_text(large_text(600_000, 2))
    assert "a server takes at most 4,194,304" in refused("task", "check", str(tmp_path / "large.toml"))


def test_a_server_hosts_no_task_whose_check_in_is_larger_than_it_takes(tmp_path: Path):
    """Review 2, network finding M2: however the task comes here, and whatever the operator allows."""
    task = make_task("fits")
    size = largest_check_in(find(task).expected(task))
    with serving(tmp_path / "data", limits=Limits(body=size - 1)) as running:
        with pytest.raises(TaskError, match=f"takes at most {size - 1:,}"):
            running.run(running.hub.add_task(task))
        assert running.hub.store.tasks() == []
    with serving(tmp_path / "data", task, limits=Limits(body=size)) as running:
        assert running.device().check_in(task).status == 202


def test_a_task_of_any_size_is_refused_before_an_array_is_made():
    """Review 2, network finding M2b: a draft of 1,000,000 x 300 was taken, and its start took 1.15 GB."""
    task = large(1_000_000, 300)
    tracemalloc.start()
    try:
        with pytest.raises(TaskError, match="Let it learn fewer weights"):
            check_hosted(task)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20  # and not 1.2 GB


def test_shipped_tasks_fit():
    for name in ("activity", "demo", "digits", "digits-masked", "mnist"):
        task = settled(find_task(name))
        check_sizes(task, find(task))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 1_000_000])
def test_the_head_of_an_array_is_what_msgpack_writes(size: int):
    data = bytes(size)
    assert msgpack.packb(data) == binary_head(size) + data
