"""The public extractor: computed as its file says, bounded, of one picture alone, and refused where it does not fit."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from drawn_network import HIDDEN, SIDE, named_by, network_file, tensors

from crowdml import artefacts
from crowdml.convolutions import backward, forward
from crowdml.errors import DataError, TaskError
from crowdml.features import prepared
from crowdml.features.extractor import FORMAT, Seen, enlarged, extract, network, picture_features, read_network
from crowdml.safetensors import pack_tensors
from crowdml.task import parse

FILE = network_file()
TASK = named_by(FILE)
FEATURES = TASK.features


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefacts, "_KNOWN", {})
    network.cache_clear()
    artefacts.admit(FILE, FEATURES.extractor.sha256, "the test's file")  # pyright: ignore[reportOptionalMemberAccess]


def pictures(count: int, seed: int = 2) -> Any:
    return np.random.default_rng(seed).random((count, 36))


def by_loops(net: Any, picture: Any) -> Any:
    """The definition, place by place: no patches, no products of matrices."""
    maps = picture[:, :, None].astype(float)
    for kernel, biases in net.layers:
        side, size = len(maps), len(kernel)
        reach, found = size // 2, np.zeros((side, side, kernel.shape[3]))
        for row in range(side):
            for column in range(side):
                for i in range(size):
                    for j in range(size):
                        at, on = row + i - reach, column + j - reach
                        if 0 <= at < side and 0 <= on < side:
                            found[row, column] += maps[at, on] @ kernel[i, j]
        found += biases
        half = side // 2
        pooled = np.zeros((half, half, found.shape[2]))
        for row in range(half):
            for column in range(half):
                pooled[row, column] = found[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].max(axis=(0, 1))
        maps = np.maximum(pooled, 0)
    return np.maximum(maps.ravel() @ net.matrix + net.biases, 0) - net.centre


@pytest.mark.parametrize("side", [8, 9, 11])
def test_it_computes_two_convolutions_two_poolings_and_a_hidden_layer(side):
    parts = {**tensors(side=side), "biases.1": np.float32([0.1, -0.2, 0.3])}
    net = read_network(pack_tensors(parts, {"format": "crowdml/extractor/1", "side": str(side)}), "it")
    rows = np.random.default_rng(3).random((4, side, side)).astype(np.float32)
    wanted = [by_loops(net, row) for row in rows]
    assert (np.ptp(wanted, axis=0) > 1e-3).sum() >= 3
    assert net(rows) == pytest.approx(np.array(wanted), abs=1e-5)


def test_features_lie_on_the_sphere_of_the_task_whatever_the_pictures():
    rows = np.concatenate([pictures(70), 1e30 * pictures(3), 1e-30 * pictures(3), -pictures(3)])
    found = prepared(FEATURES, rows)
    assert found.shape == (79, HIDDEN)
    assert found.dtype == np.float32
    size = np.linalg.norm(found.astype(np.float64), axis=1)
    assert size.max() <= 1
    assert size.min() > 1 - 1e-5


def test_a_picture_that_is_not_finite_is_the_zero_row_and_changes_no_other():
    rows = pictures(5)
    good = prepared(FEATURES, rows)
    rows[1, 3], rows[4, 0] = np.nan, np.inf
    found = prepared(FEATURES, rows)
    assert not found[[1, 4]].any()
    assert np.array_equal(found[[0, 2, 3]], good[[0, 2, 3]])


def test_rows_are_treated_alone_and_neither_brightness_nor_place_counts():
    rows = pictures(70)
    assert prepared(FEATURES, rows[65:66]) == pytest.approx(prepared(FEATURES, rows)[65:66], abs=1e-6)
    assert prepared(FEATURES, 255 * rows) == pytest.approx(prepared(FEATURES, rows), abs=1e-5)
    blob = np.zeros((2, 6, 6))
    blob[0, 1:4, 1:4] = blob[1, 2:5, 2:5] = [[1, 2, 1], [0, 3, 1], [1, 1, 2]]
    one, moved = prepared(FEATURES, blob.reshape(2, 36))
    assert one == pytest.approx(moved, abs=0.1)


def test_pictures_of_another_side_are_enlarged_between_their_pixels():
    row = np.float32([[0, 1, 2, 3]])
    assert enlarged(row, 3)[0].tolist() == [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]]
    assert np.array_equal(enlarged(row, 2)[0], [[0, 1], [2, 3]])
    assert enlarged(np.arange(16, dtype=np.float32)[None], 3)[0, ::2, ::2].tolist() == [[0, 3], [12, 15]]


def test_the_file_beside_a_model_gives_the_features_of_devices(tmp_path):
    path = tmp_path / "network.safetensors"
    path.write_bytes(FILE)
    rows = pictures(4)
    assert np.array_equal(picture_features(path, rows, "l2", 1.0), prepared(FEATURES, rows))


def test_slopes_are_the_loss_changes():
    """Each number of `backward` against the difference that moving a weight makes."""
    net = read_network(FILE, "it")
    rows = np.random.default_rng(4).random((3, SIDE, SIDE, 1))
    layers = [(kernel.astype(float), biases.astype(float)) for kernel, biases in net.layers]
    flat, seen = forward(rows, layers)
    slope = np.random.default_rng(5).normal(size=flat.shape)
    found = backward(slope, layers, seen)
    for place, (given, at_answers) in enumerate(found):
        kernel, biases = layers[place]
        gradients = (given.transpose(0, 2, 1) @ at_answers).reshape(3, *kernel.shape)
        for at in ((0, 0, 0, 0), (1, 2, 0, 1), (2, 1, kernel.shape[2] - 1, kernel.shape[3] - 1)):
            kernel[at] += 1e-6
            changed = ((forward(rows, layers)[0] - flat) * slope).sum(1) / 1e-6
            kernel[at] -= 1e-6
            assert gradients[(slice(None), *at)] == pytest.approx(changed, rel=1e-3, abs=1e-4)
        biases[0] += 1e-6
        changed = ((forward(rows, layers)[0] - flat) * slope).sum(1) / 1e-6
        biases[0] -= 1e-6
        assert at_answers.sum(1)[:, 0] == pytest.approx(changed, rel=1e-3, abs=1e-4)


# --- what is refused ---


@pytest.mark.parametrize(
    "changes",
    [
        {"weights.0": np.zeros((3, 3, 2, 2))},
        {"weights.0": np.zeros((2, 2, 1, 2))},
        {"weights.0": np.zeros((3, 5, 1, 2))},
        {"weights.1": np.zeros((3, 3, 4, 3))},
        {"weights.2": np.zeros((11, HIDDEN))},
        {"biases.1": np.zeros(4)},
        {"centre": np.zeros(HIDDEN + 1)},
        {"more": np.zeros(1)},
    ],
)
def test_a_file_that_is_no_extractor_is_refused_by_a_sentence(changes):
    with pytest.raises(DataError, match=r"the file is no extractor: .*weights\.0 \d"):
        read_network(network_file(**changes), "the file")


@pytest.mark.parametrize("metadata", [{}, {"format": "crowdml/extractor/1"}, {"format": "crowdml/model/1", "side": "8"},
                                      {"format": "crowdml/extractor/1", "side": "-8"}])  # fmt: skip
def test_a_file_that_does_not_say_what_it_is_is_refused(metadata):
    with pytest.raises(DataError, match="the file is no extractor: its metadata"):
        read_network(pack_tensors(tensors(), metadata), "the file")


def test_a_side_that_would_take_a_device_for_ever_is_refused():
    parts = {**tensors(), "weights.2": np.zeros((3 * 25 * 25, HIDDEN))}
    with pytest.raises(DataError, match="is no extractor"):
        read_network(pack_tensors(parts, {"format": "crowdml/extractor/1", "side": "100"}), "it")


def test_a_task_of_another_dimension_says_which_one_fits():
    other = named_by(FILE, hidden=6).features
    with pytest.raises(TaskError, match=r"features\.dimension = 6: the extractor \w{12} makes 5 features .* Say 5\."):
        extract(other.extractor, pictures(1), other.dimension)  # pyright: ignore[reportArgumentType]


def test_a_file_of_another_hash_is_not_taken_and_a_missing_one_says_how_to_get_it():
    sha256 = hashlib.sha256(network_file(9)).hexdigest()
    with pytest.raises(
        DataError, match=f"the SHA-256 {FEATURES.extractor.sha256[:12]}, and the task names {sha256[:12]}"
    ):  # pyright: ignore[reportOptionalMemberAccess]
        artefacts.admit(FILE, sha256, "it")
    assert not artefacts.is_here(sha256)
    with pytest.raises(DataError, match=r"is not here\..*--artefact FILE"):
        artefacts.find(sha256)
    long = bytes(artefacts.LARGEST + 1)
    with pytest.raises(DataError, match="at most 1,048,576"):
        artefacts.admit(long, hashlib.sha256(long).hexdigest(), "it")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("pixels = 36", "pixels = 35", "pictures are squares"),
        ("pixels = 36", "pixels = 10000", "between 4 and 4096"),
        ('sha256 = "', 'sha256 = "../', "64 digits"),
        ("bound = 1.0 }", "bound = 1.0 }, low = 0.0, high = 1.0", "Leave those out"),
        ("dimension = 5", 'kind = "windows", dimension = 5', "takes pictures"),
    ],
)
def test_an_extractor_that_no_task_can_name_is_refused(old, new, why):
    from drawn_network import TEXT

    text = TEXT.format(name="p", sha256="0" * 64, hidden=HIDDEN)
    assert old in text
    with pytest.raises(TaskError, match=why):
        parse(text.replace(old, new))


def test_an_older_task_keeps_its_hash():
    assert "extractor" not in parse(TASK_WITHOUT).canonical.decode()


TASK_WITHOUT = """
name = "plain"
features = { dimension = 4, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 5, step = { c = 1.0 } }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0 }
"""


def test_names_in_a_file_of_another_begin_no_line_of_ours():
    with pytest.raises(DataError) as refused:
        read_network(network_file(**{"x\nServer: all is well.\x1b[31m\ud800": np.zeros(1)}), "it")
    assert "Server: all is well." in str(refused.value)
    assert not set("\n\x1b\ud800") & set(str(refused.value))


def test_a_small_file_does_not_take_gigabytes():
    """Patches of the second convolution are 42 MB a picture here: 64 of them at once would be 2.7 GB."""
    shapes = {"weights.0": (9, 9, 1, 128), "biases.0": 128, "weights.1": (9, 9, 128, 1), "biases.1": 1,
              "weights.2": (256, 1), "biases.2": 1, "centre": 1}  # fmt: skip
    data = pack_tensors({name: np.ones(shape) for name, shape in shapes.items()}, {"format": FORMAT, "side": "64"})
    assert len(data) < 100_000
    sha256 = hashlib.sha256(data).hexdigest()
    artefacts.admit(data, sha256, "it")
    tracemalloc.start()
    found = extract(Seen(sha256, 16), pictures(4)[:, :16], 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (4, 1)
    assert peak < 150e6
    assert read_network(FILE, "ours").block == 64
