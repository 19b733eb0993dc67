"""One run, the whole system (Steinke, Nasr, Jagielski 2023; review, section 7): canaries in one transcript.

Each of m devices senses one canary whose label is a fair coin. With weights at zero the hinge gradient of x = e_j is
e_j or -e_j: neighbours that are as far apart as the sensitivity says, in directions of their own. The auditor reads the
sealed messages and guesses every coin. Under epsilon-DP the right guesses are dominated by a binomial of m tries that
succeed with chance e^epsilon / (1 + e^epsilon).
"""

import numpy as np
import pytest
from scipy import stats
from tasks import SGD, toml

from crowdml.arrays import Samples
from crowdml.messages import SERVER, decode, seal
from crowdml.price import Price
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find, sgd
from crowdml.task import Task, parse
from crowdml.turn import check_in

DIRECTIONS = 10


def hinge(epsilon: float) -> Task:
    return parse(
        toml(
            SGD,
            name="canaries",
            features={"dimension": DIRECTIONS, "norm": {"kind": "l1", "bound": 1.0}},
            labels={"classes": ["tails", "heads"]},
            model={"kind": "svm"},
            protocol={"batch": 1},
            privacy={"mechanism": "discrete-laplace", "epsilon": {"gradient": epsilon}},
        )
    )


def right_guesses(task: Task, canaries: int, seed: int) -> int:
    """How many coins the transcript of one run gives away to its best reader."""
    protocol = find(task)
    params = sgd.Params(np.zeros(DIRECTIONS, np.float32), np.int32(0))
    coins = np.random.default_rng(seed).integers(0, 2, canaries)
    right = 0
    for device, coin in enumerate(coins):
        direction = device % DIRECTIONS
        batch = Samples(np.eye(DIRECTIONS, dtype=np.float32)[[direction]], np.array([coin], np.int32))
        said = check_in(protocol, task, batch, params, noise=SeededSource(stream(seed, device, 0)), me=str(device))
        envelope = seal(task.hash, str(device), frozenset((SERVER,)), 1, said.message, said.door)
        heard = decode(envelope.kind, envelope.body).gradient.value
        right += int((heard[direction] < 0) == (coin == 1))  # the gradient of heads points down
    return right


def least_to_reject(epsilon: float, canaries: int) -> int:
    """The fewest right guesses that epsilon-DP allows with a chance below 1e-3."""
    return int(stats.binom(canaries, 1 / (1 + np.exp(-epsilon))).isf(1e-3)) + 1


def test_the_auditors_limits_are_those_of_the_review():
    assert [least_to_reject(epsilon, 1000) for epsilon in (0.5, 1, 2, 4)] == [670, 775, 912, 994]
    assert [least_to_reject(epsilon, 10_000) for epsilon in (0.5, 1, 2, 4)] == [6375, 7448, 8908, 9861]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_a_thousand_canaries_in_one_run_give_away_no_more_than_is_quoted(epsilon: float):
    task = hinge(epsilon)
    assert Price.of(find(task), task).sample_epsilon() == pytest.approx(epsilon)
    guessed = right_guesses(task, 1000, seed=11)
    assert guessed < least_to_reject(epsilon, 1000)
    assert guessed > 1000 * (1 - 0.5 * np.exp(-epsilon / 2)) - 4 * np.sqrt(250)  # the reader really reads


def test_a_thousand_canaries_find_noise_of_half_the_scale():
    assert right_guesses(hinge(2.0), 1000, seed=11) >= least_to_reject(1.0, 1000)
