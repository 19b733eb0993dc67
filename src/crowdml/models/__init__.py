"""Models: losses, per-sample gradients, predictions, and the bounds that privacy rests on. No noise, no state."""

from crowdml.models.binary import Logistic, SmoothSvm, Svm
from crowdml.models.cnn import Cnn
from crowdml.models.linear import LeastSquares, Linear
from crowdml.models.make import KINDS, describe_model, make_model, read_model
from crowdml.models.mlp import Mlp
from crowdml.models.model import Model, Norm, longest_gradient, sample_gradients
from crowdml.models.softmax import Softmax

__all__ = [
    "KINDS", "Cnn", "LeastSquares", "Linear", "Logistic", "Mlp", "Model", "Norm", "SmoothSvm", "Softmax", "Svm",
    "describe_model", "longest_gradient", "make_model", "read_model", "sample_gradients",
]  # fmt: skip
