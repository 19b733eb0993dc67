"""Processes beside this one, and what is said when one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from proportions_task import street

from crowdml.demo.compare import beside
from crowdml.errors import WorkerKilled
from crowdml.sim import cities
from crowdml.sim.workers import workers


def killing(stop: threading.Event) -> None:
    """Kill the first process that this one starts."""
    while not stop.wait(0.005):
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
            return


@pytest.fixture
def killer():
    stop = threading.Event()
    thread = threading.Thread(target=killing, args=(stop,))
    yield thread.start
    stop.set()
    thread.join()


def test_a_worker_that_is_killed_ends_the_work_with_a_sentence():
    sentence = "One of 1 processes that compute a sum was killed, .* then run the same command again"
    with pytest.raises(WorkerKilled, match=sentence), workers(1, "a sum") as pool:  # noqa: PT012
        child = pool.submit(os.getpid).result(60)
        asked = pool.submit(time.sleep, 600)
        os.kill(child, signal.SIGKILL)
        asked.result(60)


def test_the_comparison_of_the_demo_does_not_wait_for_a_worker_that_is_gone(killer: Callable[[], None]):
    killer()
    with pytest.raises(WorkerKilled, match="compute what the crowd is compared with was killed"), beside() as pool:
        pool.submit(time.sleep, 600).result(60)


def test_a_city_whose_worker_is_killed_says_so(killer: Callable[[], None]):
    task = street(5, peers=2, epsilon=2.0)
    city = cities.exchange(task, np.random.default_rng(1).poisson(40, (5, 24 * 6)), seed=1)
    killer()
    with pytest.raises(WorkerKilled, match="compute what each device of the city learns was killed"):
        cities.learn(task, city.states, city.kept, seed=1, workers=2)


def test_an_error_here_ends_the_workers_at_once():
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), workers(1, "a sum") as pool:  # noqa: PT012
        child = pool.submit(os.getpid).result(60)
        pool.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
