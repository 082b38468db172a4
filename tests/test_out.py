"""What --out names: a folder, or one file of the format that its suffix says; where folders are made."""

from functools import partial
from pathlib import Path
from typing import get_args

import pytest

import attnscope
from attnscope.api.ablate import QUESTIONS
from attnscope.api.why import NAME as WHY_NAME
from attnscope.cli.option_groups import DRAWN, parameters
from attnscope.cli.output import Writing, check_writable, settle_figures
from attnscope.errors import UsageError
from attnscope.export import manifest
from attnscope.figures.style import ImageFormat
from attnscope.model.selection import may_be_one_head
from attnscope.studies import atlas
from attnscope.studies import comparison as differences
from attnscope.studies.ablation import Ablation
from attnscope.studies.budgets import BudgetCosts
from attnscope.studies.knockout_records import KnockoutResult
from attnscope.studies.patching import PatchedPairs
from attnscope.studies.study_folder import claim
from attnscope.utils.folders import KINDS, OTHERS, PICTURES, TABLES, check
from attnscope.utils.tables import FORMATS
from helpers.command_line import SENTENCE, call
from helpers.commands import COMMANDS

SUFFIXES = (*PICTURES, *TABLES, *OTHERS)
RIVER = "the bank of the river, the bank of the"
BEGINS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".parquet": b"PAR1", ".arrow": b"ARROW1"}
WRITING = {  # the group of each command that says where files go
    command: group
    for command, (run, _) in COMMANDS.items()
    for group in run.groups
    if issubclass(group, Writing) and "out" in parameters(*run.groups)
}
HEATMAP = ("draw", SENTENCE, "-q", "--select", "L1H4")
WHY = ("why", RIVER, "--head", "L3H0", "--key", "river", "-q")
KNOCKOUT = ("knockout", RIVER, "--key", "river", "--random", "0", "-q", "--over", "layers")
PATCH = ("patch", RIVER, "--corrupted", RIVER.replace("river", "field"), "--random", "0", "-q", "--over", "layers")


KEEPERS = {  # by the file that says what fills a folder: what refuses one that another kind fills
    manifest.NAME: partial(manifest.check, now={}),
    differences.NAME: partial(differences.check_folder, asked={}),
    **{
        f"{readings}/{study}.json": partial(claim, readings=readings, study=study, facts={})
        for readings, study in (
            *((one, one) for one in ("knockout", "ablation", *QUESTIONS)),
            *(("readings", "scan"), ("texts", "corpus"), ("budgets", "budget"), ("patching", "patch")),
        )
    },
}


def test_the_suffixes_are_those_that_are_written():
    assert {name.removeprefix(".") for name in TABLES} == set(FORMATS)
    assert {name.removeprefix(".") for name in PICTURES} == set(get_args(ImageFormat))


@pytest.mark.parametrize("own", KEEPERS)
def test_no_kind_of_result_is_written_into_the_folder_of_another(own, tmp_path):
    refuses = KEEPERS[own]
    for kind, name in ((kind, name) for kind, names in KINDS.items() for name in names if own not in names):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
        with pytest.raises(UsageError, match=f"holds {kind} \\({(folder / name).name}\\)"):
            refuses(folder, force=False)
        refuses(folder, force=True)


def test_every_study_says_in_its_folder_what_kind_it_is():
    known = {name for names in KINDS.values() for name in names}
    finished = {atlas.NAME, differences.NAME, WHY_NAME}
    finished |= {f"{one.stem}.json" for one in (KnockoutResult, PatchedPairs, BudgetCosts, Ablation)}
    assert {"manifest.json", "run.json", "checkpoints.parquet", *KEEPERS, *finished} <= known


def test_every_command_that_writes_says_where():
    assert {"heads", "draw", "relations", "batch", "scan", "knockout", "parity", "view"} <= set(WRITING)


@pytest.mark.parametrize("command", WRITING)
def test_the_name_of_a_file_is_never_a_folder(command, tmp_path):
    group = WRITING[command]
    more = {"sources": ["corpus.txt"]} if command == "batch" else {}
    assert command == "batch" or not group.of_folders
    allowed = {"view": (".html", ".htm"), "parity": (".json",)}.get(command, group.files)
    for suffix in SUFFIXES:
        out = tmp_path / f"a{suffix}"
        if suffix in group.of_folders:
            assert group(out=out, **more).folder == out
            continue
        if suffix in allowed:
            assert (group(out=out, **more).file, group(out=out, **more).folder) == (out, None)
            continue
        with pytest.raises(UsageError) as refused:
            group(out=out, **more)
        assert str(out.with_suffix("")) in refused.value.hint
        assert "--image" not in refused.value.hint or "image" in parameters(*COMMANDS[command][0].groups)


def test_in_python_the_name_of_a_file_is_no_folder_either(demo, tmp_path):
    seen = attnscope.capture(demo, SENTENCE)
    picture, table = tmp_path / "maps.pdf", tmp_path / "heads.tsv"
    assert [*seen.export(picture, figures=["overview"]), *seen.export(table)] == [picture, table]
    assert (picture.read_bytes()[:4], table.read_text()[:5]) == (b"%PDF", "layer")
    for name, how, says in [
        ("a.png", {"figures": ["overview", "metrics"]}, r"2 are drawn.*figures=\["),
        ("a.csv", {"tables": False}, "there is no table to write to"),
        ("a.html", {}, "expected a folder; name one: .*a$"),
    ]:
        with pytest.raises(UsageError, match=says):
            seen.export(tmp_path / name, **how)
    for study in ("a.png", "a.csv"):
        with pytest.raises(UsageError, match="expected a folder"):
            check(tmp_path / study, "scan", None, {}, force=True)
    assert sorted(tmp_path.iterdir()) == [table, picture]


def test_a_folder_may_be_called_so(tmp_path):
    (tmp_path / "a.png").mkdir()
    for out in (tmp_path / "a.png", tmp_path / "v1.5", tmp_path / "model.gguf"):
        written = WRITING["scan"](out=out)
        assert (written.folder, written.file) == (out, None)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (HEATMAP, "fig.pdf"),
        ((*HEATMAP[:3], "--figures", "metrics"), "made/METRICS.PNG"),
        (("rollout", SENTENCE, "-q"), "rolled.svg"),
        (WHY, "why.svg"),
        pytest.param((*HEATMAP, "--figures", "layers"), "fig.svg", marks=pytest.mark.e2e),
        pytest.param(("heads", SENTENCE, "-q", "--select", "1.4"), "fig.png", marks=pytest.mark.e2e),
        pytest.param(KNOCKOUT, "fig.pdf", marks=pytest.mark.e2e),
        pytest.param(PATCH, "fig.pdf", marks=pytest.mark.e2e),
        pytest.param(
            ("knockout", RIVER, "--keep", "stream:1+4", "-q", "--over", "layers"), "b.png", marks=pytest.mark.e2e
        ),
    ],
)
def test_one_picture_is_one_file_of_that_format(arguments, name, tmp_path):
    out = tmp_path / name
    call(*arguments, "--out", str(out)).ok()
    assert out.read_bytes().startswith(BEGINS[out.suffix.lower()])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [out]


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads", SENTENCE, "-q", "--sort", "sink"),
        ("keys", SENTENCE, "-q"),
        pytest.param(("relations", SENTENCE, "-q", "--over", "heads"), marks=pytest.mark.e2e),
        pytest.param(("text", SENTENCE, "-q", "--query", "last"), marks=pytest.mark.e2e),
        pytest.param(("rollout", SENTENCE, "-q"), marks=pytest.mark.e2e),
        pytest.param(WHY, marks=pytest.mark.e2e),
        pytest.param(KNOCKOUT, marks=pytest.mark.e2e),
        pytest.param(PATCH, marks=pytest.mark.e2e),
    ],
)
def test_one_table_is_what_a_pipe_gets(arguments, tmp_path):
    out = tmp_path / "table.csv"
    printed = call(*arguments, "--out", str(out)).ok().out
    assert out.read_bytes() == printed
    out.write_text("of before")
    call(*arguments, "--format", "jsonl", "--out", str(tmp_path / "table.jsonl")).ok()
    assert (tmp_path / "table.jsonl").read_bytes() == call(*arguments, "--format", "jsonl").ok().out


@pytest.mark.e2e
def test_a_run_is_drawn_again_into_one_file(tmp_path):
    run = tmp_path / "run"
    call("heads", SENTENCE, "-q", "--top-k", "all", "--figures", "overview", "--out", str(run)).ok()
    again = ("draw", str(run), "-q", "--out", str(tmp_path / "fig.pdf"))
    call(*again, "--figures", "overview").ok()
    assert (tmp_path / "fig.pdf").read_bytes().startswith(b"%PDF")
    assert "several are drawn; choose a head, --select L1H4" in call(*again).refusal


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*HEATMAP[:3],), "fig.pdf is one picture, and several are drawn; choose a head, --select L1H4, or a figure"),
        ((*HEATMAP[:3], "--select", "3"), "--select 3 names several heads"),
        ((*HEATMAP, "--figures", "overview,heads"), "several are drawn"),
        (("heads", SENTENCE, "--figures", "heads"), "several are drawn"),
        ((*HEATMAP, "--image", "svg"), "--out fig.pdf and --image svg name two formats; leave out --image"),
        (("scan", "demo"), "--out fig.pdf: expected a folder; write --out fig --image pdf"),
        (("keys", SENTENCE), "a file in .csv, .tsv, .jsonl, .parquet, .arrow; write --out fig"),
        (KNOCKOUT[:-2], "there is no picture to write to fig.pdf; take heads or layers one by one with --over heads"),
    ],
)
def test_what_is_no_one_picture_is_refused(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in call(*arguments, "--out", "fig.pdf").refusal
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("one", ["L1H4", "1.4", "last.0", "L-1H0", "cross.1.4", "@induction", "(3, 1)"])
def test_expressions_that_may_name_one_head(one):
    assert may_be_one_head(one)


@pytest.mark.parametrize("several", ["3", "*.0", "0-3.1", "1.0-2", "L1H4,L2H1", "enc", "cross.1", "L1H*"])
def test_expressions_that_name_several_heads(several):
    assert not may_be_one_head(several)


@pytest.mark.parametrize(
    "command", [name for name, (run, _) in COMMANDS.items() if "out" in parameters(*run.groups) and name in WRITING]
)
def test_an_option_of_pictures_needs_a_picture(command):
    groups = COMMANDS[command][0].groups
    for name, one in parameters(*groups).items():
        if DRAWN in one.extra:
            for out in (None, *[Path("a.csv")] * (command != "batch")):  # batch may call a folder so
                with pytest.raises(UsageError, match=f"--{one.spelled} is about pictures, and none is written"):
                    settle_figures(groups, {"out": out, name: "pdf"}, {name})
            assert settle_figures(groups, {"out": None, name: "pdf"}, ()) == {}  # of a manifest or a file


def test_a_table_is_sent_to_a_file_in_the_format_of_its_name():
    refusal = call("compare", "a", "--compare-text", "b", "--out", "x.parquet").refusal
    assert "write --out x, or send the table there: --format parquet > x.parquet" in refusal


@pytest.mark.parametrize(
    ("command", "out", "instead"),
    [
        ("draw", "x.csv", "a table: attnscope heads TEXT --out x.csv"),
        ("keys", "x.png", "a picture: attnscope draw TEXT --out x.png"),
    ],
)
def test_a_file_that_another_command_makes_is_named_with_it(command, out, instead):
    assert call(command, SENTENCE, "--out", out).refusal.endswith(f", or make {instead}")


def test_image_without_out_is_refused():
    assert "--image is about pictures, and none is written" in call("heads", SENTENCE, "--image", "pdf").refusal


def test_at_most_three_levels_of_folders_are_made_and_none_at_the_root(tmp_path):
    for folder in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "a" / "b"):
        check_writable(folder)
    with pytest.raises(UsageError, match=r"there is no folder .*such; check the path, or make it: mkdir -p"):
        check_writable(tmp_path / "with" / "no" / "such" / "dir")
    root = Path(tmp_path.anchor)
    for folder in (root / "no-such-folder", root / "no-such-folder" / "runs"):
        with pytest.raises(UsageError, match=r"there is no folder .*no-such-folder; check|not writable"):
            check_writable(folder)


def test_a_mistyped_page_makes_nothing(tmp_path):
    said = call("view", SENTENCE, "--out", str(tmp_path / "with" / "no" / "such" / "dir" / "page.html")).refusal
    assert f"there is no folder {tmp_path / 'with' / 'no' / 'such'}" in said
    assert not list(tmp_path.iterdir())
