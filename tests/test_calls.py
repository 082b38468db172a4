"""The commands as functions: `attnscope.scan(model)` and the others, records with tables, pictures and folders."""

import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

import attnscope
from attnscope.api.records import Explained
from attnscope.api.scan import Scan
from attnscope.errors import UsageError
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureOptions, Request, View
from attnscope.serve.client import Session
from helpers.command_line import HANGS, SENTENCE, call
from helpers.hints import OPTION, hints_of_source, hints_of_the_library

ROOT = Path(attnscope.__file__).parents[1]
SWAPPED = "Mary gave John a book", "John gave Mary a book"
ROOMS = "batch", "explain", "parity"  # modules that are called
KEYWORDS = {
    "CaptureOptions": {*CaptureOptions.__annotations__, *Request.__dataclass_fields__, *View.__dataclass_fields__}
}
# positional arguments, else two
GIVEN = {"connect": 0, "compare": 3, "explain": 3, "listen": 3, "save_tensors": 3, "save_weights": 3, "why": 3}
GIVEN |= dict.fromkeys(("load", "parity", "recording", "scan", "Session.capture"), 1)
COMMAND = re.compile(r"attnscope [a-z]+ |llama-gguf-split --")
TEXTS = (SENTENCE, "the cat", "a small dog sat by the old mill on the river", "the cat sat")


WRONG = {
    "scan": lambda model: attnscope.scan(model, sequence=2),
    "ablate": lambda model: attnscope.ablate(model, "3.0", replase="zero"),
    "batch": lambda model: attnscope.batch(model, ["a"], topk=3),
    "compare": lambda model: attnscope.compare(model, model, "a", alignn="text"),
    "depth": lambda model: attnscope.depth(model, "a", querry="last"),
    "explain": lambda model: attnscope.explain(model, "a", head="L0H0", querry="last"),
    "parity": lambda model: attnscope.parity(model, atoll=1e-5),
    "knockout": lambda model: attnscope.knockout(model, "a", keyy="last"),
    "patch": lambda model: attnscope.patch(model, "a", corupted="b"),
    "capture": lambda model: attnscope.capture(model, "a", engin="fused"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_misspelt_option_is_named_with_those_that_there_are(demo, name: str) -> None:
    with pytest.raises(attnscope.AttnscopeError, match=rf"^{name} has no option '\w+'; it has \w+, "):
        WRONG[name](demo)


@pytest.mark.parametrize("name", sorted(WRONG.keys() - {"capture"}))
def test_what_is_no_model_is_refused(name: str) -> None:
    given = {"ablate": ("3.0",), "batch": (["a"],), "compare": (None, "a"), "explain": ("a", "L0H0")}
    given |= dict.fromkeys(("depth", "knockout", "patch"), ("a",))
    with pytest.raises(attnscope.AttnscopeError, match="LoadedModel, got str"):
        getattr(attnscope, name)("demo", *given.get(name, ()))


@pytest.fixture(scope="module")
def scanned(demo) -> Scan:
    return attnscope.scan(demo, sequences=2)


@pytest.fixture(scope="module")
def exported(scanned, tmp_path_factory) -> tuple[Path, set[str]]:
    """The folder of that scan, and the names of the files that it was said to get."""
    folder = tmp_path_factory.mktemp("scan")
    return folder, {path.name for path in scanned.export(folder)}


@pytest.fixture(scope="module")
def shorter(demo) -> Scan:
    return attnscope.scan(demo, sequences=1)


@pytest.mark.e2e
def test_a_scan_is_a_table_and_a_picture(scanned) -> None:
    assert len(scanned.atlas.heads) == 24
    assert {"layer", "head", "probe", "effect"} <= set(scanned.table().column_names)
    assert scanned.figure().png.startswith(b"\x89PNG")


def test_a_scan_is_an_atlas_that_selects_heads(demo, scanned, exported) -> None:
    folder, names = exported
    assert names == {"atlas.json", "atlas.parquet", "probes.png"}
    assert {path.name for path in folder.iterdir()} >= names
    assert attnscope.capture(demo, SENTENCE, atlas=folder).atlas.roles == scanned.atlas.roles


def test_a_scan_is_not_written_over_another(exported, shorter) -> None:
    folder, names = exported
    before = {name: (folder / name).read_bytes() for name in names}
    with pytest.raises(attnscope.AttnscopeError, match="another scan"):
        shorter.export(folder)
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_an_ablation_is_what_the_command_prints(demo) -> None:
    found = attnscope.ablate(demo, "3.0-1", sequences=2, random=2)
    said = call(
        *["ablate", "demo", "--select", "3.0-1", "--sequences", "2", "--random", "2", "-q", "--format", "jsonl"]
    ).records
    assert found.table().column("heads").to_pylist() == [row["heads"] for row in said]
    np.testing.assert_allclose(found.table()["effect"].to_pylist(), [row["effect"] for row in said], atol=1e-6)
    assert "demo, copy, 2 sequences" in repr(found)
    assert "<table>" in found._repr_html_()


def test_sets_by_name_and_texts_are_ablated(demo, tmp_path: Path) -> None:
    found = attnscope.ablate(demo, {"mine": ["L3H0", "L1H5"]}, [SENTENCE, "the cat sat"], random=2, replace="zero")
    [together] = [row for row in found.table().to_pylist() if row["condition"] == "together"]
    assert (together["set"], together["heads"], together["n"]) == ("mine", "L1H5 L3H0", 2)
    pairs = attnscope.ablate(demo, ["L3H0", "L3H1"], sequences=2, pairs=True)
    assert pairs.table().num_rows == 1
    assert [path.name for path in pairs.export(tmp_path)] == ["pairs.parquet"]
    with pytest.raises(attnscope.AttnscopeError, match="pairs and prune"):
        attnscope.ablate(demo, "3.0-1", pairs=True, prune=True)


@pytest.mark.e2e
def test_a_comparison_is_what_the_command_prints(demo, tmp_path: Path) -> None:
    found = attnscope.compare(demo, demo, SWAPPED[0], compare_text=SWAPPED[1])
    said = call("compare", "--text", SWAPPED[0], "--compare-text", SWAPPED[1], "-q", "--format", "jsonl").records
    assert [(row["layer"], row["head"]) for row in found.table().to_pylist()] == [
        (row["layer"], row["head"]) for row in said
    ]
    np.testing.assert_allclose(found.table()["js"].to_pylist(), [row["js"] for row in said], atol=1e-6)
    written = {path.name for path in found.export(tmp_path)}
    assert {"heads.csv", "metrics.csv", "tokens.csv", "differences.png", "compare.json"} <= written
    several = attnscope.compare(demo, demo, list(TEXTS))
    assert (several.found.texts, float(several.found.js.effect.max())) == (4, 0.0)
    with pytest.raises(attnscope.AttnscopeError, match="compare_text is of one text"):
        attnscope.compare(demo, demo, list(TEXTS), compare_text="a")


def test_a_dataset_of_texts_in_memory(demo, tmp_path: Path) -> None:
    found = attnscope.batch(demo, [{"text": SENTENCE, "id": "first"}, "the bank"], query="last", key="bank")
    assert found.rows("texts")["id"].to_pylist() == ["first", "given:2"]
    assert found.table().num_rows == 24
    rows = found.rows("heads").to_pylist()
    alone = attnscope.capture(demo, SENTENCE, query="last", key="bank")
    assert rows[7]["mass"] == pytest.approx(alone.heads[7].mass, abs=1e-5)
    folder = found.export(tmp_path / "dataset")
    assert len(call("heads", str(folder), "-q", "--format", "jsonl").records) == 24
    with pytest.raises(attnscope.AttnscopeError, match="is not empty"):
        found.export(folder)


def test_a_dataset_in_a_folder_goes_on_and_holds_to_its_options(demo, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the bank\n\nthe river bank\n")
    first = attnscope.batch(demo, corpus, tmp_path / "out")
    assert (first.tally.texts, [one.reason for one in first.failures]) == (2, ["empty"])
    assert attnscope.batch(demo, corpus, tmp_path / "out").tally.texts == 0
    with pytest.raises(attnscope.AttnscopeError, match="top-k was 5, now 3"):
        attnscope.batch(demo, corpus, tmp_path / "out", top_k=3)
    with pytest.raises(attnscope.AttnscopeError, match="expected texts, got one"):
        attnscope.batch(demo, "corpus.txt")


def test_a_certificate_and_an_explanation(demo, tmp_path: Path) -> None:
    held = attnscope.parity(demo, SENTENCE, select="3.0")
    assert held.holds
    assert json.loads(held.export(tmp_path).read_text())["holds"] is True
    assert not attnscope.parity(demo, SENTENCE, atol=0.0).holds
    steps = attnscope.explain(demo, SENTENCE, head="L2H1")
    assert steps.table()["holds"].to_pylist().count(True) > 3
    assert steps.failures == []
    assert [path.suffix for path in steps.export(tmp_path)] == [".jsonl", ".png"]
    with pytest.raises(attnscope.AttnscopeError, match=r"bank\(\d\), bank\(\d\)"):
        attnscope.explain(demo, SENTENCE, head="L2H1", query="bank")


def test_rooms_are_functions_whatever_is_imported_first(demo) -> None:
    import attnscope.certificate.verdicts
    import attnscope.corpus.folder
    import attnscope.steps.attention

    for room in (attnscope.batch, attnscope.explain, attnscope.parity):
        assert callable(room)
        assert ">>> " in (room.__doc__ or "")
    assert attnscope.corpus.folder.Job
    assert attnscope.batch(demo, ["the bank"]).table().num_rows == 24


@pytest.mark.parametrize("how", [{}, {"query": "last"}, {"engine": "fused"}, {"select": "1.*"}])
def test_a_list_is_read_as_each_text_alone(demo, how) -> None:
    together = attnscope.capture(demo, list(TEXTS), **how)
    for text, seen in zip(TEXTS, together, strict=True):
        alone = attnscope.capture(demo, text, **how)
        assert seen.prompt.ids == alone.prompt.ids
        assert seen.failures == []
        for layer, weights in alone.weights.items():
            torch.testing.assert_close(seen.weights[layer], weights, atol=1e-5, rtol=0)
        for layer, values in alone.maps.values.items():
            np.testing.assert_allclose(seen.maps.values[layer], values, atol=1e-5)
        same(seen.table(), alone.table())
        same(seen.relations(), alone.relations())


def same(found: pa.Table, expected: pa.Table) -> None:
    """Equal columns, numbers to 1e-5."""
    assert found.column_names == expected.column_names
    for name in expected.column_names:
        one, other = found[name].to_pylist(), expected[name].to_pylist()
        if pa.types.is_floating(expected[name].type):
            np.testing.assert_allclose(np.array(one, float), np.array(other, float), atol=1e-5)
        else:
            assert one == other, name


def test_a_list_of_texts_takes_fewer_passes_than_texts(demo, monkeypatch) -> None:
    from attnscope.api import capture as texts

    passes, observe = [], texts.observe
    monkeypatch.setattr(
        texts, "observe", lambda loaded, prompts, *a, **b: passes.append(1) or observe(loaded, prompts, *a, **b)
    )
    assert len(attnscope.capture(demo, list(TEXTS) * 4)) == 16
    assert len(passes) == 1


def test_heads_by_name_and_a_coloured_text(demo) -> None:
    seen = attnscope.capture(demo, SENTENCE)
    assert seen.head("L2H1") is seen.heads[13]
    assert torch.equal(seen.matrix("2.1"), seen.weights[2][1])
    assert seen.heatmap("L2H1").png == seen.heatmap(2, 1).png
    shown = seen.text("last", "L2H1")
    np.testing.assert_allclose(shown.weight_T, seen.weights[2][1, -1].numpy(), atol=1e-7)
    means = np.concatenate([seen.weights[layer][:, -1].numpy() for layer in range(4)]).mean(0)
    np.testing.assert_allclose(seen.text().table()["weight"].to_pylist(), means, atol=1e-6)
    assert shown._repr_html_().count("<span") == len(seen.prompt)
    assert "&lt;s&gt;" in shown._repr_html_()
    for wrong, said in {"L9H1": "no layer 9; .* 0 to 3", "x": "L1H4"}.items():
        with pytest.raises(attnscope.AttnscopeError, match=said):
            seen.head(wrong)
    with pytest.raises(attnscope.AttnscopeError, match=r"the number of a layer, got 'L1H4'; write weights\[1\]\[4\]"):
        seen.weights["L1H4"]
    lean = attnscope.capture(demo, SENTENCE, request=attnscope.Request(relations=True))
    with pytest.raises(attnscope.AttnscopeError, match="no matrices were kept"):
        lean.text()


def test_a_notebook_shows_the_columns_of_the_terminal(demo) -> None:
    seen = attnscope.capture(demo, SENTENCE)
    shown = seen._repr_html_()
    for title in ("head", "kv", "roles", "focus", "top key", "strongest relation", "weight"):
        assert f"<th>{title}</th>" in shown
    assert shown.index("<th>focus</th>") < shown.index("<th>prev</th>") < shown.index("<th>entropy</th>")
    assert "bank(8) → river(7)" in shown
    assert not {"within", "without", "others", "partners", "place", "every", "keeping"} & set(dir(seen))
    assert all(hasattr(seen, name) for name in dir(seen))


@pytest.mark.e2e
def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    """Which type checkers read, and which a folder of the package's name does not hide; a finder is neither."""
    (tmp_path / "attnscope").mkdir()
    for name in ("__init__.py", "_version.py"):
        (tmp_path / "attnscope" / name).write_bytes((ROOT / "attnscope" / name).read_bytes())
    (tmp_path / "attnscope" / "demo").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "attnscope/demo/LICENSE").write_bytes((ROOT / "attnscope/demo/LICENSE").read_bytes())
    for folder in ("tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    script = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    pytest.importorskip("setuptools", minversion="77")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=HANGS)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if "dist-info" not in name]
        assert [files.read(name).decode().strip() for name in names] == [str(tmp_path)]
        assert names[0].endswith(".pth")


TYPO = """import attnscope
model = attnscope.load("demo")
attnscope.scan(model, sequence=2)
attnscope.batch(model, ["a"], topk=3)
attnscope.capture(model, "a", engine="fusde")
attnscope.capture(model, ["a", "b"])[0].head("L0H0")
attnscope.parity(model).holds
"""


@pytest.mark.slow
def test_a_type_checker_finds_misspelt_options(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPO)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", "user.py"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=10 * HANGS,
    )
    lines = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line}
    assert lines == {3, 4, 5}


@pytest.mark.parametrize(("checks", "expected"), [([], None), ([True, True], True), ([True, False], False)])
def test_a_step_holds_if_all_its_checks_do(checks, expected):
    step = SimpleNamespace(name="a", formula="b", why="", checks=[SimpleNamespace(holds=one) for one in checks])
    assert Explained(SimpleNamespace(steps=[step])).table()["holds"].to_pylist() == [expected]


class Refusing:
    """Given for a model: whoever looks at it gets an error."""

    def __init__(self, hint):
        self.hint = hint

    def __getattribute__(self, name):
        raise UsageError("no", object.__getattribute__(self, "hint"))


CALLS = [name for name in attnscope.__all__ if inspect.isroutine(getattr(attnscope, name)) or name in ROOMS]
CALLS += ["Session.capture"]


def public(name):
    return Session(LoadOptions()).capture if name == "Session.capture" else getattr(attnscope, name)


def options_of(name):
    """The keywords of a call, and those of how its model is loaded."""
    options = {one.name for one in fields(LoadOptions)}
    for one in inspect.signature(public(name)).parameters.values():
        record = re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation))
        options |= KEYWORDS[record[1]] if record else {one.name}
    return options


@pytest.mark.parametrize("name", CALLS)
def test_a_hint_in_python_names_options_that_the_call_has(monkeypatch, name) -> None:
    """Every hint of the source as every call says it: steps are left out whose options it has not."""
    options, others = options_of(name), 0
    for hint in hints_of_source():
        refusing = Refusing(hint)
        monkeypatch.setattr("attnscope.serve.client.request_status", partial(getattr, refusing))
        with pytest.raises(UsageError) as caught:
            public(name)(*[refusing] * GIVEN.get(name, 2))
        said = str(caught.value).removeprefix("no; ")
        if said.endswith(f", which is no option of {name.rpartition('.')[2]}"):
            others += 1
            continue
        beside = set(re.findall(r"\w+", re.sub(r"\{[^{}]*\}", "", hint)))  # words of the hint itself
        named = {one for one in set(re.findall(r"\{(\w+)", hint)) - beside if re.search(rf"\b{one}\b", said)}
        assert named <= options, (hint, said)
    assert 0 < others < len(hints_of_source())


def test_no_hint_of_the_library_spells_an_option_of_the_command_line() -> None:
    """But in a whole command of a shell, such as `attnscope serve stop`."""
    found = set(hints_of_the_library())
    assert len(found) > 30
    assert [one for one in sorted(found) if re.search(OPTION, one) and not COMMAND.search(one)] == []
