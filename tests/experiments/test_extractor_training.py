"""The public extractor: the shipped file is the one that the shipped tasks name, and its maker makes such a file."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from click.testing import CliRunner

from crowdml import artefacts
from crowdml.cli import cli
from crowdml.experiments.extractor import MODEL, drawings
from crowdml.features.extractor import network, read_network, upright
from crowdml.task import find_task, shipped


def test_a_file_is_made_and_a_task_can_name_it(tmp_path):
    path = tmp_path / "made.safetensors"
    words = ["data", "extractor", str(path), "--drawings", "512", "--passes", "3", "--json", "-"]
    said = CliRunner().invoke(cli, words)
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["bytes"] == path.stat().st_size < artefacts.LARGEST
    made = read_network(path.read_bytes(), "it")
    assert (made.side, len(made.biases)) == (28, 128)
    known = drawings(300, 5)
    features = made(known.x.reshape(-1, 28, 28) * 28)
    assert np.abs(features.mean(axis=0)).mean() < 0.1 * features.std()  # centred on other drawings
    centres = np.stack([features[known.y == digit].mean(axis=0) for digit in range(10)])
    nearest = ((features[:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == known.y).mean() > 0.6  # of a network that saw 1,536 pictures; 0.1 by chance


def test_its_file_has_to_end_as_its_format_does(tmp_path):
    said = CliRunner().invoke(cli, ["data", "extractor", str(tmp_path / "x.bin")])
    assert said.exit_code == 1
    assert "ends in .safetensors" in said.output
    assert not list(tmp_path.iterdir())


def test_drawings_are_seen_as_devices_see_them():
    from crowdml.experiments.drawn import draw_digits

    x, y = draw_digits(600, np.random.default_rng([3, 600]))
    known = drawings(600, 3)
    assert np.array_equal(known.y, y)
    np.testing.assert_allclose(known.x.reshape(-1, 28, 28) * 28, upright(x, 28), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(known.x, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("name", [each for each in shipped() if find_task(each).artefacts])
def test_a_shipped_task_names_the_shipped_extractor(name):
    task = find_task(name)
    (sha256,) = task.artefacts
    data = artefacts.shipped(sha256)
    assert data is not None
    assert len(data) < 1_000_000
    made = network(sha256)
    assert [kernel.shape for kernel, _ in made.layers] == [tuple(each) for each in MODEL.kernels]
    assert task.features.dimension == len(made.biases) == 128


def test_there_are_two_of_them():
    assert {each for each in shipped() if find_task(each).artefacts} == {"digits-cnn", "mnist-cnn"}
