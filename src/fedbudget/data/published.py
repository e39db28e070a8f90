"""The paper's datasets as they are published: what is known of their files, where they are found, how to get them.

What is known of the five published datasets: their files, where these may lie, and where they can be had.

Checksums are of contents when unzipped, because the same contents are distributed zipped in more than one way.

Published datasets on this machine: where they are looked for, and how what is missing comes there.

They are looked for in `--data-dir`, then `FEDBUDGET_DATA`, then the user's cache folder. A dataset comes from one
place, and there from one folder or archive, so that copies of different kinds are not mixed. Finding looks at names
alone; what the files hold is for the reader, or for `fedbudget data check`.

What is missing is asked of the sources one after the other. What one source gave stays, also when all fail in the end.
Only files with the right contents ever get their names.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedbudget.data.contents import PART
from fedbudget.data.download import (
    File,
    PackageMembers,
    Progress,
    Source,
    Target,
    archive,
    knowledge_table,
    mirror,
)
from fedbudget.errors import UserError


@dataclass(frozen=True)
class PublishedDataset:
    """A dataset that others have published.

    Args:
      name: as commands call it.
      title: what it is, for a person.
      samples: how many there are, of training and test together.
      licence: under which it was published.
      files: all of its files.
      folders: where it may lie below a folder of data; the first is where it is fetched to.
      sources: where it can be had, in the order to try them.
      archive: the name of a `.tar.gz` that may lie there instead, with all files in it.
    """

    name: str
    title: str
    samples: int
    licence: str
    files: tuple[File, ...]
    folders: tuple[str, ...]
    sources: tuple[Source, ...]
    archive: str | None = None


def dataset_named(name: str) -> PublishedDataset:
    """The dataset of that name."""
    if name not in PUBLISHED:
        raise UserError(
            f"unknown dataset {name!r}; published ones are {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


_FILES = """
mnist train-images-idx3-ubyte 47040016 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
mnist train-labels-idx1-ubyte 60008 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
mnist t10k-images-idx3-ubyte 7840016 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
mnist t10k-labels-idx1-ubyte 10008 ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
fashion-mnist train-images-idx3-ubyte 47040016 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
fashion-mnist train-labels-idx1-ubyte 60008 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
fashion-mnist t10k-images-idx3-ubyte 7840016 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
fashion-mnist t10k-labels-idx1-ubyte 10008 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
cifar-10 data_batch_1.bin 30730000 cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
cifar-10 data_batch_2.bin 30730000 a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
cifar-10 data_batch_3.bin 30730000 bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
cifar-10 data_batch_4.bin 30730000 014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
cifar-10 data_batch_5.bin 30730000 755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
cifar-10 test_batch.bin 30730000 8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b
energy energydata_complete.csv 11979363 2820bf712ad0275cb18b85a05250926100d8e65ebb9f4d2d016ca91ea152a25d
user-knowledge user_knowledge.csv 12175 86f11893ad1be525c0c2fd8dda9983bd6bf52c42416bcacdd7a77016b43dec4c
"""  # dataset, file, bytes, sha256


def _files(dataset: str) -> tuple[File, ...]:
    rows = [line.split() for line in _FILES.split("\n") if line.startswith(f"{dataset} ")]
    return tuple(File(name, int(size), sha256) for _, name, size, sha256 in rows)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_UCI = "https://archive.ics.uci.edu/static/public"
_KNOWLEDGE = PackageMembers(
    "Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls", convert=knowledge_table
)

_DATASETS = (
    PublishedDataset(
        *("mnist", "handwritten digits, 28x28", 70_000, "CC BY-SA 3.0", _files("mnist")),
        folders=("mnist", "MNIST/raw"),  # the second is torchvision's
        sources=(
            mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
            mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", ".gz"),
        ),
    ),
    PublishedDataset(
        *("fashion-mnist", "clothes, 28x28", 70_000, "MIT", _files("fashion-mnist")),
        folders=("fashion-mnist", "FashionMNIST/raw"),  # the second is torchvision's
        sources=(
            mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz"),
            mirror(
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                ".gz",
            ),
        ),
    ),
    PublishedDataset(
        *(
            "cifar-10",
            "photographs, 32x32 in colour",
            60_000,
            "none stated; cite Krizhevsky (2009)",
        ),
        files=_files("cifar-10"),
        folders=("cifar-10-batches-bin", "cifar-10"),
        archive="cifar-10-binary.tar.gz",
        sources=(
            archive(
                f"{_TORONTO}/cifar-10-binary.tar.gz",
                PackageMembers("cifar-10-batches-bin/{name}"),
                limit=200_000_000,
            ),
        ),
    ),
    PublishedDataset(
        *("energy", "energy use of appliances", 19_735, "CC BY 4.0", _files("energy")),
        folders=("energy",),
        sources=(
            mirror(
                "https://raw.githubusercontent.com/LuisM78/Appliances-energy-prediction-data/master/"
            ),
            archive(
                f"{_UCI}/374/appliances+energy+prediction.zip",
                PackageMembers("{name}"),
                limit=20_000_000,
            ),
        ),
    ),
    PublishedDataset(
        *(
            "user-knowledge",
            "students' knowledge",
            403,
            "CC BY 4.0",
            _files("user-knowledge"),
        ),
        folders=("user-knowledge",),
        sources=(
            archive(f"{_UCI}/257/user+knowledge+modeling.zip", _KNOWLEDGE, limit=5_000_000),
        ),
    ),
)

PUBLISHED: Mapping[str, PublishedDataset] = {dataset.name: dataset for dataset in _DATASETS}
"""The published datasets by name."""


class DatasetMissing(UserError):
    """No file of a dataset is in any of the places."""


def find(name: str, data_dir: Path | None) -> dict[str, Path]:
    """Where each file of a dataset lies: itself, with `.gz`, or the archive that holds it. Missing ones are left out.

    Raises:
      DatasetMissing: no place has any of them.
    """
    dataset = dataset_named(name)
    folders = places(data_dir)
    for _, folder in folders:
        if paths := files_in(dataset, folder):
            return paths
    where = ", ".join(f"{folder} ({what})" for what, folder in folders)
    raise DatasetMissing(
        f"{name} is not here: looked in {where}; fedbudget data get {name} fetches it"
    )


def places(data_dir: Path | None) -> list[tuple[str, Path]]:
    """The folders to look in, the first one first, each with what it is."""
    from platformdirs import user_cache_path

    chosen = [] if data_dir is None else [("--data-dir", data_dir.expanduser())]
    if variable := os.environ.get("FEDBUDGET_DATA"):
        chosen.append(("FEDBUDGET_DATA", Path(variable).expanduser()))
    return [*chosen, ("the cache folder", user_cache_path("fedbudget"))]


def files_in(dataset: PublishedDataset, place: Path) -> dict[str, Path]:
    """The files of a dataset in one place: in the folder that has the most of them, or else in an archive."""
    folders = [place / folder for folder in dataset.folders]
    candidates = [stored_in(folder, dataset) for folder in folders]
    if dataset.archive is not None:
        # Taken to be complete: to look inside would be to unzip all of it each time.
        archives = [folder / dataset.archive for folder in (place, *folders)]
        candidates += [
            {file.name: path for file in dataset.files}
            for path in archives
            if path.is_file()
        ]
    return max(candidates, key=len)  # of equals the first


def stored_in(folder: Path, dataset: PublishedDataset) -> dict[str, Path]:
    """The files of a dataset that lie in a folder, plain or zipped."""
    forms = [
        (file.name, folder / f"{file.name}{suffix}")
        for file in dataset.files
        for suffix in (".gz", "")
    ]
    return {
        name: path for name, path in forms if path.is_file()
    }  # plain comes last, and stays


def container(paths: Mapping[str, Path]) -> Path:
    """What files lie in that belong together: their archive, or their folder."""
    path = next(iter(paths.values()))
    return path if path.name.endswith(".tar.gz") else path.parent


def get(
    name: str,
    data_dir: Path,
    progress: Progress | None = None,
    sources: Sequence[Source] | None = None,
) -> dict[str, Path]:
    """Fetches what is missing of a dataset, or has wrong contents.

    Args:
      name: of a published dataset.
      data_dir: gets a folder for the dataset.
      progress: is called as it goes.
      sources: where to look; the dataset's own when not given.

    Returns:
      Where each file lies.
    """
    dataset = dataset_named(name)
    if not _missing(dataset.files, paths := files_in(dataset, data_dir)):
        return paths
    target = Target(_writable(data_dir / dataset.folders[0]), progress or Progress())
    missing = _missing(dataset.files, stored_in(target.folder, dataset))
    problems = []
    for source in dataset.sources if sources is None else sources:
        if not missing:
            break
        target.progress.on_source(source.name)
        try:
            source.fetch(missing, target)
        except UserError as problem:
            problems.append(f"{source.name}: {' '.join(str(problem).split())}")
        missing = _missing(missing, stored_in(target.folder, dataset))
    if missing:
        with suppress(OSError):
            target.folder.rmdir()  # which it can only if nothing came
        part = (
            ""
            if len(missing) == len(dataset.files)
            else f"{len(missing)} of {len(dataset.files)} files of "
        )
        raise UserError(
            f"{part}{name} could not be fetched: {'; '.join(problems) or 'there is no source'}"
        )
    for left_over in target.folder.glob(f"*{PART}"):
        left_over.unlink()  # of sources that broke off before another one had it all
    return files_in(dataset, data_dir)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to: {error.strerror or error}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written to: Permission denied")
    return folder


def _missing(files: Sequence[File], paths: dict[str, Path]) -> list[File]:
    """The files that are not there with the right contents."""
    return [
        file
        for file in files
        if file.name not in paths or not file.matches(paths[file.name])
    ]
