"""A person's way through the dashboard: runs, a run, a finding, its moment."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from pages import post
from playwright.sync_api import Page, expect
from recorded_runs import failing, healthy

from ampwatch_server.serve import Running

pytestmark = pytest.mark.browser

SHOWN_RANGE = "document.getElementById('timeline-plot')._fullLayout.xaxis.range"


def open_run(page: Page, server: Running, run: str, query: str = "") -> None:
    page.goto(f"{server.url}/run/{run}{query}")
    page.wait_for_selector("#timeline-plot .main-svg")


def test_from_the_list_to_the_finding_to_its_moment(page: Page, server: Running) -> None:
    page.goto(server.url)
    row = page.get_by_role("row").filter(has_text="Broken run")
    expect(row).to_contain_text("Failing")
    row.get_by_role("link", name="Broken run").click()
    expect(page.locator("#verdict")).to_contain_text("Failing")
    page.wait_for_selector("#timeline-plot .main-svg")
    page.locator(".finding").first.get_by_role("link").first.click()
    page.wait_for_function(f"() => {SHOWN_RANGE}[0] <= 40 && {SHOWN_RANGE}[1] >= 40 && {SHOWN_RANGE}[1] < 70")
    expect(page).to_have_url(re.compile("finding="))
    expect(page.locator("#timeline-plot")).to_be_in_viewport()


def test_the_address_of_a_finding_shows_it_to_another_person(page: Page, server: Running) -> None:
    open_run(page, server, "failing", "?at=41&stat=norm&tensor=1&theme=dark")
    page.wait_for_function(f"() => {SHOWN_RANGE}[0] === 1 && {SHOWN_RANGE}[1] === 60")
    expect(page.locator("#stat")).to_have_value("norm")
    expect(page.locator("#histogram-title")).to_have_text("Histogram of <b>head</b>.weight")
    page.wait_for_selector("#histogram-plot .main-svg")


def test_the_verdict_is_said_once(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    sentence = page.locator(".verdict-sentence").inner_text()
    expect(page.locator("#findings")).not_to_contain_text(sentence)
    expect(page.locator(".finding .moment").first).to_have_text(re.compile("^since step 40"))
    page.goto(f"{server.url}/run/healthy")
    expect(page.locator(".verdict-sentence")).to_have_text(re.compile("^60 steps taken"))


def test_a_resumed_job_is_one_timeline(page: Page, server: Running) -> None:
    post(server, healthy("resumed", producer="e" * 32, name="Long run"))
    post(server, failing("resumed", "f" * 32, "Long run"))
    open_run(page, server, "resumed")
    page.wait_for_function(
        "() => document.getElementById('timeline-plot').layout.shapes.some((shape) => shape.x0 === 59.5)"
    )
    page.locator(".finding .moment").first.click()
    page.wait_for_function(f"() => {SHOWN_RANGE}[0] > 59 && {SHOWN_RANGE}[1] >= 119")


def test_a_healthy_run_is_calm(page: Page, server: Running) -> None:
    open_run(page, server, "healthy")
    expect(page.locator("#verdict")).to_contain_text("Healthy")
    expect(page.locator(".finding:not([data-severity=info])")).to_have_count(0)


def test_marks_of_skips_and_of_losses_that_are_no_number(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    names = page.evaluate(
        "document.getElementById('timeline-plot').data.map((trace) => [trace.name, trace.x.length])"
    )
    assert {("loss is NaN", 20), ("skipped step", 20), ("backoff", 20)} <= {tuple(pair) for pair in names}


def test_a_row_of_the_heatmap_opens_its_histogram(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    plot = page.locator("#heatmap-plot .nsewdrag")
    plot.scroll_into_view_if_needed()
    plot.hover(position={"x": 40, "y": 8})
    page.wait_for_selector("#heatmap-plot .hovertext")
    assert page.locator("#heatmap-plot .hovertext tspan.line").all_text_contents() == [
        "embed.weight",
        "Linear, 64 × 64, float32",
        "inf and NaN: 0 elements",
        "step 0 (attempt 0)",
    ]
    plot.click(position={"x": 42, "y": 8})
    expect(page.locator("#histogram-title")).to_have_text("Histogram of embed.weight")


def test_the_theme_is_switched_and_kept(page: Page, server: Running) -> None:
    open_run(page, server, "healthy", "?theme=light")
    page.get_by_role("button", name="Switch to the dark theme").click()
    page.wait_for_function(
        "() => document.getElementById('timeline-plot')._fullLayout.paper_bgcolor === '#161b22'"
    )
    page.goto(server.url)
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Switch to the light theme").click()
    expect(page).to_have_url(re.compile("theme=light"))


@pytest.mark.parametrize("path", ["/", "/run/failing"])
def test_nothing_is_wider_than_a_phone(page: Page, server: Running, path: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.url + path)
    page.wait_for_selector(".runs, #heatmap-plot .main-svg")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_keyboard_reaches_a_finding_and_opens_it(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    page.locator(".finding summary").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".finding").first).not_to_have_attribute("open", "")


def test_names_are_text(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    expect(page.locator("#tensor option").nth(2)).to_have_text("<b>head</b>.weight")
    page.wait_for_selector("#heatmap-plot .main-svg")
    assert "<b>head</b>.weight" in page.locator("#heatmap-plot .yaxislayer-above").text_content()


def test_events_are_saved_as_csv(page: Page, server: Running) -> None:
    open_run(page, server, "failing")
    page.select_option("#event-type", "skip")
    expect(page.locator("#events tbody tr")).to_have_count(20)
    with page.expect_download() as download:
        page.locator("#events-csv").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0] == "time_s,rank,producer,type,attempt,step,stream,repeat,data"
    assert len(lines) == 21


def test_the_documentation_of_the_api_stays_at_home(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".opblock")


def test_pages_work_under_the_path_of_a_proxy(page: Page, server: Running) -> None:
    prefix = "/user/ada/proxy/8765"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page.route(f"**{prefix}/**", lambda route: route.continue_(url=route.request.url.replace(prefix, "", 1)))
    page.goto(f"{server.url}{prefix}/")
    page.get_by_role("link", name="Broken run").click()
    page.wait_for_selector("#heatmap-plot .main-svg")
    page.get_by_role("link", name="ampwatch").click()
    page.get_by_role("link", name="Broken run").wait_for()
    assert [path for path in asked if not path.startswith(prefix)] == []
