"""Downloads, over a real socket: a good file, a wrong one, a cut connection, a refusal."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import shutil
import struct
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from crowdml.datasets import fetch, load
from crowdml.datasets.files import SourceFile, cache_folder, npz_bytes, read_npz
from crowdml.datasets.table import MNIST, WATCH
from crowdml.errors import DataError, UnknownName

downloads = importlib.import_module("crowdml.datasets.downloads")
CONTENT = npz_bytes({"x": np.arange(100_000)})
FILE = SourceFile("made.npz", (hashlib.sha256(CONTENT).hexdigest(),), len(CONTENT))


@contextlib.contextmanager
def serving(files, cut=None):
    """A web server on 127.0.0.1 with these files; with `cut`, it hangs up after so many bytes of each."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            asked.append(name)
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            self.wfile.write(files[name][:cut])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data/", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(mirror, progress=lambda *_: None, file=FILE):
    return downloads.fetch_file(file, "made", progress, mirror=mirror)


def everything_in_the_cache():
    return sorted(path.name for path in (cache_folder() / "data").glob("*")) if cache_folder().exists() else []


def test_a_good_file_is_kept_and_not_fetched_twice_and_progress_reaches_the_end():
    seen = []
    with serving({"made.npz": CONTENT}) as (mirror, asked):
        path = get(mirror, lambda *step: seen.append(step))
        assert path.read_bytes() == CONTENT
        assert seen[0] == ("made.npz", 0, len(CONTENT))
        assert seen[-1] == ("made.npz", len(CONTENT), len(CONTENT))
        assert get(mirror) == path
        assert asked == ["made.npz"]
    assert everything_in_the_cache() == ["made.npz"]


def test_a_file_with_a_wrong_checksum_is_not_kept():
    with (
        serving({"made.npz": CONTENT[:-1] + b"!"}) as (mirror, _),
        pytest.raises(DataError, match=f"not {FILE.sha256[0][:12]}.*nothing was kept"),
    ):
        get(mirror)
    assert everything_in_the_cache() == []


def test_a_cut_connection_is_told_with_both_sizes_and_nothing_is_kept():
    with (
        serving({"made.npz": CONTENT}, cut=70_000) as (mirror, _),
        pytest.raises(DataError, match=f"cut off after 70,000 of {len(CONTENT):,} bytes"),
    ):
        get(mirror)
    assert everything_in_the_cache() == []


def test_a_refusal_is_told_with_its_status():
    with serving({}) as (mirror, _), pytest.raises(DataError, match=r"made\.npz answered 404 Not Found"):
        get(mirror)
    assert everything_in_the_cache() == []


def test_a_server_that_is_not_there_is_told():
    with serving({}) as (mirror, _):
        pass
    with pytest.raises(DataError, match=r"could not be read \(.*refused"):
        get(mirror)


@pytest.mark.parametrize("mirror", ["ftp://127.0.0.1/", "file:///etc", "nonsense"])
def test_only_web_addresses_are_read(mirror):
    with pytest.raises(DataError, match="not an http or https address"):
        get(mirror)


def test_a_damaged_file_in_the_cache_folder_is_replaced_but_not_one_in_the_owners_folder(monkeypatch, tmp_path):
    folder = cache_folder() / "data"
    folder.mkdir(parents=True)
    (folder / "made.npz").write_bytes(b"damaged")
    with serving({"made.npz": CONTENT}) as (mirror, _):
        assert get(mirror).read_bytes() == CONTENT
        (tmp_path / "made.npz").write_bytes(b"damaged")
        monkeypatch.setenv("CROWDML_DATA", str(tmp_path))
        with pytest.raises(DataError, match="delete it"):
            get(mirror)
    assert (tmp_path / "made.npz").read_bytes() == b"damaged"


def test_a_cache_folder_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with serving({"made.npz": CONTENT}) as (mirror, _), pytest.raises(DataError, match="cannot be written"):
        get(mirror)


def test_what_we_made_ourselves_says_how_and_is_fetched_from_a_mirror_only():
    with pytest.raises(DataError, match=r"cannot be fetched, as it holds features that we computed.*mirror"):
        fetch("cifar10")


def test_data_without_files_needs_no_fetching_and_unknown_names_are_refused():
    assert fetch("digits") == ()
    assert fetch("synthetic") == ()
    with pytest.raises(UnknownName):
        fetch("mnits")


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def made_mnist():
    rng = np.random.default_rng(41)
    arrays = {
        "x_train": rng.integers(256, size=(20, 4, 4), dtype=np.uint8),
        "y_train": rng.integers(10, size=20, dtype=np.uint8),
        "x_test": rng.integers(256, size=(10, 4, 4), dtype=np.uint8),
        "y_test": rng.integers(10, size=10, dtype=np.uint8),
    }
    parts = {part.name: idx(arrays[part.array]) for part in downloads.MNIST_FILES}
    table = tuple(
        replace(part, bytes=len(parts[part.name]), sha256=hashlib.sha256(parts[part.name]).hexdigest())
        for part in downloads.MNIST_FILES
    )
    return arrays, table, {f"{name}.gz": gzip.compress(content) for name, content in parts.items()}


def test_idx_files_come_from_the_first_site_that_has_them_all(monkeypatch, tmp_path):
    arrays, table, packed = made_mnist()
    monkeypatch.setattr(downloads, "MNIST_FILES", table)
    some = {name: content for name, content in packed.items() if "labels" not in name}
    with serving(some) as (first, _), serving(packed) as (second, _):
        got = downloads.mnist_arrays(tmp_path, lambda *_: None, sites=(first, second))
    assert all((got[name] == arrays[name]).all() for name in arrays)


@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: gzip.compress(b"other"), lambda b: b"not gzip"])
def test_damaged_idx_files_are_refused_where_no_site_is_left(monkeypatch, tmp_path, damage):
    _, table, packed = made_mnist()
    monkeypatch.setattr(downloads, "MNIST_FILES", table)
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    packed["t10k-labels-idx1-ubyte.gz"] = damage(packed["t10k-labels-idx1-ubyte.gz"])
    with serving(packed) as (site, _), pytest.raises(DataError, match=r"MNIST was not fetched \(.*t10k-labels.*npm"):
        downloads.mnist_arrays(tmp_path, lambda *_: None, sites=(site,))


def recordings(arrays):
    """The text files that the watch's arrays came from, user 1629 with every sample twice, as in the source."""
    codes = np.array(list(downloads.WATCH_ACTIVITIES))
    files = {}
    for user in downloads.WATCH_USERS:
        own = arrays["user"] == user
        lines = [
            f"{user},{codes[activity]},{x},{y},{z};\n"
            for activity, (x, y, z) in zip(arrays["activity"][own], arrays["acc"][own].astype(str), strict=True)
        ]
        files[f"data_{user}_accel_watch.txt"] = ("".join(lines) * (2 if user == 1629 else 1)).encode()
    return files


def test_recordings_that_are_not_recordings_are_refused(tmp_path):
    files = {f"data_{user}_accel_watch.txt": b"<html>moved</html>\n" for user in downloads.WATCH_USERS}
    with serving(files) as (site, _), pytest.raises(DataError, match="not a recording of user 1600"):
        downloads.watch_arrays(tmp_path, lambda *_: None, site=site)


# With the real files


def test_real_mnist_is_built_from_its_idx_files_into_a_file_that_loads(real_data, monkeypatch, tmp_path):
    arrays = read_npz(real_data / MNIST.name, "mnist")
    packed = {f"{part.name}.gz": gzip.compress(idx(arrays[part.array]), 1) for part in downloads.MNIST_FILES}
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(packed) as (site, _):
        monkeypatch.setitem(
            downloads.BUILDERS, MNIST.name, lambda folder, progress: downloads.mnist_arrays(folder, progress, (site,))
        )
        (path,) = fetch("mnist")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == MNIST.sha256[1]
    assert load("mnist").x_train.shape == (59_760, 50)


def test_real_recordings_are_built_from_their_text_files_into_the_same_arrays(real_data, monkeypatch, tmp_path):
    files = recordings(read_npz(real_data / WATCH.name, "activity"))
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(files) as (site, _):
        monkeypatch.setitem(
            downloads.BUILDERS, WATCH.name, lambda folder, progress: downloads.watch_arrays(folder, progress, site)
        )
        (path,) = fetch("activity")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == WATCH.sha256[1]
    assert load("activity").x_train.shape == (5698, 64)


def test_our_own_files_are_fetched_from_a_mirror(real_data, monkeypatch, tmp_path):
    content = (real_data / "cifar10_cnn_pca100.npz").read_bytes()
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({"cifar10_cnn_pca100.npz": content}) as (mirror, _):
        fetch("cifar10", mirror=mirror)
    assert load("cifar10").x_train.shape == (50_000, 100)
    shutil.rmtree(tmp_path / "cache")
