"""The data sets by name: one table, `table.toml`. A new data set is one more entry in it, and a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from crowdml.datasets import adult, census, recipes, traffic
from crowdml.datasets.dataset import Dataset, Prepared, frozen
from crowdml.datasets.files import TABLE, SourceFile, cached, find, locate
from crowdml.datasets.synthetic import CLASSES as BLOBS
from crowdml.datasets.synthetic import blobs
from crowdml.datasets.tables import Columns, is_table
from crowdml.errors import DataError, UnknownName
from crowdml.features import Norm, normalise
from crowdml.texts import did_you_mean


@dataclass(frozen=True)
class Spec:
    """One data set: what it is, where it comes from, under which terms, and the recipe that prepares it."""

    name: str
    title: str
    rows: tuple[int, int, int]  # devices, evaluation, public
    features: int
    classes: tuple[str, ...]
    source: str
    terms: str
    note: str
    recipe: recipes.Recipe
    version: int = 1  # of the recipe: raise it when its output changes, and old cache entries are not used again
    files: tuple[SourceFile, ...] = ()
    keep: bool = False  # whether what the recipe makes is worth a cache entry
    as_published: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class DatasetInfo:
    """One line of `crowdml data list`."""

    name: str
    title: str
    rows: tuple[int, int, int]  # devices, evaluation, public
    features: int
    classes: int
    found: bool
    where: str  # the files' places; or what is missing
    bytes: int  # of the files found
    terms: str


RECIPES = {"adult": adult, "census": census, "recipes": recipes, "traffic": traffic}
_FILES = {
    "scats": traffic.SCATS,
    **{key: SourceFile(each["name"], tuple(each["sha256"]), each["bytes"]) for key, each in TABLE["files"].items()},
}
MNIST, CROWDML, CIFAR, WATCH, ADULT, CENSUS = (
    _FILES[key] for key in ("mnist", "crowdml", "cifar", "watch", "adult", "census")
)


def _spec(name: str) -> Spec:
    """The data set that `table.toml` describes: what it says itself, and the rest of the one that it is like."""
    own: dict[str, Any] = dict(TABLE["sets"][name])
    said: dict[str, Any] = {**TABLE["sets"].get(own.pop("like", None), {}), **own}
    module, recipe = said.pop("recipe").split(".")
    named = (_FILES[key] for key in said.pop("files", ()))
    lists = {key: tuple(said.pop(key)) for key in ("rows", "classes")}
    return Spec(name=name, recipe=getattr(RECIPES[module], recipe), files=tuple(named), **lists, **said)


SPECS: dict[str, Spec] = {name: _spec(name) for name in TABLE["sets"]}
SYNTHETIC = "synthetic"
NAMES: tuple[str, ...] = (*SPECS, SYNTHETIC)

_SPLITS = tuple(field.name for field in fields(Prepared) if field.name != "groups")


def spec_of(name: str) -> Spec:
    """The table's row; an unknown name is answered with the known ones."""
    if name not in SPECS:
        near = did_you_mean(name, NAMES)
        raise UnknownName(f"no data set is called {name!r}.{near} Known are {', '.join(NAMES)}.")
    return SPECS[name]


def load(name: str, *, normalise: Norm = "l2", seed: int | None = None, columns: Columns | None = None) -> Dataset:
    """The data set of that name, each row of features scaled onto the unit sphere of the norm (or left, with "none").

    `seed` is for "synthetic", which is made from it, and for a file with a table (`is_table`), whose rows for tests
    are drawn by it; `columns` says what the columns of such a file are. Raises `UnknownName`, `DataError`.
    """
    if is_table(name):
        return _brought((columns or Columns()).read(name, seed), normalise)
    if columns not in (None, Columns()):
        raise DataError(f"data set {name!r} has its own labels and splits: name columns and --test for a file alone.")
    if name == SYNTHETIC:
        if seed is None:
            raise DataError("data set 'synthetic' is made from a seed; give one: load('synthetic', seed=1).")
        return blobs(rows=10_000, features=20, classes=len(BLOBS), seed=seed, normalise=normalise)
    spec = spec_of(name)
    if seed is not None:
        raise DataError(f"data set {name!r} is not made by chance, so seed={seed} has no meaning here; leave it out.")
    paths = tuple(find(file, name) for file in spec.files)
    prepared = _kept(spec, paths) if spec.keep else spec.recipe(paths)
    return assemble(spec, prepared, normalise)


def _brought(data: Dataset, norm: Norm) -> Dataset:
    """A table with its rows on the sphere of the norm."""
    x_train, x_test, x_public = (frozen(normalise(each, norm)) for each in (data.x_train, data.x_test, data.x_public))
    return replace(data, x_train=x_train, x_test=x_test, x_public=x_public)


def assemble(spec: Spec, prepared: Prepared, norm: Norm) -> Dataset:
    """Normalise rows, fix types (labels of no classes are numbers), make read-only."""
    kind = np.int32 if spec.classes else np.float32
    return Dataset(
        name=spec.name,
        title=spec.title,
        x_train=frozen(normalise(prepared.x_train, norm)),
        y_train=frozen(prepared.y_train.astype(kind)),
        x_test=frozen(normalise(prepared.x_test, norm)),
        y_test=frozen(prepared.y_test.astype(kind)),
        x_public=frozen(normalise(prepared.x_public, norm)),
        y_public=frozen(prepared.y_public.astype(kind)),
        classes=spec.classes,
        groups=None if prepared.groups is None else frozen(prepared.groups.astype(np.int32)),
        note=spec.note,
        as_published=spec.as_published,
    )


def _kept(spec: Spec, paths: recipes.Paths) -> Prepared:
    wanted = frozenset((*_SPLITS, "groups") if spec.grouped else _SPLITS)
    sources = "-".join(file.sha256[0][:16] for file in spec.files)
    arrays = cached(
        f"{spec.name}-{spec.version}-{sources}",
        wanted,
        lambda: {name: array for name, array in vars(spec.recipe(paths)).items() if array is not None},
    )
    return Prepared(**{name: arrays[name] for name in _SPLITS}, groups=arrays.get("groups"))


def catalogue() -> list[DatasetInfo]:
    """Every data set, with where its files are; looks at places and sizes only, reads no file."""
    made = DatasetInfo(
        SYNTHETIC,
        "Gaussian blobs, made from a seed",
        (10_000, 2500, 2500),
        20,
        len(BLOBS),
        True,
        "made by code",
        0,
        "none",
    )
    return [*map(_described, SPECS.values()), made]


def _described(spec: Spec) -> DatasetInfo:
    places = {file.name: locate(file) for file in spec.files}
    found = [path for path in places.values() if path is not None]
    missing = [name for name, path in places.items() if path is None]
    where = f"missing: {', '.join(missing)}" if missing else ", ".join(map(str, found)) or "comes with scikit-learn"
    return DatasetInfo(
        spec.name, spec.title, spec.rows, spec.features, len(spec.classes),
        not missing, where, sum(path.stat().st_size for path in found), spec.terms,
    )  # fmt: skip
