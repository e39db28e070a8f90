"""Run folders with hostile contents, and the commands that read them.

Every file of a real run is attacked: its kind (a pipe, a folder, a link out, a file without
end), its bytes, and every value in it. Values come from the file itself, so that a new
field is attacked without a change here.

    python -m support.hostile_folders ROOT FIRST LAST

makes the folders FIRST to LAST - 1 under ROOT. Commands, Python functions and pages of the
dashboard read each. It prints one line of JSON for each failure: a traceback, a hang, an
exit code that is not documented, a control character in the output, code that was executed,
or a change outside of the folder.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import stat
import sys
import tomllib
import traceback
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tomli_w
from safetensors import safe_open

from fedbudget import UserError, forecast, load, train
from fedbudget.cli.main import main
from fedbudget.dashboard.app import Dashboard
from fedbudget.runs.checkpoint import _CHECKSUM_LENGTH, _KIND, _checksum, safetensors_parts

LIMIT = 60  # seconds of a command before it counts as hanging
CODES = {0, 1, 2}
REFUSALS = {404, 409, 422}  # statuses of the dashboard
DEEP = json.loads("[" * 200 + "]" * 200)
HOSTILE: tuple[Any, ...] = (
    *(None, [], {}, "", 0, -1, True, 1e308, -1e308, 10**30, 2**63, 0.5),
    *(float("nan"), float("inf"), [None], {"": None}, DEEP, "x" * 100_000),
    *("\x1b[2J\x07", "\u202etxt.exe", "[/bold]", "[link=file:///]", '=HYPERLINK("x")'),
    *("../../outside", "/dev/zero", "evil.py:Net", "evil.py", "nan", "\x00", "\ud800"),
)
"""Values that replace any other value."""

TEXTS = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"1",
    b"[" * 100_000,
    b"a = " + b"[" * 100_000,
    b"1" * 5000,
    b'{"a": ' + b"1" * 5000 + b"}\n",
    b"\x00" * 10_000,
    (2**62).to_bytes(8, "little") + b"{}",
)
"""Contents that replace a whole file."""

Change = Callable[[random.Random, Path], str]
Action = Callable[[], object]
CHOSEN = 5  # actions on each folder, besides its removal
REMOVE = "runs remove --yes"


def base_run(root: Path) -> Path:
    """Train the run whose folder is attacked, with the files that it needs beside it."""
    run = root / "base"
    train(
        dataset="digits",
        model="softmax",
        nodes=3,
        budget="time=1000s",
        costs="simulated",
        rounds=4,
        tau=2,
        personal=True,
        out=run,
    )
    outside = root / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    np.savez(root / "new.npz", x=np.zeros((2, 64)))
    (root / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('executed').write_text('')\n"
    )
    return run


def attack(run: Path, seed: int) -> str:
    """Change files of a run folder; return what was changed."""
    chance = random.Random(seed)
    files = sorted(file for file in run.rglob("*") if file.is_file())
    done = []
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        file = chance.choice(files)
        if not stat.S_ISREG(file.lstat().st_mode if os.path.lexists(file) else 0):
            continue  # it was replaced before
        change: Change = chance.choice([_value, _value, _value, _value, _bytes, _kind])
        with contextlib.suppress(Exception):  # it was changed before into something else
            done.append(f"{file.relative_to(run)}: {change(chance, file)}")
    return "; ".join(done)


def commands(run: Path, root: Path) -> list[list[str]]:
    """The commands that read a run folder."""
    name = str(run)
    return [
        ["show", name],
        ["show", name, "--json"],
        ["show", name, "--all"],
        ["runs", str(run.parent)],
        ["runs", str(run.parent), "--json"],
        ["explain", name, "--round", "3"],
        ["explain", name],
        ["compare", name, str(root / "base")],
        ["forecast", name],
        ["report", name, "--out", str(root / "report.html")],
        ["predict", name, "--data", str(root / "new.npz")],
        ["predict", name, "--data", str(root / "new.npz"), "--site", "0"],
        ["evaluate", name, "--dataset", "digits"],
        ["export", name, "--to", "numpy", "--out", str(root / "model.npz")],
        ["run", "--resume", name, "--rounds", "6"],
        [
            "run",
            "--config",
            str(run / "config.toml"),
            "--rounds",
            "1",
            "--out",
            f"{name}.n",
        ],
    ]


def actions(run: Path, root: Path) -> dict[str, Action]:
    """All that reads a run folder: commands, Python functions and pages, by name."""
    found: dict[str, Action] = {
        " ".join(command).replace(f"{run.parent}/", ""): partial(main, command)
        for command in commands(run, root)
    }
    x = np.zeros((2, 64), np.float32)
    found["load"] = refused(lambda: load(run).predict(x))
    found["load of a site"] = refused(lambda: load(run, site="0").predict(x))
    found["forecast"] = refused(lambda: forecast(run))
    found["train"] = refused(lambda: train(resume=run, rounds=6))
    found["dashboard"] = partial(show_in_browser, run)
    return found


def refused(read: Action) -> Action:
    """Call a Python function, which may refuse its folder, or fail to write to it."""

    def call() -> None:
        with contextlib.suppress(UserError, OSError):
            read()

    return call


def show_in_browser(run: Path) -> None:
    """Request the pages that show a run folder from a dashboard."""
    page = Dashboard(run.parent, port=0)
    name = f"api/runs/{run.name}"
    paths = ("api/runs", name, f"{name}/rows?from=1&to=3", f"{name}/rounds/3")
    with page.in_background():
        for path in paths:
            try:
                address = f"http://127.0.0.1:{page.port}/{path}"
                with urllib.request.urlopen(address, timeout=LIMIT) as answer:
                    json.loads(answer.read())
            except urllib.error.HTTPError as error:
                error.close()
                if error.code not in REFUSALS:
                    raise AssertionError(f"{path}: HTTP status {error.code}") from None


def _value(chance: random.Random, file: Path) -> str:
    """Replace a random value of a file of text or tensors."""
    if file.suffix == ".toml":
        content = tomllib.loads(file.read_text())
        place = _replace_one(chance, content)
        with contextlib.suppress(TypeError):  # TOML has no null
            file.write_text(tomli_w.dumps(content), errors="surrogatepass")
        return place
    if file.suffix == ".safetensors":
        return _replace_in_tensors(chance, file)
    lines = file.read_text().splitlines()
    if file.suffix == ".json":
        lines = [file.read_text()]
    at = chance.randrange(len(lines))
    content = json.loads(lines[at])
    place = _replace_one(chance, content)
    lines[at] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")
    return f"line {at}, {place}"


def _replace_one(chance: random.Random, content: Any) -> str:
    places = [*_places(content)]
    parent, name = chance.choice(places)
    value = chance.choice(HOSTILE)
    action = chance.choice(["set", "set", "set", "delete", "add"])
    if action == "delete":
        del parent[name]
    elif action == "add" and isinstance(parent, dict):
        parent["\x1b[2J" if chance.random() < 0.5 else "more"] = value
    else:
        parent[name] = value
    return f"{action} {name!r} {str(value)[:40]!r}"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a nested value with the key of each part."""
    if isinstance(content, dict | list):
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield content, key
            yield from _places(content[key])


def _replace_in_tensors(chance: random.Random, file: Path) -> str:
    """Replace a value in the metadata, or a tensor; the checksum is right afterwards."""
    if chance.random() < 0.2:
        arrays, _ = read_tensors(file)
        name = chance.choice([*arrays])
        replace_tensor(file, name, chance.choice(odd_tensors(arrays[name])))
        return f"tensor {name}"
    arrays, metadata = read_tensors(file)
    key = _KIND if _KIND in metadata else "fedbudget"
    start = _CHECKSUM_LENGTH if key == _KIND else 0
    content = json.loads(metadata[key][start:])
    place = _replace_one(chance, content)
    metadata[key] = metadata[key][:start] + json.dumps(content)
    _write_tensors(file, arrays, metadata)
    return place


def read_tensors(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata."""
    with safe_open(file, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return arrays, dict(opened.metadata())


def odd_tensors(values: Any) -> list[Any]:
    """Tensors to put in place of one: other values, and other shapes."""
    most = np.iinfo(values.dtype).max if values.dtype.kind in "iu" else True
    filled = np.full_like(values, np.nan if values.dtype.kind == "f" else most)
    other = np.zeros((3, 5), np.float32)
    return [filled, values[:0], other, other.astype(values.dtype), values.reshape(1, -1)]


def replace_tensor(file: Path, name: str, values: Any) -> None:
    """Replace a tensor of a file; the checksum is right afterwards."""
    arrays, metadata = read_tensors(file)
    arrays[name] = np.ascontiguousarray(values)
    _write_tensors(file, arrays, metadata)


def _write_tensors(file: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    if _KIND in metadata:
        text = metadata[_KIND][_CHECKSUM_LENGTH:]
        metadata[_KIND] = _checksum(arrays, text) + text
    file.write_bytes(b"".join(safetensors_parts(arrays, metadata)))


def _bytes(chance: random.Random, file: Path) -> str:
    """Replace, cut or flip bytes."""
    content = bytearray(file.read_bytes())
    match chance.choice(["whole", "cut", "flip", "twice"]):
        case "whole":
            content = bytearray(chance.choice(TEXTS))
        case "cut":
            content = content[: chance.randrange(len(content) + 1)]
        case "flip":
            for _ in range(chance.choice([1, 20])):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case "twice":
            content = content * 2
    file.write_bytes(content)
    return f"bytes {zlib.crc32(content):08x}"


def _kind(chance: random.Random, file: Path) -> str:
    """Replace a file by something else with its name."""
    kind = chance.choice(["pipe", "folder", "link", "loop", "zero", "sparse", "gone"])
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link":
            file.symlink_to(file.parents[len(file.parents) - 1] / "nowhere")
        case "loop":
            file.symlink_to(file)
        case "zero":
            file.symlink_to("/dev/zero")
        case "sparse":
            with file.open("wb") as opened:
                opened.truncate(2**44)
    return kind


class _Hang(BaseException):
    pass


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise _Hang


def failure_of(action: Action) -> str | None:
    """Return what is wrong with the behaviour of an action."""
    out = io.StringIO()
    code: Any = 0
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            action()
    except SystemExit as ended:
        code = ended.code
    except _Hang:
        return "hangs: " + traceback.format_exc()[-600:]
    except BaseException:
        return traceback.format_exc()[-900:]
    finally:
        signal.alarm(0)
    if code not in CODES:
        return f"exit code {code}"
    controls = {each for each in out.getvalue() if not each.isprintable()} - {*"\n\r"}
    return f"control characters {controls}" if controls else None


def tree(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def failures(root: Path, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Attack the folders with these numbers; yield what went wrong."""
    os.chdir(root)
    base = root / "base"
    own = tree(root / "outside") | tree(base)
    for seed in range(first, last):
        place = root / f"runs{seed}"
        run = place / "run"
        shutil.copytree(base, run)
        attacked = attack(run, seed)
        every = actions(run, root)
        chosen = random.Random(seed).sample([*every], CHOSEN)
        for name in [*chosen, REMOVE]:
            wrong = failure_of(every.get(name, partial(main, [*REMOVE.split(), str(run)])))
            if wrong is None and (root / "executed").exists():
                wrong = "code was executed"
            if wrong is None and own != tree(root / "outside") | tree(base):
                wrong = "another folder was changed"
            if wrong is not None:
                yield {"seed": seed, "attack": attacked, "action": name, "wrong": wrong}
                (root / "executed").unlink(missing_ok=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    base_root = Path(sys.argv[1])
    if not (base_root / "base").exists():
        base_run(base_root)
    for each in failures(base_root, int(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(each), flush=True)
