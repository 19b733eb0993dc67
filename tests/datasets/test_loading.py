"""Data sets by name: splits, checksums, errors and the cache; on the real files where they are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from crowdml.datasets import NAMES, blobs, catalogue, load, recipes
from crowdml.datasets.files import SourceFile, cache_folder, cached, find, npz_bytes, read_npz, written
from crowdml.datasets.table import ADULT, CENSUS, CIFAR, CROWDML, MNIST, SPECS, WATCH
from crowdml.datasets.traffic import SCATS
from crowdml.errors import DataError, UnknownName


def small_mnist(rng):
    """Made images of 8x8 pixels, as many for testing as in MNIST."""
    return {
        "x_train": rng.integers(256, size=(300, 8, 8), dtype=np.uint8),
        "y_train": rng.integers(10, size=300, dtype=np.uint8),
        "x_test": rng.integers(256, size=(10_000, 8, 8), dtype=np.uint8),
        "y_test": rng.integers(10, size=10_000, dtype=np.uint8),
    }


def small_watch(users):
    """Made recordings: every user, activities 0 to 5, 200 samples each."""
    rng = np.random.default_rng(31)
    user = np.repeat(np.arange(users, dtype=np.int16), 6 * 200)
    activity = np.tile(np.repeat(np.arange(6, dtype=np.uint8), 200), users)
    return {"user": user, "activity": activity, "acc": rng.standard_normal((len(user), 3)).astype(np.float32)}


def made_file(folder, content=b"some bytes"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made.npz").write_bytes(content)
    return SourceFile("made.npz", (hashlib.sha256(content).hexdigest(),), len(content))


# Digits and blobs: always there


def test_digits_split_by_a_fixed_rule_into_1437_and_360_with_every_class_in_both():
    pytest.importorskip("sklearn")
    data = load("digits")
    assert (len(data.y_train), len(data.y_test), len(data.y_public)) == (1437, 360, 0)
    share = np.bincount(data.y_test) / (np.bincount(data.y_test) + np.bincount(data.y_train))
    assert (abs(share - 0.2) < 0.005).all()
    both = np.concatenate([load("digits", normalise="none").x_train, load("digits", normalise="none").x_test]) * 16
    from sklearn.datasets import load_digits

    assert sorted(map(bytes, both.astype(np.uint8))) == sorted(map(bytes, load_digits().data.astype(np.uint8)))


def test_digits012_are_the_rows_of_digits_that_show_0_to_2():
    pytest.importorskip("sklearn")
    few, all_ten = load("digits012"), load("digits")
    assert few.classes == ("0", "1", "2")
    assert (few.x_train == all_ten.x_train[all_ten.y_train < 3]).all()
    assert (few.x_test == all_ten.x_test[all_ten.y_test < 3]).all()


def test_rows_are_on_the_sphere_of_the_norm_asked_for_and_arrays_cannot_be_changed():
    pytest.importorskip("sklearn")
    for kind, order in (("l1", 1), ("l2", 2)):
        lengths = np.linalg.norm(load("digits", normalise=kind).x_train.astype(float), ord=order, axis=1)
        assert (lengths <= 1).all()
        assert (lengths > 1 - 1e-6).all()
    data = load("digits")
    assert data.x_train.dtype == np.float32
    assert data.y_train.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        data.x_train[0, 0] = 1
    with pytest.raises(FrozenInstanceError):
        data.name = "other"


def test_blobs_come_from_the_seed_and_nothing_else():
    first, again, other = (blobs(rows=400, features=6, classes=3, seed=seed) for seed in (1, 1, 2))
    assert first.x_train.tobytes() == again.x_train.tobytes()
    assert first.x_train.tobytes() != other.x_train.tobytes()
    assert (len(first.y_train), len(first.y_test), len(first.y_public)) == (400, 100, 100)
    assert set(first.y_train) == {0, 1, 2}
    centres = np.stack([first.x_train[first.y_train == label].mean(axis=0) for label in range(3)])
    nearest = ((first.x_test[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == first.y_test).mean() > 0.8


def test_synthetic_data_is_not_made_without_a_seed_nor_real_data_with_one():
    with pytest.raises(DataError, match="seed=1"):
        load("synthetic")
    with pytest.raises(DataError, match="seed=3 has no meaning"):
        load("digits", seed=3)
    assert load("synthetic", seed=3).x_train.shape == (10_000, 20)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known_ones():
    with pytest.raises(UnknownName, match=r"Did you mean 'mnist'\? Known are digits, digits012, mnist,"):
        load("mnits")


def test_loading_data_imports_numpy_and_neither_scikit_learn_nor_jax():
    code = (
        "import sys, crowdml.datasets, crowdml.features\n"
        "crowdml.datasets.load('synthetic', seed=1)\n"
        "sys.exit(' '.join({'sklearn', 'jax', 'scipy'} & {name.split('.')[0] for name in sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Nothing private and nothing that errors are reported on is ever fitted (review, R4)


def test_mnist_pca_does_not_change_when_the_images_of_devices_and_of_tests_do():
    arrays = small_mnist(np.random.default_rng(21))
    other = small_mnist(np.random.default_rng(22))
    changed = {**arrays, "x_train": arrays["x_train"].copy(), "x_test": other["x_test"]}
    changed["x_train"][240:] = other["x_train"][240:]
    before, after = recipes.mnist_splits(arrays), recipes.mnist_splits(changed)
    assert before.x_public.tobytes() == after.x_public.tobytes()
    assert (before.x_train != after.x_train).any()
    probe = recipes.mnist_splits({**changed, "x_train": arrays["x_train"]})
    assert probe.x_train.tobytes() == before.x_train.tobytes()  # the same map, whatever is evaluated on


def test_no_device_holds_a_public_image_of_mnist():
    arrays = small_mnist(np.random.default_rng(21))
    pixels = recipes.mnist_pixel_splits(arrays)
    assert (len(pixels.x_train), len(pixels.x_test), len(pixels.x_public)) == (60, 10_000, 240)
    public = {row.tobytes() for row in pixels.x_public}
    assert not public & {row.tobytes() for row in pixels.x_train}
    assert (np.concatenate([pixels.y_public, pixels.y_train]) == arrays["y_train"]).all()


def test_mnist_pca_does_change_with_the_public_images_and_as_published_with_the_training_images():
    arrays = small_mnist(np.random.default_rng(21))
    other = small_mnist(np.random.default_rng(22))
    public = arrays["x_train"].copy()
    public[:240] = other["x_train"][:240]
    assert (recipes.mnist_splits({**arrays, "x_train": public}).x_test != recipes.mnist_splits(arrays).x_test).any()
    published = recipes.mnist_as_published_splits(arrays)
    assert len(published.y_test) == 10_000
    assert len(published.y_public) == 0
    moved = recipes.mnist_as_published_splits({**arrays, "x_train": other["x_train"]})
    assert (moved.x_test != published.x_test).any()


def test_activity_users_are_in_one_split_only_and_no_window_spans_two_activities():
    arrays = small_watch(25)
    splits = recipes.activity_splits(arrays)
    kept = 3 * 5  # three windows of 64 in 200 samples, five activities; kicking is left out
    assert (len(splits.y_train), len(splits.y_test), len(splits.y_public)) == (5 * kept, 10 * kept, 10 * kept)
    assert set(splits.groups) == set(range(5))
    assert np.bincount(splits.y_train).tolist() == [5 * 6, 5 * 6, 5 * 3]
    held_out = {**arrays, "acc": np.where(arrays["user"][:, None] >= 5, 0, arrays["acc"])}
    assert recipes.activity_splits(held_out).x_train.tobytes() == splits.x_train.tobytes()
    with pytest.raises(DataError, match="20 are held out"):
        recipes.activity_splits(small_watch(20))


# Files: where they are looked for, and what is wrong with them


def test_a_missing_file_is_answered_with_where_it_was_looked_for_and_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(
        DataError, match=r"mnist\.npz is not in .*cache.*CROWDML_DATA is not set; run `crowdml data fetch"
    ):
        load("mnist")
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere \(\$CROWDML_DATA\) nor in .*\(the cache folder\)"):
        load("mnist")


def test_the_named_folder_comes_before_the_cache_folder(monkeypatch, tmp_path):
    file = made_file(tmp_path / "mine")
    made_file(cache_folder() / "data")
    assert find(file, "made") == cache_folder() / "data" / "made.npz"
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path / "mine"))
    assert find(file, "made") == tmp_path / "mine" / "made.npz"


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty"])
@pytest.mark.parametrize(
    "name", ["mnist", "mnist-as-published", "mnist-crowdml", "cifar10", "activity", "adult", "census", "scats"]
)
def test_a_damaged_file_is_refused_with_both_checksums(monkeypatch, tmp_path, name, damage):
    whole = npz_bytes({"x_train": np.arange(1000)})
    content = {"cut": whole[:500], "one bit": whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], "empty": b""}[
        damage
    ]
    file = SPECS[name].files[0]
    (tmp_path / file.name).write_bytes(content)
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=rf"damaged or another version: {len(content):,} bytes.*{file.sha256[0][:12]}"
    ) as error:
        load(name)
    assert "\n" not in str(error.value)
    assert f"crowdml data fetch {name}" in str(error.value)


def test_a_truncated_or_pickled_npz_is_a_data_error_and_not_a_traceback(tmp_path):
    path = tmp_path / "made.npz"
    path.write_bytes(npz_bytes({"x": np.arange(1000)})[:-30])
    with pytest.raises(DataError, match=r"not a readable \.npz file"):
        read_npz(path, "made")
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"not a readable \.npz file"):
        read_npz(path, "made")


def test_a_checksum_is_computed_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path))
    file = made_file(tmp_path)
    find(file, "made")
    (memory,) = (cache_folder() / "verified").iterdir()
    remembered = memory.read_text()
    memory.write_text(remembered[:-64] + "0" * 64)  # a wrong memory is believed: so the file was not read again
    with pytest.raises(DataError, match="000000000000"):
        find(file, "made")
    made_file(tmp_path, b"other bytes!")
    with pytest.raises(DataError, match=r"12 bytes with SHA-256 (?!0000)"):
        find(file, "made")
    memory.write_bytes(b"\xff\xfe")  # a damaged memory is not an error
    find(made_file(tmp_path), "made")


def test_a_file_that_may_not_be_read_is_a_data_error(tmp_path, monkeypatch):
    file = made_file(tmp_path)
    (tmp_path / "made.npz").chmod(0)
    if os.access(tmp_path / "made.npz", os.R_OK):
        pytest.skip("this account reads everything")
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        find(file, "made")


# The cache of prepared arrays


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b.replace(b"\x07", b"\x08")])
def test_a_damaged_cache_entry_is_made_again(damage):
    calls = []

    def make():
        calls.append(1)
        return {"x": np.full(100, 7)}

    assert (cached("key", frozenset({"x"}), make)["x"] == 7).all()
    assert (cached("key", frozenset({"x"}), make)["x"] == 7).all()
    assert len(calls) == 1
    entry = cache_folder() / "prepared" / "key.npz"
    entry.write_bytes(damage(entry.read_bytes()))
    assert (cached("key", frozenset({"x"}), make)["x"] == 7).all()
    assert len(calls) == 2
    assert (cached("key", frozenset({"x"}), make)["x"] == 7).all()
    assert len(calls) == 2


def test_a_cache_entry_without_a_wanted_array_is_made_again():
    cached("key", frozenset({"x"}), lambda: {"x": np.zeros(2)})
    assert set(cached("key", frozenset({"x", "y"}), lambda: {"x": np.ones(2), "y": np.ones(2)})) == {"x", "y"}


def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept"):
        assert (cached("key", frozenset({"x"}), lambda: {"x": np.ones(2)})["x"] == 1).all()


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"

    def interrupted():
        with written(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "deep").iterdir()) == []
    with written(path) as stream:
        stream.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["file"]


def test_the_same_arrays_give_the_same_npz_bytes_in_any_order():
    a, b = np.arange(5), np.array(3, np.int32)
    assert npz_bytes({"a": a, "b": b}) == npz_bytes({"b": b, "a": a})


# The table


def test_the_catalogue_lists_every_data_set_with_what_is_missing():
    infos = {info.name: info for info in catalogue()}
    assert tuple(infos) == NAMES
    assert infos["mnist"].where == "missing: mnist.npz"
    assert not infos["mnist"].found
    assert infos["synthetic"].found
    assert all(info.terms and info.title for info in infos.values())


def test_every_data_set_says_what_was_fitted_on_what():
    assert all(spec.note.endswith(".") for spec in SPECS.values())
    assert "R4 is met" in SPECS["mnist"].note
    for name in ("mnist-as-published", "mnist-crowdml", "cifar10", "adult-as-published"):
        assert "R4 is not met" in SPECS[name].note
    published = {"mnist-as-published", "mnist-crowdml", "adult-as-published"}
    assert {name for name, spec in SPECS.items() if spec.as_published} == published


# The real files


@pytest.mark.parametrize("file", [MNIST, CROWDML, CIFAR, WATCH, ADULT, CENSUS, SCATS], ids=lambda file: file.name)
def test_the_real_files_have_their_checksums_and_sizes(real_data, file):
    path = find(file, "any")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256[0]
    assert path.stat().st_size == file.bytes


@pytest.mark.parametrize("file", [MNIST, WATCH], ids=lambda file: file.name)
def test_packed_again_the_real_arrays_have_the_other_accepted_checksum(real_data, file):
    assert hashlib.sha256(npz_bytes(read_npz(real_data / file.name, "any"))).hexdigest() == file.sha256[1]


@pytest.mark.parametrize("name", list(SPECS))
def test_real_data_has_the_rows_features_and_classes_that_the_table_says(real_data, name):
    spec, data = SPECS[name], load(name)
    assert (len(data.y_train), len(data.y_test), len(data.y_public)) == spec.rows
    assert (len(data.x_train), len(data.x_test), len(data.x_public)) == spec.rows
    assert data.features == spec.features
    assert not spec.classes or set(np.unique(data.y_train)) == set(range(len(data.classes)))
    assert (data.groups is not None) == spec.grouped
    assert all(np.isfinite(x).all() for x in (data.x_train, data.x_test, data.x_public))


def test_real_mnist_splits_are_the_images_they_are_said_to_be(real_data):
    raw, data = read_npz(real_data / "mnist.npz", "mnist"), load("mnist")
    assert (data.y_public == raw["y_train"][:240]).all()
    assert (data.y_train == raw["y_train"][240:]).all()
    assert (data.y_test == raw["y_test"]).all()
    pixels = load("mnist-pixels", normalise="none")
    assert (pixels.x_public[7] == raw["x_train"][7].ravel() / np.float32(255)).all()
    assert (pixels.x_train[0] == raw["x_train"][240].ravel() / np.float32(255)).all()
    published = load("mnist-as-published")
    assert (len(published.y_train), len(published.y_test)) == (60_000, 10_000)


def test_a_damaged_cache_entry_of_real_mnist_is_rebuilt_to_the_same_bits(real_data):
    before = load("mnist")
    (entry,) = (cache_folder() / "prepared").glob("mnist-2-*.npz")
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert load("mnist").x_train.tobytes() == before.x_train.tobytes()


def test_real_mnist_is_prepared_once_and_then_loads_from_the_cache(real_data, monkeypatch):
    before = load("mnist")

    def again(*_):
        raise AssertionError("prepared again")

    monkeypatch.setitem(SPECS, "mnist", replace(SPECS["mnist"], recipe=again))
    assert load("mnist").x_train.tobytes() == before.x_train.tobytes()


def test_as_published_mnist_is_the_published_file_up_to_signs(real_data):
    path = real_data / "crowdml_mnist50_l2.npz"
    if not path.is_file():
        pytest.skip(
            "crowdml_mnist50_l2.npz: SKIPPED, not in CROWDML_DATA; our PCA was not compared with the published rows"
        )
    theirs, ours = load("mnist-crowdml", normalise="l2"), load("mnist-as-published", normalise="l2")
    signs = np.sign((theirs.x_test * ours.x_test).sum(axis=0))
    np.testing.assert_allclose(ours.x_test * signs, theirs.x_test, atol=1e-5)
    np.testing.assert_allclose(ours.x_train * signs, theirs.x_train, atol=1e-5)
    assert (ours.y_train == theirs.y_train).all()
    published = read_npz(path, "mnist-crowdml")["x_test_published_1000"]
    np.testing.assert_allclose(theirs.x_test[:1000], published, atol=1e-6)
    np.testing.assert_allclose(theirs.x_test, load("mnist-crowdml", normalise="none").x_test, atol=1e-6)


def test_least_squares_on_public_pca_features_is_as_good_as_on_published_ones(real_data):
    def error(name):
        data = load(name)
        gram = data.x_train.T @ data.x_train
        weights = np.linalg.solve(gram, data.x_train.T @ np.eye(10, dtype=np.float32)[data.y_train])
        return ((data.x_test @ weights).argmax(axis=1) != data.y_test).mean()

    public, published = error("mnist"), error("mnist-as-published")
    assert public < 0.19
    assert abs(public - published) < 0.01


@pytest.mark.slow
def test_components_of_240_public_images_are_about_as_good_as_those_of_all_training_images(real_data):
    """Errors are on all test images, as in papers, so they stand beside each other."""
    linear = pytest.importorskip("sklearn.linear_model")

    def error(data):
        model = linear.LogisticRegression(C=100, max_iter=300).fit(data.x_train, data.y_train)
        return (model.predict(data.x_test) != data.y_test).mean()

    published, public = error(load("mnist-as-published")), error(load("mnist"))
    assert 0.08 < published < 0.10
    assert abs(public - published) < 0.015
