"""What the pages show where there is nothing, where something is wrong, and while records arrive."""

from __future__ import annotations

import pytest
from pages import post
from playwright.sync_api import BrowserContext, Page, expect
from recorded_runs import failing, healthy

from ampwatch_server.serve import Running, running

pytestmark = pytest.mark.browser


def test_no_run_matches(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/?q=nothing-has-this-name")
    expect(page.locator("#runs")).to_contain_text("No run matches")
    page.get_by_role("button", name="Clear the filters").click()
    expect(page.get_by_role("row").filter(has_text="Calm run")).to_be_visible()


def test_a_new_run_appears_by_itself(page: Page, server: Running) -> None:
    page.goto(server.url)
    page.get_by_role("row").filter(has_text="Calm run").wait_for()
    post(server, healthy("arrived", "c" * 32, "Arrived run"))
    expect(page.locator("tr[data-run=arrived]")).to_be_visible()


def test_an_open_page_follows_its_run_into_failure(page: Page, server: Running) -> None:
    described, attempts, tensors = failing("followed", "d" * 32, "Followed run")
    post(server, [described])
    page.goto(f"{server.url}/run/followed")
    expect(page.locator("#verdict")).to_contain_text("No data")
    post(server, [attempts, tensors])
    expect(page.locator("#verdict")).to_contain_text("Failing")
    expect(page.locator("#facts")).to_contain_text("20 of 60")


def test_an_unknown_run_is_said_to_be_unknown(signed_in: BrowserContext, server: Running) -> None:
    page = signed_in.new_page()
    page.goto(f"{server.url}/run/nowhere")
    expect(page.get_by_role("alert")).to_contain_text("There is no such run here")
    expect(page.get_by_role("link", name="All runs")).to_be_visible()
    expect(page.locator("#page")).to_be_hidden()
    page.close()


def test_a_lost_server_is_told_and_what_was_shown_stays(signed_in: BrowserContext, tmp_path) -> None:
    page = signed_in.new_page()
    with running(database=f"sqlite:///{tmp_path / 'short.db'}") as server:
        post(server, healthy())
        page.goto(server.link)
        page.goto(f"{server.url}/run/healthy")
        page.wait_for_selector("#heatmap-plot .main-svg")
    expect(page.locator("#connection")).to_have_text("Connection lost, trying again…")
    expect(page.locator("#verdict")).to_contain_text("Healthy")
    page.close()


def test_an_open_page_goes_on_with_a_server_that_was_started_again(
    signed_in: BrowserContext, tmp_path
) -> None:
    page = signed_in.new_page()
    database = f"sqlite:///{tmp_path / 'again.db'}"
    described, attempts, tensors = failing("resumed", "e" * 32, "Resumed run")
    with running(database=database) as server:
        post(server, [described])
        page.goto(server.link)
        page.goto(f"{server.url}/run/resumed")
        expect(page.locator("#verdict")).to_contain_text("No data")
    expect(page.locator("#connection")).to_have_text("Connection lost, trying again…")
    with running(database=database, port=int(server.url.rpartition(":")[2])) as server:
        post(server, [attempts, tensors])
        expect(page.locator("#verdict")).to_contain_text("Failing")
        expect(page.locator("#connection")).not_to_contain_text("lost")
        page.close()


def test_a_server_without_runs_says_how_to_begin(signed_in: BrowserContext, tmp_path) -> None:
    page = signed_in.new_page()
    with running(database=f"sqlite:///{tmp_path / 'empty.db'}") as server:
        page.goto(server.link)
        expect(page.locator("#runs")).to_contain_text("ampwatch.GradScaler")
    page.close()
