"""`scan --revision a,b`: one scan per checkpoint of a hub model, a table and a picture of them all."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from attnscope.export.study_figures import courses, stacked
from attnscope.figures import Style
from attnscope.figures.curves import GREY, HEAD_COLOURS, Course, CourseSheet, courses_figure
from attnscope.figures.fonts import Fonts
from attnscope.figures.writer import drawing
from attnscope.model import loading
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.loading import Source
from attnscope.studies.atlas import Atlas, Finding, load_atlas
from attnscope.studies.statistics import Effects
from helpers.command_line import call
from helpers.fake_hub import COMMIT, serve
from helpers.folders import saved

LATER = "89abcdef" * 5


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with two checkpoints of a tiny model."""
    root = tmp_path_factory.mktemp("hub")
    shape = {"vocab_size": 2000, "max_position_embeddings": 32, "num_hidden_layers": 1}
    early, late = (saved(root / str(seed), seed=seed, **shape) for seed in (0, 1))
    with serve(early, {LATER: late}) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", fake.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(root / "cache"))
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield fake


def atlas(effects, low):
    """An atlas of three heads with one probe held against two nulls."""
    zero = np.zeros(3)
    first = Effects(*[zero] * 10, n=np.full(3, 64))
    first = replace(first, effect=np.array(effects), low_all=np.array(low))
    second = Effects(*[zero] * 10, n=np.full(3, 64))
    findings = [Finding("induction p10", "other", first), Finding("induction p10", "shuffled", second)]
    return Atlas({(0, 0): ("induction",), (0, 1): (), (1, 0): ()}, {}, findings)


def test_courses_are_the_effects_of_the_first_null():
    atlases = {"a": atlas([0.1, 0.2, 0.3], [0.0, 0.1, 0.2]), "b": atlas([0.9, 0.2, np.nan], [0.8, 0.29, np.nan])}
    [course] = courses(atlases, [(0, 0), (0, 1), (1, 0)])
    assert (course.name, course.unit, course.named) == ("induction p10", "above other", [0])
    np.testing.assert_array_equal(course.values_RN, [[0.1, 0.2, 0.3], [0.9, 0.2, np.nan]])
    assert stacked(atlases).column("revision").to_pylist() == ["a"] * 6 + ["b"] * 6
    assert stacked(atlases).drop(["revision"]).slice(6).equals(atlases["b"].table())


def test_named_heads_are_coloured_the_same_everywhere_and_named_at_their_end():
    shown = [
        Course("one", "above other", np.array([[0.1, 0.0, 0.2], [0.2, 0.1, 0.9]]), [2]),
        Course("two", "above other", np.array([[0.1, 0.0, 0.2], [0.8, 0.1, 0.81]]), [0, 2]),
    ]
    with drawing(Fonts()):
        figure = courses_figure(CourseSheet(shown, ["L0H0", "L0H1", "L1H0"], ["a", "b"]), Style(), 1240)
    one, two = figure.axes[0], figure.axes[2]
    drawn = [{tuple(line.get_ydata()): line.get_color() for line in ax.lines} for ax in (one, two)]
    assert drawn[0] == {(0.1, 0.2): GREY, (0.0, 0.1): GREY, (0.2, 0.9): HEAD_COLOURS[0]}
    assert drawn[1] == {(0.1, 0.8): HEAD_COLOURS[1], (0.0, 0.1): GREY, (0.2, 0.81): HEAD_COLOURS[0]}
    named = {text.get_text(): text.xy[1] for text in two.texts if text.get_text().startswith("L")}
    assert named["L1H0"] == pytest.approx(0.81)
    assert named["L0H0"] < 0.8  # pushed down: it would lie on the other
    assert [text.get_text() for text in one.get_xticklabels()] == ["a", "b"]


@pytest.fixture
def alone(monkeypatch):
    """How many models that were loaded earlier are still there, whenever one is loaded; nobody collects by chance."""
    before, found, load = [], [], loading.load

    def watched(options):
        found.append(sum(one() is not None for one in before))
        loaded = load(options)
        before.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(loading, "load", watched)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.usefixtures("short_scan")
@pytest.mark.e2e
def test_each_checkpoint_is_scanned_and_all_are_shown(hub, alone, tmp_path):
    asked = ["scan", "owner/tiny", "--revision", f"main, {LATER}", "--sequences", "2", "--probe", "sink"]
    result = call(*asked, "--out", str(tmp_path), columns=160).ok()
    assert alone == [0, 0]
    assert "roles at the last" in result.out.decode()
    assert {path.name for path in tmp_path.iterdir()} == {"main", LATER, "checkpoints.parquet", "checkpoints.png"}
    rows = pq.read_table(tmp_path / "checkpoints.parquet").to_pylist()
    for name, commit, folder in (("main", COMMIT, hub.folder), (LATER, LATER, hub.commits[LATER])):
        found = load_atlas(tmp_path / name)
        said = found.facts["model"]
        assert (said["name"], said["revision"], said["weights_sha256"]) == (
            "owner/tiny",
            commit,
            weights_sha256(folder),
        )
        mine = [row["effect"] for row in rows if row["revision"] == name]
        np.testing.assert_array_equal(np.array(mine, float), np.array(found.table()["effect"].to_pylist(), float))
        other = hub.folder if name == LATER else hub.commits[LATER]
        assert [found.fits(Source("copy", one)) for one in (folder, other)] == [True, False]  # whatever its name
    assert len(rows) == 2 * len(found.table())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["owner/tiny", "--revision", "a,,b"], 2, "--revision names an empty revision; name each once"),
        (["owner/tiny", "--revision", "a,b,a"], 2, "names 'a' twice; name each once"),
        (["demo", "--revision", "a,b"], 2, "demo is a folder and has no revisions; leave out --revision"),
        (["owner/tiny", "--revision", "main,absent"], 3, "owner/tiny has no revision 'absent'"),
    ],
)
def test_bad_inputs_in_one_line(hub, arguments, code, says):
    result = call("scan", *arguments, "--sequences", "2", "-q")
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1), result.err
    assert says in result.err


def test_what_checkpoints_would_cost_is_that_of_one_each(hub):
    result = call("scan", "owner/tiny", "--revision", f"main,{LATER}", "--dry-run").ok()
    assert "revision main, 1 of 2" in result.err
    assert result.out.count(b"trials") == 1
