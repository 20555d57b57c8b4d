"""Many ranks on a run's page, and many runs on the list."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import recorded_runs
from pages import PATIENCE_MS, Watch, post
from playwright.sync_api import Browser, Page, expect

from ampwatch.records import Event, pack_events
from ampwatch_server.serve import Running, running

pytestmark = pytest.mark.browser

SWEEP = ("gpt lr=0.1", "gpt lr=0.01", "gpt lr=0.01 seed2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A sweep of three, one run by itself, and one of 40 ranks of which two stand out."""
    database = tmp_path_factory.mktemp("server") / "ampwatch.db"
    with running(database=f"sqlite:///{database}") as server:
        for i, name in enumerate(SWEEP):
            post(server, recorded_runs.healthy(f"sweep-{i}", f"{i + 1:032x}", name))
        post(server, recorded_runs.failing("alone", "c" * 32, "alone"))
        for rank in range(40):
            made = recorded_runs.failing if rank == 7 else recorded_runs.healthy
            sent = made("many", f"{0xD00 + rank:032x}", "Forty ranks")
            end = (
                []
                if rank == 9
                else [
                    pack_events(
                        [Event("finish", recorded_runs.START + 60)],
                        producer=sent[0].producer,
                        seq=3,
                        run="many",
                        rank=rank,
                    )
                ]
            )
            post(
                server,
                [recorded_runs.of_rank(batch, rank) for batch in (sent[:1] if rank == 9 else sent)] + end,
            )
        yield server


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watch = Watch(page, server.url)
    page.goto(server.link)
    yield page
    context.close()
    assert watch.faults == []


def ranks(page: Page) -> list[str]:
    return page.locator("#ranks-table tbody th").all_inner_texts()


def test_of_many_ranks_those_that_stand_out_are_shown(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/run/many")
    expect(page.locator("#ranks-told")).to_have_text("2 of 40 ranks stand out")
    assert ranks(page) == ["7", "9"]
    cells = page.locator("#ranks-table tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].slice(3, 6).map(cell => cell.innerText))"
    )
    assert cells == [["60", "0", "20 (33 %)"], ["0", "60", "0 (–)"]]
    page.get_by_role("button", name="Show all 40").click()
    assert len(ranks(page)) == 40
    page.get_by_role("button", name="Show rank 7 in the plots").click()
    expect(page.locator("#rank")).to_have_value("7")


def test_a_run_of_one_rank_has_no_list_of_ranks(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/run/alone")
    page.wait_for_selector("#timeline-plot .main-svg")
    expect(page.locator("#ranks")).to_be_hidden()


def test_the_runs_of_a_sweep_are_grouped_and_folded(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/?order=name")
    page.wait_for_selector("#runs table")
    page.get_by_label("Group").select_option("name")
    expect(page.locator("tr.group")).to_have_count(1)
    expect(page.locator("tr.group")).to_contain_text("3 runs · 3 live")
    assert page.url.endswith("/?order=name&group=name")
    fold = page.get_by_role("button", name="gpt", exact=True)
    fold.press("Enter")
    expect(page.locator("tr[data-run]")).to_have_count(2)
    expect(page.get_by_role("button", name="gpt", exact=True)).to_be_focused()
    page.get_by_label("Group").select_option("project")
    expect(page.locator("tr.group")).to_contain_text("tests")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["?group=name", "run/many"])
def test_what_stands_out_is_readable_on_a_phone_in_both_themes(
    page: Page, server: Running, theme: str, path: str
) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"{server.url}/{path}{'&' if '?' in path else '?'}theme={theme}")
    page.wait_for_selector(".fold, .ranks .odd")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5


LOWEST_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => { const color = rgb(getComputedStyle(element).backgroundColor); return color[3] || !element.parentElement ? color : behind(element.parentElement); };
  const contrast = (element) => { const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
  return Math.min(...[...document.querySelectorAll(".fold, .group .small, .ranks .odd, .ranks th, .ranks button, #ranks-told")].map(contrast));
}"""
