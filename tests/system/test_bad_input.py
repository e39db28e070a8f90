"""A wrong command ends with one line, exit code 2, and without touching any file."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.commands import run_command

FEDBUDGET = Path(sys.executable).with_name("fedbudget")
RUN = ["run", "--out", "out"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with valid and invalid files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBUDGET_DATA", "nothing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # must be absolute
    good = "a,b,y\n" + "1,2,0\n3,5,1\n" * 10
    for name, text in {
        "good.csv": good,
        "missing.csv": good + "4,,1\n",
        "nan.csv": good + "nan,4,1\n",
        "nan-target.csv": good + "3,4,nan\n",
        "words.csv": good + "3,four,1\n",
        "real.csv": "a,y\n" + "1,0.25\n2,0.5\n" * 10,
        "unknown-key.toml": "nodes = 5\ntaus = 3\n",
        "wrong-type.toml": "nodes = 'five'\n",
        "broken.toml": "nodes = = 5\n",
        "file": "a file, not a folder",
        "full/mine.txt": "not to be touched",
        "empty/.keep": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    x = np.zeros((20, 3))
    np.savez(tmp_path / "good.npz", x=x, y=np.arange(20) % 2)
    x[7, 1] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.arange(20) % 2)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


WRONG = [
    (
        [*RUN, "--dataset", "imagenet"],
        "unknown dataset 'imagenet'; use digits, mnist, fashion-mnist, cifar-10, energy",
    ),
    (
        [*RUN, "--dataset", "mnist"],
        r"mnist was not found in nothing \(FEDBUDGET_DATA\), .* data get mnist",
    ),
    (
        ["run", "--task", "svm"],
        "unknown task 'svm'; use one of cnn-cifar-10, cnn-fashion-mnist, cnn-mnist",
    ),
    (
        ["run", "--task", "cnn-mnist", "--config", "a.toml"],
        "give --task or --config, not both",
    ),
    (
        [*RUN, "--train-samples", "0"],
        "--train-samples must be a whole number of at least 1, not 0",
    ),
    (
        [*RUN, "--train-samples", "5000"],
        "5000 training samples of digits were requested; there are 1437",
    ),
    (
        [*RUN, "--method", "magic"],
        "--method must be accelerated, frugal, paper, newton, centralized or asynchronous, "
        "not ",
    ),
    (
        [*RUN, "--method", "asynchronous", "--speeds", "1,2"],
        "--speeds needs one number for each of the",
    ),
    ([*RUN, "--speeds", "1,2"], "--speeds needs one number for each of the"),
    (
        [*RUN, "--speeds", "1,fast"],
        "--speeds must be a number for each node, such as 4,4,1,1,1, or lognormal:SPREAD",
    ),
    (
        [*RUN, "--aggregation-factor", "0"],
        "--aggregation-factor must be a positive number, not 0",
    ),
    ([*RUN, "--dataset", "none.csv"], r"none\.csv does not exist"),
    (
        [*RUN, "--model", "forest"],
        "unknown model 'forest'; use one of svm, linear, kmeans, softmax, mlp, cnn, lenet",
    ),
    (
        [*RUN, "--tau", "0"],
        "--tau must be adaptive or a whole number of at least 1, not '0'",
    ),
    (
        [*RUN, "--tau", "-3"],
        "--tau must be adaptive or a whole number of at least 1, not '-3'",
    ),
    (
        [*RUN, "--tau", "abc"],
        "--tau must be adaptive or a whole number of at least 1, not 'abc'",
    ),
    # One round of the paper's SGD is 0.013015156 + 0.131604348 seconds.
    (
        [*RUN, "--budget", "time=0.1s"],
        r"time=0\.1s is too small: one round costs about 0\.1446s",
    ),
    (
        [*RUN, "--budget", "time=1h", "--budget", "bytes=1kB"],
        "bytes=1kB is too small: one round costs about .*kB",
    ),
    ([*RUN, "--budget", "time=-5s"], "'time=-5s': the limit must be a positive number"),
    ([*RUN, "--budget", "time=0"], "'time=0': the limit must be a positive number"),
    ([*RUN, "--budget", "time=soon"], "'time=soon': .* is not a number"),
    ([*RUN, "--budget", "time=1.2.3s"], r"'1\.2\.3s' is not a number"),
    ([*RUN, "--budget", "time="], "'time=': '' is not a number"),
    ([*RUN, "--budget", "15s"], "'15s' is not understood"),
    (
        [*RUN, "--budget", "time=5parsec"],
        "unknown unit 'parsec' for time; use ms, s, sec, min, h",
    ),
    ([*RUN, "--budget", "time=5MB"], "unknown unit 'MB' for time"),
    (
        [*RUN, "--budget", "water=5"],
        "unknown resource 'water' .*; use one of time, energy, bytes, cpu, money",
    ),
    ([*RUN, "--budget", "time=5s", "--budget", "time=6s"], "budget time is given twice"),
    ([*RUN, "--case", "5"], "case 5 does not exist; the paper has cases 1, 2, 3 and 4"),
    ([*RUN, "--partition", "case:x"], "partition 'case:x' is not understood"),
    (
        [*RUN, "--case", "1", "--partition", "case:1"],
        "give --case or --partition, not both",
    ),
    ([*RUN, "--nodes", "1438"], "1438 nodes are more than the 1437 samples"),
    ([*RUN, "--nodes", "0"], "--nodes must be a whole number of at least 1, not 0"),
    ([*RUN, "--nodes", "many"], "'--nodes': 'many' is not a valid integer"),
    (
        [*RUN, "--batch-size", "0"],
        "--batch-size must be full or a whole number of at least 1, not '0'",
    ),
    (
        [*RUN, "--batch-size", "289"],
        "batch-size 289 is larger than the largest shard, 245 samples of node 0",
    ),
    ([*RUN, "--step-size", "0"], "--step-size must be auto or a positive number, not '0'"),
    ([*RUN, "--watts", "-1"], "--watts must be a number of at least 0, not -1"),
    ([*RUN, "--costs", "guessed"], "costs must be simulated or measured, not 'guessed'"),
    (
        [*RUN, "--dataset", "missing.csv"],
        r"missing\.csv: b has no value in 1 of 21 rows, such as row 22: --impute mean",
    ),
    (
        [*RUN, "--dataset", "nan.csv"],
        r"nan\.csv: a has no value in 1 of 21 rows, such as row 22: --impute",
    ),
    (
        [*RUN, "--dataset", "nan-target.csv"],
        r"nan-target\.csv: y, the target, has no value in 1 of 21 rows, such as row 22",
    ),
    (
        [*RUN, "--dataset", "words.csv"],
        r"words\.csv: b has numbers, but not in 1 of 21 rows, such as 'four' in row 22",
    ),
    ([*RUN, "--dataset", "nan.npz"], r"nan\.npz: sample 7 is not finite"),
    ([*RUN, "--dataset", "broken.npz"], r"broken\.npz is not an \.npz file"),
    (
        [*RUN, "--dataset", "empty"],
        r"empty has no \.csv, \.tsv, \.parquet, \.feather, \.arrow or \.npz file",
    ),
    (
        [*RUN, "--dataset", "good.csv", "--target", "price"],
        "has no column 'price'; it has a, b, y",
    ),
    (
        [*RUN, "--dataset", "good.csv", "--test-share", "1"],
        "--test-share must be a number of at least 0 and below 1, not 1",
    ),
    (
        [*RUN, "--dataset", "real.csv", "--model", "svm"],
        r"real\.csv has no classes to predict",
    ),
    (
        [*RUN, "--dataset", "good.npz", "--partition", "files"],
        r"good\.npz has 0 for 5 nodes",
    ),
    (["run", "--out", "file/run"], "file/run cannot be written to"),
    (["run", "--out", "file"], "file cannot be written to"),
    (["run", "--out", "full"], "full is not empty; a run needs an empty folder"),
    (
        [*RUN, "--config", "none.toml"],
        r"none\.toml cannot be read: No such file or directory",
    ),
    (
        [*RUN, "--config", "unknown-key.toml"],
        r"unknown-key\.toml: unknown key 'taus'; did you mean tau\?",
    ),
    (
        [*RUN, "--config", "wrong-type.toml"],
        r"wrong-type\.toml: nodes must be a whole number of at least 1, not 'five'",
    ),
    ([*RUN, "--config", "broken.toml"], r"broken\.toml is not valid TOML"),
    ([*RUN, "--buget", "time=9s"], r"No such option: --buget; did you mean --budget\?"),
    (
        [*RUN, "--engine", "rays"],
        r"--engine must be in-process, ray or network, not 'rays'; did you mean ray\?",
    ),
    ([*RUN, "--ray-address", "auto"], "--ray-address needs --engine ray"),
    ([*RUN, "--model", "sofmax"], r"unknown model 'sofmax'; did you mean softmax\?"),
    (
        [*RUN, "--method", "centralized", "--step-size", "auto"],
        "--method centralized needs a --step-size that is a number",
    ),
    ([*RUN, "surprise"], "unexpected extra argument"),
    (["run", "--out"], "requires an argument"),
    (["start"], "No such command 'start'"),
    (["rum"], "No such command 'rum'. Did you mean 'run'"),
    (
        [
            "join",
            "127.0.0.1:7700",
            "--dataset",
            "digits",
            "--shard",
            "1/2",
            "--delay",
            "-1",
        ],
        "--delay must be at least 0",
    ),
    *(
        (["join", "127.0.0.1:7700", "--data", "good.csv", *options], message)
        for options, message in (
            (
                ["--privacy-limit", "0"],
                "--privacy-limit is an ε of more than 0 and at most 100, not 0",
            ),
            (
                ["--privacy-account", "a.json"],
                "--privacy-account needs a --privacy-limit, such as 4",
            ),
            (["--privacy-delta", "1e-6"], "--privacy-delta needs a --privacy-limit"),
            (["--privacy-unit", "sample"], "--privacy-unit needs a --privacy-limit"),
            (
                ["--privacy-limit", "4", "--privacy-account", "file"],
                "file is not an account of privacy",
            ),
            (
                ["--privacy-limit", "4", "--privacy-account", "full"],
                "full is not an account of privacy",
            ),
            (["--identity", "good.csv"], "good.csv is not a private key in PEM format"),
            (
                ["--known-nodes", "nothing.txt", "--identity", "new.key"],
                "cannot read nothing.txt",
            ),
        )
    ),
    (
        ["run", "--budget", "privacy=4", "--drift-correction"],
        "--drift-correction needs data that nodes of a private run",
    ),
    (
        ["compare", "--rivals", "--budget", "privacy=4"],
        "runs are compared by their loss, which private runs do not report",
    ),
    (["local", "--pace", "1,x"], "--pace must be a list of numbers, not '1,x'"),
    (["compare", "--cases", "1,5"], "case 5 does not exist"),
    (
        ["compare", "--taus", "1,x"],
        "--taus must be a list of whole numbers of at least 1, not '1,x'",
    ),
    (
        ["compare", "--taus", "0"],
        "--taus must be a list of whole numbers of at least 1, not '0'",
    ),
    (["compare", "--quick"], "--quick goes with --rivals"),
    (["compare", "--jobs", "2"], "--jobs goes with --rivals"),
    (["compare", "--out", "out"], "--out goes with --rivals"),
    (["compare", "--partition", "case:2"], "--partition goes with --rivals"),
    (
        ["compare", "--rivals", "--cases", "1", "--partition", "case:2"],
        "give --cases or --partition, not both",
    ),
    (
        ["compare", "--rivals", "--method", "centralized"],
        "--method centralized has no --rivals; use --method accelerated",
    ),
    (
        ["run", "--server-beta2", "0.9"],
        "--server-beta2 has no effect with --update accelerate",
    ),
    (
        ["run", "--update", "fedadm"],
        r"--update must be average, .*, not 'fedadm'; did you mean fedadam\?",
    ),
    (["compare", "--seeds", "0"], "--seeds must be a whole number of at least 1, not 0"),
    (["compare", "--budget", "time=0.1s"], r"one round costs about 0\.1446s"),
    (["show", "full"], "full is not the folder of a run"),
    (["show", "nowhere"], "nowhere is not the folder of a run"),
    (["explain", "full", "--round", "1"], "full is not the folder of a run"),
    (["explain", "full"], "full is not the folder of a run"),
    (["compare", "full", "nowhere"], "full is not the folder of a run"),
    (["predict", "full", "--data", "x.csv"], "--data; it is now called --dataset"),
    ([*RUN, "--epochs", "3"], "No such option: --epochs; use --rounds and --tau"),
    ([*RUN, "--lr", "3"], "No such option: --lr; use --step-size"),
    (["explain", "full", "--ruond", "3"], r"did you mean --round\?"),
    (["evaluate", "full", "--dataset", "digits"], "full is not the folder of a run"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG]
)
def test_one_line_and_exit_code_two(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    code, out, err = run_command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"fedbudget: .*{message}.*\n", err), err
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [("0", "has no round 0; it has rounds 1 to"), ("999", "has no round 999")],
)
def test_missing_round_cannot_be_explained(
    number: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(capsys, *RUN, "--budget", "time=1s", "--json")
    before = contents(folder)
    code, out, err = run_command(capsys, "explain", "out", "--round", number)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"fedbudget: .*{message}.*\n", err)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        [*RUN, "--json", "--budget", "time=0.1s"],
        [*RUN, "--json", "--dataset", "missing.csv"],
        ["run", "--out", "file/run", "--budget", "time=1s"],
    ],
)
def test_process_fails_without_traceback(arguments: list[str], folder: Path) -> None:
    before = contents(folder)
    done = subprocess.run(
        [FEDBUDGET, *arguments], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"fedbudget: .+\n", done.stderr)
    assert contents(folder) == before
