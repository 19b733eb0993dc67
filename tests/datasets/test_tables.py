"""Tables of somebody's own: what is read from a file, how it is split, and what is refused."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

from crowdml.datasets import Columns, cells, load, read_table
from crowdml.datasets.described import described
from crowdml.errors import DataError

HEAD = "age,height,who,sick\n"
ROWS = "30,1.80,anna,yes\n41,1.65,anna,no\n52,1.70,bert,no\n63,1.60,bert,yes\n74,1.75,cleo,no\n"


def written(folder: Path, text: str | bytes, name: str = "rows.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_columns_are_features_labels_and_devices(tmp_path: Path):
    table = read_table(written(tmp_path, HEAD + ROWS), label="sick", device="who")
    assert table.names == ("age", "height")
    assert table.x.tolist()[0] == pytest.approx([30, 1.8])
    assert table.kind == "class"
    assert table.classes == ("no", "yes")
    assert table.y.tolist() == ["yes", "no", "no", "yes", "no"]
    assert table.devices is not None
    assert table.devices.tolist() == ["anna", "anna", "bert", "bert", "cleo"]


def test_the_last_column_is_the_label_unless_somebody_says_otherwise(tmp_path: Path):
    path = written(tmp_path, HEAD + ROWS)
    assert read_table(path, ignore=["who"]).label == "sick"
    assert read_table(path, ignore=["who", "sick"]).label == "height"
    assert read_table(path, label="age", ignore=["who", "sick"]).names == ("height",)


def test_a_file_without_a_heading_names_its_columns_by_number(tmp_path: Path):
    table = read_table(written(tmp_path, "1,2,0\n3,4,1\n"))
    assert (table.names, table.label, table.classes) == (("1", "2"), "3", ("0", "1"))
    assert len(table) == 2


def test_a_packed_file_an_npz_file_and_a_csv_file_are_one_table(tmp_path: Path):
    plain = read_table(written(tmp_path, HEAD + ROWS), label="sick", device="who")
    zipped = written(tmp_path, gzip.compress((HEAD + ROWS).encode()), "a.csv.gz")
    packed = read_table(zipped, label="sick", device="who")
    np.savez(tmp_path / "a.npz", x=plain.x, y=plain.y, devices=plain.devices)
    arrays = read_table(tmp_path / "a.npz")
    for other in (packed, arrays):
        assert np.array_equal(other.x, plain.x)
        assert other.y.tolist() == plain.y.tolist()
        assert other.classes == plain.classes
        assert other.devices is not None
        assert plain.devices is not None
        assert other.devices.tolist() == plain.devices.tolist()


def test_a_parquet_file_is_the_same_table(tmp_path: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = read_table(written(tmp_path, HEAD + ROWS), label="sick", device="who")
    columns = {"age": plain.x[:, 0], "height": plain.x[:, 1], "who": plain.devices, "sick": plain.y}
    parquet.write_table(arrow.table({name: list(values) for name, values in columns.items()}), tmp_path / "a.parquet")
    other = read_table(tmp_path / "a.parquet", label="sick", device="who")
    assert np.array_equal(other.x, plain.x)
    assert other.y.tolist() == plain.y.tolist()


def test_without_pyarrow_a_parquet_file_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Exception, match=r"pip install 'crowdml\[parquet\]'"):
        read_table(written(tmp_path, b"PAR1", "a.parquet"))


def test_names_of_classes_stay_as_they_were_written_and_sort_as_numbers(tmp_path: Path):
    table = read_table(written(tmp_path, "a,b\n1,10\n2,9\n3,2\n4,10\n"))
    assert table.classes == ("2", "9", "10")
    assert read_table(written(tmp_path, "a,b\n1,01\n2,1\n")).classes == ("01", "1")


def test_labels_with_decimals_are_numbers(tmp_path: Path):
    table = read_table(written(tmp_path, "a,b\n1,0.5\n2,1.5\n"))
    assert table.kind == "number"
    assert table.classes == ()
    assert table.y.tolist() == [0.5, 1.5]


def test_a_share_of_the_rows_is_held_out_by_the_seed_and_no_device_holds_it(tmp_path: Path):
    path = written(tmp_path, "a,b\n" + "".join(f"{row},{row % 2}\n" for row in range(100)))
    data = load(path, normalise="none", seed=3)
    again = load(path, normalise="none", seed=3)
    other = load(path, normalise="none", seed=4)
    assert (len(data.y_train), len(data.y_test)) == (80, 20)
    assert np.array_equal(data.x_test, again.x_test)
    assert not np.array_equal(data.x_test, other.x_test)
    assert sorted([*data.x_train[:, 0], *data.x_test[:, 0]]) == list(range(100))
    assert len(load(path, normalise="none", seed=3, columns=Columns(test="0.5")).y_test) == 50


def test_every_device_keeps_the_rows_that_its_task_counts_on(tmp_path: Path):
    sizes = {"anna": 15, "bert": 15, "cleo": 7, "dora": 3}
    rows = "".join(f"{name},{row},{row % 2}\n" for name, count in sizes.items() for row in range(count))
    table = read_table(written(tmp_path, "who,a,b\n" + rows), device="who")
    for seed in range(5):
        data = table.dataset(seed=seed)
        assert len(data.y_test) == 8
        assert all(np.bincount(data.groups) >= [12, 12, 5, 2])
    assert table.crowd() == (3, 4)
    assert table.crowd(test="other.csv") == (3, 6)


def test_the_crowd_of_a_table_has_ten_rows_each_up_to_a_thousand_devices(tmp_path: Path):
    def crowd(rows: int, *said: int) -> tuple[int, int]:
        text = "a,b\n" + "".join(f"{row},{row % 2}\n" for row in range(rows))
        return read_table(written(tmp_path, text)).crowd(*said)

    assert crowd(500) == (40, 10)
    assert crowd(500, 20) == (20, 20)
    assert crowd(20) == (5, 3)
    assert crowd(15_000) == (1000, 12)
    with pytest.raises(DataError, match="has 20 rows, 16 without those to test on: too few for 17 devices"):
        crowd(20, 17)


def test_another_file_may_hold_the_rows_to_test_on_in_any_order_of_columns(tmp_path: Path):
    path = written(tmp_path, HEAD + ROWS)
    test = written(tmp_path, "sick,height,age,more\nyes,1.7,20,x\nperhaps,1.8,21,y\n", "test.csv")
    data = load(path, normalise="none", seed=1, columns=Columns("sick", "who", test=test, public=test))
    assert data.x_test[0].tolist() == pytest.approx([20, 1.7])
    assert data.classes == ("no", "perhaps", "yes")
    assert data.y_test.tolist() == [2, 1]
    assert data.x_public.shape == (2, 2)
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1, 1, 2]
    assert len(data.y_train) == 5


def test_an_npz_file_may_bring_its_own_rows_to_test_on(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x_train=np.eye(4), y_train=[0, 1, 0, 1], x_test=np.ones((2, 4)), y_test=[1, 1])
    data = load(str(tmp_path / "a.npz"), normalise="none", seed=1)
    assert (len(data.y_train), data.y_test.tolist()) == (4, [1, 1])


def test_labels_are_recoded_by_the_names_of_a_task_or_by_their_places(tmp_path: Path):
    data = load(written(tmp_path, HEAD + ROWS), normalise="none", seed=1, columns=Columns("sick", "who", test="0.2"))
    turned = data.recoded(("yes", "no"), (-1.0, 1.0))
    assert turned.y_train.tolist() == [1 - y for y in data.y_train.tolist()]
    coded = load(written(tmp_path, "a,b\n1,0\n2,1\n3,1\n"), normalise="none", seed=1, columns=Columns(test="0.34"))
    assert coded.recoded(("no", "yes"), (-1.0, 1.0)).y_train.tolist() == coded.y_train.tolist()
    with pytest.raises(DataError, match="has the label 'no', which is none of the task's: ill, well"):
        data.recoded(("ill", "well"), (-1.0, 1.0))


BAD = {
    "no file": (None, "is not there"),
    "another ending": ("a.txt", "does not end in .csv"),
    "empty": ("", "is empty"),
    "blank first line": ("\n1,2\n", "begins with a blank line"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\xff\xfe\0", "is no CSV file"),
    "header only": ("a,b\n", "has a heading and no rows"),
    "one column": ("a\n1\n", "line 1 has one field"),
    "ragged": ("a,b\n1,0\n2\n", "line 3 has 1 field, fewer than the 2 columns"),
    "too wide": ("a,b\n1,0,5\n", "line 2 has 3 fields, more than the 2 columns"),
    "blank line": ("a,b\n1,0\n\n2,1\n", "line 3 is blank"),
    "two names": ("a,a,b\n1,2,0\n", "columns 1 and 2 are both called 'a'"),
    "open quotes": ('a,b\n"1,0\n2,1\n', "line 2: its quotes do not close"),
    "no UTF-8": (b"a,b\n1,0\n\xe4,1\n", "line 3 is not in UTF-8"),
    "missing value": ("a,b\n1,0\n,1\n", "line 3: column 'a' has no value (in 1 of 2 rows). Fill it in"),
    "NA": ("a,b\n1,0\n2,1\nNA,1\nnan,1\n", "line 4: column 'a' has no value (in 2 of 4 rows)"),
    "text": ("a,b\n1,0\nred,1\n", "line 3: column 'a' holds a text where features are numbers (in 1 row of 2)"),
    "infinite": ("a,b\n1,0\ninf,1\n", "line 3: column 'a' holds no finite number, or one above 1e+30 in size (in 1"),
    "too large": ("a,b\n1,0\n-2e30,1\n", "line 3: column 'a' holds no finite number, or one above 1e+30 in size"),
    "first line without end": ("a" * 8_000_000, "line 1 is longer than a row can be"),
    "commas alone": ("," * 4_000_000, "line 1 has 4,000,001 fields; at most 100,000 are read"),
    "no label": ("a,b\n1,0\n2,\n", "line 3: column 'b' has no label (in 1 of 2 rows)"),
    "one class": ("a,b\n1,0\n2,0\n", "every label in column 'b' is '0', and a classifier needs two classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_refused_by_file_row_and_column(case: str, tmp_path: Path):
    text, sentence = BAD[case]
    name = "a.txt" if case == "another ending" else "rows.csv"
    path = str(tmp_path / name) if text is None else written(tmp_path, text, name)
    with pytest.raises(DataError) as refused:
        read_table(path)
    said = str(refused.value)
    assert sentence in said
    assert path in said
    assert said.endswith(".")
    assert "\n" not in said


def test_a_column_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path):
    path = written(tmp_path, HEAD + ROWS)
    with pytest.raises(DataError, match=r"has no column 'sik' for --label. Did you mean 'sick'\? Its columns are age"):
        read_table(path, label="sik")
    with pytest.raises(DataError, match="for --device"):
        read_table(path, device="where")
    with pytest.raises(DataError, match="for --ignore"):
        read_table(path, ignore=["x"])


def test_many_numbers_are_no_classes(tmp_path: Path):
    path = written(tmp_path, "a,b\n" + "".join(f"{row},{row / 7}\n" for row in range(200)))
    with pytest.raises(DataError, match=r"line 3: column 'b' holds 200 different numbers.*labels.kind = \"number\""):
        read_table(path, kind="class")


def test_a_text_is_no_number_to_predict(tmp_path: Path):
    path = written(tmp_path, "a,b\n1,0.5\n2,tall\n")
    with pytest.raises(DataError, match="line 3: column 'b' holds a text, and the task predicts a number"):
        read_table(path, kind="number")


def test_a_constant_column_is_read_and_said(tmp_path: Path):
    (note,) = read_table(written(tmp_path, "a,c,b\n1,7,0\n2,7,1\n")).notes
    assert "column 'c' has one value in all 2 rows" in note
    assert "--ignore c" in note


def test_broken_archives_are_refused_in_a_sentence(tmp_path: Path):
    for name, content, why in (
        ("a.csv.gz", b"a,b\n1,0\n", "cannot be read"),
        ("a.npz", b"PK\x03\x04", "is no NPZ file"),
    ):
        with pytest.raises(DataError, match=why):
            read_table(written(tmp_path, content, name))
    np.savez(tmp_path / "b.npz", inputs=np.eye(2))
    with pytest.raises(DataError, match="has no arrays x and y: it has inputs"):
        read_table(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.eye(3), y=[0, 1])
    with pytest.raises(DataError, match=r"array 'y' has shape \(2,\), and there are 3 rows"):
        read_table(tmp_path / "c.npz")


def test_names_of_features_are_as_many_as_the_features(tmp_path: Path):
    for names in (["a", "b"], "abc"):  # with two names for three features, the label would be the third feature
        np.savez(tmp_path / "a.npz", x=np.eye(3), y=[0, 1, 1], feature_names=names)
        with pytest.raises(DataError, match=r"feature_names has shape .*, and there are 3 features"):
            read_table(tmp_path / "a.npz")


def test_a_packed_array_or_table_that_would_fill_the_memory_is_refused_by_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file, file.open("x.npy", "w") as member:
        head = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
        np.lib.format.write_array_header_1_0(member, head)
    with pytest.raises(DataError, match="array x has more than 200,000,000 values"):
        read_table(tmp_path / "a.npz")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [1, 2, 3], "b": [0, 1, 1]}), tmp_path / "a.parquet")
    monkeypatch.setattr(cells, "MOST_VALUES", 5)
    with pytest.raises(DataError, match=r"a\.parquet has more than 5 values"):
        read_table(tmp_path / "a.parquet")


def test_a_share_that_leaves_no_rows_is_refused(tmp_path: Path):
    path = written(tmp_path, HEAD + ROWS)
    for share, why in (("0.01", "is 0 of its 5 rows"), ("2", "between 0 and 1"), ("some", "between 0 and 1")):
        with pytest.raises(DataError, match=why):
            load(path, seed=1, columns=Columns("sick", "who", test=share))


def test_a_table_is_described_by_what_its_columns_look_like(tmp_path: Path):
    lines = [
        f"{row},{row % 4},{row / 3:.3f},7,{'red' if row % 2 else 'blue'},note {row % 3},,{row % 2}" for row in range(40)
    ]
    lines[5] = lines[5].replace("1.667", "")
    facts = described(written(tmp_path, "id,user_id,weight,unit,colour,remark,nothing,label\n" + "\n".join(lines)))
    assert {column.name: column.looks for column in facts.columns} == {
        "id": "row id",
        "user_id": "device",
        "weight": "feature",
        "unit": "constant",
        "colour": "category",
        "remark": "category",
        "nothing": "empty",
        "label": "label",
    }
    assert (facts.rows, facts.label, facts.kind, facts.devices) == (40, "label", "class", 4)
    assert facts.classes == {"0": 20, "1": 20}
    assert facts.missing == 41
