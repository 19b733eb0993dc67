# pyright: basic, reportMissingImports=false
"""pfl's simulation on one process: python run_pfl.py SAMPLES.npz numpy|torch [network]. Prints JSON."""

import json
import sys
import time
from itertools import pairwise

BEGIN = time.perf_counter()

import numpy as np  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402

NETWORK = "network" in sys.argv[3:]
"""Ten steps of 100 samples on an MLP with two layers of 75 (PyTorch), instead of one step of 20 on softmax."""
COHORT, HIDDEN = 10, (75, 75)
ROUNDS, WARM, BATCH, STEPS, RATE = (20, 3, 100, 10, 0.5) if NETWORK else (200, 20, 20, 1, 50.0)


class Stamps(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        return False, Metrics()


def numpy_parts(x, y, classes):
    from pfl.internal.ops import numpy_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.model.base import StatefulModel
    from pfl.stats import MappedVectorStatistics

    set_framework_module(numpy_ops)

    class Softmax(StatefulModel):
        def __init__(self):
            self.weights = np.zeros((x.shape[-1], classes), np.float32)

        def get_parameters(self, placeholders=None):
            return MappedVectorStatistics({"weights": self.weights.copy()})

        def set_parameters(self, parameters):
            self.weights[:] = parameters["weights"]

        def get_model_difference(self, other, clone=False):
            return MappedVectorStatistics({"weights": self.weights - other["weights"]})

        def apply_model_update(self, statistics):
            self.weights += statistics["weights"]
            return self, Metrics()

        def evaluate(self, dataset, name_formatting_fn, eval_params=None):
            return Metrics()

        def save(self, path): ...

        def load(self, path): ...

    class OneStep(FederatedAveraging):
        def train_one_user(self, initial_model_state, model, user_dataset, central_context):
            xb, yb = next(iter(user_dataset.iter(BATCH)))
            scores = xb @ model.weights
            residual = np.exp(scores - scores.max(1, keepdims=True))
            residual /= residual.sum(1, keepdims=True)
            residual[np.arange(len(yb)), yb] -= 1
            model.weights -= RATE / len(yb) * (xb.T @ residual)
            return model.get_model_difference(initial_model_state), Metrics()

    model = Softmax()
    return model, OneStep, (x, y), lambda rows: rows @ model.weights


def torch_parts(x, y, classes):
    import torch
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)

    class Softmax(torch.nn.Module):
        def __init__(self):
            super().__init__()
            if NETWORK:
                widths, layers = (x.shape[-1], *HIDDEN, classes), []
                for into, out in pairwise(widths):
                    layers += [torch.nn.Linear(into, out), torch.nn.ReLU()]
                self.scores = torch.nn.Sequential(*layers[:-1])
            else:
                self.scores = torch.nn.Linear(x.shape[-1], classes, bias=False)

        def loss(self, inputs, labels, eval=False):  # noqa: A002
            return torch.nn.functional.cross_entropy(self.scores(inputs), labels)

        def metrics(self, inputs, labels, eval=False):  # noqa: A002
            return {}

    net = Softmax()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    held = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))

    def scores(rows):
        with torch.no_grad():
            return net.scores(torch.from_numpy(rows)).numpy()

    return model, FederatedAveraging, held, scores


def main():
    data = np.load(sys.argv[1])
    x, y = data["x"], data["y"]
    model, algorithm, held, scores = (numpy_parts if sys.argv[2] == "numpy" else torch_parts)(x, y, int(y.max()) + 1)
    sampler = get_user_sampler("random", list(range(len(x))))
    devices = FederatedDataset(lambda user: Dataset(raw_data=[part[user] for part in held], user_id=str(user)), sampler)
    backend = SimulatedBackend(training_data=devices, val_data=None)
    local = NNTrainHyperParams(
        local_batch_size=BATCH, local_num_epochs=None, local_num_steps=STEPS, local_learning_rate=RATE
    )

    def rounds(count):
        stamps = Stamps()
        params = NNAlgorithmParams(
            central_num_iterations=count, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=None
        )
        algorithm().run(
            params, backend, model, local, NNEvalHyperParams(local_batch_size=None), callbacks=[stamps],
            send_metrics_to_platform=False,
        )  # fmt: skip
        return stamps.times

    rounds(1)
    start = time.perf_counter() - BEGIN
    rates = []
    for _ in range(3):
        times = rounds(WARM + ROUNDS)
        rates.append(COHORT * ROUNDS / (times[-1] - times[WARM - 1]))
    right = scores(x.reshape(-1, x.shape[-1])).argmax(1) == y.reshape(-1)
    from importlib.metadata import version

    print(
        json.dumps(
            {"rates": rates, "start": start, "accuracy": float(right.mean()), "version": f"pfl {version('pfl')}"}
        )
    )


main()
