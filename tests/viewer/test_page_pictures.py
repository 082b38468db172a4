"""Pages of a text with pictures: decoder and tower on one axis, and the weights of a query over the picture.

Shapes: Q query, K key, T token of both.
"""

import io
import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

import attnscope
from attnscope.inputs.prompt import Medium, Patch, Prompt
from attnscope.model.selection import DECODER, VISION
from attnscope.observe.records import KeptKeys
from attnscope.observe.request import LayerKey
from attnscope.viewer.page_data import ahead
from helpers.browsing import visiting
from helpers.command_line import Result, call
from helpers.pages import Read, read
from helpers.picture_models import picture, saved

TEXT = "What is on the river bank?"
SECRET = "a comment </script><script>window.ran = 1</script>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def field(place: Path) -> str:
    """A picture whose file says more than its pixels."""
    said = PngImagePlugin.PngInfo()
    said.add_text("Comment", SECRET)
    with Image.open(picture(place / "plain.png")) as image:
        exif = image.getexif()
        exif[0x010E] = SECRET
        image.save(place / "field.png", pnginfo=said, exif=exif)
    return str(place / "field.png")


@pytest.fixture(scope="module")
def llava(place: Path) -> str:
    return saved("llava", place)


@pytest.fixture(scope="module")
def page(llava: str, field: str, place: Path) -> Path:
    result = viewed(llava, field, place / "page.html")
    assert (result.code, result.out) == (0, b""), result.err
    return place / "page.html"


@pytest.fixture(scope="module")
def seen(llava: str, field: str) -> Any:
    return attnscope.capture(attnscope.load(llava), TEXT, picture=field)


def viewed(folder: str, picture: str, out: Path, *more: str) -> Result:
    return call("view", "-m", folder, "--text", TEXT, "--picture", picture, "--out", str(out), *more)


def ends(found: Read, name: str) -> list[np.ndarray | None]:
    side = found.said["sides"][0]
    count = len(side["tokens"]["text"])
    return [None if place is None else found.array(place, "<i4", count) for place in side[name]]


def own(folder: str, seen: Any) -> dict[tuple[str, int], torch.Tensor]:
    """What decoder and tower return of their own, (H, T, T) each."""
    model, inputs = attnscope.load(folder).model, seen.prompt.medium.inputs
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(torch.tensor([seen.prompt.ids]), **inputs, output_attentions=True, use_cache=False)
        tower = model.model.vision_tower(inputs["pixel_values"], output_attentions=True)
    found = {(DECODER, layer): one[0] for layer, one in enumerate(whole.attentions)}
    return found | {(VISION, layer): one[0] for layer, one in enumerate(tower.attentions)}


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_decoder_and_tower_are_on_one_axis(
    family: str, place: Path, llava: str, field: str, page: Path, seen: Any
) -> None:
    folder = llava if family == "llava" else saved(family, place)
    seen = seen if family == "llava" else attnscope.capture(attnscope.load(folder), TEXT, picture=field)
    found = read(page) if family == "llava" else Read(seen.page().html)
    [side] = found.said["sides"]
    text, tower = seen.of(DECODER).queries, seen.of(VISION).queries
    assert side["tokens"]["text"] == [*text.tokens, *tower.tokens]
    assert [turn[2] for turn in side["turns"]] == ["text", "vision tower"]
    expected, steps = own(folder, seen), {(one["at"], one["head"]): one["scale"] for one in side["maps"]}
    maps = found.maps()
    assert len(maps) == 20
    for (at, head), map_TT in maps.items():
        layer = side["layers"][at]
        weights = expected[layer["stack"], layer["layer"]][head].numpy()
        start = len(text) if layer["stack"] == VISION else 0
        inside = slice(start, start + len(weights))
        np.testing.assert_allclose(map_TT[inside, inside], weights, atol=steps[at, head] / 2 + 1e-6)
        map_TT[inside, inside] = 0
        assert not map_TT.any()
    for at, (first, end) in enumerate(zip(ends(found, "first"), ends(found, "end"), strict=True)):
        layer = side["layers"][at]
        seen_QK = (expected[layer["stack"], layer["layer"]] > 0).any(0).numpy()
        start = len(text) if layer["stack"] == VISION else 0
        for query, row in enumerate(seen_QK):
            begin = 0 if first is None else first[start + query]
            assert set(start + np.flatnonzero(row)) == set(range(begin, end[start + query])), (at, query)
    state = dict(part.split("=") for part in found.said["open"].split("&"))
    assert side["layers"][int(state["at"])]["stack"] == DECODER
    assert int(state["query"]) == len(text) - 1


def test_pictures_are_encoded_anew_and_patches_lie_where_they_were_cut(page: Path, field: str, seen: Any) -> None:
    [side] = read(page).said["sides"]
    [one] = side["pictures"]
    kind, _, data = one["src"].partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(b64decode(data))) as image, Image.open(field) as given:
        assert image.size == given.size == (160, 80)
        assert not image.getexif()
        assert "comment" not in image.info
        off = np.abs(np.asarray(image, float) - np.asarray(given.convert("RGB"), float))
        assert off.mean() < 2  # of 255, by JPEG
    written = page.read_bytes() + b64decode(data)
    assert b"window.ran" not in written
    assert SECRET.encode() not in written
    prompt = seen.prompt
    assert len(side["patches"]) == 32  # 16 of the text, 16 of the tower, without [CLS]
    for token, number, *box in side["patches"][:16]:
        assert number == 0
        assert tuple(box) == pytest.approx(prompt.medium.patches[token].box)
        assert side["tokens"]["label"][token].startswith("img ")


def test_who_looks_ahead_is_read_off_weights_and_off_the_strongest_keys() -> None:
    """Queries 1 and 2 see each other, as tokens of one picture do."""
    key, weights = LayerKey(0, DECODER), torch.eye(4).expand(2, -1, -1).clone()
    prompt = Prompt(
        "", (0,) * 4, ("a",) * 4, ("a",) * 4, (True,) * 4, ("",) * 4, (), medium=Medium(patches={1: Patch(0, None)})
    )
    seen = SimpleNamespace(queries=prompt, weights={key: weights}, kept_keys=None)
    assert ahead(seen, key) is None  # type: ignore[arg-type]
    weights[1, 1, 2] = 0.5
    assert ahead(seen, key).tolist() == [1, 3, 3, 4]  # type: ignore[arg-type, union-attr]
    strongest = KeptKeys([0, 1], *weights.topk(2), query=range(4))
    kept = SimpleNamespace(queries=prompt, weights={}, kept_keys={key: strongest})
    assert ahead(kept, key).tolist() == [1, 3, 3, 4]  # type: ignore[arg-type, union-attr]


def test_a_large_picture_is_made_smaller(place: Path) -> None:
    from attnscope.viewer.pack import LONGEST, uri

    with Image.open(io.BytesIO(b64decode(uri(Image.new("RGBA", (2000, 1000))).partition(",")[2]))) as image:
        assert image.size == (LONGEST, LONGEST // 2)


def test_what_has_no_room_is_said(llava: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewed(llava, field, tmp_path / "some.html", "--select", "vision.1.2,0.3").ok()
    heads = [(one["at"], one["head"]) for one in read(tmp_path / "some.html").said["sides"][0]["heads"]]
    assert len(heads) == 2
    monkeypatch.setattr("attnscope.viewer.page.DEFLATED", 50.0)
    small = viewed(llava, field, tmp_path / "small.html", "--max-mb", "0.1").ok()
    assert "--select vision.3.2" in small.err
    side = read(tmp_path / "small.html").said["sides"][0]
    assert {layer["stack"] for layer in side["layers"]} == {DECODER}
    assert len(side["patches"]) == 16


def test_a_question_is_of_the_text(llava: str, field: str, tmp_path: Path) -> None:
    viewed(llava, field, tmp_path / "page.html", "--query", "bank").ok()
    said = read(tmp_path / "page.html").said
    assert said["open"].startswith("view=picture&")
    assert {layer["stack"] for layer in said["sides"][0]["layers"]} == {DECODER}
    refused = viewed(llava, field, tmp_path / "no.html", "--compare-text", "a river")
    assert refused.code == 2
    assert "cannot show another text" in refused.err


def test_the_patches_are_ranked_by_their_weights(browser: Any, page: Path, seen: Any) -> None:
    count = len(seen.prompt)
    with visiting(browser, page, f"view=picture&at=1&head=2&query={count - 1}") as visit:
        panel = visit.view("picture")
        weights = seen.weights[1][2, count - 1]
        best = max(seen.prompt.medium.patches, key=lambda at: float(weights[at]))
        panel.locator("h2", has_text=", L1H2").wait_for()
        top = panel.locator(".ranking button").first
        assert float(weights[int(top.get_attribute("data-token"))]) == pytest.approx(float(weights[best]), abs=3e-3)
        assert float(top.locator("b").inner_text()) == pytest.approx(float(weights[best]), abs=3e-3)
        share = float(weights[list(seen.prompt.medium.patches)].sum())
        assert float(panel.locator(".note").inner_text().split()[0]) == pytest.approx(share, abs=0.011)


@pytest.mark.e2e
def test_a_click_on_the_picture_asks_about_a_patch(browser: Any, page: Path, seen: Any) -> None:
    count = len(seen.prompt)
    with visiting(browser, page) as visit:
        visit.page.locator("[role=tab][data-view=picture]").click()
        visit.go(view="picture", at=1, head=2, query=count - 1)
        panel = visit.view("picture")
        panel.locator("h2", has_text=", L1H2").wait_for()
        canvas = panel.locator("canvas")
        box = canvas.bounding_box()
        left, top_edge, right, bottom = seen.prompt.medium.patches[6].box
        at = {"x": box["width"] * (left + right) / 2, "y": box["height"] * (top_edge + bottom) / 2}
        canvas.hover(position=at)
        assert seen.prompt.labels[6] in visit.tip("weight")
        canvas.click(position=at)
        visit.settled(query=6)
        visit.go(view="picture", at=3, head=1, query=6)  # a layer of the tower reads other tokens there
        last = seen.prompt.labels[max(seen.prompt.medium.patches)]  # the text's token is none of the tower's
        panel.locator("h2", has_text=f"{last} looks in the picture, vision L1H1").wait_for()
        canvas.click(position=at)
        visit.settled(query=count + 6)
        panel.locator(".note", has_text="on the picture").wait_for()
        for view in ("model", "matrix", "text"):
            visit.go(view=view, at=3, head=1, query=count + 6)
            visit.view(view).locator("canvas:visible, .piece:visible, table:visible").first.wait_for(state="visible")


def test_a_text_alone_has_no_pictures() -> None:
    said = Read(attnscope.capture(attnscope.load("demo"), "the bank").page().html).said
    assert not {"pictures", "patches"} & set(said["sides"][0])
    assert json.dumps(said["sides"][0]["end"]) == "[null, null, null, null]"
