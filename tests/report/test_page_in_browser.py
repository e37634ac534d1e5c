"""A report in a real browser."""

import csv
import io

import pytest

from browser import open_page
from conftest import HOSTILE
from vicinal.studies.study import show_study

RESULTS = "#results table"


@pytest.fixture
def page(browser, study_report):
    """The report of a study in a wide, light window, which must not have had errors at the end."""
    with open_page(browser, study_report) as opened:
        yield opened
        assert opened.errors == []


def test_the_harness_notices_errors_requests_and_accessibility_faults(browser, tmp_path):
    file = tmp_path / "leak.html"
    image = '<img src="http://127.0.0.1:9/a.png">'
    file.write_text(f'<html lang="en"><title>t</title>{image}<script>console.error("one"); missing()</script></html>')
    with open_page(browser, file) as opened:
        assert "http://127.0.0.1:9/a.png" in opened.requests
        assert "one" in opened.errors
        assert any("missing is not defined" in error for error in opened.errors)
        assert ("image-alt", image) in opened.accessibility_faults()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_errors_no_requests_and_no_accessibility_fault(browser, study_report, hostile_report, scheme):
    for file in (study_report, hostile_report) if scheme == "light" else (study_report,):
        with open_page(browser, file, scheme=scheme) as opened:
            opened.text()  # opens what is closed
            assert opened.accessibility_faults() == []
            assert opened.errors == []
            assert opened.requests == [file.resolve().as_uri()]


def test_the_policy_of_the_page_runs_no_script_but_its_own(browser, study_report, tmp_path):
    page = study_report.read_text()
    assert page.count("</body>") == 1
    changed = tmp_path / "changed.html"
    changed.write_text(page.replace("</body>", "<script>document.title = 'run'</script></body>"))
    with open_page(browser, changed) as opened:
        assert opened.page.title() == "digits - vicinal report"
        assert any("Content Security Policy" in error for error in opened.errors)
        assert opened.page.locator("html.scripted").count() == 1


def test_a_click_sorts_by_number_and_a_second_one_turns_the_order(browser, hostile_report):
    with open_page(browser, hostile_report) as opened:
        table = "#cost table"
        before = [float(text) for text in opened.column(table, 2)]
        header = opened.page.locator(f"{table} th").nth(2)
        header.get_by_role("button").focus()
        opened.page.keyboard.press("Enter")
        assert header.get_attribute("aria-sort") == "ascending"
        assert [float(text) for text in opened.column(table, 2)] == sorted(before)
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        assert [float(text) for text in opened.column(table, 2)] == sorted(before, reverse=True)
        assert len(set(before)) > 3


def test_numbers_sort_by_value_and_cells_without_one_stay_below(browser, tmp_path, study_report):
    """10 is after 9, -2 before 1, and an empty cell last in both orders, in a table of the page."""
    from vicinal.report.html import Cell, html_table

    values = {"10": 10.0, "9": 9.0, "none": None, "-2": -2.0, "1,000": 1000.0}
    table = html_table(["number"], [[Cell(text, value)] for text, value in values.items()], caption="numbers")
    file = tmp_path / "numbers.html"
    file.write_text(study_report.read_text().replace("<main", f'<div id="numbers">{table}</div><main'))
    with open_page(browser, file) as opened:
        button = opened.page.locator("#numbers th button")
        button.click()
        assert opened.column("#numbers", 0) == ["-2", "9", "10", "1,000", "none"]
        button.click()
        assert opened.column("#numbers", 0) == ["1,000", "10", "9", "-2", "none"]


@pytest.mark.parametrize(
    "before",
    [
        None,
        pytest.param("Object.defineProperty(navigator, 'clipboard', {value: undefined})", marks=pytest.mark.slow),
    ],
)
def test_buttons_copy_the_table(browser, study_folder, study_report, before):
    """With the clipboard of the browser, and without."""
    result = show_study(study_folder)
    with open_page(browser, study_report, before=before) as opened:
        copied = {}
        opened.page.evaluate("document.body.appendChild(document.createElement('textarea')).id = 'target'")
        for form in ("Markdown", "CSV", "LaTeX"):
            opened.page.get_by_role("button", name=f"Copy as {form}").click()
            opened.page.wait_for_function("document.querySelector('[role=status]').textContent === 'Copied.'")
            opened.page.locator("#target").fill("")
            opened.page.locator("#target").press("Control+V")
            copied[form] = opened.page.locator("#target").input_value()
        assert opened.errors == []
    assert copied["Markdown"] == result.markdown()
    rows = list(csv.DictReader(io.StringIO(copied["CSV"])))
    assert [(row["arm"], float(row["mean"])) for row in rows] == [(row.arm, row.summary.mean) for row in result.rows]
    lines = copied["LaTeX"].splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrl}"
    assert [line.split(" & ")[0] for line in lines if line.endswith(r"\\")] == ["arm", "none", "gmm *"]


def test_the_page_is_never_wider_than_the_window(browser, study_report, hostile_report):
    for file in (study_report, hostile_report):
        with open_page(browser, file) as opened:
            opened.text()
            for width in (1280, 390, 320):
                opened.page.set_viewport_size({"width": width, "height": 900})
                assert opened.page.evaluate("innerWidth") == width
                assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
                for table in opened.page.locator(".scroll").all():
                    assert table.bounding_box()["width"] <= width


def test_text_of_plots_is_large_enough_on_a_phone(browser, study_report):
    with open_page(browser, study_report, width=390) as opened:
        heights = opened.page.evaluate(
            "Array.from(document.querySelectorAll('figure.plot svg text'), each => each.getBoundingClientRect().height)"
        )
        assert len(heights) > 30
        assert min(heights) > 10


def test_without_scripts_everything_is_there(browser, study_folder, study_report):
    result = show_study(study_folder)
    with open_page(browser, study_report, scripts=False) as opened:
        text = opened.text()
        assert not opened.page.locator(".needs-script:visible").count()
        assert opened.page.locator("figure.plot svg:visible").count() >= 6
        assert opened.page.locator("table:visible").count() == opened.page.locator("table").count() >= 5
    for row in result.rows:
        assert f"{row.summary.mean:.2f}" in text
    found = result.rows[1].difference
    for figure in (f"{found.mean:+.2f}", f"{found.low:+.2f} to {found.high:+.2f}", "135,242", "135,402"):
        assert figure in text
    for pair in result.rows[1].pairs:
        assert f"{pair.value:.2f}" in text
    assert "train_size: 96" in text
    assert "difference to none, in points" in text


def test_the_page_prints_on_several_pages(browser, study_report):
    with open_page(browser, study_report, scheme="dark") as opened:
        content = opened.page.pdf(format="A4")
        assert content.startswith(b"%PDF")
        assert content.count(b"/Type /Page\n") > 1
        opened.page.emulate_media(media="print", color_scheme="dark")
        assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not opened.page.locator("nav").is_visible()
        assert opened.page.locator("details pre").first.is_visible() is False  # forms to copy are not printed
        assert opened.page.locator("#settings pre").first.bounding_box()["height"] > 100  # closed on the screen


def test_names_stay_text(browser, hostile_report):
    """In the heading, tables, plots, alternative texts and configurations."""
    with open_page(browser, hostile_report) as opened:
        assert opened.page.locator("script").count() == 2
        assert "against" in opened.page.title()
        text = opened.text()
        labels = " ".join(opened.page.locator("[role=img]").evaluate_all("all => all.map(e => e.ariaLabel)"))
        drawn = " ".join(opened.page.locator("#answer svg text").all_text_contents())
        for name in HOSTILE:
            assert opened.page.locator("#results td", has_text=name).count() or name.lower() in text
            assert name.lower() in text
            assert name.lower() in labels
        assert "49" not in opened.page.locator("h1").inner_text()  # {{ 7 * 7 }} is not a template
        assert "script>" in drawn
        assert opened.errors == []
