# pyright: basic, reportMissingImports=false
"""Flower's simulation on Ray: python run_flower.py SAMPLES.npz ROUNDS [network]. Prints JSON."""

import json
import logging
import sys
import time
from importlib.metadata import version
from itertools import pairwise

BEGIN = time.perf_counter()

import numpy as np  # noqa: E402
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

PATH, ROUNDS = sys.argv[1], int(sys.argv[2])
NETWORK = "network" in sys.argv[3:]
"""Ten steps of 100 samples on an MLP with two layers of 75, instead of one step of 20 on softmax."""
COHORT, BATCH, STEPS, RATE = (10, 100, 10, 0.5) if NETWORK else (10, 20, 1, 50.0)
WIDTHS = (75, 75) if NETWORK else ()
held = {}
client = ClientApp()


def first_weights(features, classes):
    if not NETWORK:
        return [np.zeros((features, classes), np.float32)]
    chance, widths = np.random.default_rng(0), (features, *WIDTHS, classes)
    pairs = pairwise(widths)
    made = [(chance.normal(size=(into, out)) * np.sqrt(2 / into), np.zeros(out)) for into, out in pairs]
    return [part.astype(np.float32) for layer in made for part in layer]


def step(weights, x, y):
    """One step of a ReLU network, by hand: the weights are matrices and biases in turn; or one matrix."""
    layers = [(weights[0], 0.0)] if len(weights) == 1 else [*zip(weights[::2], weights[1::2], strict=True)]
    entering = [x]
    for matrix, biases in layers[:-1]:
        entering.append(np.maximum(entering[-1] @ matrix + biases, 0))
    scores = entering[-1] @ layers[-1][0] + layers[-1][1]
    slope = np.exp(scores - scores.max(1, keepdims=True))
    slope /= slope.sum(1, keepdims=True)
    slope[np.arange(len(y)), y] -= 1
    slope *= RATE / len(y)
    after = []
    for (matrix, biases), a in zip(layers[::-1], entering[::-1], strict=True):
        after.append([matrix - a.T @ slope, biases - slope.sum(0)][: 1 + NETWORK])
        slope = (slope @ matrix.T) * (a > 0)
    return [part.astype(np.float32) for layer in after[::-1] for part in layer]


@client.train()
def train(message, context):
    if not held:
        held.update(np.load(PATH))
    device = int(context.node_config["partition-id"])
    x, y = held["x"][device], held["y"][device]
    weights = message.content["arrays"].to_numpy_ndarrays()
    for number in range(STEPS):
        part = slice(number * BATCH, (number + 1) * BATCH)
        weights = step(weights, x[part], y[part])
    after = ArrayRecord(weights)
    content = RecordDict({"arrays": after, "metrics": MetricRecord({"num-examples": BATCH * STEPS})})
    return Message(content, reply_to=message)


times, ends = [], []


class Stamped(FedAvg):
    def aggregate_train(self, server_round, replies):
        combined = super().aggregate_train(server_round, replies)
        times.append(time.perf_counter())
        return combined


server = ServerApp()


@server.main()
def main(grid, context):
    data = np.load(PATH)
    devices, _, features = data["x"].shape
    strategy = Stamped(
        fraction_train=COHORT / devices, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=devices
    )
    initial = ArrayRecord(first_weights(features, int(data["y"].max()) + 1))
    ends.extend(strategy.start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS).arrays.to_numpy_ndarrays())


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data = np.load(PATH)
    x, y = data["x"], data["y"]
    run_simulation(
        server, client, num_supernodes=len(x), backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    took = np.diff(times)[max(1, ROUNDS // 8) :]
    rates = [COHORT * len(part) / part.sum() for part in np.array_split(took, 3)]
    scores = x.reshape(-1, x.shape[-1])
    for place in range(0, len(ends), 2):
        scores = scores @ ends[place] + (ends[place + 1] if NETWORK else 0)
        scores = np.maximum(scores, 0) if place + 2 < len(ends) else scores
    right = scores.argmax(1) == y.reshape(-1)
    found = {
        "rates": rates,
        "start": times[0] - BEGIN,
        "accuracy": float(right.mean()),
        "version": f"flwr {version('flwr')}",
    }
    print(json.dumps(found))
