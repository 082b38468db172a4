"""Two texts side by side: what the page draws between their units and how it orders heads, beside the command's."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.export.study_figures import signed_maps
from attnscope.hooks.engines import ENGINES
from attnscope.model.loading import wrap
from attnscope.observe.request import Request
from attnscope.serve.questions import divergences
from attnscope.studies.comparison import OneSide, compare_heads
from attnscope.viewer.page import About, Plan, page_of
from attnscope.viewer.page_data import Side
from helpers.browsing import visiting
from helpers.command_line import HANGS, call
from helpers.compared import by_loops
from helpers.families import tiny_model
from helpers.made_tokenizers import byte_level
from helpers.pages import read

NODE = shutil.which("node")
RIVER = "the {} bank is located on river bank"
CUT = [  # two texts, and how they are aligned
    (RIVER.format("financial"), RIVER.format("muddy"), None),  # one token against four
    (RIVER.format("muddy"), RIVER.format("financial"), None),
    ("a huge crocodile walked", "a tiny elephant walked", None),  # several against several
    ("the old boat lies still", "the boat lies very still here", None),  # no partner, on both sides
    ("Mary saw John", "John saw Mary", "position"),
    ("Mary saw John", "John saw Mary", "text"),
    ("the bank", "the bank", None),
    ("the bank", "the bank", "text"),
    ("the <s> bank", "the muddy <s> bank", None),
    ("naïve café 😀 日本", "naïve cafés 日本", None),
    ("שלום bank", "שלום river bank", None),
]
FIRST, SECOND = CUT[0][:2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    page = tmp_path_factory.mktemp("compare") / "page.html"
    call("view", "--text", FIRST, "--compare-text", SECOND, "-o", str(page)).ok()
    return page


@pytest.mark.parametrize("align", ["position", "text"])
def test_the_page_says_how_tokens_are_paired(tmp_path, align):
    page = tmp_path / "page.html"
    swapped = ("--text", "Mary saw John", "--compare-text", "John saw Mary", "--align", align)
    call("view", *swapped, "-o", str(page)).ok()
    said = read(page).said
    counts = [len(side["tokens"]["text"]) for side in said["sides"]]
    one_to_one = [list(range(counts[0]))] * 2
    assert counts[0] == counts[1] > 3
    assert said["title"].endswith(f"| aligned by {'position' if align == 'position' else 'characters'}")
    assert f"--align {align}" in said["command"]
    assert (said["units"]["tokens"] == one_to_one) == (align == "position")
    alone = call("view", *swapped[:2], *swapped[4:], "-o", str(page))
    assert (alone.code, "--align needs two texts, got one" in alone.err) == (2, True)


@pytest.fixture(scope="module")
def weights(demo):
    """Of both texts, layer by layer (H, Q, K)."""
    return [[layer.numpy() for layer in attnscope.capture(demo, text).weights.values()] for text in (FIRST, SECOND)]


def sides_of(loaded, other, texts, align):
    """Both sides as the page and the command have them: a page of them, and the command's comparison."""
    models = loaded, other
    kept = [attnscope.capture(*one, request=Request(weights=True)) for one in zip(models, texts, strict=True)]
    page = page_of([Side(one) for one in kept], Plan(bits=16), About(), align, divergences(*kept, align))
    pair = [OneSide(model, one.prompt, ENGINES["eager"]) for model, one in zip(models, kept, strict=True)]
    heads = loaded.geometry.heads_by_layer
    maps = {"decoder": {layer: range(count) for layer, count in heads.items()}}
    return page, compare_heads([tuple(pair)], maps=maps, align=align)


def said_by(paths, **state):
    """What the page's own code says of pages: the heads in its order, each with what it draws."""
    assert NODE is not None
    asked = [NODE, str(Path(__file__).with_name("compared.mjs")), *map(str, paths)]
    ran = subprocess.run(asked, input=json.dumps(state), capture_output=True, text=True, timeout=HANGS, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def drawn(values):
    """Rows as numbers, NaN where nothing is seen."""
    return np.array(values, float)


def check_page_and_command(path, said, found):
    """The page's values between units are sums and means of what it holds, and the command's to a step of a key; its
    heads stand in the command's order."""
    page, shared = read(path), found.pair.shared
    assert [(one["at"], one["head"]) for one in said] == [found.heads[place] for place in found.order]
    maps = [head_QK for layer in signed_maps(found.pair) for head_QK in layer.values_HQK]
    scales = [{(one["at"], one["head"]): one["scale"] for one in side["maps"]} for side in page.said["sides"]]
    most = max(len(members) for side in shared.members for members in side)
    for one, place in zip(said, found.order, strict=True):
        head = one["at"], one["head"]
        assert one["js"] == pytest.approx(found.js.effect[place], abs=1e-6)
        assert one["lost"] == pytest.approx([found.lost_SN[0, place], found.other_lost_SN[0, place]], abs=1e-6)
        both = [by_loops(page.maps(side)[head], shared.members[side], shared.members[side], ())[0] for side in (0, 1)]
        a, b, difference = (drawn(values) for values in (*one["masses"], one["difference"]))
        seen = np.isfinite(difference)
        assert (seen == np.isfinite(maps[place])).all()
        np.testing.assert_allclose(np.nan_to_num(a), both[0], atol=1e-6)
        np.testing.assert_allclose(np.nan_to_num(b), both[1], atol=1e-6)
        np.testing.assert_allclose(difference[seen], (b - a)[seen], atol=1e-6)
        step = sum(of_side[head] for of_side in scales) / 2
        np.testing.assert_allclose(difference[seen], maps[place][seen], atol=most * step + 1e-6)
        largest = difference[one["row"], one["column"]]
        assert largest == pytest.approx(one["value"], abs=1e-9)
        assert abs(largest) == np.nanmax(np.abs(difference))


def check_cut(tmp_path, made):
    """Of pages and comparisons, each with the other's."""
    paths = [page.save(tmp_path / f"{number}.html") for number, (page, _) in enumerate(made)]
    for path, said, (_, found) in zip(paths, said_by(paths), made, strict=True):
        check_page_and_command(path, said, found)
    return {(len(one), len(two)) for _, found in made for one, two in zip(*found.pair.shared.members, strict=True)}


@pytest.mark.skipif(NODE is None, reason="no node")
@pytest.mark.parametrize(
    ("cut", "sizes"),
    [(CUT[:4], {(1, 1), (1, 4), (4, 1), (4, 5)}), pytest.param(CUT[4:], {(1, 1)}, marks=pytest.mark.e2e)],
)
def test_the_page_has_the_commands_values_and_order_however_texts_are_cut(tmp_path, demo, cut, sizes):
    assert sizes <= check_cut(tmp_path, [sides_of(demo, demo, texts, align) for *texts, align in cut])


@pytest.mark.e2e
@pytest.mark.skipif(NODE is None, reason="no node")
def test_two_tokenizers_share_the_units_that_the_command_has(tmp_path, demo):
    shape = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6}
    other = wrap(tiny_model("llama", vocab_size=330, **shape), byte_level())
    assert (1, 4) in check_cut(tmp_path, [sides_of(demo, other, [RIVER.format("old")] * 2, None)])


@pytest.mark.skipif(NODE is None, reason="no node")
@pytest.mark.parametrize(
    ("texts", "align"),
    [
        (("a crocodile-walk, very slow", "the elephants-walk very slow"), "text"),
        (("old crocodile on", "muddy boat lies"), "position"),  # words of 1 and 4 pieces beside words of 4 and 1
    ],
)
def test_whole_words_are_units_with_all_of_their_tokens(tmp_path, demo, texts, align):
    page, found = sides_of(demo, demo, texts, align)
    path = page.save(tmp_path / "words.html")
    prompts = [one.prompt for one in found.pair[:2]]
    shared = found.pair.shared.whole(*([(word.start, word.stop) for word in prompt.words] for prompt in prompts))
    names = [
        ["".join(prompt.labels[token] for token in members) for members in of_units]
        for prompt, of_units in zip(prompts, shared.members, strict=True)
    ]
    [said] = said_by([path], words=True)
    for one in said:
        head, (rows, columns) = (one["at"], one["head"]), one["labels"]
        assert rows == columns
        assert [{one.lstrip("·"), two.lstrip("·")} for one, two in zip(*names, strict=True)] == [
            {part.lstrip("·") for part in row.split("/")} for row in rows
        ]
        for side in (0, 1):
            members = shared.members[side]
            mass, _ = by_loops(read(path).maps(side)[head], members, members, ())
            np.testing.assert_allclose(np.nan_to_num(drawn(one["masses"][side])), mass, atol=1e-6)


def told(visit, holding):
    """The three values beside the pointer."""
    lines = visit.tip(holding).split()
    shown = [
        line.replace("−", "-") for line in lines if "." in line and line.lstrip("+−<>").replace(".", "").isdecimal()
    ]
    return [0.0 if line[0] in "<>" else float(line) for line in shown]


BANK, WORD, PIECES = (3, 6), 2, range(2, 6)  # in both texts; `·financial`, and `·m` `ud` `d` `y`


def test_a_word_is_compared_with_all_pieces_of_its_partner(browser, path, weights):
    a, b = weights[0][1][4][BANK[0], WORD], weights[1][1][4][BANK[1], PIECES].sum()
    steps = [
        next(one["scale"] for one in side["maps"] if (one["at"], one["head"]) == (1, 4))
        for side in read(path).said["sides"]
    ]
    slack = steps[0] / 2 + len(PIECES) * steps[1] / 2 + 5.1e-4  # of three decimals, or below 0.001
    with visiting(browser, path, "view=compare&at=1&head=4") as visit:
        visit.page.locator("figure[data-side=diff] .top-canvas[data-cells]").wait_for()
        note = visit.view("compare").locator(".note").first.inner_text()
        assert note.startswith("9 shared tokens. ")
        assert "Only in" not in note
        facts = visit.page.locator("header .facts").last.inner_text()
        assert " ".join(facts.split()) == "A 9 tokens B 12 tokens"
        for plot, row, column in ((2, BANK[0], WORD), (1, BANK[1], PIECES[1])):
            visit.page.mouse.move(*visit.cell(row, column, plot=plot))
            np.testing.assert_allclose(told(visit, "3 ·bank"), [a, b, b - a], atol=slack)
            assert "2 ·financial/·muddy" in visit.tip("3 ·bank")
        visit.page.mouse.click(*visit.cell(BANK[1], PIECES[1], plot=1))
        visit.settled(side=1, query=BANK[1], key=PIECES[1], keyEnd=None)
        visit.page.mouse.click(*visit.cell(BANK[0], WORD, plot=2))
        visit.settled(side=1, query=BANK[1], key=PIECES[0], keyEnd=PIECES[-1] + 1)
        visit.view("compare").page.locator("label:has-text('side') select").select_option("0")
        visit.settled(side=None, query=BANK[0], key=WORD, keyEnd=None)
        visit.page.keyboard.press("3")
        visit.token("head", BANK[0], "query").wait_for()


def test_the_page_names_what_has_no_partner(browser, tmp_path):
    page = tmp_path / "page.html"
    call("view", "--text", "the old boat lies", "--compare-text", "the boat lies on mud", "-o", str(page)).ok()
    with visiting(browser, page, "view=compare&at=1&head=4") as visit:
        visit.page.locator("figure[data-side=diff] .top-canvas[data-cells]").wait_for()
        note = visit.view("compare").locator(".note").first.inner_text()
        shared, *alone = note.split(" Only in ")
        assert shared.endswith("shared tokens.")
        assert [one[:1] for one in alone] == ["A", "B"]
        assert "2 ·old" in alone[0]
        assert "·on" in alone[1]
        visit.page.mouse.move(*visit.cell(3, 2, plot=0))
        assert visit.tip("2 ·old").count("no partner") == 2


@pytest.mark.e2e
def test_the_heads_are_listed_as_the_command_ranks_them(browser, path):
    ran = call("compare", FIRST, "--compare-text", SECOND, "--format", "jsonl").ok()
    table = [json.loads(line) for line in ran.out.splitlines()]
    with visiting(browser, path, "view=compare&at=1&head=4&least=0.1") as visit:
        listed = visit.view("compare").locator("[data-role=differences] tr[data-head]")
        visit.until("count => document.querySelectorAll('[data-role=differences] tr[data-head]').length === count", 24)
        assert [row.get_attribute("data-head") for row in listed.all()] == [
            f"{row['layer']}.{row['head']}" for row in table
        ]
        bits = [float(text) for text in listed.locator("td:nth-child(2)").all_inner_texts()]
        np.testing.assert_allclose(bits, [row["js"] for row in table], atol=5.1e-5)
        listed.nth(1).click()
        visit.settled(at=table[1]["layer"], head=table[1]["head"])
