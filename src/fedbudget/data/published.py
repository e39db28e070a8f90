"""Published datasets: their files, local folders and downloads.

- A dataset is searched for in `--data-dir`, then in `FEDBUDGET_DATA`, then in the user's
  cache folder. All of its files come from one folder or archive, so that different copies
  are not mixed. The search checks names only; readers and `fedbudget data check` check the
  contents.
- `get` downloads missing files from one source after another. Files from one source are
  kept, even if the download fails in the end. Only files with the right contents receive
  their name.
- Checksums are of uncompressed contents, because servers compress them in different ways.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedbudget.data.download import (
    File,
    Progress,
    Source,
    Target,
    archive,
    knowledge_table,
    mirror,
    plain_text,
)
from fedbudget.errors import UserError
from fedbudget.file_contents import PART


@dataclass(frozen=True)
class PublishedDataset:
    """A dataset that others have published.

    Args:
      name: in commands.
      title: a short description for the user.
      samples: number of training and test samples.
      licence: of the data.
      files: all of its files.
      folders: possible subfolders of a data folder; downloads go to the first.
      sources: to download from, in this order.
      archive: name of a `.tar.gz` that may replace the files.
    """

    name: str
    title: str
    samples: int
    licence: str
    files: tuple[File, ...]
    folders: tuple[str, ...]
    sources: tuple[Source, ...]
    archive: str | None = None


class DatasetMissing(UserError):
    """No data folder contains any file of a dataset."""


# dataset, file, bytes, sha256
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
tcga-brca brca.csv 113184 07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020
tcga-brca centers.csv 4274 d610df2dae0203ea229c9579747ed3eb8d28e137c5378f55acc6fe6b4632bb1d
beijing-air PRSA_Data_Aotizhongxin_20130301-20170228.csv 2660337 ee2015d9e240a240ce0efb0541497ac47f6f194d6b7038195cb03e864826ef20
beijing-air PRSA_Data_Changping_20130301-20170228.csv 2546749 8c1178baf279402eefe3003a810efd6b972959299a9d9369774e575b9d30af93
beijing-air PRSA_Data_Dingling_20130301-20170228.csv 2500380 789e8191371b47d752ba22ffab39e544ff083257cd7c5c2af61f67d29ba6bc39
beijing-air PRSA_Data_Dongsi_20130301-20170228.csv 2461119 351df2eded346bc6eb2d4cfdc3cb3b9f29b4f3fe34ca606a62cbd5beeaad6731
beijing-air PRSA_Data_Guanyuan_20130301-20170228.csv 2520301 14793824f1216777da8d0dcfd332e034825e7922c9cf2e8777b159a989758060
beijing-air PRSA_Data_Gucheng_20130301-20170228.csv 2479151 5952e3f2fc1bd8eb9de34aaf6266ff32df7ef77ba1029d841051b23b5897c137
beijing-air PRSA_Data_Huairou_20130301-20170228.csv 2465804 fb63d57dc28d1bb795b15816fe24ac236f58e7a84fee1198181f3faf783d6bb2
beijing-air PRSA_Data_Nongzhanguan_20130301-20170228.csv 2664120 9753b3722b4ad70e4ca909b119511f360dcbbf1d83eda30951154db58401adbc
beijing-air PRSA_Data_Shunyi_20130301-20170228.csv 2445726 184a7bbbb959c5cf51bbdb926aa961c5af8fa4000aacfb56055c1f0130a6aadd
beijing-air PRSA_Data_Tiantan_20130301-20170228.csv 2479496 18023a1059e2cfae6c23edc1579bb36b0e9af48aaa45d849a8a07353d1e753ea
beijing-air PRSA_Data_Wanliu_20130301-20170228.csv 2484033 7724e7d14762fd27207ac7b7c06d08bfadbae6c3ff2219c714f9361e2afe7a3d
beijing-air PRSA_Data_Wanshouxigong_20130301-20170228.csv 2695513 3484fbdbb56a8da92de9caf9f3a3f66b1ec03dfdd203f215afc39cefd163f7ce
parkinsons parkinsons_updrs.data 911261 f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39
cmapss train_FD001.txt 3515356 963b5e22825b34d8b21c69e1aeb4af3e647050eb672ee8834ba4b5d91d2de0f8
shakespeare input.txt 1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
omniglot images_background_small1.zip 1319022 f38eb80f801274ac2b4dff5b24289016bfaba4a7d5bb50deebf27104ad6cb8a4
"""  # noqa: E501


def _files(dataset: str) -> tuple[File, ...]:
    rows = [line.split() for line in _FILES.splitlines() if line.startswith(f"{dataset} ")]
    return tuple(File(name, int(size), sha256) for _, name, size, sha256 in rows)


_S3 = "https://ossci-datasets.s3.amazonaws.com"
_CVDF = "https://storage.googleapis.com/cvdf-datasets"
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_GITHUB = "https://raw.githubusercontent.com"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_NASA = "https://phm-datasets.s3.amazonaws.com/NASA"
_UCI = "https://archive.ics.uci.edu/static/public"

_DATASETS = (
    PublishedDataset(
        name="mnist",
        title="handwritten digits, 28x28",
        samples=70_000,
        licence="CC BY-SA 3.0",
        files=_files("mnist"),
        folders=("mnist", "MNIST/raw"),  # the second is torchvision's
        sources=(mirror(f"{_S3}/mnist/", ".gz"), mirror(f"{_CVDF}/mnist/", ".gz")),
    ),
    PublishedDataset(
        name="fashion-mnist",
        title="clothes, 28x28",
        samples=70_000,
        licence="MIT",
        files=_files("fashion-mnist"),
        folders=("fashion-mnist", "FashionMNIST/raw"),  # the second is torchvision's
        sources=(
            mirror(f"{_ZALANDO}/", ".gz"),
            mirror(
                f"{_GITHUB}/zalandoresearch/fashion-mnist/master/data/fashion/",
                ".gz",
            ),
        ),
    ),
    PublishedDataset(
        name="cifar-10",
        title="photographs, 32x32 in colour",
        samples=60_000,
        licence="none stated; cite Krizhevsky (2009)",
        files=_files("cifar-10"),
        folders=("cifar-10-batches-bin", "cifar-10"),
        archive="cifar-10-binary.tar.gz",
        sources=(
            archive(
                f"{_TORONTO}/cifar-10-binary.tar.gz",
                "cifar-10-batches-bin/{name}",
                limit=200_000_000,
            ),
        ),
    ),
    PublishedDataset(
        name="energy",
        title="energy use of appliances",
        samples=19_735,
        licence="CC BY 4.0",
        files=_files("energy"),
        folders=("energy",),
        sources=(
            mirror(f"{_GITHUB}/LuisM78/Appliances-energy-prediction-data/master/"),
            archive(
                f"{_UCI}/374/appliances+energy+prediction.zip", "{name}", limit=20_000_000
            ),
        ),
    ),
    PublishedDataset(
        name="user-knowledge",
        title="students' knowledge",
        samples=403,
        licence="CC BY 4.0",
        files=_files("user-knowledge"),
        folders=("user-knowledge",),
        sources=(
            archive(
                f"{_UCI}/257/user+knowledge+modeling.zip",
                "Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls",
                limit=5_000_000,
                convert=knowledge_table,
            ),
        ),
    ),
    PublishedDataset(
        name="tcga-brca",
        title="survival with breast cancer, 6 regions",
        samples=352,
        licence="NIH GDC open access, no re-identification; table of FLamby: MIT",
        files=_files("tcga-brca"),
        folders=("tcga-brca", "natural/tcga-brca"),
        sources=(mirror(f"{_GITHUB}/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"),),
    ),
    PublishedDataset(
        name="beijing-air",
        title="air quality at 12 stations",
        samples=412_029,
        licence="CC BY 4.0",
        files=_files("beijing-air"),
        folders=("beijing-air", "natural/beijing-air"),
        sources=(
            archive(
                f"{_UCI}/501/beijing+multi+site+air+quality+data.zip",
                "PRSA_Data_20130301-20170228/{name}",
                limit=50_000_000,
                convert=plain_text,
                inner="PRSA2017_Data_20130301-20170228.zip",
            ),
        ),
    ),
    PublishedDataset(
        name="parkinsons",
        title="voices of 42 patients with Parkinson's",
        samples=5875,
        licence="CC BY 4.0",
        files=_files("parkinsons"),
        folders=("parkinsons", "natural/parkinsons-telemonitoring"),
        sources=(
            archive(f"{_UCI}/189/parkinsons+telemonitoring.zip", "{name}", limit=5_000_000),
        ),
    ),
    PublishedDataset(
        name="cmapss",
        title="wear of 100 jet engines, FD001",
        samples=20_631,
        licence="work of the US government (NASA)",
        files=_files("cmapss"),
        folders=("cmapss", "natural/cmapss-fd001"),
        sources=(
            archive(
                f"{_NASA}/6.+Turbofan+Engine+Degradation+Simulation+Data+Set.zip",
                "{name}",
                limit=50_000_000,
                convert=plain_text,
                inner="6. Turbofan Engine Degradation Simulation Data Set/CMAPSSData.zip",
            ),
            archive(
                "https://zenodo.org/records/15346912/files/CMAPSSData.zip",
                "{name}",
                limit=50_000_000,
                convert=plain_text,
            ),
        ),
    ),
    PublishedDataset(
        name="shakespeare",
        title="next character, 99 roles of plays",
        samples=198_000,
        licence="public domain",
        files=_files("shakespeare"),
        folders=("shakespeare", "natural/shakespeare-roles"),
        sources=(mirror(f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/"),),
    ),
    PublishedDataset(
        name="omniglot",
        title="136 characters drawn by 20 people",
        samples=2720,
        licence="MIT",
        files=_files("omniglot"),
        folders=("omniglot", "natural/omniglot-small"),
        sources=(mirror(f"{_GITHUB}/brendenlake/omniglot/master/python/"),),
    ),
)

PUBLISHED: Mapping[str, PublishedDataset] = {dataset.name: dataset for dataset in _DATASETS}
"""The published datasets by name."""


def dataset_named(name: str) -> PublishedDataset:
    """Return the dataset of that name."""
    if name not in PUBLISHED:
        raise UserError(
            f"unknown dataset {name!r}; published ones are {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def find(name: str, data_dir: Path | None) -> dict[str, Path]:
    """Return the path of each file: plain, with `.gz`, or of the archive that contains it.

    Missing files are left out.

    Raises:
      DatasetMissing: no data folder contains any of them.
    """
    dataset = dataset_named(name)
    folders = data_folders(data_dir)
    for _, folder in folders:
        if paths := files_in(dataset, folder):
            return paths
    searched = ", ".join(f"{folder} ({what})" for what, folder in folders)
    raise DatasetMissing(
        f"{name} was not found in {searched}; download it with: fedbudget data get {name}"
    )


def data_folders(data_dir: Path | None) -> list[tuple[str, Path]]:
    """Return the data folders in the order of the search, each with a description."""
    from platformdirs import user_cache_path

    folders = [] if data_dir is None else [("--data-dir", data_dir.expanduser())]
    if variable := os.environ.get("FEDBUDGET_DATA"):
        folders.append(("FEDBUDGET_DATA", Path(variable).expanduser()))
    return [*folders, ("the cache folder", user_cache_path("fedbudget"))]


def files_in(dataset: PublishedDataset, data_folder: Path) -> dict[str, Path]:
    """Return the files of a dataset in a data folder.

    They come from the subfolder that has the most of them, or else from an archive.
    """
    folders = [data_folder / folder for folder in dataset.folders]
    candidates = [_stored_in(folder, dataset) for folder in folders]
    if dataset.archive is not None:
        # An archive counts as complete: checking would decompress all of it every time.
        for folder in (data_folder, *folders):
            path = folder / dataset.archive
            if path.is_file():
                candidates.append({file.name: path for file in dataset.files})
    return max(candidates, key=len)  # the first of equals


def container(paths: Mapping[str, Path]) -> Path:
    """Return the archive or the folder that contains the files of a dataset."""
    path = next(iter(paths.values()))
    return path if path.name.endswith(".tar.gz") else path.parent


def get(
    name: str,
    data_dir: Path,
    progress: Progress | None = None,
    sources: Sequence[Source] | None = None,
) -> dict[str, Path]:
    """Download the files of a dataset that are missing or have wrong contents.

    Args:
      name: of a published dataset.
      data_dir: receives a subfolder for the dataset.
      progress: callbacks.
      sources: to download from; the dataset's sources by default.

    Returns:
      The path of each file.
    """
    dataset = dataset_named(name)
    paths = files_in(dataset, data_dir)
    if not _missing(dataset.files, paths):
        return paths
    target = Target(_writable(data_dir / dataset.folders[0]), progress or Progress())
    missing = _missing(dataset.files, _stored_in(target.folder, dataset))
    problems = []
    for source in dataset.sources if sources is None else sources:
        if not missing:
            break
        target.progress.on_source(source.name)
        try:
            source.fetch(missing, target)
        except UserError as problem:
            problems.append(f"{source.name}: {' '.join(str(problem).split())}")
        missing = _missing(missing, _stored_in(target.folder, dataset))

    if missing:
        with suppress(OSError):
            target.folder.rmdir()  # succeeds only for an empty folder
        what = name
        if len(missing) < len(dataset.files):
            what = f"{len(missing)} of {len(dataset.files)} files of {name}"
        reasons = "; ".join(problems) or "there is no source"
        raise UserError(f"{what} could not be downloaded: {reasons}")
    for left_over in target.folder.glob(f"*{PART}"):
        left_over.unlink()  # of a source that failed before another succeeded
    return files_in(dataset, data_dir)


def _stored_in(folder: Path, dataset: PublishedDataset) -> dict[str, Path]:
    """Return the files of a dataset in a folder; a plain file wins over a `.gz`."""
    paths = {}
    for file in dataset.files:
        for path in (folder / file.name, folder / f"{file.name}.gz"):
            if path.is_file():
                paths[file.name] = path
                break
    return paths


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder} cannot be written to: {reason}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written to: Permission denied")
    return folder


def _missing(files: Sequence[File], paths: Mapping[str, Path]) -> list[File]:
    """Return the files that are absent or have wrong contents."""
    return [
        file
        for file in files
        if file.name not in paths or not file.matches(paths[file.name])
    ]
