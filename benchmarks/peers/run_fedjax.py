# pyright: basic, reportMissingImports=false
"""FedJAX's federated averaging: python run_fedjax.py SAMPLES.npz [network]. Prints one line of JSON."""

import json
import sys
import time
from importlib.metadata import version
from itertools import pairwise

BEGIN = time.perf_counter()

import fedjax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

NETWORK = "network" in sys.argv[2:]
"""Ten steps of 100 samples on an MLP with two layers of 75, instead of one step of 20 on softmax."""
COHORT, HIDDEN = 10, (75, 75)
ROUNDS, WARM, BATCH, STEPS, RATE = (30, 5, 100, 10, 0.5) if NETWORK else (200, 20, 20, 1, 50.0)


def first_weights(features, classes):
    if not NETWORK:
        return {"weights": jnp.zeros((features, classes))}
    chance, widths = np.random.default_rng(0), (features, *HIDDEN, classes)
    found = {}
    for layer, (into, out) in enumerate(pairwise(widths)):
        found[f"w{layer}"] = jnp.asarray(chance.normal(size=(into, out)) * np.sqrt(2 / into), jnp.float32)
        found[f"b{layer}"] = jnp.zeros(out)
    return found


def scores(params, x):
    if not NETWORK:
        return x @ params["weights"]
    for layer in range(len(HIDDEN)):
        x = jax.nn.relu(x @ params[f"w{layer}"] + params[f"b{layer}"])
    return x @ params[f"w{len(HIDDEN)}"] + params[f"b{len(HIDDEN)}"]


def main():
    data = np.load(sys.argv[1])
    x, y = data["x"], data["y"].astype(np.int32)
    fedjax.set_for_each_client_backend("jit")
    held = fedjax.InMemoryFederatedData(
        {f"{n:07d}": {"x": xs, "y": ys} for n, (xs, ys) in enumerate(zip(x, y, strict=True))}
    )

    def losses(params, batch, rng):
        odds = jax.nn.log_softmax(scores(params, batch["x"]))
        return -jnp.take_along_axis(odds, batch["y"][:, None], 1)[:, 0]

    algorithm = fed_avg.federated_averaging(
        fedjax.grad(losses),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(held, num_clients=COHORT, seed=0)
    state = algorithm.init(first_weights(x.shape[-1], int(y.max()) + 1))

    def rounds(state, count):
        for _ in range(count):
            state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        return state

    state = rounds(state, 1)
    start = time.perf_counter() - BEGIN
    state = rounds(state, WARM)
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        state = rounds(state, ROUNDS)
        rates.append(COHORT * ROUNDS / (time.perf_counter() - began))
    right = np.asarray(scores(state.params, x.reshape(-1, x.shape[-1]))).argmax(1) == y.reshape(-1)
    name = f"fedjax {version('fedjax')} on jax {jax.__version__}"
    print(json.dumps({"rates": rates, "start": start, "accuracy": float(right.mean()), "version": name}))


main()
