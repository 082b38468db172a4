"""A scan's own texts: divergences against a loop, looks against captures, clusters against their definition."""

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import attnscope
from attnscope.errors import InputError, UsageError
from attnscope.figures import Style
from attnscope.figures.fonts import Fonts
from attnscope.figures.pictures import Pairs, pairs_figure
from attnscope.figures.style import ROLE_COLOURS
from attnscope.figures.writer import drawing
from attnscope.studies import head_distances as texts_room
from attnscope.studies.head_distances import LONGEST, clustered, head_js, on_texts, prompts_of
from helpers.command_line import call
from helpers.corpora import written
from helpers.rows import csv_rows

TEXTS = [
    "the financial bank is located on river bank",
    "Mary saw John, and John gave Mary a book",
    "the cat sat on the mat and the cat sat on the mat " * 8,
]


@pytest.fixture(scope="module")
def found(demo, tmp_path_factory):
    """What the demo does on TEXTS, and the folder that holds it."""
    folder = tmp_path_factory.mktemp("scan")
    return on_texts(demo, prompts_of(demo, TEXTS), folder), folder


def js_of(one, two):
    """Lin's divergence of two distributions in bits, spelled out."""
    total = 0.0
    for p, q in zip(one, two, strict=True):
        middle = (p + q) / 2
        total += sum(x / 2 * math.log2(x / middle) for x in (p, q) if x > 0)
    return total


def test_divergences_are_those_of_the_models_own_attentions(demo, found):
    expected = []
    for prompt in prompts_of(demo, TEXTS[:2]):
        given = demo.model(torch.tensor([prompt.ids]), output_attentions=True).attentions
        rows = torch.cat([one[0] for one in given]).double().numpy()  # N, Q, K
        expected.append(
            [
                [np.mean([js_of(rows[a, q], rows[b, q]) for q in range(1, len(prompt))]) for b in (0, 7, 18, 23)]
                for a in (0, 7, 18, 23)
            ]
        )
    two = on_texts(demo, prompts_of(demo, TEXTS[:2]))
    assert two.heads == tuple(itertools.product(range(4), range(6)))
    np.testing.assert_allclose(two.js_NN[np.ix_([0, 7, 18, 23], [0, 7, 18, 23])], np.mean(expected, 0), atol=1e-6)
    assert np.abs(two.js_NN - found[0].js_NN).max() > 0.01  # the third text counts too


def test_apart_is_one_bit_alike_is_none():
    weights_NTT = torch.zeros(3, 4, 4)
    weights_NTT[0, :, 0] = weights_NTT[2, :, 0] = 1
    weights_NTT[1] = torch.eye(4)
    assert head_js(weights_NTT) == pytest.approx(np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]]))


def test_looks_are_counted_over_texts(demo, found):
    captured = [attnscope.capture(demo, list(prompt.ids)) for prompt in prompts_of(demo, TEXTS)]
    for place, head in enumerate(found[0].heads):
        looks = [seen.heads[place].text_role for seen in captured]
        assert found[0].shares[head] == {look: looks.count(look) / 3 for look in looks}
    assert found[0].shares[3, 0]["induction"] == pytest.approx(1 / 3)


def test_long_texts_are_cut_and_single_tokens_left_out(demo, monkeypatch):
    long, short = prompts_of(demo, ["the cat " * 200, "the cat"])
    assert (len(long), long.removed > 0, short.removed) == (LONGEST, True, 0)
    monkeypatch.setattr(texts_room, "LONGEST", 1)
    with pytest.raises(InputError, match="no text has two tokens"):
        prompts_of(demo, ["the cat"])


def test_the_tables_say_the_same(found):
    read, folder = found
    rows = pq.read_table(folder / "head_js.parquet").to_pylist()
    assert len(rows) == 24 * 23 // 2
    [one] = [row for row in rows if list(row.values())[:4] == [1, 5, 2, 1]]
    assert one["js"] == read.js_NN[11, 13]
    total = {}
    for row in csv_rows((folder / "looks_like.csv").read_bytes()):
        head = int(row["layer"]), int(row["head"])
        assert float(row["share"]) == pytest.approx(read.shares[head][row["looks_like"]], rel=1e-6)
        total[head] = total.get(head, 0) + float(row["share"])
    assert total == pytest.approx(dict.fromkeys(read.heads, 1.0))


def test_what_was_read_is_not_read_again(demo, found, tmp_path, monkeypatch):
    read, folder = found[0], Path(shutil.copytree(found[1], tmp_path / "texts"))
    monkeypatch.setattr(texts_room, "AT_ONCE", 2)
    prompts = prompts_of(demo, TEXTS)
    told, now = [], []
    again = on_texts(demo, prompts, folder, advance=told.append)  # texts 0 to 2 lie there under 0; 2 is new
    assert sum(told) == 3
    (folder / "texts" / "000000.npz").unlink()
    observe = texts_room.observe
    monkeypatch.setattr(
        texts_room, "observe", lambda loaded, prompts, request: now.extend(prompts) or observe(loaded, prompts, request)
    )
    on_texts(demo, prompts, folder)
    assert now == prompts[:2]
    with pytest.raises(UsageError, match=": texts was 3, now 2;"):
        on_texts(demo, prompts[:2], folder)
    forced = on_texts(demo, prompts[:2], folder, force=True)
    assert forced.looks_SN.shape == (2, 24)
    assert again.js_NN.shape == read.js_NN.shape


def average_linkage(distance):
    """Heights and members of every merge, by the definition: the mean distance over all pairs of two clusters."""
    parts, merges = [frozenset([n]) for n in range(len(distance))], []
    while len(parts) > 1:
        mean = {
            pair: np.mean([distance[a, b] for a in pair[0] for b in pair[1]])
            for pair in itertools.combinations(parts, 2)
        }
        pair = min(mean, key=mean.get)
        merges.append((mean[pair], pair[0] | pair[1]))
        parts = [part for part in parts if part not in pair] + [pair[0] | pair[1]]
    return merges


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_average_linkage(seed):
    points = np.random.default_rng(seed).normal(size=(9, 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    tree = clustered(distance)
    members = {n: frozenset([n]) for n in range(9)}
    for number, ((one, two, height), (expected, whole)) in enumerate(
        zip(tree.merges, average_linkage(distance), strict=True), start=9
    ):
        members[number] = members[one] | members[two]
        assert (members[number], height) == (whole, pytest.approx(expected))
        places = sorted(tree.leaves.index(leaf) for leaf in whole)
        assert places == list(range(places[0], places[0] + len(whole)))  # the tree has no crossing
    assert sorted(tree.leaves) == list(range(9))


def test_those_who_meet_are_nearest():
    line = np.array([0.0, 10.0, 1.0, 11.0, 2.5])
    assert clustered(np.abs(line[:, None] - line[None])).leaves in ((0, 2, 4, 1, 3), (3, 1, 4, 2, 0))
    assert clustered(np.zeros((1, 1))).leaves == (0,)


def brackets(ax):
    """Where both ends of each bracket of a tree stand, left to right as drawn, and its height."""
    segments = [segment.tolist() for segment in ax.collections[0].get_segments()]
    return [((one[0][0], one[-1][0]), pytest.approx(one[1][1])) for one in segments]


def test_the_picture_has_heads_in_the_trees_order_and_their_colours():
    values = np.array([[0, 0.9, 0.2], [0.9, 0, 0.8], [0.2, 0.8, 0]])
    blue, pink = ROLE_COLOURS["induction"], ROLE_COLOURS["sink"]
    tree = clustered(values)
    pairs = Pairs(
        values, ["L0H0", "L0H1", "L0H2"], tree.leaves, tree.merges, [[blue, pink], [], [pink]], {"sink": pink}
    )
    with drawing(Fonts()):
        figure = pairs_figure(pairs, Style(), ("Heads", "note", "JS"), 600)
    ax, bar, above = figure.axes
    order = list(tree.leaves)
    middle = {leaf: place + 0.5 for place, leaf in enumerate(order)}  # of the cell of a head

    assert np.array_equal(ax.images[0].get_array(), values[np.ix_(order, order)])
    assert [text.get_text() for text in ax.get_yticklabels()] == [pairs.labels[leaf] for leaf in order]
    marks = [(round(mark.get_y()), mark.get_facecolor()[:3]) for mark in ax.patches]
    assert sorted(row for row, _ in marks) == sorted([order.index(0)] * 2 + [order.index(2)])
    assert brackets(above) == [((middle[0], middle[2]), 0.2), (((middle[0] + middle[2]) / 2, middle[1]), 0.85)]
    assert bar.get_ylabel() == "JS"


# the command


@pytest.mark.usefixtures("short_scan")
def test_the_command_writes_and_says_what_heads_look_like(tmp_path):
    texts, out = written(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS)), tmp_path / "atlas"
    asked = ["scan", "demo", "--sequences", "2", "--texts", str(texts), "--out", str(out)]
    result = call(*asked, columns=160).ok()
    assert "3 texts: " in result.err
    shown = result.out.decode()
    assert "text role" in shown
    assert "induction 33 %" in shown
    names = {path.name for path in out.iterdir()}
    assert {"head_js.png", "head_js.parquet", "looks_like.csv", "atlas.json"} <= names


def test_what_texts_would_take_is_said_too(tmp_path):
    texts = written(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))
    result = call("scan", "demo", "--sequences", "2", "--texts", str(texts), "--dry-run").ok()
    assert b"3 texts: " in result.out


@pytest.mark.parametrize(
    ("texts", "more", "code", "says"),
    [
        ("the cat", [], 2, "--texts writes tables and a picture; name a folder with --out DIR"),
        (None, ["--dry-run"], 2, "there is no file"),
        ("", ["--dry-run"], 4, "there is no text in"),
        ("\n\n", ["--dry-run"], 4, "there is no text in"),
    ],
)
def test_bad_inputs_in_one_line(texts, more, code, says, tmp_path):
    path = tmp_path / "texts.txt"
    if texts is not None:
        path.write_text(texts)
    result = call("scan", "demo", "--sequences", "2", "-q", "--texts", str(path), *more)
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1), result.err
    assert says in result.err
