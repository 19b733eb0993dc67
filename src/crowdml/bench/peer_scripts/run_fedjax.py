# pyright: basic, reportMissingImports=false
"""FedJAX's federated averaging: python run_fedjax.py SAMPLES.npz. Prints one line of JSON. Needs fedjax only."""

import json
import sys
import time
from importlib.metadata import version

BEGIN = time.perf_counter()

import fedjax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

ROUNDS, WARM, COHORT, BATCH, RATE = 200, 20, 10, 20, 50.0


def main():
    data = np.load(sys.argv[1])
    x, y = data["x"], data["y"].astype(np.int32)
    fedjax.set_for_each_client_backend("jit")
    held = fedjax.InMemoryFederatedData(
        {f"{n:07d}": {"x": xs, "y": ys} for n, (xs, ys) in enumerate(zip(x, y, strict=True))}
    )

    def losses(params, batch, rng):
        odds = jax.nn.log_softmax(batch["x"] @ params["weights"])
        return -jnp.take_along_axis(odds, batch["y"][:, None], 1)[:, 0]

    algorithm = fed_avg.federated_averaging(
        fedjax.grad(losses),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(held, num_clients=COHORT, seed=0)
    state = algorithm.init({"weights": jnp.zeros((x.shape[-1], int(y.max()) + 1))})

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
    right = (x.reshape(-1, x.shape[-1]) @ np.asarray(state.params["weights"])).argmax(1) == y.reshape(-1)
    name = f"fedjax {version('fedjax')} on jax {jax.__version__}"
    print(json.dumps({"rates": rates, "start": start, "accuracy": float(right.mean()), "version": name}))


main()
