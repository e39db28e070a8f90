"""The page of runs and the report, as people see them: in a real browser, of real runs."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser

from fedbudget.api import train
from fedbudget.cli.dashboard import require_dashboard
from fedbudget.dashboard.app import Dashboard
from fedbudget.errors import UserError
from fedbudget.runs.folder import RunWriter
from support.browser import OpenPage, chromium, open_page
from support.made_runs import SETTINGS, make_run, many_rounds, record, summary_of
from support.processes import FEDBUDGET, commands, records

TOKEN = "a-token-of-enough-letters"

pytestmark = pytest.mark.xdist_group("browser")  # which has one Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs, of adaptive τ and of two that are fixed, and one with many rounds that is
    not.
    """
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


def well_behaved(look: OpenPage, address: str) -> None:
    """Nothing was asked of anybody else, and nothing was complained of."""
    assert look.console_errors == []
    assert [
        url for url in look.requests if not url.startswith((address, "data:", "blob:"))
    ] == []


def points(look: OpenPage, chart: str) -> int:
    """Of the longest trace of a chart."""
    found = look.page.evaluate(
        "(name) => Math.max(...document.querySelector(`[data-chart=${name}]`).data.map((trace) => trace.x.length))",
        chart,
    )
    return int(found)


def in_focus(look: OpenPage) -> int:
    return int(look.page.locator(".words").first.get_attribute("data-round") or 0)


def test_a_live_run_appears_grows_and_ends_without_a_reload(
    browser: Browser, tmp_path: Path
) -> None:
    writer = RunWriter(tmp_path / "runs" / "live", SETTINGS.to_toml())
    for number in range(1, 4):
        writer.append(record(number))
    page = Dashboard(tmp_path / "runs", port=0)
    with page.in_background(), open_page(browser) as look:
        look.page.goto(page.address("live"))
        look.wait_until_drawn()
        look.page.evaluate("window.stillTheSamePage = true")
        assert look.text(".state") == "running"
        assert look.text("[data-gauge=time] .amount") == "0.3s of 20s"
        assert "at this pace until" in look.text("[data-gauge=time]")
        for number in range(4, 200):
            writer.append(record(number))
        look.until(
            "document.querySelector('[data-gauge=time] .amount').textContent === '19.9s of 20s'"
        )
        look.until("document.querySelector('[data-chart=loss]').data[0].x.length === 199")
        look.until(
            "document.querySelector('.words').dataset.round === '199'"
        )  # the focus is on the latest
        writer.append(record(200, tau=0, reason="final loss"))
        writer.finish(summary_of(make_run(tmp_path / "another")), b"")
        look.until("document.querySelector('.state').textContent === 'finished'")
        assert look.text("[data-gauge=time] .amount") == "20s of 20s"
        assert (
            look.page.locator("[data-gauge=time] [role=meter]").get_attribute(
                "aria-valuenow"
            )
            == "100"
        )
        assert look.page.evaluate("window.stillTheSamePage") is True
        well_behaved(look, page.address())


@pytest.mark.slow
def test_a_real_run_is_shown_while_it_is_made_and_to_its_end(
    browser: Browser, tmp_path: Path
) -> None:
    with commands(tmp_path) as start, open_page(browser) as look:
        options = (
            "--model",
            "softmax",
            "--budget",
            "time=100h",
            "--rounds",
            "100000",
            "--out",
            "runs/live",
            "--dashboard",
        )
        run = start.run("run", *options)
        where = run.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/)run/live")[1]
        run.wait_until(lambda: len(records(tmp_path / "runs" / "live")) > 5)
        look.page.goto(f"{where}run/live")
        look.wait_until_drawn()
        before = int(look.page.locator(".run").get_attribute("data-rounds") or 0)
        look.until(f"Number(document.querySelector('.run').dataset.rounds) > {before}")
        assert run.end(signal.SIGINT) == 0
        look.until("document.querySelector('.run').dataset.state === 'interrupted'")
        rounds = int(look.page.locator(".run").get_attribute("data-rounds") or 0)
        assert rounds == len(records(tmp_path / "runs" / "live"))
        well_behaved(look, where)


@pytest.mark.slow
def test_nodes_on_other_machines_are_shown_with_what_they_missed(
    browser: Browser, tmp_path: Path
) -> None:
    with commands(tmp_path) as start, open_page(browser) as look:
        options = (
            "--nodes",
            "2",
            "--model",
            "softmax",
            "--budget",
            "time=1h",
            "--out",
            "runs/live",
            "--dashboard",
        )
        aggregator = start.serve(*options)
        stays, leaves = start.nodes(aggregator.port, 2)
        where = aggregator.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/)run/live")[1]
        aggregator.wait_until(lambda: (tmp_path / "runs" / "live" / "nodes.json").exists())
        look.page.goto(f"{where}run/live")
        look.wait_until_drawn()
        cells = "[...document.querySelectorAll('[aria-label=Nodes] tr')].map((row) => row.innerText.split('\\t'))"
        look.until(f"{cells}.length === 3")
        assert [row[:2] for row in look.page.evaluate(cells)[1:]] == [
            ["n1", "40"],
            ["n2", "50"],
        ]
        assert leaves.end(signal.SIGKILL) == -signal.SIGKILL
        look.until(f"{cells}[2].at(-1) === 'away'")
        assert look.page.evaluate(cells)[1][-1] != "away"
        assert aggregator.end(signal.SIGINT) == 0
        assert stays.end() == 0
        look.until("document.querySelector('.run').dataset.state === 'interrupted'")
        well_behaved(look, where)


def test_the_curve_follows_the_pointer_and_the_keys(
    browser: Browser, address: str, runs: Path
) -> None:
    made = records(runs / "tau-adaptive")
    with open_page(browser) as look:
        look.page.goto(f"{address}run/tau-adaptive")
        look.wait_until_drawn()
        assert in_focus(look) == max(each.round for each in made if each.tau)
        look.page.locator("[data-chart=tau]").scroll_into_view_if_needed()
        box = look.page.locator("[data-chart=tau] .nsewdrag").bounding_box()
        assert box is not None
        seen: list[int] = []
        for share in (0.3, 0.6):
            look.page.mouse.move(
                box["x"] + share * box["width"], box["y"] + box["height"] / 2
            )
            known = ",".join(map(str, [0, made[-2].round, *seen]))
            look.until(
                f"![{known}].includes(Number(document.querySelector('.words').dataset.round))"
            )
            seen.append(in_focus(look))
            at = made[seen[-1] - 1]
            # The pointer is in the middle of the chart: there, about that share of the time
            # was spent.
            assert abs(at.spent["time"] / made[-1].spent["time"] - share) < 0.1
            assert f"Round {at.round}: τ = {at.tau}, {at.reason}" in look.text(".words")
        assert seen[0] < seen[1]
        look.page.mouse.move(0, 0)
        for key, step in (("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowLeft", -1)):
            before = in_focus(look)
            look.page.keyboard.press(key)
            look.until(
                f"document.querySelector('.words').dataset.round === '{before + step}'"
            )
        look.until(
            "document.querySelector('[data-chart=G]').data.some((trace) => trace.name === 'chosen τ' && "
            f"trace.x[0] === {made[in_focus(look) - 1].tau})"
        )
        well_behaved(look, address)


def test_an_unknown_reason_is_drawn_and_written_as_it_is(
    browser: Browser, tmp_path: Path
) -> None:
    """A controller of a user's own has reasons of its own, and no text of a run means
    anything to the page.
    """
    reasons = ["start", "warm-up", "<b>100 %{y}</b> & more", "warm-up"]
    make_run(
        tmp_path / "runs" / "own",
        [record(at, tau=at, reason=own) for at, own in enumerate(reasons, 1)],
    )
    page = Dashboard(tmp_path / "runs", port=0)
    with page.in_background(), open_page(browser) as look:
        look.page.goto(page.address("own"))
        look.wait_until_drawn()
        legend = look.page.locator("[data-chart=tau] .legendtext").all_text_contents()
        assert [text.strip() for text in legend] == [
            "start",
            "warm-up",
            "<b>100 %{y}</b> & more",
        ]
        assert look.text("[data-tile=tau] .figure") == "2.5"  # 1, 2, 3 and 4 local updates
        assert (
            "Round 4: τ = 4, warm-up. The controller gave this reason itself."
            in look.text(".words")
        )
        look.page.keyboard.press("ArrowLeft")
        look.until("document.querySelector('.words').dataset.round === '3'")
        assert "Round 3: τ = 3, <b>100 %{y}</b> & more." in look.text(".words")
        well_behaved(look, page.address())


def test_all_can_be_reached_with_the_keyboard_and_focus_is_seen(
    browser: Browser, address: str
) -> None:
    with open_page(browser) as look:
        look.page.goto(f"{address}run/tau-adaptive")
        look.wait_until_drawn()
        reached: list[list[str]] = []
        while not reached or reached[-1][0] != "SUMMARY":
            look.page.keyboard.press("Tab")
            reached.append(
                look.page.evaluate(
                    "(({tagName, textContent}, {outlineStyle}) => [tagName, textContent.slice(0, 20), outlineStyle])"
                    "(document.activeElement, getComputedStyle(document.activeElement))"
                )
            )
            assert len(reached) < 30
        names = [(tag, text) for tag, text, _ in reached]
        assert names[0] == ("A", "Skip to the content")
        assert {("BUTTON", "Latest"), ("SUMMARY", "Settings")} <= set(names)
        assert {"SELECT", "INPUT", "BUTTON"} <= {tag for tag, _ in names}
        assert {outline for _, _, outline in reached} == {"solid"}
        look.page.locator("input[type=range]").focus()
        before = in_focus(look)
        look.page.keyboard.press("ArrowLeft")
        look.until(f"document.querySelector('.words').dataset.round === '{before - 1}'")


def test_runs_are_listed_and_compared_in_one_chart(
    browser: Browser, address: str, runs: Path
) -> None:
    with open_page(browser) as look:
        look.page.goto(address)
        look.page.get_by_label("Compare tau-adaptive").check()
        assert look.page.locator("button.main").is_disabled()
        look.page.get_by_label("Compare tau-10").check()
        look.page.get_by_role("button", name="Compare 2 runs").click()
        look.until("document.querySelector('.compare')?.dataset.traces === '2'")
        last = records(runs / "tau-10")[-1]

        def end() -> list[float]:
            traces = "document.querySelector('[data-chart=compared]').data"
            found: list[float] = look.page.evaluate(
                f"(({{x, y}}) => [x.at(-1), y.at(-1)])({traces}.find(({{name}}) => name === 'tau-10'))"
            )
            return found

        assert end() == [last.spent["time"], last.best_loss]
        look.page.get_by_label("against").select_option("energy")
        assert end() == [last.spent["energy"], last.best_loss]
        assert "tau-adaptive" in look.text(".compare table")
        dashes = look.page.evaluate(
            "document.querySelector('[data-chart=compared]').data.map((trace) => trace.line.dash)"
        )
        assert len(set(dashes)) == 2  # told apart without colour too
        well_behaved(look, address)


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(
    browser: Browser, address: str, dark: bool
) -> None:
    with open_page(browser, width=360, dark=dark) as look:
        for path in ("", "run/tau-adaptive", "compare?run=tau-adaptive&run=tau-1"):
            look.page.goto(f"{address}{path}")
            look.until(
                "document.querySelector('.run[data-drawn], .compare[data-traces], table') !== null"
            )
            assert look.horizontal_overflow <= 0
        shade = look.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (shade < 128) is dark
        look.page.locator("#theme").click()
        shade = look.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (shade < 128) is not dark
        well_behaved(look, address)


def test_ten_thousand_rounds_are_drawn_thinned_and_exactly_on_zoom(
    browser: Browser, address: str, runs: Path
) -> None:
    with open_page(browser) as look:
        look.page.goto(f"{address}run/long")
        look.wait_until_drawn()
        took = look.page.evaluate("Math.round(performance.now())")
        print(f"10,000 rounds were open after {took} ms")
        assert 500 < points(look, "loss") <= 3000
        assert (
            max(look.page.evaluate("document.querySelector('[data-chart=loss]').data[0].y"))
            > 5
        )  # the spike
        box = look.page.locator("[data-chart=loss] .nsewdrag").bounding_box()
        assert box is not None
        look.page.mouse.move(box["x"] + 0.50 * box["width"], box["y"] + 50)
        look.page.mouse.down()
        look.page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 55, steps=4)
        look.page.mouse.up()
        exact = "(() => { const rounds = document.querySelector('[data-chart=loss]').data[0].customdata;"
        exact += " return rounds.length > 100 && rounds.every((round, at) => at === 0 || round === rounds[at - 1] + 1); })()"
        look.until(exact)
        made = records(runs / "long")
        rounds, losses = look.page.evaluate(
            "(({customdata, y}) => [customdata, y])(document.querySelector('[data-chart=loss]').data[0])"
        )
        assert losses == [made[number - 1].loss for number in rounds]
        look.page.get_by_role("button", name="Whole run").click()
        look.until(
            "document.querySelector('[data-chart=loss]').data[0].customdata[0] === 1"
        )
        well_behaved(look, address)


def test_a_token_is_needed_once(browser: Browser, runs: Path) -> None:
    page = Dashboard(runs, port=0, token=TOKEN)
    with page.in_background(), open_page(browser) as look:
        refused = look.page.goto(page.address())
        assert refused is not None
        assert refused.status == 401
        assert "needs a token" in look.text("main")
        look.page.goto(f"{page.address()}?token={TOKEN}")
        look.until("document.querySelector('table') !== null")
        assert look.page.url == page.address()
        look.page.goto(page.address("tau-1"))
        look.wait_until_drawn()
        assert "τ = 1 was fixed by the settings" in look.text(".words")


def test_a_run_that_is_not_there_has_a_clear_page(browser: Browser, address: str) -> None:
    with open_page(browser) as look:
        answer = look.page.goto(f"{address}run/nobody")
        assert answer is not None
        assert answer.status == 404
        assert "there is no run 'nobody'" in look.text("main")


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
        with open_page(browser, offline=True) as look:
            look.page.goto(out.as_uri())
            look.wait_until_drawn()
            assert look.page.locator(".run").count() == 3
            look.until("document.querySelector('[data-chart=compared]').data.length === 3")
            losses = [summary_of(runs / f"tau-{tau}")["loss"] for tau in (1, 10)]
            fixed = (
                f"the loss was {losses[0]:.4g} with τ = 1 and {losses[1]:.4g} with τ = 10"
            )
            assert fixed in look.text(".lead")
            assert "energy=200J" in look.text(".settings")
            before = in_focus(look)
            look.page.locator("input[type=range]").first.focus()
            look.page.keyboard.press("ArrowLeft")
            look.until(f"document.querySelector('.words').dataset.round === '{before - 1}'")
            assert look.console_errors == []
            assert look.requests == [out.as_uri()]

    def test_fits_a_phone(self, browser: Browser, runs: Path, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        subprocess.run(
            [FEDBUDGET, "report", runs / "tau-1", "--out", out],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with open_page(browser, width=360, dark=True) as look:
            look.page.goto(out.as_uri())
            look.wait_until_drawn()
            assert look.horizontal_overflow <= 0
            assert look.console_errors == []


class TestCommand:
    def test_serves_until_it_is_interrupted(self, runs: Path) -> None:
        with commands(runs.parent) as start:
            page = start.run("dashboard", "runs", "--port", "0", "--no-open")
            where = page.wait_for(r"http://127\.0\.0\.1:\d+/")[0]
            with urlopen(f"{where}api/runs") as answer:
                listed = json.load(answer)["runs"]
            assert {run["name"] for run in listed} >= {"tau-adaptive", "long"}
            assert page.end(signal.SIGINT) == 0
            assert "Traceback" not in page.errors

    def test_beyond_this_machine_needs_the_token_of_the_environment(
        self, runs: Path
    ) -> None:
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

    @pytest.mark.parametrize("missing", ["starlette", "uvicorn", "plotly"])
    def test_says_which_extra_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(UserError, match=r"pip install 'fedbudget\[dashboard\]'"):
            require_dashboard()

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
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
    def test_says_what_is_wrong(
        self, runs: Path, arguments: list[str], complaint: str
    ) -> None:
        with commands(runs.parent) as start:
            command = start.run(*arguments)
            assert command.end() == 2
            assert re.escape(complaint) in re.escape(command.errors)
            assert command.errors.count("\n") == 1
