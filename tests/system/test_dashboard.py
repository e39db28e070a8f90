"""The dashboard and the report of real runs in a real browser."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import pytest
from playwright.sync_api import Browser

from fedbudget.api import train
from fedbudget.cli.dashboard import require_dashboard
from fedbudget.dashboard.app import Dashboard
from fedbudget.errors import UserError
from fedbudget.runs.folder import RunWriter
from support.browser import OpenPage, chromium, open_page
from support.processes import FEDBUDGET, cli_options, commands, records
from support.synthetic_runs import SETTINGS, make_run, many_rounds, record, summary_of

TOKEN = "a-token-of-enough-letters"

pytestmark = pytest.mark.xdist_group("browser")  # one shared Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs with adaptive and two fixed τ, and a synthetic run of many rounds."""
    folder = tmp_path_factory.mktemp("seen") / "runs"
    for tau in ("adaptive", 1, 10):
        train(
            case=2,
            tau=tau,
            method="frugal",
            budget=["time=6s", "energy=200J"],
            out=folder / f"tau-{tau}",
            seed=1,
        )
    many_rounds(folder / "long", 10_000)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    page = Dashboard(runs, port=0)
    with page.in_background():
        yield page.address()


def assert_clean(view: OpenPage, address: str) -> None:
    """There are no requests to other hosts and no console errors."""
    assert view.console_errors == []
    assert [
        url for url in view.requests if not url.startswith((address, "data:", "blob:"))
    ] == []


def points(view: OpenPage, chart: str) -> int:
    """Number of points of the longest trace of a chart."""
    count = view.page.evaluate(
        "(name) => Math.max(...document.querySelector(`[data-chart=${name}]`)"
        ".data.map((trace) => trace.x.length))",
        chart,
    )
    return int(count)


def focused_round(view: OpenPage) -> int:
    return int(view.page.locator(".words").first.get_attribute("data-round") or 0)


def test_live_run_updates_without_reload(browser: Browser, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "runs" / "live", SETTINGS.to_toml())
    for number in range(1, 4):
        writer.append(record(number))
    page = Dashboard(tmp_path / "runs", port=0)
    with page.in_background(), open_page(browser) as view:
        view.page.goto(page.address("live"))
        view.wait_until_drawn()
        view.page.evaluate("window.stillTheSamePage = true")
        assert view.text(".state") == "running"
        assert view.text("[data-gauge=time] .amount") == "0.3s of 20s"
        assert "at this pace until" in view.text("[data-gauge=time]")
        for number in range(4, 200):
            writer.append(record(number))
        view.until(
            "document.querySelector('[data-gauge=time] .amount').textContent"
            " === '19.9s of 20s'"
        )
        view.until("document.querySelector('[data-chart=loss]').data[0].x.length === 199")
        # The focus follows the latest round.
        view.until("document.querySelector('.words').dataset.round === '199'")
        writer.append(record(200, tau=0, reason="final loss"))
        writer.finish(summary_of(make_run(tmp_path / "another")), b"")
        view.until("document.querySelector('.state').textContent === 'finished'")
        assert view.text("[data-gauge=time] .amount") == "20s of 20s"
        assert (
            view.page.locator("[data-gauge=time] [role=meter]").get_attribute(
                "aria-valuenow"
            )
            == "100"
        )
        assert view.page.evaluate("window.stillTheSamePage") is True
        assert_clean(view, page.address())


@pytest.mark.slow
def test_real_run_is_shown_until_end(browser: Browser, tmp_path: Path) -> None:
    with commands(tmp_path) as start, open_page(browser) as view:
        options = cli_options(
            model="softmax",
            budget="time=100h",
            rounds=100000,
            out="runs/live",
            dashboard=True,
        )
        run = start.run("run", *options)
        where = run.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/)run/live")[1]
        run.wait_until(lambda: len(records(tmp_path / "runs" / "live")) > 5)
        view.page.goto(f"{where}run/live")
        view.wait_until_drawn()
        before = int(view.page.locator(".run").get_attribute("data-rounds") or 0)
        view.until(f"Number(document.querySelector('.run').dataset.rounds) > {before}")
        assert run.end(signal.SIGINT) == 130
        view.until("document.querySelector('.run').dataset.state === 'interrupted'")
        rounds = int(view.page.locator(".run").get_attribute("data-rounds") or 0)
        assert rounds == len(records(tmp_path / "runs" / "live"))
        assert_clean(view, where)


@pytest.mark.slow
def test_remote_nodes_and_their_absence(browser: Browser, tmp_path: Path) -> None:
    with commands(tmp_path) as start, open_page(browser) as view:
        options = cli_options(
            nodes=2, model="softmax", budget="time=1h", out="runs/live", dashboard=True
        )
        aggregator = start.serve(*options)
        stays, leaves = start.nodes(aggregator.port, 2)
        where = aggregator.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/)run/live")[1]
        aggregator.wait_until(lambda: (tmp_path / "runs" / "live" / "nodes.json").exists())
        view.page.goto(f"{where}run/live")
        view.wait_until_drawn()
        cells = "[...document.querySelectorAll('[aria-label=Nodes] tr')]"
        cells += ".map((row) => row.innerText.split('\\t'))"
        view.until(f"{cells}.length === 3")
        assert [row[:2] for row in view.page.evaluate(cells)[1:]] == [
            ["n1", "40"],
            ["n2", "50"],
        ]
        assert leaves.end(signal.SIGKILL) == -signal.SIGKILL
        view.until(f"{cells}[2].at(-1) === 'away'")
        assert view.page.evaluate(cells)[1][-1] != "away"
        assert aggregator.end(signal.SIGINT) == 130
        assert stays.end() == 0
        view.until("document.querySelector('.run').dataset.state === 'interrupted'")
        assert_clean(view, where)


def test_curve_follows_pointer_and_keys(browser: Browser, address: str, runs: Path) -> None:
    made = records(runs / "tau-adaptive")
    with open_page(browser) as view:
        view.page.goto(f"{address}run/tau-adaptive")
        view.wait_until_drawn()
        assert focused_round(view) == max(each.round for each in made if each.tau)
        view.page.locator("[data-chart=tau]").scroll_into_view_if_needed()
        box = view.page.locator("[data-chart=tau] .nsewdrag").bounding_box()
        assert box is not None
        seen: list[int] = []
        for share in (0.3, 0.6):
            view.page.mouse.move(
                box["x"] + share * box["width"], box["y"] + box["height"] / 2
            )
            known = ",".join(map(str, [0, made[-2].round, *seen]))
            view.until(
                f"![{known}].includes(Number(document.querySelector('.words').dataset.round))"
            )
            seen.append(focused_round(view))
            at = made[seen[-1] - 1]
            # At this position of the chart, about that share of the time was spent.
            assert abs(at.spent["time"] / made[-1].spent["time"] - share) < 0.1
            assert f"Round {at.round}: τ = {at.tau}, {at.reason}" in view.text(".words")
        assert seen[0] < seen[1]
        view.page.mouse.move(0, 0)
        for key, step in (("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowLeft", -1)):
            before = focused_round(view)
            view.page.keyboard.press(key)
            view.until(
                f"document.querySelector('.words').dataset.round === '{before + step}'"
            )
        view.until(
            "document.querySelector('[data-chart=G]').data"
            ".some((trace) => trace.name === 'chosen τ' && "
            f"trace.x[0] === {made[focused_round(view) - 1].tau})"
        )
        assert_clean(view, address)


def test_custom_reason_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    """A custom controller has its own reasons; the page never interprets them as HTML."""
    reasons = ["start", "warm-up", "<b>100 %{y}</b> & more", "warm-up"]
    make_run(
        tmp_path / "runs" / "own",
        [record(at, tau=at, reason=own) for at, own in enumerate(reasons, 1)],
    )
    page = Dashboard(tmp_path / "runs", port=0)
    with page.in_background(), open_page(browser) as view:
        view.page.goto(page.address("own"))
        view.wait_until_drawn()
        legend = view.page.locator("[data-chart=tau] .legendtext").all_text_contents()
        assert [text.strip() for text in legend] == [
            "start",
            "warm-up",
            "<b>100 %{y}</b> & more",
        ]
        assert view.text("[data-tile=tau] .figure") == "2.5"  # 1, 2, 3 and 4 local updates
        assert (
            "Round 4: τ = 4, warm-up. The controller gave this reason itself."
            in view.text(".words")
        )
        view.page.keyboard.press("ArrowLeft")
        view.until("document.querySelector('.words').dataset.round === '3'")
        assert "Round 3: τ = 3, <b>100 %{y}</b> & more." in view.text(".words")
        assert_clean(view, page.address())


def test_keyboard_reaches_all_with_visible_focus(browser: Browser, address: str) -> None:
    with open_page(browser) as view:
        view.page.goto(f"{address}run/tau-adaptive")
        view.wait_until_drawn()
        reached: list[list[str]] = []
        while not reached or reached[-1][0] != "SUMMARY":
            view.page.keyboard.press("Tab")
            reached.append(
                view.page.evaluate(
                    "(({tagName, textContent}, {outlineStyle}) =>"
                    " [tagName, textContent.slice(0, 20), outlineStyle])"
                    "(document.activeElement, getComputedStyle(document.activeElement))"
                )
            )
            assert len(reached) < 30
        names = [(tag, text) for tag, text, _ in reached]
        assert names[0] == ("A", "Skip to the content")
        assert {("BUTTON", "Latest"), ("SUMMARY", "Settings")} <= set(names)
        assert {"SELECT", "INPUT", "BUTTON"} <= {tag for tag, _ in names}
        assert {outline for _, _, outline in reached} == {"solid"}
        view.page.locator("input[type=range]").focus()
        before = focused_round(view)
        view.page.keyboard.press("ArrowLeft")
        view.until(f"document.querySelector('.words').dataset.round === '{before - 1}'")


def test_runs_are_listed_and_compared(browser: Browser, address: str, runs: Path) -> None:
    with open_page(browser) as view:
        view.page.goto(address)
        view.page.get_by_label("Compare tau-adaptive").check()
        assert view.page.locator("button.main").is_disabled()
        view.page.get_by_label("Compare tau-10").check()
        view.page.get_by_role("button", name="Compare 2 runs").click()
        view.until("document.querySelector('.compare')?.dataset.traces === '2'")
        last = records(runs / "tau-10")[-1]

        def end() -> list[float]:
            traces = "document.querySelector('[data-chart=compared]').data"
            point: list[float] = view.page.evaluate(
                f"(({{x, y}}) => [x.at(-1), y.at(-1)])"
                f"({traces}.find(({{name}}) => name === 'tau-10'))"
            )
            return point

        assert end() == [last.spent["time"], last.best_loss]
        view.page.get_by_label("against").select_option("energy")
        assert end() == [last.spent["energy"], last.best_loss]
        assert "tau-adaptive" in view.text(".compare table")
        dashes = view.page.evaluate(
            "document.querySelector('[data-chart=compared]').data"
            ".map((trace) => trace.line.dash)"
        )
        assert len(set(dashes)) == 2  # distinguishable without colour
        assert_clean(view, address)


@pytest.mark.parametrize("dark", [False, True])
def test_fits_a_phone_in_both_themes(browser: Browser, address: str, dark: bool) -> None:
    with open_page(browser, width=360, dark=dark) as view:
        for path in ("", "run/tau-adaptive", "compare?run=tau-adaptive&run=tau-1"):
            view.page.goto(f"{address}{path}")
            view.until(
                "document.querySelector("
                "'.run[data-drawn], .compare[data-traces], table') !== null"
            )
            assert view.horizontal_overflow <= 0
        shade = view.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (shade < 128) is dark
        view.page.locator("#theme").click()
        shade = view.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (shade < 128) is not dark
        assert_clean(view, address)


def test_ten_thousand_rounds_are_thinned(
    browser: Browser, address: str, runs: Path
) -> None:
    with open_page(browser) as view:
        view.page.goto(f"{address}run/long")
        view.wait_until_drawn()
        took = view.page.evaluate("Math.round(performance.now())")
        print(f"10,000 rounds were open after {took} ms")
        assert 500 < points(view, "loss") <= 3000
        assert (
            max(view.page.evaluate("document.querySelector('[data-chart=loss]').data[0].y"))
            > 5
        )  # the spike
        box = view.page.locator("[data-chart=loss] .nsewdrag").bounding_box()
        assert box is not None
        view.page.mouse.move(box["x"] + 0.50 * box["width"], box["y"] + 50)
        view.page.mouse.down()
        view.page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 55, steps=4)
        view.page.mouse.up()
        # A zoomed chart has every round.
        rounds_shown = "document.querySelector('[data-chart=loss]').data[0].rounds"
        every = "rounds.every((round, at) => at === 0 || round === rounds[at - 1] + 1)"
        view.until(f"((rounds) => rounds.length > 100 && {every})({rounds_shown})")
        made = records(runs / "long")
        rounds, losses = view.page.evaluate(
            "(({rounds, y}) => [rounds, y])"
            "(document.querySelector('[data-chart=loss]').data[0])"
        )
        assert losses == [made[number - 1].loss for number in rounds]
        view.page.get_by_role("button", name="Whole run").click()
        view.until("document.querySelector('[data-chart=loss]').data[0].rounds[0] === 1")
        assert_clean(view, address)


def test_token_is_needed_once(browser: Browser, runs: Path) -> None:
    page = Dashboard(runs, port=0, token=TOKEN)
    with page.in_background(), open_page(browser) as view:
        refused = view.page.goto(page.address())
        assert refused is not None
        assert refused.status == 401
        assert "needs a token" in view.text("main")
        view.page.goto(f"{page.address()}?token={TOKEN}")
        view.until("document.querySelector('table') !== null")
        assert view.page.url == page.address()
        view.page.goto(page.address("tau-1"))
        view.wait_until_drawn()
        assert "τ = 1 was fixed by the settings" in view.text(".words")


def test_missing_run_has_an_error_page(browser: Browser, address: str) -> None:
    with open_page(browser) as view:
        answer = view.page.goto(f"{address}run/missing")
        assert answer is not None
        assert answer.status == 404
        assert "there is no run 'missing'" in view.text("main")


class TestReport:
    def test_opens_from_disk_without_a_network(
        self, browser: Browser, runs: Path, tmp_path: Path
    ) -> None:
        names = [str(runs / f"tau-{tau}") for tau in ("adaptive", "1", "10")]
        out = tmp_path / "report.html"
        subprocess.run(
            [FEDBUDGET, "report", *names, "--out", out],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with open_page(browser, offline=True) as view:
            view.page.goto(out.as_uri())
            view.wait_until_drawn()
            assert view.page.locator(".run").count() == 3
            view.until("document.querySelector('[data-chart=compared]').data.length === 3")
            losses = [summary_of(runs / f"tau-{tau}")["loss"] for tau in (1, 10)]
            fixed = (
                f"the loss was {losses[0]:.4g} with τ = 1 and {losses[1]:.4g} with τ = 10"
            )
            assert fixed in view.text(".lead")
            assert "energy=200J" in view.text(".settings")
            before = focused_round(view)
            view.page.locator("input[type=range]").first.focus()
            view.page.keyboard.press("ArrowLeft")
            view.until(f"document.querySelector('.words').dataset.round === '{before - 1}'")
            assert view.console_errors == []
            assert view.requests == [out.as_uri()]

    def test_fits_a_phone(self, browser: Browser, runs: Path, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        subprocess.run(
            [FEDBUDGET, "report", runs / "tau-1", "--out", out],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with open_page(browser, width=360, dark=True) as view:
            view.page.goto(out.as_uri())
            view.wait_until_drawn()
            assert view.horizontal_overflow <= 0
            assert view.console_errors == []


class TestCommand:
    def test_serves_until_it_is_interrupted(self, runs: Path) -> None:
        with commands(runs.parent) as start:
            page = start.run("dashboard", "runs", "--port", "0", "--no-open")
            where = page.wait_for(r"(http://127\.0\.0\.1:\d+/)(\?token=\S+)")
            with build_opener(HTTPCookieProcessor()).open(
                f"{where[1]}api/runs{where[2]}"
            ) as answer:
                listed = json.load(answer)["runs"]
            assert {run["name"] for run in listed} >= {"tau-adaptive", "long"}
            assert page.end(signal.SIGINT) == 0
            assert "Traceback" not in page.errors

    def test_other_machines_need_a_token(self, runs: Path) -> None:
        with commands(runs.parent) as start:
            page = start.run(
                "dashboard",
                "runs",
                "--port",
                "0",
                "--host",
                "0.0.0.0",
                FEDBUDGET_TOKEN=TOKEN,
            )
            port = page.wait_for(
                r"http://localhost:(\d+)/  \(/\?token=TOKEN the first time"
            )[1]
            with pytest.raises(HTTPError, match="401"):
                urlopen(f"http://127.0.0.1:{port}/")
            assert TOKEN not in page.errors
            assert page.end(signal.SIGINT) == 0

    @pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
    def test_missing_extra_is_named(
        self, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(UserError, match=r"pip install 'fedbudget\[dashboard\]'"):
            require_dashboard()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["dashboard", "nowhere"], "there is no folder nowhere"),
            (
                ["dashboard", "runs", "--host", "0.0.0.0"],
                "--host 0.0.0.0 lets other machines see the runs, so it needs a token",
            ),
            (["report", "nowhere"], "nowhere is not the folder of a run"),
            (
                ["report", "runs/tau-1", "--out", "no/such/folder.html"],
                "cannot be written: No such file or directory",
            ),
        ],
    )
    def test_wrong_arguments_fail_in_one_line(
        self, runs: Path, arguments: list[str], message: str
    ) -> None:
        with commands(runs.parent) as start:
            command = start.run(*arguments)
            assert command.end() == 2
            assert message in command.errors
            assert command.errors.count("\n") == 1
