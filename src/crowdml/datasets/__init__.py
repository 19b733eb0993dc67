"""Data sets by name, with checksums and public splits, and how their rows are spread over devices. NumPy only."""

from crowdml.datasets.dataset import Dataset
from crowdml.datasets.downloads import fetch
from crowdml.datasets.populations import DrawnPopulation, Population, by_class, by_user, drawn, iid
from crowdml.datasets.synthetic import blobs
from crowdml.datasets.table import NAMES, DatasetInfo, Spec, catalogue, load
from crowdml.datasets.tables import Columns, Table, is_table, read_table
from crowdml.datasets.traffic import Readings, made_up_city, series

__all__ = [
    "NAMES", "Columns", "Dataset", "DatasetInfo", "DrawnPopulation", "Population", "Readings", "Spec", "Table", "blobs",
    "by_class", "by_user", "catalogue", "drawn", "fetch", "iid", "is_table", "load", "made_up_city", "read_table",
    "series",
]  # fmt: skip
