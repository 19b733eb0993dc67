"""Rounds of masking over real HTTP: what is heard, told, refused and kept, and that the model hears sums alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from device import serving
from masked_device import crowd, make_masked, through, total_of

from crowdml.messages import decode
from crowdml.server.limits import Limits
from crowdml.server.runner import Fold
from crowdml.wire.envelopes import open_signed

MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6)


def soon(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_round_over_http_ends_in_one_entry_of_the_server_that_has_the_sum(tmp_path: Path) -> None:
    task = make_masked()
    with serving(tmp_path, task, limits=MANY) as server:
        devices = crowd(server, task, 5)
        rounds = server.hub.rounds(task.hash)
        for each in devices:
            assert each.advertise().status == 202
        through(devices, lambda: rounds.counts.get("summed") == 1)
        wanted = total_of(devices, 1)
        (entry,) = list(server.hub.store.totals(task.hash))
        signed = open_signed(entry[1])
        assert signed.verify(server.hub.key.public)
        heard = decode(signed.envelope.kind, signed.envelope.body)
        assert (heard.gradient.value == wanted["gradient"]).all()
        assert (heard.labels.value == wanted["labels"]).all()
        assert (int(heard.devices), int(heard.version)) == (5, 0)
        fold = Fold(task)
        fold.apply(heard, "server")
        assert np.array_equal(server.hub.runners[task.hash].fold.weights, fold.weights)
        assert server.hub.runners[task.hash].offer.version == 1
        assert devices[0].look().round == 2
