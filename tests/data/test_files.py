"""The user's files: .csv, .npz, folders and arrays; errors name the file or shard."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import ipc
from scipy.sparse import csr_array

from fedbudget import data
from fedbudget.data.columns import read_npz
from fedbudget.data.files import from_samples, from_shards, load, load_all
from fedbudget.data.read_tables import PLAIN
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def csv_of(path: Path, rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Path:
    header = ",".join(f"c{column}" for column in range(rows.shape[1]))
    lines = [",".join(repr(float(value)) for value in row) for row in rows]
    return write(path, "\n".join([header, *lines, ""]))


class TestCsvDataset:
    def test_text_classes_are_sorted(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "pets.csv", "weight,kind\n" + "4,cat\n30,dog\n0.1,bird\n5,cat\n" * 5
        )
        dataset = load(path, test_share=0.0)
        assert dataset.classes == ("bird", "cat", "dog")
        assert dataset.train.labels is not None
        assert dataset.train.labels.tolist() == [1, 2, 0, 1] * 5

    def test_large_integers_stay_distinct_classes(self, tmp_path: Path) -> None:
        dataset = load(
            write(tmp_path / "a.csv", "a,zip\n" + "1,1000001\n2,1000002\n" * 5),
            test_share=0.0,
        )
        assert dataset.classes == ("1000001", "1000002")
        assert dataset.train.labels is not None
        assert dataset.train.labels.tolist() == [0, 1] * 5

    @pytest.mark.parametrize(
        ("values", "classes"), [(range(50), 50), (range(51), 0), ([0, 0.5, 1], 0)]
    )
    def test_up_to_fifty_integer_classes(
        self, tmp_path: Path, values: list[float], classes: int
    ) -> None:
        path = write(
            tmp_path / "a.csv", "a,y\n" + "".join(f"1,{value}\n" for value in values)
        )
        dataset = load(path, test_share=0.0)
        assert len(dataset.classes) == classes
        assert (dataset.train.labels is None) == (classes == 0)

    def test_training_rows_are_standardised(self, tmp_path: Path) -> None:
        """Features and a real target. A constant feature becomes zero."""
        rows = np.random.default_rng(0).normal(30, 9, (100, 4))
        rows[:, 1] = 0.1
        dataset = load(csv_of(tmp_path / "a.csv", rows))
        x = dataset.train.x.astype(np.float64)
        assert len(x) == 80
        assert x.mean(axis=0) == pytest.approx(0, abs=1e-6)
        assert x.std(axis=0) == pytest.approx([1, 0, 1], abs=1e-6)
        y = dataset.table(dataset.train, "real").y.astype(np.float64)
        assert (y.mean(), y.std()) == pytest.approx((0, 1), abs=1e-6)

    def test_held_out_rows_use_training_moments(self, tmp_path: Path) -> None:
        rows = np.random.default_rng(0).normal(30, 9, (100, 3))
        rows[:, 2] = np.arange(100) + 0.5  # identifies the row
        dataset = load(csv_of(tmp_path / "a.csv", rows), test_share=0.3)
        assert dataset.test is not None
        assert dataset.train.values is not None
        assert dataset.test.values is not None
        trained, tested = (
            values.astype(int) for values in (dataset.train.values, dataset.test.values)
        )
        assert sorted([*trained, *tested]) == list(range(100))
        assert len(tested) == 30
        known = rows[trained, :2]
        expected = (rows[tested, :2] - known.mean(axis=0)) / known.std(axis=0)
        assert dataset.test.x == pytest.approx(expected, abs=1e-5)

    def test_held_out_rows_are_fixed(self, tmp_path: Path) -> None:
        path = csv_of(tmp_path / "a.csv", np.random.default_rng(0).normal(size=(40, 3)))
        one, other = load(path), load(path)
        assert one.test is not None
        assert other.test is not None
        assert np.array_equal(one.test.x, other.test.x)

    def test_unreadable_csv_is_rejected(self, tmp_path: Path) -> None:
        """A field of 200,000 characters, and bytes of no encoding."""
        text = "a,y\n" + "1" * 200_000 + ",2\n"
        path = write(tmp_path / "long.csv", text)
        with pytest.raises(UserError, match=r"long\.csv cannot be read"):
            load(path)
        path = tmp_path / "binary.csv"
        path.write_bytes(b"a,y\n1,\x81\n")
        with pytest.raises(UserError, match=r"binary\.csv cannot be read"):
            load(path)

    @pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
    def test_other_encodings(self, tmp_path: Path, encoding: str) -> None:
        path = write(tmp_path / "a.csv", "a,y\n1,café\n2,bar\n" * 1, encoding)
        dataset = load(path, test_share=0.0)
        assert dataset.classes == ("bar", "café")
        guessed = any("read as Windows-1252" in remark for remark in dataset.remarks)
        assert guessed == (encoding == "latin-1")

    def test_tab_separated_file_with_decimal_commas(self, tmp_path: Path) -> None:
        path = write(tmp_path / "A.TSV", "a\tb\ty\n1,5\t2\t0\n2,5\t3\t1\n")
        dataset = data.load(str(path), test_share=0.0, standardise=False)
        assert dataset.train.x.tolist() == [[1.5, 2], [2.5, 3]]

    def test_decimal_commas_are_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", 'a,y\n"1,5",0\n"2,5",1\n"0,5",1\n')
        with pytest.raises(UserError, match=r"numbers with decimal commas \('1,5' in"):
            load(path)

    def test_index_of_pandas_is_dropped_by_its_name(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", ",a,y\n0,7,0\n1,8,1\n")
        options = TableOptions(drop=("Unnamed: 0",))
        dataset = load(path, options, test_share=0.0, standardise=False)
        assert dataset.train.x.tolist() == [[7], [8]]

    def test_further_markers_of_missing_cells(self, tmp_path: Path) -> None:
        """The mean of the others takes their place. The layout keeps the markers."""
        path = write(tmp_path / "a.csv", "a,y\n1,0\n<0.5,0\n3,1\n")
        options = TableOptions(missing=("<0.5",), impute="mean")
        dataset = load(path, options, test_share=0.0, standardise=False)
        assert dataset.train.x.tolist() == [[1], [2], [3]]
        assert dataset.layout is not None
        assert dataset.layout.options_for(PLAIN).missing == ("<0.5",)

    @pytest.mark.parametrize("ending", ["feather", "arrow"])
    def test_arrow_files(self, tmp_path: Path, ending: str) -> None:
        table = pyarrow.table({"a": [1.0, 2.0], "y": ["no", "yes"]})
        path = tmp_path / f"a.{ending}"
        writer = ipc.new_file if ending == "feather" else ipc.new_stream
        with path.open("wb") as file, writer(file, table.schema) as sink:
            sink.write_table(table)
        dataset = load(path, test_share=0.0, standardise=False)
        assert dataset.train.x.tolist() == [[1], [2]]
        assert dataset.classes == ("no", "yes")


class TestNpz:
    def test_uint8_features_are_pixels(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.array([[0, 51], [255, 102]], np.uint8), y=[0, 1])
        dataset = load(tmp_path / "a.npz", test_share=0.0)
        assert dataset.train.x.dtype == np.uint8
        assert dataset.table(dataset.train, "classes").scaled(
            np.arange(2)
        ) == pytest.approx(np.array([[0.0, 0.2], [1.0, 0.4]]))

    def test_float_features_are_not_scaled(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).normal(5, 2, (10, 3))
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) / 4)
        dataset = load(tmp_path / "a.npz", test_share=0.0)
        assert np.array_equal(dataset.train.x, x)
        assert dataset.scale == 1
        assert (
            dataset.table(dataset.train, "real").y.tolist() == (np.arange(10) / 4).tolist()
        )

    def test_images_are_flattened(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.arange(12, dtype=np.float32).reshape(2, 2, 3))
        expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
        assert load(tmp_path / "a.npz").train.x.tolist() == expected

    def test_npz_with_test_samples(self, tmp_path: Path) -> None:
        np.savez(
            tmp_path / "a.npz",
            x=np.zeros((9, 2)),
            y=np.arange(9) % 2,
            x_test=np.ones((3, 2)),
            y_test=[1, 0, 1],
        )
        dataset = load(tmp_path / "a.npz", test_share=0.5)
        assert len(dataset.train) == 9
        assert dataset.test is not None
        assert dataset.test.x.tolist() == [[1, 1]] * 3
        assert dataset.test.labels is not None
        assert dataset.test.labels.tolist() == [1, 0, 1]

    def test_text_classes(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array(["up", "down", "up"]))
        dataset = load(tmp_path / "a.npz", test_share=0.0)
        assert dataset.classes == ("down", "up")
        assert dataset.train.labels is not None
        assert dataset.train.labels.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"y": np.zeros(3)}, "has no array named x"),
            ({"x": np.zeros(3)}, r"must be \[samples, ...\], not of shape \(3,\)"),
            ({"x": np.zeros((0, 3))}, r"must be \[samples, ...\], not of shape \(0, 3\)"),
            ({"x": np.array([["a", "b"]])}, "features must be numbers"),
            (
                {"x": np.zeros((3, 2)), "y": np.zeros(4)},
                r"y has shape \(4,\), but x has 3 samples",
            ),
            (
                {"x": np.zeros((3, 2)), "y": np.zeros(3, complex)},
                "y must be numbers or text",
            ),
            (
                {"x": np.array([[1.0], [np.nan], [np.inf]])},
                "sample 1 is not finite .*; 2 of 3 samples are affected",
            ),
            (
                {"x": np.zeros((3, 2)), "y": [0, 1, np.nan]},
                "the target of sample 2 is not finite",
            ),
            (
                {"x": np.zeros((3, 2)), "x_test": np.full((2, 2), np.nan)},
                "sample 0 is not finite",
            ),
            ({"x": np.array([[1, {}]], dtype=object)}, "is not a readable .npz file"),
        ],
    )
    def test_invalid_arrays_are_rejected(
        self, tmp_path: Path, arrays: dict[str, object], message: str
    ) -> None:
        np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):
            read_npz(tmp_path / "a.npz")

    def test_damaged_archives_are_rejected(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "whole.npz", x=np.random.default_rng(0).random((50, 3)))
        whole = bytearray((tmp_path / "whole.npz").read_bytes())
        with (tmp_path / "array.npz").open("wb") as file:
            np.save(file, np.zeros((5, 3)))
        (tmp_path / "empty.npz").write_bytes(b"")
        (tmp_path / "text.npz").write_bytes(b"x,y\n1,2\n")
        (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
        whole[200] ^= 0xFF
        (tmp_path / "flipped.npz").write_bytes(whole)
        for name in ("array", "empty", "text", "half", "flipped"):
            message = f"{name}.npz is not (an|a readable) .npz file"
            with pytest.raises(UserError, match=message):
                read_npz(tmp_path / f"{name}.npz")


class TestFolder:
    def folder(self, tmp_path: Path, sizes: tuple[int, ...] = (10, 20, 5)) -> Path:
        """One file per site. The first feature of a row is the number of its file."""
        folder = tmp_path / "sites"
        folder.mkdir()
        for number, size in enumerate(sizes):
            x = np.column_stack([np.full(size, number), np.arange(size)]).astype(np.float64)
            np.savez(folder / f"site-{number}.npz", x=x, y=np.arange(size) % 2)
        return folder

    def test_one_file_per_node(self, tmp_path: Path) -> None:
        dataset = load(self.folder(tmp_path), test_share=0.2)
        assert dataset.files == (8, 16, 4)
        assert dataset.train.x[:, 0].tolist() == [0] * 8 + [1] * 16 + [2] * 4

    def test_every_file_has_held_out_rows(self, tmp_path: Path) -> None:
        dataset = load(self.folder(tmp_path), test_share=0.2)
        assert dataset.test is not None
        assert dataset.test.x[:, 0].tolist() == [0] * 2 + [1] * 4 + [2] * 1
        rows = {(a, b) for a, b in [*dataset.train.x.tolist(), *dataset.test.x.tolist()]}
        assert len(rows) == 35  # none is in both

    def test_single_file_is_not_assigned(self, tmp_path: Path) -> None:
        assert load(self.folder(tmp_path) / "site-0.npz").files == ()

    def test_csv_files_share_standardization(self, tmp_path: Path) -> None:
        folder = tmp_path / "sites"
        folder.mkdir()
        for number in range(2):
            write(folder / f"{number}.csv", f"a,y\n{number},1\n{number},2\n")
        dataset = load(folder, test_share=0.0)
        assert dataset.train.x.ravel().tolist() == [-1, -1, 1, 1]

    def test_incompatible_files_are_rejected(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        np.savez(folder / "wide.npz", x=np.zeros((4, 3)), y=np.zeros(4))
        message = "must be the same everywhere, found 2 of float64 and 3 of float64"
        with pytest.raises(UserError, match=message):
            load(folder)
        np.savez(folder / "wide.npz", x=np.zeros((4, 2)))
        message = "targets must be numbers in all files, text in all, or in none"
        with pytest.raises(UserError, match=message):
            load(folder)

    def test_empty_folder_is_rejected(self, tmp_path: Path) -> None:
        message = r"has no \.csv, .* or \.npz file; a folder must hold one file"
        with pytest.raises(UserError, match=message):
            load(tmp_path)


class TestArrays:
    def test_shards_stay_with_their_nodes(self) -> None:
        dataset = from_shards(
            [([[1.0], [2.0]], [0, 1]), ([[3.0]], [1])], test=([[9.0]], [0])
        )
        assert dataset.files == (2, 1)
        assert dataset.train.x.ravel().tolist() == [1, 2, 3]
        assert dataset.test is not None
        assert dataset.test.x.tolist() == [[9.0]]

    def test_errors_name_the_shard(self) -> None:
        with pytest.raises(UserError, match="shard 1: sample 0 is not finite"):
            from_shards([([[1.0]], [0]), ([[np.nan]], [1])], test=None)
        with pytest.raises(UserError, match="at least one node's data"):
            from_shards([], test=None)


def test_new_samples_use_training_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "new.csv", "a,y\n1,dog\n2,cat\n")
    result = load_all(path, classes=("bird", "cat", "dog"))
    assert result.train.labels is not None
    assert result.train.labels.tolist() == [2, 1]
    assert result.scale == 1
    with pytest.raises(UserError, match="class 'dog' is not one of bird, cat"):
        load_all(path, classes=("bird", "cat"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digitz", r"unknown dataset 'digitz'; did you mean digits\?"),
        ("missing.csv", "missing.csv does not exist"),
        ("missing.npz", "missing.npz does not exist"),
        *(
            (
                name,
                f"unknown dataset '{name}'; use digits, .* or the path of a .csv, .t",
            )
            for name in ("imagenet", "no/such/folder")
        ),
    ],
)
def test_unknown_datasets_and_files(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.load(name)


class TestObjects:
    """Data that people have in Python."""

    X = np.arange(20.0).reshape(10, 2)
    Y = np.array([0, 1] * 5)

    def test_pair_of_arrays(self) -> None:
        dataset = from_samples((self.X, self.Y), None, test_share=0.2)
        assert dataset.classes == ("0", "1")
        assert dataset.test is not None
        assert (len(dataset.train), len(dataset.test), dataset.files) == (8, 2, ())

    def test_arrays_of_objects(self) -> None:
        """Texts in pandas are objects, and so are mixed columns."""
        y = np.array(["well", "ill", "ill", "well"], object)
        x = np.array([[1, 2.5], [True, 0], [3, 4], [5, 6]], object)
        dataset = from_samples((x, y), None)
        assert dataset.classes == ("ill", "well")
        assert dataset.train.x.tolist() == [[1, 2.5], [1, 0], [3, 4], [5, 6]]
        with pytest.raises(UserError, match="features must be numbers, not object"):
            from_samples((np.array([["a", None]], object), y[:1]), None)

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (([[1.0], [2.0]], [[0], [1]]), r"y has shape \(2, 1\); pass y.ravel\(\)"),
            ([np.ones((2, 3)), np.ones(2)], r"list of two arrays; pass the tuple \(x, y\)"),
            (np.ones((2, 3)), r"dataset must be \(x, y\).*, not a ndarray"),
        ],
    )
    def test_mistaken_pairs_are_refused(self, samples: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            from_samples(samples, None)

    def test_frame_with_separate_target(self) -> None:
        frame = pd.DataFrame(self.X, columns=["a", "b"])
        dataset = from_samples((frame, pd.Series(self.Y, name="ill")), None)
        assert dataset.layout is not None
        assert (dataset.layout.names, dataset.layout.target) == (("a", "b"), "ill")
        with pytest.raises(UserError, match="a is a column of x and the name of y"):
            from_samples((frame, pd.Series(self.Y, name="a")), None)
        with pytest.raises(UserError, match="target has 9 rows, not 10"):
            from_samples((frame, self.Y[1:]), None)

    def test_categorical_dtype_is_a_category(self) -> None:
        frame = pd.DataFrame({"ward": pd.Categorical([3, 7, 3, 7]), "y": [0, 1, 0, 1]})
        dataset = from_samples(frame, None)
        assert dataset.layout is not None
        assert dataset.layout.feature_names == ("ward=3", "ward=7")

    def test_arrow_table(self) -> None:
        table = pyarrow.table({"a": [1.0, 2.0], "y": [0, 1]})
        dataset = from_samples(table, None, standardise=False)
        assert dataset.train.x.tolist() == [[1], [2]]

    def test_shares_of_shards_are_held_out(self) -> None:
        dataset = from_shards([(self.X, self.Y)] * 2, None, test_share=0.5)
        assert dataset.test is not None
        assert (dataset.files, len(dataset.test)) == ((5, 5), 10)
        samples = [*zip(self.X, self.Y, strict=True)]
        lists = from_shards([samples, samples[:4]], None, test_share=0.5)
        assert lists.test is not None
        assert (lists.files, len(lists.test)) == ((5, 2), 7)
        assert not set(lists.train.x[:, 0]) & set(lists.test.x[:, 0])

    def test_sparse_matrix_is_named(self) -> None:
        with pytest.raises(UserError, match=r"x is a sparse matrix; pass x.toarray\(\)"):
            from_samples((csr_array(self.X), self.Y), None)
