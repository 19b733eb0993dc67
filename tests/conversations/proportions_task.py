"""Tasks of label proportions, for tests: devices in a row, and a crowd that only counts."""

from __future__ import annotations

from crowdml.task import Task, parse

ROW = """
name = "street"
title = "How busy will it be in a quarter of an hour?"

[features]
kind = "windows"
dimension = 3
horizon = 1

[labels]
classes = ["quiet", "busy", "full"]
bins = [10, 50]

[model]
kind = "clusters"
k = 4
restarts = 3

[protocol]
kind = "proportions"
batch = 8
peers = {peers}
memory = 6

[privacy]
mechanism = "discrete-laplace"
epsilon = {{ counts = {epsilon} }}
budget = {{ epsilon = {epsilon}, samples = 100000 }}

{places}
"""


def street(places: int = 5, *, peers: int = 2, epsilon: float = 1.0) -> Task:
    """Places along a line, further and further apart: each has its left neighbour nearest, but for the first."""
    listed = "\n".join(
        f'[[places]]\nname = "corner {place}"\nlat = 0.0\nlon = {(place + place * place) / 1000:.3f}'
        for place in range(places)
    )
    return parse(ROW.format(peers=peers, epsilon=epsilon, places=listed))


HISTOGRAM = """
name = "moods"

[features]
dimension = 1
norm = {{ kind = "l2", bound = 1.0 }}

[labels]
classes = ["glad", "calm", "sad"]

[model]
kind = "histogram"

[protocol]
kind = "proportions"
batch = 20

[privacy]
{privacy}
{masking}
"""


def histogram(*, masked: bool = False) -> Task:
    """A crowd that only counts: each check-in by itself, or cohorts of 10 under masks."""
    if masked:
        privacy = 'mechanism = "skellam"\nepsilon = { counts = 1.0 }\ndelta = 1e-6\n'
        return parse(HISTOGRAM.format(privacy=privacy, masking="[masking]\ncohort = 10\nminimum = 8\ncolluders = 1\n"))
    privacy = 'mechanism = "discrete-laplace"\nepsilon = { counts = 0.5 }\n'
    return parse(HISTOGRAM.format(privacy=privacy, masking=""))
