"""Pages of encoders and encoder-decoders: what each query sees, and the stacks on one axis, text before target.

Shapes: Q query, K key.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.export.redraw import load_run
from attnscope.model.loading import wrap
from attnscope.model.selection import CROSS, DECODER, ENCODER, LINEAR, StackLayer
from attnscope.observe.request import CaptureSpec, LayerKey
from attnscope.observe.run import prepare
from attnscope.serve.questions import ShowPage, kept_fields
from attnscope.utils.stages import NO_PROGRESS
from attnscope.viewer.page import BASE64, DEFLATED, Plan, about
from attnscope.viewer.page_data import SideMatrices, StackedSide, Wanted, stacked
from helpers.browsing import DESKTOP, PHONE, Sight, visiting
from helpers.command_line import Result, call
from helpers.folders import with_tokenizer
from helpers.pages import Read, read
from helpers.parity_models import roused_model
from helpers.stack_families import own, tiny

SOURCE, TARGET = "the financial bank is on a river", "the bank was old"
STACKS = (ENCODER, DECODER, CROSS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tiny("t5", vocab_size=2000, decoder_start_token_id=0)
    return str(with_tokenizer(model, tmp_path_factory.mktemp("models") / "t5"))


@pytest.fixture(scope="module")
def seen(folder: str) -> Any:
    loaded = attnscope.load(folder, device="cpu")
    return attnscope.capture(loaded, SOURCE, target=TARGET, request=attnscope.Request(metrics=()))


@pytest.fixture(scope="module")
def page(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "page.html"
    result = viewed(folder, out, "--query", "was", "--key", "bank")
    assert (result.code, result.out) == (0, b""), result.err
    return out


def viewed(folder: str, out: Path, *arguments: str) -> Result:
    return call("view", "-m", folder, "--text", SOURCE, "--target", TARGET, "--out", str(out), *arguments)


def blocks(seen: Any) -> dict[tuple[str, int, int], np.ndarray]:
    """What the family itself returns, each at its place of the axis that both texts share."""
    source, target = len(seen.of(ENCODER).queries), len(seen.queries)
    places = {
        ENCODER: (slice(0, source), slice(0, source)),
        DECODER: (slice(source, None), slice(source, None)),
        CROSS: (slice(source, None), slice(0, source)),
    }
    found = {}
    model = seen_model(seen)
    for (kind, layer), weights in own(
        model, torch.tensor([seen.of(ENCODER).queries.ids]), decoder_input_ids=torch.tensor([seen.queries.ids])
    ).items():
        for head in range(weights.shape[1]):
            found[kind, layer, head] = np.zeros((source + target, source + target))
            found[kind, layer, head][places[kind]] = weights[0, head]
    return found


def seen_model(seen: Any) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    name = seen.facts["model"]["name"]
    return AutoModelForSeq2SeqLM.from_pretrained(name, attn_implementation="eager").eval()


def ends(found: Read, name: str) -> list[np.ndarray | None]:
    side = found.said["sides"][0]
    count = len(side["tokens"]["text"])
    return [None if place is None else found.array(place, "<i4", count) for place in side[name]]


def test_all_stacks_are_on_one_axis_with_the_models_own_weights(page: Path, seen: Any) -> None:
    found, expected = read(page), blocks(seen)
    [side] = found.said["sides"]
    source = len(seen.of(ENCODER).queries)
    assert side["tokens"]["text"] == [*seen.of(ENCODER).queries.tokens, *seen.queries.tokens]
    assert [turn[2] for turn in side["turns"]] == ["text", "target"]
    maps, steps = found.maps(), {(one["at"], one["head"]): one["scale"] for one in side["maps"]}
    assert len(maps) == len(expected)
    for (at, head), map_QK in maps.items():
        layer = side["layers"][at]
        own_QK = expected[layer["stack"], layer["layer"], head]
        np.testing.assert_allclose(map_QK, own_QK, atol=steps[at, head] / 2 + 1e-6)
    reach = zip(ends(found, "first"), ends(found, "end"), strict=True)
    for at, (layer, (first, end)) in enumerate(zip(side["layers"], reach, strict=True)):
        for query in range(len(side["tokens"]["text"])):
            begin = 0 if first is None else first[query]
            seen_QK = np.logical_or.reduce([expected[layer["stack"], layer["layer"], head] > 0 for head in range(4)])
            assert set(np.flatnonzero(seen_QK[query])) == set(range(begin, end[query])), (at, query)
    was, banks = seen.queries.labels.index("·was"), [seen.of(ENCODER).queries.labels.index("·bank")]
    assert found.said["asked"]["query"] == {"text": "was", "positions": [source + was]}
    assert found.said["asked"]["key"] == {"text": "bank", "positions": banks}
    at = int(dict(part.split("=") for part in found.said["open"].split("&"))["at"])
    assert side["layers"][at]["stack"] == CROSS


def test_selected_stacks_alone_and_pages_too_small_for_maps(folder: str, tmp_path: Path, seen: Any) -> None:
    viewed(folder, tmp_path / "cross.html", "--select", "cross.1", "--max-mb", "0.1").ok()
    side = read(tmp_path / "cross.html").said["sides"][0]
    assert [(one["stack"], one["layer"]) for one in side["layers"]] == [(CROSS, 1)]
    assert len(side["heads"]) == 4
    request = attnscope.Request(relations=True, top_k=3)
    loaded = attnscope.load(folder, device="cpu")
    found = Read(attnscope.capture(loaded, SOURCE, target=TARGET, request=request).page().html)
    expected = blocks(seen)
    layers = found.said["sides"][0]["layers"]
    for (at, head), (keys_Qk, weights_Qk) in found.relations().items():
        own_QK = expected[layers[at]["stack"], layers[at]["layer"], head]
        for query, keys in enumerate(keys_Qk):
            known = keys[keys >= 0]
            np.testing.assert_allclose(weights_Qk[query][keys >= 0], own_QK[query][known], atol=1e-4)
            np.testing.assert_allclose(np.sort(own_QK[query])[::-1][: len(known)], own_QK[query][known], atol=1e-6)


def test_a_page_of_an_encoder_shows_both_sides(tmp_path: Path) -> None:
    folder = with_tokenizer(tiny("bert", vocab_size=2000), tmp_path / "bert")
    out = tmp_path / "page.html"
    call("view", "-m", str(folder), "--text", SOURCE, "--out", str(out)).ok()
    found = read(out)
    count = len(found.said["sides"][0]["tokens"]["text"])
    assert all((end == count).all() for end in ends(found, "end"))
    assert all(first is None for first in ends(found, "first"))


def test_a_window_to_both_sides_hides_what_the_model_gives_no_weight(tmp_path: Path) -> None:
    model = tiny("modernbert", vocab_size=2000, local_attention=4)
    loaded = attnscope.load(str(with_tokenizer(model, tmp_path / "modernbert")), device="cpu")
    seen = attnscope.capture(loaded, f"{SOURCE} and was old", request=attnscope.Request(weights=True))
    found, count = Read(seen.page().html), len(seen.queries)
    weights, windowed = own(model, torch.tensor([seen.queries.ids])), []
    for layer, first_T, end_T in zip(
        found.said["sides"][0]["layers"], ends(found, "first"), ends(found, "end"), strict=True
    ):
        some_QK = (weights[ENCODER, layer["layer"]][0] > 0).any(0)
        first_T = np.zeros(count, int) if first_T is None else first_T
        for query, (first, end) in enumerate(zip(first_T, end_T, strict=True)):
            assert some_QK[query].nonzero()[:, 0].tolist() == list(range(first, end))
        windowed.append(not some_QK.all())
        assert windowed[-1] == layer["visible"].startswith("window")
    assert set(windowed) == {True, False}


@pytest.fixture(scope="module")
def tables(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that lists every key."""
    out = tmp_path_factory.mktemp("run") / "t5"
    return exported(folder, out, relations=True, top_k=None, target=TARGET)


def exported(folder: str | Path, out: Path, target: str | None = None, select: str | None = None, **asked: Any) -> Path:
    loaded = attnscope.load(str(folder), device="cpu")
    seen = attnscope.capture(loaded, SOURCE, target=target, select=select, request=attnscope.Request(**asked))
    seen.export(out, figures=())
    return out


def of_tables(run: Path, tmp_path: Path) -> Read:
    out = tmp_path / "tables.html"
    call("view", str(run), "--from-tables", "--out", str(out)).ok()
    return read(out)


def test_tables_make_the_page_that_the_model_makes(
    tables: Path, page: Path, seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stacks, without the model: its maps are the family's own weights too."""
    monkeypatch.setattr("attnscope.model.loading.load", None)
    found, direct = of_tables(tables, tmp_path), read(page)
    [side], [expected] = found.said["sides"], direct.said["sides"]
    for name in ("name", "model", "engine", "text", "tokens", "words", "sentences", "turns", "metrics"):
        assert side[name] == expected[name], name
    assert [(one["stack"], one["layer"]) for one in side["layers"]] == [
        (one["stack"], one["layer"]) for one in expected["layers"]
    ]
    for one, same in zip(side["heads"], expected["heads"], strict=True):
        scores = [np.array(which.pop("scores"), float) for which in (one, same)]
        np.testing.assert_allclose(*scores, rtol=1e-6)
        assert one.pop("top_key_mass") == pytest.approx(same.pop("top_key_mass"), rel=1e-6)
        assert {**one, "uniform": None} == {**same, "uniform": None}
    for name in ("first", "end"):
        for one, same in zip(ends(found, name), ends(direct, name), strict=True):
            assert (one is None and same is None) or (one == same).all()
    own_HQK, steps = blocks(seen), {(one["at"], one["head"]): one["scale"] for one in side["maps"]}
    maps = found.maps()
    assert len(maps) == len(own_HQK)
    for (at, head), map_QK in maps.items():
        layer = side["layers"][at]
        expected_QK = own_HQK[layer["stack"], layer["layer"], head]
        np.testing.assert_allclose(map_QK, expected_QK, atol=steps[at, head] / 2 + 1e-6)
    assert side["layers"][int(found.said["open"].partition("at=")[2].partition("&")[0])]["stack"] == CROSS


def test_tables_of_some_stacks_and_some_keys(folder: str, tmp_path: Path) -> None:
    some = exported(folder, tmp_path / "run", target=TARGET, select="cross.1.2,enc.0.1", relations=True, top_k=2)
    found = of_tables(some, tmp_path)
    side = found.said["sides"][0]
    assert [(one["stack"], one["layer"]) for one in side["layers"]] == [(ENCODER, 0), (CROSS, 1)]
    source = len(side["tokens"]["text"]) - 5
    for (at, _), (keys, _) in found.relations().items():
        asked = np.flatnonzero((keys >= 0).any(1))
        assert (keys < source).all()
        assert set(asked) == set(range(source) if at == 0 else range(source, source + 5))


def test_tables_of_an_encoder_show_both_sides(tmp_path: Path) -> None:
    folder = with_tokenizer(tiny("bert", vocab_size=2000), tmp_path / "bert")
    found = of_tables(exported(folder, tmp_path / "run", select="0", relations=True, top_k=None), tmp_path)
    [end] = ends(found, "end")
    assert (end == len(end)).all()
    assert all(map_QK.sum(1) == pytest.approx(1, abs=1e-3) for map_QK in found.maps().values())


@pytest.mark.parametrize(
    ("model_type", "channel", "signed"),
    [
        ("falcon_h1", None, [("decoder", False), ("linear", True)]),
        ("mamba2", None, [("linear", True)]),
        ("mamba", 3, [("channels", True)]),
        ("mamba", None, [("channels", False)]),
    ],
)
def test_tables_of_layers_without_a_softmax_make_the_page_that_the_model_makes(
    demo: Any, tmp_path: Path, model_type: str, channel: int | None, signed: list[tuple[str, bool]]
) -> None:
    loaded = wrap(roused_model(model_type, vocab_size=2000), demo.tokenizer, model_type)
    view = attnscope.View(channel=channel)
    request = attnscope.Request(weights=True, relations=True, top_k=None, view=view)
    seen = attnscope.capture(loaded, SOURCE, request=request, select="1" + ",linear.1" * (len(signed) > 1))
    seen.export(tmp_path / "run", figures=())
    found = of_tables(tmp_path / "run", tmp_path)
    layers, maps = found.said["sides"][0]["layers"], found.maps()
    assert [(one["stack"], one.get("signed", False)) for one in layers] == signed
    assert sum(layer["heads"] for layer in layers) == len(maps)
    for (at, head), values in maps.items():
        weights = np.asarray(seen.of(layers[at]["stack"]).weights[1][head])
        np.testing.assert_allclose(values, weights, atol=float(np.abs(weights).max()) / 60_000)
        assert (values.min() < 0) == signed[at][1]
    # The pictures of the folder have the same signs, a stack in a folder of its own where there are several.
    kinds = ("--figures", "overview,heads", "--select", "1.0" + ",linear.1.2" * (len(signed) > 1))
    call("draw", str(tmp_path / "run"), "--out", str(tmp_path / "again"), *kinds).ok()
    several = [f"{stack}/" for stack, _ in signed] if len(signed) > 1 else [""]
    heads = ["L01H00.png", "L01H02.png"][: len(signed)]
    drawn = sorted(path.relative_to(tmp_path / "again").as_posix() for path in (tmp_path / "again").rglob("*.png"))
    places = zip(several, heads, strict=True)
    assert drawn == [f"{stack}{name}" for stack, head in places for name in (f"heads/{head}", "overview.png")]
    again = load_run(tmp_path / "run")
    for stack, of_stack in again.stacks.items():
        [drawn_HQK] = of_stack.maps.values.values()
        expected = np.asarray(seen.of(stack).weights[1])
        np.testing.assert_allclose(np.tril(drawn_HQK), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("relations.csv", ",cross\n", ",crass\n", "relations.csv is damaged"),
        ("manifest.json", '"target_prompt"', '"other_prompt"', "tokens its target has"),
        ("manifest.json", '"target_prompt": {', '"target_prompt": {"more": 1,', "tokens were read"),
    ],
)
def test_what_is_missing_of_a_run_is_said(
    tables: Path, tmp_path: Path, name: str, old: str, new: str, says: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in ("manifest.json", "heads.csv", "relations.csv"):
        (run / file).write_bytes((tables / file).read_bytes())
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))
    result = call("view", str(run), "--from-tables", "--out", str(tmp_path / "page.html"), "-q")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert says in result.err


def test_two_pages_beside_each_other_are_refused(folder: str, tmp_path: Path) -> None:
    result = viewed(folder, tmp_path / "page.html", "--compare-text", "another river")
    assert result.code == 2
    assert "a page of each" in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.e2e
def test_the_page_names_its_stacks_and_opens_every_view(browser: Any, page: Path) -> None:
    with visiting(browser, page) as visit:
        for view in ("model", "metrics", "head", "matrix", "text", "token"):
            visit.page.locator(f"[role=tab][data-view={view}]").click()
            visit.settled(view=view)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
        names = set()
        visit.page.locator("[role=tab][data-view=model]").click()
        for stack in STACKS:
            visit.page.locator(f"[data-stack={stack}]").click()
            opening = "" if stack == DECODER else f"{stack} "
            visit.page.locator(f".grid [data-head][aria-label^='{opening}L0H0']:visible").wait_for()
            shown = visit.page.locator("[data-view=model] [data-head][aria-label]").evaluate_all(
                "found => found.map((one) => one.getAttribute('aria-label'))"
            )
            names |= {str(name).partition(",")[0] for name in shown}
        assert {"L0H0", "encoder L0H0", "cross L1H3"} <= names


@pytest.mark.parametrize("stacks", [(CROSS,), pytest.param(STACKS, marks=pytest.mark.e2e)], ids=["cross", "all"])
def test_each_stack_has_its_own_axes(browser: Any, page: Path, seen: Any, stacks: tuple[str, ...]) -> None:
    source, target = len(seen.of(ENCODER).queries), len(seen.queries)
    sizes = {ENCODER: (source, source), DECODER: (target, target), CROSS: (target, source)}
    with visiting(browser, page, "view=head&at=0&head=1") as visit:
        assert visit.page.locator(".top .quote, .left-out").all_inner_texts() == [f"{SOURCE} → {TARGET}"]
        for stack in stacks:
            visit.page.locator(f"[data-stack={stack}]").click()
            visit.page.keyboard.press("3")
            visit.settled(view="head", head=1)
            for axis, count in zip(("query", "key"), sizes[stack], strict=True):
                rows = visit.view("head").locator(f".rows [data-axis={axis}]")
                visit.until(f"count => document.querySelectorAll('.rows [data-axis={axis}]').length === count", count)
                assert rows.first.locator(".position").inner_text() == "0", "each text counts from 0"
            visit.page.locator("[role=tab][data-view=matrix]").click()
            visit.settled(view="matrix")
            name = visit.page.locator(".status .head-name").inner_text()
            assert name.startswith("L" if stack == DECODER else stack)
            visit.page.mouse.move(*visit.cell(sizes[stack][0] - 1, sizes[stack][1] - 1))
            told = visit.tip("weight")
            labels = (seen.of(stack).queries.labels[-1], seen.of(stack).keys.labels[-1])
            assert f"{sizes[stack][0] - 1} {labels[0]}" in told
            assert f"{sizes[stack][1] - 1} {labels[1]}" in told


@pytest.mark.e2e
def test_maps_of_a_short_target_over_a_long_text_are_flat_and_close_together(
    browser: Any, page: Path, seen: Any
) -> None:
    at = 2 * len(seen.of(ENCODER).visible)  # the encoder's and the decoder's layers come first
    with visiting(browser, page, "view=model&at=0") as visit:
        square = visit.view("model").locator("button[data-head]").first.bounding_box()
        visit.go(view="model", at=at, head=0)
        visit.settled(at=at)
        first, below = (
            visit.view("model").locator(f'button[data-head="{one}.0"]').bounding_box() for one in (at, at + 1)
        )
        names = [one.bounding_box() for one in visit.view("model").locator(".layer").all() if one.inner_text()]
    shape = len(seen.queries) / len(seen.of(ENCODER).queries)
    assert square["height"] == pytest.approx(square["width"], abs=1)
    assert first["height"] == pytest.approx(max(14, shape * first["width"]), abs=1)
    assert below["y"] - first["y"] - first["height"] < 10
    for box, name in zip((first, below), names, strict=False):
        assert name["y"] + name["height"] / 2 == pytest.approx(box["y"] + box["height"] / 2, abs=2)


@pytest.mark.e2e
def test_the_key_of_what_cannot_be_seen_stands_where_there_is_some(browser: Any, page: Path, seen: Any) -> None:
    layers = len(seen.of(ENCODER).visible)
    with visiting(browser, page, "view=matrix&at=0") as visit:
        found = []
        for at in (0, layers, 2 * layers):  # encoder, decoder, cross
            visit.go(view="matrix", at=at, head=0)
            visit.settled(at=at)
            visit.drawn()
            found.append("cannot be seen" in visit.view("matrix").locator(".legend").inner_text())
    assert found == [False, True, False]


@pytest.mark.e2e
def test_on_a_phone_the_role_and_the_filters_share_a_line(browser: Any, page: Path) -> None:
    with visiting(browser, page, "view=model&at=0", PHONE) as visit:
        bar = visit.page.locator(".filters")
        role, more = (bar.locator(name).bounding_box() for name in (".role", ".more"))
        assert role["y"] + role["height"] / 2 == pytest.approx(more["y"] + more["height"] / 2, abs=4)
        assert bar.bounding_box()["height"] < 90
        rights = visit.page.locator(".facts span").evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")
        assert rights
        assert max(rights) <= PHONE[0]  # none is cut off at the edge
        facts, tools = (visit.page.locator(name).bounding_box() for name in (".facts", ".tools"))
        assert facts["x"] + facts["width"] > tools["x"] + tools["width"] / 2  # below them, and as wide as the window


@pytest.mark.e2e
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1280", "390"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_stack_is_wider_than_the_window(browser: Any, page: Path, seen: Any, size: Sight, theme: str) -> None:
    layers = len(seen.of(ENCODER).visible)
    with visiting(browser, page, "view=model&at=0", size, theme) as visit:
        for at in (0, layers, 2 * layers):
            for view in ("model", "metrics", "head", "matrix", "text", "token"):
                visit.go(view=view, at=at, head=1)
                visit.settled(view=view, at=at)
                visit.view(view).locator(":is(canvas, .piece, table):visible").first.wait_for(state="visible")
                assert visit.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0, (view, at)


@pytest.fixture(scope="module")
def of_weights(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A capture, and the page of a file that has its cross-attention alone."""
    seen = attnscope.capture(attnscope.load(folder, device="cpu"), SOURCE, target=TARGET, engine="eager")
    cross, place = seen.of(CROSS), tmp_path_factory.mktemp("weights")
    layers = [cross.weights[key] for key in cross.weights]
    attnscope.save_weights(place / "cross.npz", layers, cross.keys, query_tokens=cross.queries, model="mine")
    result = call("view", "--weights-file", str(place / "cross.npz"), "--out", str(place / "page.html"))
    assert (result.code, result.out) == (0, b""), result.err
    return seen, place / "page.html"


def test_a_page_of_cross_attention_alone_has_its_weights_where_both_texts_are(of_weights: tuple[Any, Path]) -> None:
    seen, path = of_weights
    found, source = read(path), len(seen.of(ENCODER).queries)
    side = found.said["sides"][0]
    assert {layer["stack"] for layer in side["layers"]} == {CROSS}
    assert {layer["kv_heads"] for layer in side["layers"]} == {head["kv_head"] for head in side["heads"]} == {None}
    for entry in side["maps"]:
        key = side["layers"][entry["at"]]["layer"]
        own_QK = seen.of(CROSS).weights[key][entry["head"]].numpy()
        page_TT = found.map(entry)
        np.testing.assert_allclose(page_TT[source:, :source], own_QK, atol=0.005)


@pytest.mark.e2e
def test_the_page_of_weights_opens_in_every_view_and_says_that_they_are_not_verified(
    browser: Any, of_weights: tuple[Any, Path]
) -> None:
    with visiting(browser, of_weights[1]) as visit:
        title = visit.page.locator("h1").inner_text()
        assert title == "weights not verified: mine"
        for view in ("model", "metrics", "head", "matrix", "text", "token"):
            visit.page.locator(f"[role=tab][data-view={view}]").click()
            visit.settled(view=view)
            visit.view(view).locator("canvas, .piece, table").first.wait_for(state="visible")
        assert "(" not in visit.page.locator(".facts").inner_text()  # no kv heads


@pytest.mark.parametrize(
    ("family", "select", "opens"),
    [
        ("falcon_h1", "linear.1.2", "at=5&head=2"),
        ("falcon_h1", "1.2", "at=1&head=2"),
        ("mamba", "1", "at=1&head=0&metric=previous_token"),  # its heads have no focus
    ],
)
def test_a_page_opens_at_a_head_without_a_softmax_that_was_named(
    demo: Any, family: str, select: str, opens: str
) -> None:
    loaded = wrap(roused_model(family, vocab_size=2000).eval(), demo.tokenizer, family)
    side = ShowPage(whole=select).answer(loaded, CaptureSpec(SOURCE), NO_PROGRESS, lambda info: None)
    seen = StackedSide(side.seen).seen if stacked(side.seen) else side.seen
    assert about(seen, side.whole).open == f"view=head&{opens}"


def test_heads_of_one_stack_alone_stay_whole_where_a_page_has_no_room_for_all(demo: Any) -> None:
    loaded = wrap(roused_model("falcon_h1", vocab_size=2000).eval(), demo.tokenizer, "falcon_h1")
    named = {1: (0,), StackLayer(1, LINEAR): (2, 3)}
    seen = attnscope.capture(loaded, SOURCE, request=attnscope.Request(weights=named, relations=True))
    assert {key: tuple(heads) for key, heads in seen.weight_heads.items()} == {(1, DECODER): (0,)}
    assert {key: tuple(heads) for key, heads in seen.of(LINEAR).weight_heads.items()} == {(1, LINEAR): (2, 3)}
    maps = SideMatrices([0, 1, 2, 3], np.zeros((4, 8, 8), np.float32))
    page = seen.page(select="1.0,linear.1.2-3")
    assert "at=1&head=0" in page.html.decode().replace("\\u0026", "&")
    parts = maps.shrunk(Wanted(rows=4, whole=named), LayerKey(1, LINEAR))
    assert [(part.heads, part.size) for part in parts] == [([2, 3], 1), ([0, 1], 2)]


@pytest.mark.parametrize("model", ["qwen3_next", "mamba"])
def test_layers_without_a_softmax_count_where_a_page_is_too_small_for_their_maps(demo: Any, model: str) -> None:
    loaded = wrap(roused_model(model, vocab_size=2000).eval(), demo.tokenizer, model)
    run = prepare(loaded, CaptureSpec(SOURCE))
    heads = sum(loaded.geometry.mapped.values())
    bytes_of_all = heads * len(run.prompt) * (len(run.prompt) + 1) / 2 * BASE64 * DEFLATED
    assert kept_fields(run, Plan(max_mb=bytes_of_all * 1.01 / 1e6))["weights"] is True
    assert kept_fields(run, Plan(max_mb=bytes_of_all * 0.99 / 1e6))["weights"] is False


def test_linear_heads_are_on_the_page_with_signs_and_colours_about_0(browser: Any, demo: Any, tmp_path: Path) -> None:
    text = "the financial bank is on the bank of a river"
    loaded = wrap(roused_model("qwen3_next", vocab_size=2000).eval(), demo.tokenizer, "hybrid")
    seen = attnscope.capture(loaded, text, request=attnscope.Request(weights=True, relations=True, operands=True))
    page = tmp_path / "page.html"
    seen.page().save(str(page))
    held = read(page)
    layers = held.said["sides"][0]["layers"]
    places = [(layer["stack"], layer["layer"], layer.get("signed", False)) for layer in layers]
    assert places == [("decoder", 3, False), *(("linear", layer, True) for layer in range(3))]
    for (at, head), values in held.maps().items():
        weights = np.asarray(seen.of(layers[at]["stack"]).weights[layers[at]["layer"]][head])
        np.testing.assert_allclose(values, weights, atol=float(np.abs(weights).max()) / 250)
    assert min(values.min() for (at, _), values in held.maps().items() if at) < 0
    assert {step["at"] for step in held.said["sides"][0]["steps"]["heads"]} == {0}, "those of the softmax stay"
    with visiting(browser, page, "view=matrix&at=1&head=2") as visit:
        assert visit.view("matrix").locator(".scale").first.inner_text().startswith("\N{MINUS SIGN}")
        visit.go(view="matrix", at=0, head=2)
        visit.until("() => document.querySelector('[data-view=matrix] .scale').innerText.startsWith('0')")
        # A row of a linear layer has no fixed sum: its largest weight fills a bar, and nothing is uniform.
        query, weights_QK = 6, np.asarray(seen.of("linear").weights[0][2])
        sizes = np.abs(weights_QK[query]) / np.abs(weights_QK[query]).max()
        visit.go(view="head", at=1, head=2, query=query, pin=1)
        visit.until(f"() => document.querySelector('.rows .query.focus')?.dataset.token === '{query}'")
        bands = visit.view("head").locator(".rows .key .band")
        shown = bands.evaluate_all("all => all.map((one) => JSON.parse(one.dataset.bands)[0][1])")
        np.testing.assert_allclose(shown[: query + 1], sizes[: query + 1], atol=0.02)
        assert "uniform" not in visit.page.locator("section.status").inner_text()
        visit.go(view="head", at=0, head=2)
        visit.until("() => document.body.innerText.includes('uniform 0')")
