"""The page that replays another setting over a run."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from ampwatch_server.serve import Running

pytestmark = pytest.mark.browser


def open_what_if(page: Page, server: Running, run: str, query: str = "") -> None:
    page.goto(f"{server.url}/what-if/{run}{query}")
    page.wait_for_selector("#replay-plot .main-svg")


def cells(page: Page, row: int) -> list[str]:
    return page.locator(f"#effects tbody tr:nth-child({row}) td").all_inner_texts()


def test_from_a_run_to_another_setting_and_back(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/run/failing")
    page.get_by_role("link", name="What if").click()
    page.wait_for_selector("#replay-plot .main-svg")
    expect(page.locator("#recommended")).to_contain_text("no loss scale would have taken them")
    assert cells(page, 1)[0] == cells(page, 2)[0] == "20 (33 %)"
    page.get_by_role("link", name="This run").click()
    expect(page).to_have_url(re.compile("/run/failing$"))


def test_a_slider_replays_and_lies_in_the_address(page: Page, server: Running) -> None:
    open_what_if(page, server, "healthy")
    posted: list[str] = []
    page.on("request", lambda request: posted.append(request.url) if request.method == "POST" else None)
    page.get_by_label("growth interval").focus()
    page.keyboard.press("Home")
    expect(page.locator("#code")).to_contain_text("GradScaler(growth_interval=5)")
    assert posted == [f"{server.url}/v1/runs/healthy/replay?theme=light"]
    expect(page).to_have_url(re.compile(r"set\.growth_interval=5"))
    page.reload()
    expect(page.locator("#code")).to_contain_text("GradScaler(growth_interval=5)")


def test_another_frameworks_scaler(page: Page, server: Running) -> None:
    open_what_if(page, server, "failing")
    page.get_by_label("Scaler").select_option("deepspeed")
    expect(page.locator("#effects")).to_contain_text(
        "DeepSpeed raises: the loss scale is at its minimum already"
    )
    page.get_by_role("button", name="Reset to the recorded setting").click()
    expect(page.locator("#code")).to_contain_text("torch.amp.GradScaler()")


def test_the_links_of_a_narrow_page_stay_on_one_line(page: Page, server: Running) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    open_what_if(page, server, "failing")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    lines = page.locator(".bar nav a").evaluate_all("all => all.map(a => a.getClientRects().length)")
    assert lines == [1, 1, 1, 1]


def test_an_unknown_scaler_in_the_address_is_torchs(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/what-if/healthy?policy=nonsense")
    expect(page.get_by_label("Scaler")).to_have_value("torch")
