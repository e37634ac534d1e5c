"""Sliders and the explorer of a report, in a real browser."""

import re

import pytest
import torch

import vicinal
from browser import open_page
from vicinal.analysis.image_selection import ImageSelection
from vicinal.analysis.opened_model import open_models

PIXELS = "canvas => canvas.toDataURL()"


@pytest.fixture
def page(browser, study_report):
    """The report of a trained study, which must not have had errors or requests at the end."""
    with open_page(browser, study_report) as opened:
        yield opened.page
        assert opened.errors == []
        assert len(opened.requests) == 1


def pictures(page):
    """The picture of each arm in the explorer."""
    return page.locator("#explorer .explorer-view canvas").evaluate_all(f"all => all.map({PIXELS})")


def test_a_slider_shows_one_picture_after_the_other_by_mouse_and_keyboard(page):
    block = page.locator("#masks .frames").first
    slider, frames = block.locator("input.frame-slider"), block.locator(".frame")
    count = frames.count()
    assert count > 1
    assert slider.get_attribute("max") == str(count - 1)
    shown = []
    slider.focus()
    page.keyboard.press("Home")
    for index in range(count):
        visible = [number for number in range(count) if frames.nth(number).is_visible()]
        assert visible == [index]
        label = frames.nth(index).get_attribute("data-label")
        assert block.locator("output").inner_text() == label == slider.get_attribute("aria-valuetext")
        shown.append((label, frames.nth(index).locator("image, img").first.evaluate("each => each.outerHTML")))
        page.keyboard.press("ArrowRight")
    assert len(set(shown)) == count
    assert len({picture for _, picture in shown}) > 1  # training moved the masks


def test_moving_over_a_patch_changes_the_pictures_and_the_text(page):
    views = page.locator("#explorer .explorer-view")
    assert [view.get_attribute("data-arm") for view in views.all()] == ["none", "gmm"]
    canvas = views.first.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    seen, texts = [], []
    for part in (0.05, 0.95):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + part * box["height"])
        seen.append(pictures(page))
        texts.append(page.locator(".explorer-status").inner_text())
    assert texts[0].startswith("Patch in row 1, column 1 of 4 x 4.")
    assert texts[1].startswith("Patch in row 4, column 4 of 4 x 4.")
    assert all(before != after for before, after in zip(*seen, strict=True))
    assert seen[1][0] != seen[1][1]  # with and without the prior


def test_lists_and_arrow_keys_choose_image_layer_head_and_patch(page):
    before = pictures(page)
    for name in ("image", "layer", "head"):
        chosen = page.locator(f"select.explorer-{name}")
        last = chosen.locator("option").count() - 1
        chosen.select_option(str(0 if chosen.input_value() == str(last) else last))
        after = pictures(page)
        assert after != before, name
        before = after
    page.locator(".explorer-views").focus()
    text = page.locator(".explorer-status").inner_text()
    page.keyboard.press("ArrowUp")
    assert pictures(page) != before
    assert page.locator(".explorer-status").inner_text() != text


def test_the_explorer_tells_the_attention_of_the_model(page, study_folder):
    """Its figures are those of `vicinal.tap` on the same image, to a part of 255."""
    chosen = {"layer": "blocks.1.attn", "image": 2, "head": 3}
    for name in ("image", "layer"):
        value = chosen[name]
        page.locator(f"select.explorer-{name}").select_option(
            **({"label": value} if name == "layer" else {"index": value})
        )
    page.locator("select.explorer-head").select_option(label=f"head {chosen['head']}")
    page.locator(".explorer-views").focus()
    for key in ["ArrowUp"] * 4 + ["ArrowLeft"] * 4 + ["ArrowRight", "ArrowDown", "ArrowDown"]:
        page.keyboard.press(key)
    assert page.locator(".explorer-status").inner_text().startswith("Patch in row 3, column 2 of 4 x 4.")
    for arm in ("none", "gmm"):
        (opened,) = open_models([study_folder / "runs" / f"{arm}-s0"], device="cpu")
        names, images = ImageSelection(count=8).first(opened, 8)
        assert page.locator("select.explorer-image option").nth(chosen["image"]).inner_text() == names[chosen["image"]]
        with vicinal.tap(opened.model, layers=[1]) as tap, torch.no_grad():
            opened.model(images[chosen["image"]][None])
        weights = tap.last[0, chosen["head"] - 1, 2 * 4 + 1]
        note = page.locator(f".explorer-view[data-arm={arm}] .explorer-note").inner_text()
        row, column, percent = map(float, re.fullmatch(r"most to row (\d), column (\d): (.*)%", note).groups())
        assert percent / 100 == pytest.approx(float(weights.max()), rel=0.01)
        assert float(weights[4 * int(row - 1) + int(column - 1)]) == pytest.approx(float(weights.max()), rel=1 / 255)


def test_without_scripts_all_frames_and_a_picture_of_each_arm_are_there(browser, study_report):
    with open_page(browser, study_report, scripts=False) as opened:
        frames = opened.page.locator("#masks .frame")
        assert frames.count() > 2
        assert all(frame.is_visible() for frame in frames.all())
        assert opened.page.locator("#explorer .without-script img:visible").count() >= 2
        assert not opened.page.locator("#explorer canvas:visible").count()
        assert opened.page.locator("#fields img:visible").count() >= 2
