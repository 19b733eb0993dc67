"""From source files to the three splits. Each recipe states what it fits and on which rows (review, R4)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.dataset import Prepared
from crowdml.datasets.files import read_npz
from crowdml.errors import DataError, MissingExtra
from crowdml.features import Pca, spectrum, windows
from crowdml.features.spectrum import BINS

Paths = tuple[Path, ...]
Recipe = Callable[[Paths], Prepared]

DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
MNIST_DIMENSION = 50
MNIST_PUBLIC = 240  # the first training images of MNIST are public; devices hold the other 59,760, 60 on each of 996
PUBLIC = slice(0, 5000)  # of CIFAR-10's test images: the public split
EVALUATION = slice(5000, 10000)  # of CIFAR-10's test images: errors are reported on these
PUBLIC_USERS = 10  # the last ten, by id
EVALUATION_USERS = 10  # the ten before
# WISDM order: walking, jogging, stairs, sitting, standing, kicking. 0 is still, 1 on foot, 2 jogging; -1 is left out.
ACTIVITY_OF = np.array([1, 2, 1, 0, 0, -1], np.int32)


def digits(_: Paths) -> Prepared:
    """scikit-learn's 1,797 digits, 8x8 pixels from 0 to 16, over 16. Nothing is fitted.

    Split by a fixed rule: sorted by class (file order within), every fifth row is for evaluation: 1,437 and 360.
    """
    try:
        from sklearn.datasets import load_digits  # only here: devices need no scikit-learn
    except ImportError:
        raise MissingExtra(
            "data set 'digits': it comes with scikit-learn, which is not installed; run `pip install 'crowdml[sim]'`."
        ) from None
    x, y = load_digits(return_X_y=True)
    pixels, labels = np.asarray(x).astype(np.uint8), np.asarray(y).astype(np.uint8)
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    if digest != DIGITS_SHA256:
        raise DataError(
            f"data set 'digits': the installed scikit-learn holds other digits (SHA-256 {digest[:12]}..., not "
            f"{DIGITS_SHA256[:12]}...); install scikit-learn 1.4 or later again."
        )
    order = np.argsort(labels, kind="stable")
    evaluation = np.zeros(len(labels), bool)
    evaluation[order[::5]] = True
    scaled = pixels.astype(np.float32) / 16
    none = np.zeros(0, np.int64)
    return Prepared(
        scaled[~evaluation], labels[~evaluation], scaled[evaluation], labels[evaluation], scaled[none], labels[none]
    )


def digits012(paths: Paths) -> Prepared:
    """The rows of `digits` that show 0, 1 or 2, each in the split where it was."""
    whole = digits(paths)
    train, test = whole.y_train < 3, whole.y_test < 3
    return Prepared(
        whole.x_train[train],
        whole.y_train[train],
        whole.x_test[test],
        whole.y_test[test],
        whole.x_public,
        whole.y_public,
    )


def mnist_splits(arrays: dict[str, NDArray[Any]]) -> Prepared:
    """PCA to 50 and centring fitted on training images 0 to 239, which are public; errors on all test images."""
    pixels = mnist_pixel_splits(arrays)
    pca = Pca.fit(pixels.x_public, MNIST_DIMENSION)
    splits = ("x_train", "x_test", "x_public")
    return replace(pixels, **{split: pca.transform(getattr(pixels, split)) for split in splits})


def mnist_pixel_splits(arrays: dict[str, NDArray[Any]]) -> Prepared:
    """The 784 pixels over 255: training images 0 to 239 are public, devices hold the others. Nothing is fitted."""
    x, y = _pixels(arrays["x_train"]), arrays["y_train"]
    public, held = slice(0, MNIST_PUBLIC), slice(MNIST_PUBLIC, None)
    return Prepared(x[held], y[held], _pixels(arrays["x_test"]), arrays["y_test"], x[public], y[public])


def mnist_as_published_splits(arrays: dict[str, NDArray[Any]]) -> Prepared:
    """The paper's way (Hamm et al. 2015, section V-C): PCA fitted on all training images, errors on all test images.

    The public split is empty: the paper chose its hyper-parameters by the test error itself.
    """
    train, test = _pixels(arrays["x_train"]), _pixels(arrays["x_test"])
    pca = Pca.fit(train, MNIST_DIMENSION)
    x_test = pca.transform(test)
    return Prepared(pca.transform(train), arrays["y_train"], x_test, arrays["y_test"], x_test[:0], arrays["y_test"][:0])


def mnist(paths: Paths) -> Prepared:
    """`mnist_splits` of mnist.npz."""
    return mnist_splits(read_npz(paths[0], "mnist"))


def mnist_pixels(paths: Paths) -> Prepared:
    """`mnist_pixel_splits` of mnist.npz."""
    return mnist_pixel_splits(read_npz(paths[0], "mnist-pixels"))


def mnist_as_published(paths: Paths) -> Prepared:
    """`mnist_as_published_splits` of mnist.npz."""
    return mnist_as_published_splits(read_npz(paths[0], "mnist-as-published"))


def mnist_crowdml(paths: Paths) -> Prepared:
    """The features of the original Crowd-ML library, as stored: rows of norm one, their components' signs its own.

    PCA and centring were fitted on the 60,000 training images, which devices hold, so the public split is empty.
    """
    arrays = read_npz(paths[0], "mnist-crowdml")
    x_test, y_test = arrays["x_test"], arrays["y_test"]
    return Prepared(arrays["x_train"], arrays["y_train"], x_test, y_test, x_test[:0], y_test[:0])


def cifar10(paths: Paths) -> Prepared:
    """The 100 features as stored. Public: test 0 to 4,999; evaluation: test 5,000 to 9,999. Nothing is fitted here."""
    arrays = read_npz(paths[0], "cifar10")
    x_test, y_test = arrays["x_test"].astype(np.float32), arrays["y_test"]
    return Prepared(
        arrays["x_train"].astype(np.float32), arrays["y_train"],
        x_test[EVALUATION], y_test[EVALUATION],
        x_test[PUBLIC], y_test[PUBLIC],
    )  # fmt: skip


def activity_splits(arrays: dict[str, NDArray[Any]]) -> Prepared:
    """Spectra of windows of 64 samples (3.2 s) that do not overlap and never span two activities or two users.

    Users sorted by id: the last ten are public, the ten before are for evaluation, the others are the devices.
    """
    user, activity, acc = arrays["user"], arrays["activity"], arrays["acc"]
    edges = np.flatnonzero((np.diff(user) != 0) | (np.diff(activity) != 0)) + 1
    blocks = [block for block in np.split(np.arange(len(user)), edges) if ACTIVITY_OF[activity[block[0]]] >= 0]
    cuts = [windows(block, BINS, BINS) for block in blocks]
    rows = np.concatenate(cuts)  # [m, 64] positions in the recording
    x = spectrum(acc[rows])
    y = ACTIVITY_OF[activity[rows[:, 0]]]
    owner = user[rows[:, 0]].astype(np.int32)
    users = np.unique(user)
    held_out = PUBLIC_USERS + EVALUATION_USERS
    if len(users) <= held_out:
        raise DataError(f"data set 'activity': {len(users)} users are too few: {held_out} are held out.")
    public = np.isin(owner, users[-PUBLIC_USERS:])
    evaluation = np.isin(owner, users[-held_out:-PUBLIC_USERS])
    train = ~(public | evaluation)
    return Prepared(x[train], y[train], x[evaluation], y[evaluation], x[public], y[public], owner[train])


def activity(paths: Paths) -> Prepared:
    """`activity_splits` of the smartwatch recordings."""
    return activity_splits(read_npz(paths[0], "activity"))


def _pixels(images: NDArray[Any]) -> NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
