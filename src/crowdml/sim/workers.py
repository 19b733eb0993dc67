"""Processes that compute beside this one: one that is killed ends the work with a sentence, and none is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from crowdml.errors import WorkerKilled


@contextmanager
def workers(count: int, task: str, start: Callable[[], None] | None = None) -> Generator[ProcessPoolExecutor]:
    """Processes that compute `task`, the end of a sentence; each calls `start` first. An error here ends them at once.

    They are not forked: a process that has threads of XLA does not survive it.
    """
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=start)
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage]
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise WorkerKilled(
                f"One of {count} processes that compute {task} was killed, and what it had computed is gone. If memory "
                "ran out, take fewer devices or end other programs; then run the same command again."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
