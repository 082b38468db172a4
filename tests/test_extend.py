"""What CONTRIBUTING.md says that an extension touches is all that it takes: done on a copy, run there, and left out."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnscope
from attnscope.studies.ablation import copy as copied
from helpers.command_line import ATTNSCOPE, Result
from helpers.own import attentions

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from extend import EXTENSIONS, Cost, extend  # noqa: E402

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "attnscope"
TEXT = "the financial bank is located on river bank by the river"
EDITED = {  # files of existing code, at most
    "a metric": 1,
    "a collector": 0,
    "an intervention": 0,
    "an option": 1,
    "an engine": 1,
    "a command": 1,
    "a study": 1,
}

READ = ("--text", TEXT, "--format", "csv", "-q")
STORY = ("heads", "--file", str(ROOT / "examples" / "story.txt"), "-q")
HEADS = ("heads", "--engine")
TALKING = (*HEADS, "recomputed", *READ[:-1])
INFO = ("info", "demo", "--format", "json")
COLLECTOR = f"""
import attnscope.observe.collectors.largest, json
seen = attnscope.capture(attnscope.load("demo"), {TEXT!r}, engine="fused")
print(json.dumps([kept_HQ.tolist() for kept_HQ in seen.kept["largest"].values()]))
"""
INTERVENTION = """
from attnscope.interventions.halving import Halving
import attnscope, json
from attnscope.interventions.passes import measured
from attnscope.interventions.spec import HeadSet
from attnscope.studies.ablation import copy
demo = attnscope.load("demo")
sets = [HeadSet("two", ((3, 0), (3, 1)))]
print(json.dumps(measured(demo, copy(demo, sequences=2), sets, Halving()).tolist()))
"""
NEEDS = {  # extension -> a command, or a program, that only it makes possible
    "a metric": ("heads", "--sort", "two_back", *READ),
    "a collector": ("-c", COLLECTOR),
    "an intervention": ("-c", INTERVENTION),
    "an option": (*STORY, "--role", "induction", "--top", "all", "--format", "table"),
    "an engine": (*HEADS, "recomputed", *READ),
    "a command": ("sentences", "--text", "The bank. The river.", "--format", "csv", "-q"),
    "a study": ("silence", "--select", "1-2.*", "--out", "runs", *READ),
}
REFUSED_AT_ONCE = ("an option", "a command", "a study")  # before anything large is imported
OTHER_LAYERS = ("silence", "--select", "0.*", "--out", "runs", *READ)
REFUSED = {OTHER_LAYERS: 2}
COMMANDS = (
    *NEEDS.values(),
    OTHER_LAYERS,
    ("silence", "--dry-run", *READ),
    (*HEADS, "eager", *READ),
    TALKING,
    INFO,
    (*STORY, "--format", "csv"),
    ("heads", "--help", "all"),
    ("--help",),
)
PROCESS = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from helpers.command_line import Result, call

def ran(first, *more):
    if first != "-c":
        return call(first, *more)
    with redirect_stdout(StringIO()) as out:
        exec(more[0], {})
    return Result(0, out.getvalue().encode(), "")

done = [ran(*arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([(one.code, one.out.decode(), one.err) for one in done]))
"""


def within(folder: Path, command: tuple[str, ...], **settings) -> subprocess.CompletedProcess:
    """A process that imports the copy in this folder."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}", "COLUMNS": "100"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, **settings)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Cost]]:
    """A folder with the extended package, and what each extension took."""
    folder = tmp_path_factory.mktemp("copy")
    return folder, extend(folder)


@pytest.fixture(scope="module")
def said(copy: tuple[Path, dict[str, Cost]]) -> dict[tuple[str, ...], Result]:
    """{command: what it ended with} in a process of the copy."""
    done = within(copy[0], (sys.executable, "-c", PROCESS), input=json.dumps(COMMANDS))
    assert done.returncode == 0, done.stderr
    results = [Result(code, out.encode(), err) for code, out, err in json.loads(done.stdout)]
    for command, result in zip(COMMANDS, results, strict=True):
        assert result.code == REFUSED.get(command, 0), result.err
    return dict(zip(COMMANDS, results, strict=True))


@pytest.mark.parametrize("what", EXTENSIONS)
def test_it_takes_the_files_that_the_guide_names(what: str, copy: tuple[Path, dict[str, Cost]]) -> None:
    [line] = [line for line in GUIDE.splitlines() if line.startswith(f"| {what} |")]
    edited, new, lines = copy[1][what]
    assert len(edited) <= EDITED[what]
    assert sorted(edited + new) == sorted(EXTENSIONS[what])
    assert all(f"`{name}`" in line for name in (*edited, *(Path(name).with_stem("NAME") for name in new)))
    assert lines >= len(edited + new)


def rooms_of_the_guide() -> list[str]:
    """The names at the beginning of its list's lines, in their order."""
    block = GUIDE.partition("## The rooms")[2].split("```")[1]
    return re.findall(r"^  (\w+)/? ", block, re.MULTILINE)


def files_of_the_guide() -> list[tuple[str, str]]:
    """(file of the package or the checkout; what is to be in it, "" for the file alone), of the walk and the table."""
    sections = GUIDE.partition("## The walk of one text")[2].partition("## Habits")[0]
    return re.findall(r"`([a-z_]+/[\w/]+\.(?:py|js|json))`(?:\s+`([A-Za-z_.]+)`)?", sections)


def defined(path: Path) -> set[str]:
    """What a file defines: `name`, and `Class.name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        name = getattr(node, "name", "") or ast.unparse(getattr(node, "target", getattr(node, "targets", [node])[0]))
        names |= {name, *(f"{name}.{inner.name}" for inner in getattr(node, "body", []) if hasattr(inner, "name"))}
    return names


def test_the_guide_lists_every_room_once_each_after_those_that_it_imports_from() -> None:
    rooms = rooms_of_the_guide()
    assert sorted(rooms) == sorted(["errors", *(path.name for path in PACKAGE.iterdir() if is_room(path))])
    for place, room in enumerate(rooms):
        sources = [path.read_text(encoding="utf-8") for path in sorted((PACKAGE / room).rglob("*.py"))]
        used = {name for source in sources for name in re.findall(r"^ *from attnscope\.(\w+)", source, re.MULTILINE)}
        assert used & set(rooms) <= set(rooms[: place + 1]), room


def is_room(path: Path) -> bool:
    return path.is_dir() and path.name != "__pycache__" and any(path.iterdir())


def test_every_file_and_name_of_the_walk_is_there() -> None:
    places = files_of_the_guide()
    assert sum(bool(name) for _, name in places) > 20
    for file, name in places:
        if "NAME" in file:
            assert (PACKAGE / file).parent.is_dir(), file
            continue
        path = PACKAGE / file if (PACKAGE / file).exists() else ROOT / file
        assert path.exists(), file
        assert not name or name in defined(path), (file, name)


@pytest.mark.parametrize(
    "what", [one if one in REFUSED_AT_ONCE else pytest.param(one, marks=pytest.mark.e2e) for one in EXTENSIONS]
)
def test_what_it_adds_is_refused_where_it_is_left_out(what: str, tmp_path: Path) -> None:
    extend(tmp_path, without=what)
    program = NEEDS[what][0] == "-c"
    done = within(tmp_path, (*(ATTNSCOPE[:1] if program else ATTNSCOPE), *NEEDS[what]))
    assert done.returncode == (1 if program else 2), done.stdout + done.stderr
    assert not done.stdout


@pytest.mark.e2e
def test_the_metric_is_measured_on_the_new_engine_as_python_loops_have_it(demo, said) -> None:
    weights = attnscope.capture(demo, TEXT, engine="eager").weights
    rows = said[NEEDS["an engine"]].rows
    assert len(rows) == 24
    for row in rows:
        matrix = weights[int(row["layer"])][int(row["head"])].tolist()
        expected = [matrix[query][query - 2] for query in range(2, len(matrix))]
        assert float(row["two_back"]) == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    eager = said[(*HEADS, "eager", *READ)].rows
    assert float(eager[0]["entropy"]) == pytest.approx(float(rows[0]["entropy"]), abs=1e-5)


@pytest.mark.e2e
def test_the_engine_has_its_cost_in_what_info_says(said: dict[tuple[str, ...], Result]) -> None:
    costs = json.loads(said[INFO].out)["costs"]
    assert costs
    for cost in costs:
        assert cost["engines"]["recomputed"] == cost["eager_bytes"] > 0


@pytest.mark.e2e
def test_the_kept_thing_is_the_largest_of_each_row(demo, said: dict[tuple[str, ...], Result]) -> None:
    kept = json.loads(said[NEEDS["a collector"]].out)
    expected = attentions(demo.model, demo.tokenizer(TEXT).input_ids)
    for kept_HQ, weights_HQK in zip(kept, expected, strict=True):
        for row, weights_QK in zip(kept_HQ, weights_HQK.tolist(), strict=True):
            assert row == pytest.approx([max(weights) for weights in weights_QK], abs=1e-5)


@pytest.mark.e2e
def test_the_intervention_loses_what_is_lost_by_hand(demo, said: dict[tuple[str, ...], Result]) -> None:
    task, both = copied(demo, sequences=2), 2 * demo.model.config.head_dim

    def halve(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (torch.cat([args[0][..., :both] / 2, args[0][..., both:]], -1),)

    hook = demo.model.model.layers[3].self_attn.o_proj.register_forward_pre_hook(halve)
    with torch.no_grad():
        logits = [demo.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1) for ids in task.ids]
    hook.remove()
    found = json.loads(said[NEEDS["an intervention"]].out)
    for (whole, halved), one, ids, rows in zip(found, logits, task.ids, task.rows, strict=True):
        expected = -sum(float(one[row, ids[row + 1]]) for row in rows) / len(rows)
        assert halved == pytest.approx(expected, abs=1e-5)
        assert whole != pytest.approx(expected, abs=1e-3)


@pytest.mark.e2e
def test_heads_are_sorted_by_the_metric(said: dict[tuple[str, ...], Result]) -> None:
    scores = [float(row["two_back"]) for row in said[NEEDS["a metric"]].rows]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.e2e
def test_the_option_is_in_the_help_and_leaves_heads_of_its_role(said: dict[tuple[str, ...], Result]) -> None:
    assert b"--role ROLE" in said["heads", "--help", "all"].out
    rows = said[(*STORY, "--format", "csv")].rows
    expected = {f"L{row['layer']}H{row['head']}" for row in rows if row["role"] == "induction"}
    assert 0 < len(expected) < len(rows)
    assert set(re.findall(r"^ *(L\d+H\d+) ", said[NEEDS["an option"]].out.decode(), re.MULTILINE)) == expected


@pytest.mark.e2e
def test_the_engine_is_named_where_it_ran_and_help_lists_three(said: dict[tuple[str, ...], Result]) -> None:
    assert "engine recomputed (output model" in said[TALKING].err
    assert b"auto|eager|fused" in said["heads", "--help", "all"].out


@pytest.mark.e2e
def test_the_command_is_in_the_list_and_prints_its_table(said: dict[tuple[str, ...], Result]) -> None:
    assert b"sentences" in said[("--help",)].out
    assert [row["sentence"].strip() for row in said[NEEDS["a command"]].rows] == ["<s>", "The bank.", "The river."]


@pytest.mark.e2e
def test_the_study_costs_what_layers_without_attention_cost_by_hand(demo, said: dict[tuple[str, ...], Result]) -> None:
    ids = torch.tensor([demo.tokenizer(TEXT).input_ids])

    def loss() -> float:
        with torch.no_grad():
            logits = demo.model(ids).logits[0].log_softmax(-1).double()
        return -sum(float(logits[at, ids[0, at + 1]]) for at in range(ids.shape[1] - 1)) / (ids.shape[1] - 1)

    intact = loss()
    rows = said[NEEDS["a study"]].rows
    assert [row["set"] for row in rows] == ["L1", "L2"]
    for layer, row in enumerate(rows, 1):
        silence = demo.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
            lambda module, args: (torch.zeros_like(args[0]),)
        )
        assert float(row["effect"]) == pytest.approx(loss() - intact, abs=1e-5)
        silence.remove()


@pytest.mark.e2e
def test_the_study_leaves_its_record_says_its_cost_and_refuses_the_folder_of_another(
    copy: tuple[Path, dict[str, Cost]], said: dict[tuple[str, ...], Result]
) -> None:
    assert json.loads((copy[0] / "runs" / "silence.json").read_text())["schema"] == "silence/1"
    assert b"4 sets of heads, on 1 text: at most" in said["silence", "--dry-run", *READ].out
    assert "runs" in said[OTHER_LAYERS].err
    assert "silence" in said[OTHER_LAYERS].err
