"""What is known of the published datasets: it fits their formats, and the real files where
they are at hand.
"""

import re

import pytest

from fedbudget.data.published import PUBLISHED, dataset_named, files_in
from fedbudget.errors import UserError
from support.real_data import folder_with


def test_every_dataset_goes_by_its_own_name_and_can_be_had_somewhere() -> None:
    assert list(PUBLISHED) == [
        "mnist",
        "fashion-mnist",
        "cifar-10",
        "energy",
        "user-knowledge",
    ]
    for name, dataset in PUBLISHED.items():
        assert dataset_named(name) is dataset
        assert dataset.name == name
        assert dataset.sources
        assert dataset.licence


def test_checksums_are_checksums_and_none_is_there_twice() -> None:
    checksums = [file.sha256 for dataset in PUBLISHED.values() for file in dataset.files]
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in checksums)
    assert len(set(checksums)) == len(checksums) == 4 + 4 + 6 + 1 + 1


def test_sizes_are_what_the_formats_make_of_the_number_of_samples() -> None:
    for name in ("mnist", "fashion-mnist"):
        images, labels = (
            16 + 28 * 28 * 60_000,
            8 + 60_000,
        )  # a header, then a byte a pixel, or a label
        test_images, test_labels = 16 + 28 * 28 * 10_000, 8 + 10_000
        assert [file.size for file in dataset_named(name).files] == [
            images,
            labels,
            test_images,
            test_labels,
        ]
    assert {file.size for file in dataset_named("cifar-10").files} == {
        10_000 * (1 + 3 * 32 * 32)
    }


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        UserError,
        match="unknown dataset 'imagenet'; published ones are mnist, fashion-mnist, ",
    ):
        dataset_named("imagenet")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_files_have_these_contents(name: str) -> None:
    paths = files_in(dataset_named(name), folder_with(name))
    for file in dataset_named(name).files:
        if file.name in paths:
            assert file.matches(paths[file.name]), file.name
