"""Comparing runs, marking findings, the settings, the report: as a person does it."""

from __future__ import annotations

import json

import msgspec
import pytest
from pages import Watch, post
from playwright.sync_api import Browser, BrowserContext, Page, expect
from recorded_runs import failing

from ampwatch.records import Batch
from ampwatch_server.serve import Running

pytestmark = pytest.mark.browser


def test_runs_are_ticked_and_compared(page: Page, server: Running) -> None:
    page.goto(server.url)
    page.get_by_label("Select Calm run to compare").check()
    expect(page.locator("#picked")).to_contain_text("Select another run")
    page.get_by_label("Select Broken run to compare").first.check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector("#plot .main-svg")
    expect(page.locator("#outcome")).to_contain_text("Failing")
    expect(page.locator("#differences")).to_contain_text("Nothing that was recorded of them differs")
    page.get_by_label("Leave Broken run out").click()
    expect(page.get_by_role("heading", name="Compare 1 run", exact=True)).to_be_visible()


def test_a_comparison_is_an_address(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/compare?runs=failing,healthy&from=10&to=50&theme=dark")
    page.wait_for_function("() => document.getElementById('plot')._fullLayout?.xaxis.range[0] === 10")
    colors = page.evaluate(
        "document.getElementById('plot').data.filter((t) => t.showlegend).map((t) => t.name)"
    )
    assert colors == ["Broken run", "Calm run"]
    page.get_by_role("button", name="Show the whole").click()
    page.wait_for_function("() => document.getElementById('plot')._fullLayout.xaxis.range[0] < 10")


def test_a_comparison_of_nothing_says_where_to_begin(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/compare")
    expect(page.get_by_role("alert")).to_contain_text("No run is chosen")


def test_a_comparison_with_a_run_that_is_not_there_names_it_and_goes_on_without(
    signed_in: BrowserContext, server: Running
) -> None:
    page = signed_in.new_page()  # unwatched: a browser notes the 404
    page.goto(f"{server.url}/compare?runs=failing,gone,healthy")
    expect(page.locator("#problem")).to_contain_text("Not on this server: gone.")
    page.get_by_role("link", name="Compare the others").click()
    expect(page.get_by_role("heading", name="Compare 2 runs", exact=True)).to_be_visible()
    page.close()


def test_a_finding_is_acknowledged_by_keyboard_and_reopened(page: Page, server: Running) -> None:
    post(server, failing("marked", "9" * 32, "Marked run"))
    page.goto(f"{server.url}/run/marked")
    page.locator(".finding").first.get_by_role("button", name="Acknowledge").focus()
    page.keyboard.press("Enter")
    card = page.locator(".finding[data-mark=acknowledged]").first
    expect(card.locator("summary")).to_be_focused()
    page.reload()
    card.locator("summary").click()
    expect(card).to_contain_text("acknowledged by session browser")
    card.get_by_role("button", name="Undo").click()
    expect(page.locator(".finding[data-mark]")).to_have_count(0)


def test_a_token_is_made_and_revoked(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/settings")
    expect(page.locator("#alerts")).to_contain_text("No destination")
    page.get_by_label("Name").fill("<b>cluster</b>")
    page.get_by_label("Project").fill("<b>vision</b>")
    page.get_by_role("button", name="Create token").click()
    expect(page.locator("#made")).to_contain_text("shown this once")
    row = page.locator("#tokens tr").filter(has_text="<b>cluster</b>")
    expect(row).to_contain_text("<b>vision</b>")
    row.get_by_role("button").click()
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    expect(page.locator("#audit")).to_contain_text("token <b>cluster</b>")


@pytest.mark.parametrize("path", ["/compare?runs=failing,healthy", "/settings"])
def test_nothing_is_wider_than_a_phone(page: Page, server: Running, path: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.url + path)
    page.wait_for_selector("#plot .main-svg, #audit td")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_rank_is_chosen_for_every_plot(page: Page, server: Running) -> None:
    for rank, producer in enumerate("78"):
        post(server, ranked(producer * 32, rank))
    page.goto(f"{server.url}/run/ranks")
    page.wait_for_selector("#timeline-plot .main-svg")
    assert lines(page) == 2
    page.select_option("#rank", "1")
    page.wait_for_function(
        "() => document.getElementById('timeline-plot').data.filter((t) => t.yaxis === 'y3').length === 1"
    )
    assert "rank=1" in page.url


def lines(page: Page) -> int:
    return page.evaluate(
        "document.getElementById('timeline-plot').data.filter((t) => t.yaxis === 'y3').length"
    )


def ranked(producer: str, rank: int) -> list[Batch]:
    return [msgspec.structs.replace(batch, rank=rank) for batch in failing("ranks", producer, "Two ranks")]


def test_the_report_opens_without_a_server(browser: Browser, page: Page, server: Running, tmp_path) -> None:
    page.goto(f"{server.url}/run/failing")
    page.wait_for_selector("#timeline-plot .main-svg")
    with page.expect_download() as download:
        page.get_by_role("link", name="Report (HTML)").click()
    download.value.save_as(tmp_path / "report.html")
    alone = browser.new_page()
    watch = Watch(alone, "")
    alone.goto(f"file://{tmp_path / 'report.html'}")
    alone.wait_for_selector("[data-figure=Timeline] .main-svg")
    expect(alone.locator(".verdict")).to_contain_text("Failing")
    assert [fault for fault in watch.faults if "asked another host: file:" not in fault] == []
    alone.close()


def test_an_export_is_downloaded(page: Page, server: Running, tmp_path) -> None:
    page.goto(f"{server.url}/run/failing")
    page.wait_for_selector("#timeline-plot .main-svg")
    with page.expect_download() as download:
        page.get_by_role("link", name="Events (NDJSON)").click()
    lines = download.value.path().read_text().splitlines()
    assert json.loads(lines[0])["type"] == "run"
    assert len(lines) == 46
