"""`attnscope draw FOLDER`: pictures drawn again from tables, without a model, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.errors import InputError
from attnscope.export.redraw import redraw_study
from attnscope.model import loading
from helpers.command_line import SENTENCE, call


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a run whose tables hold its maps, one whose tables do not, a scan, an ablation, a comparison."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "texts.txt").write_text("the river bank is wide\nthe old mill stands by the river\n")
    for name, arguments in {
        "whole": ("heads", SENTENCE, "--top-k", "all", "--select", "1", "--figures", "layers,heads"),
        "few": ("heads", SENTENCE, "--figures", "overview"),
        "scan": ("scan", "demo", "--sequences", "4", "--texts", str(folder / "texts.txt")),
        "ablation": ("ablate", "demo", "--select", "3.0-1", "--sequences", "4", "--random", "2"),
        "comparison": ("compare", "the bank", "--compare-text", "the river bank"),
    }.items():
        call(*arguments, "--out", str(folder / name), "-q").ok()
    return folder


@pytest.fixture(autouse=True)
def no_model(monkeypatch, finished):
    def refuse(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load", refuse)


def drawn(result) -> list[Path]:
    return [Path(line) for line in result.ok().out.decode().splitlines()]


def pixels(path: Path) -> np.ndarray:
    return matplotlib.image.imread(path)


@pytest.mark.e2e
def test_maps_are_those_that_the_run_drew(finished, tmp_path):
    paths = drawn(call("draw", str(finished / "whole"), "--select", "1", "--out", str(tmp_path), "-q"))
    names = {path.relative_to(tmp_path).as_posix() for path in paths}
    assert {"overview.png", "layers/L01.png", "heads/L01H04.png", "metrics.png"} <= names
    for name in sorted(names - {"metrics.png", "overview.png"}):
        np.testing.assert_array_equal(pixels(tmp_path / name), pixels(finished / "whole" / name), err_msg=name)
    magma = ("--cmap", "magma", "--figures", "heads", "--select", "1.4", "--out", str(tmp_path / "magma"))
    drawn(call("draw", str(finished / "whole"), *magma, "-q"))
    name = "heads/L01H04.png"
    assert not np.array_equal(pixels(tmp_path / "magma" / name), pixels(finished / "whole" / name))


def test_what_the_tables_do_not_hold_is_said(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished)
    result = call("draw", "few", "--out", str(tmp_path))
    assert drawn(result) == [tmp_path / "metrics.png"]
    assert "attnscope draw --from few" in result.err
    assert "metrics.png does not" in result.err
    result = call("draw", str(finished / "few"), "--figures", "overview", "--out", str(tmp_path / "x"))
    assert (result.code, "no picture" in result.err) == (2, True)


def test_metrics_that_are_named_are_drawn_again_alone(finished, tmp_path):
    options = ("--figures", "metrics", "--metrics", "sink", "--image", "svg", "--out", str(tmp_path), "-q")
    [path] = drawn(call("heatmap", str(finished / "whole"), *options))
    text = path.read_text()
    assert ">sink</text>" in text
    assert ">focus</text>" not in text


SCAN, ABLATION = ("scan", ["probes", "head_js"]), ("ablation", ["ablation", "ablation_heads"])
COMPARISON = ("comparison", ["differences"])


@pytest.mark.parametrize(("study", "names"), [pytest.param(*SCAN, marks=pytest.mark.e2e), ABLATION, COMPARISON])
def test_a_study_is_drawn_again(finished, tmp_path, study, names):
    paths = drawn(call("draw", str(finished / study), "--out", str(tmp_path / "same"), "-q"))
    assert paths == [tmp_path / "same" / f"{name}.png" for name in names]
    whole = paths if study == "scan" else [path for path in paths if path.stem == "ablation"]
    for path in whole:  # tables of the others lack heads, or texts
        np.testing.assert_array_equal(pixels(path), pixels(finished / study / path.name), err_msg=path.name)


@pytest.mark.parametrize(
    ("study", "names"), [ABLATION, *(pytest.param(*one, marks=pytest.mark.e2e) for one in (SCAN, COMPARISON))]
)
def test_a_study_is_drawn_again_with_other_looks(finished, tmp_path, study, names):
    looks = ("--image", "svg", "--title", "Again", "--cmap", "magma", "--out", str(tmp_path / "other"))
    paths = drawn(call("draw", str(finished / study), *looks, "-q"))
    assert paths == [tmp_path / "other" / f"{name}.svg" for name in names]
    for path in paths:
        assert "Again" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("whole", "--model", "demo", "--out", "x"),
            "whole is drawn again from its tables: --model does not apply to it; leave it out, or read",
        ),
        (("whole", "--show"), "--show does not apply to it"),
        (("whole",), "nowhere to draw; name a folder with --out DIR"),
        (("whole", "--out", "scan"), "scan holds a scan; name another folder for the pictures of whole"),
        (
            ("scan", "--figures", "overview", "--out", "x"),
            "scan holds no run of a text; leave out --figures and --select",
        ),
        (("whole", "--select", "9", "--out", "x"), "'9' names layer 9"),
        ((".", "--out", "x"), "is a folder without results of attnscope"),
    ],
)
def test_what_is_not_drawn_again(finished, monkeypatch, arguments, says):
    monkeypatch.chdir(finished)
    result = call("draw", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 1)
    assert says in result.err
    assert not (finished / "x").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scan/atlas.json", b"{}"),
        ("scan/atlas.parquet", b"PAR1"),
        pytest.param("scan/head_js.parquet", b"\x00", marks=pytest.mark.e2e),  # as the atlas's, behind a picture
        pytest.param("scan/texts/corpus.json", b'{"texts": 1e999}', marks=pytest.mark.e2e),
        ("ablation/ablation.json", b"[]"),
        ("ablation/ablation.parquet", b"x"),
        ("comparison/compare.json", b'{"asked": 3}'),
        ("comparison/heads.csv", b"layer,head,kind\n0,0,decoder\n"),
        ("comparison/heads.csv", b"\xff\xfe"),
        ("whole/heads.csv", b"layer,head,kv_head,kind\n0,99999999,0,decoder\n"),
        ("whole/manifest.json", b"{}"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(finished, tmp_path, name, content):
    study = name.partition("/")[0]
    shutil.copytree(finished / study, tmp_path / study)
    (tmp_path / name).write_bytes(content)
    result = call("draw", str(tmp_path / study), "--out", str(tmp_path / "x"), "-q")
    assert (result.code in (2, 4), result.out, result.err.count("\n")) == (True, b"", 1), result.err
    assert "internal error" not in result.err


WORD = "x" * 100_000  # a picture of it takes minutes


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ablation/ablation.json", {"replacement": "nothing"}),
        ("ablation/ablation.json", {"task": {"name": "copy", "sequences": math.inf}}),
        ("ablation/ablation.json", {"task": {"name": WORD, "sequences": 4}}),
        ("ablation/ablation.json", {"intact": True}),
        ("ablation/ablation.json", {"measure": ["loss"]}),
        ("comparison/compare.json", {"texts": math.inf}),
        ("comparison/compare.json", {"asked": {"models": [{"name": WORD}]}}),
        ("scan/atlas.json", {"model": {"name": ["demo"], "revision": None}}),
        ("scan/atlas.parquet", {"probe": ["sink", "offset"]}),
        ("scan/atlas.parquet", {"against": WORD}),
        pytest.param("scan/texts/corpus.json", {"texts": "2"}, marks=pytest.mark.e2e),
    ],
    ids=lambda one: one if isinstance(one, str) else ", ".join(f"{key}: {value}"[:40] for key, value in one.items()),
)
def test_values_of_other_types_are_refused(finished, tmp_path, name, change):
    study = name.partition("/")[0]
    path = shutil.copytree(finished / study, tmp_path / study) / name.partition("/")[2]
    if path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    else:
        [(column, value)], table = change.items(), pq.read_table(path)
        values = pa.array([value] * len(table))
        pq.write_table(table.set_column(table.column_names.index(column), column, values), path)
    with pytest.raises(InputError, match="holds no whole"):
        redraw_study(tmp_path / study, tmp_path)
