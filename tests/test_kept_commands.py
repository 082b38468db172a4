"""Command lines that stand in people's scripts: what they read and write stays as it is, letter by letter."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
from collections import defaultdict

import pytest
import typer

from attnscope.cli.app import COMMANDS, app, command_named
from attnscope.cli.config import typed_settings
from helpers.command_line import HANGS, SENTENCE, call
from helpers.corpora import jsonl, rows
from helpers.forks import shim
from helpers.snapshots import SNAPSHOTS

HEADS = 24  # of the demo model, in 4 layers
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def shell(tmp_path):
    """Runs a line of bash in a folder with a text and a corpus; returns what it prints."""
    (tmp_path / "text.txt").write_text(SENTENCE)
    jsonl(tmp_path / "corpus.jsonl", ["the river bank", "the bank"])

    def run(line):
        env = os.environ | {"PATH": f"{shim()}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", "-o", "pipefail", "-c", line]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=HANGS)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    return run


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_names_of_the_commands():
    names = "heads relations keys text heatmap view rollout explain tokens batch scan compare ablate parity info"
    assert all(command_named(name) for name in [*names.split(), "metrics", "doctor"])


def typed_before():
    """What README, docs and help of commit 6797ef80 had one type, by the command that it means now."""
    lines = defaultdict(list)
    for line in (SNAPSHOTS / "typed.txt").read_text(encoding="utf-8").splitlines():
        words = shlex.split(line)
        lines[command_named(words[0])].append(words)
    return lines


TYPED = typed_before()


@pytest.mark.parametrize("command", TYPED)
def test_what_was_typed_before_is_read_as_then(command):
    """Each line is parsed as its command's, settings and hidden names among them."""
    for words in TYPED[command]:
        group = typer.main.get_command(app)
        outer = group.make_context("attnscope", [*words])
        name, named, rest = group.resolve_command(outer, [*outer._protected_args, *outer.args])
        assert name == words[0]
        with named.make_context(name, rest, parent=outer) as inner:
            assert inner.info_name == command
            typed_settings(inner, inner.command.groups, inner.params.get("set"))


LONG = {"scan", "ablate", "--keep", "--whole"}  # seconds rather than parts of one
ELSEWHERE = re.compile(
    r"[A-Z]+\d?|\.\.\.|\[ID\]|runs/.*|/shared/.*|(?!examples/|README).*\.(jsonl|txt|gz|png|jpg|wav|flac|yaml)"
)
REFUSED = {  # what lacks what it needs, and what asks for a token that the text has not
    "relations --weights logit": 2,
    "heatmap 'the financial bank is located on river bank' --query last --key bank": 2,
    "view --why L3H0": 2,
    "tokens 'the bank is on the river' --query lake": 4,
}


def is_short(words):
    """Whether a line is run here in little time: on the demo and files of the project, without files of its own."""
    models = [words[i + 1] for i, word in enumerate(words) if word in ("-m", "--model")]
    own = {"--out", "-o", "serve", "batch"} & {*words} or any(ELSEWHERE.fullmatch(word) for word in words)
    long = (LONG & {*words} and "--dry-run" not in words) or max(map(len, words)) > 150  # letters of a text
    return not (own or long or {*models} - {"demo"}) and len(words) > 1


@pytest.mark.e2e
@pytest.mark.parametrize("command", [name for name in TYPED if any(map(is_short, TYPED[name]))])
def test_what_was_typed_before_runs(command, monkeypatch):
    """Those lines that are short; text and ids that a line does not give are piped."""
    monkeypatch.chdir(SNAPSHOTS.parents[1])
    for words in filter(is_short, TYPED[command]):
        given = b"[0, 423, 1919]" if "--ids" in words else SENTENCE.encode()
        result = call(*words, stdin=given)
        assert result.code == REFUSED.get(shlex.join(words), 0), (words, result.err)
        assert bool(result.out) == (result.code == 0), words


def test_most_lines_that_were_typed_are_short():
    short = [shlex.join(words) for lines in TYPED.values() for words in filter(is_short, lines)]
    assert len(short) > 80
    assert {*REFUSED} < {*short}


def test_the_lines_that_were_typed_are_of_nearly_all_commands():
    assert sum(map(len, TYPED.values())) > 290
    assert set(COMMANDS) - set(TYPED) == {"run", "budgets", "depth"}  # which had other names, or none
    for words in ("heatmap", "serve --run", "serve --stop", "knockout --keep", "heads --from", "--ascending"):
        parts = words.split()
        assert any(set(parts) <= {*line} for lines in TYPED.values() for line in lines), words


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            "heatmap 'the river bank' --select L1H4 --figures heads --out c",
            "draw 'the river bank' --select L1H4 --figures heads --out b",
        ),
        (
            "knockout 'the bank of the river' --keep top:2 --over layers",
            "budgets 'the bank of the river' --keep top:2 --over layers",
        ),
        ("heads 'the river bank' --sort entropy --ascending", "heads 'the river bank' --sort=-entropy"),
        ("heads --from a/manifest.json", "heads a"),
        ("serve --run lines", "run lines"),
    ],
)
def test_what_was_typed_before_gives_the_same_now(shell, before, now):
    shell("attnscope heads 'a river bank' --figures overview --out a -q && echo 'keys a' > lines")
    first, second = (shell(f"attnscope {line}") for line in (before, now))
    assert first.replace("c/", "b/") == second != ""


@pytest.mark.e2e
def test_heads_writes_heatmaps_as_png_and_tables_as_csv(shell, tmp_path):
    printed = table(shell(f'attnscope heads --model demo --text "{SENTENCE}" --out runs/bank'))
    run = tmp_path / "runs" / "bank"
    written = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    pictures = {name for name in written if name.endswith(".png")}
    assert written - pictures == {"heads.csv", "relations.csv", "manifest.json"}
    heads = {name for name in pictures if name.startswith("heads/")}
    assert pictures - heads == {"overview.png", "top.png"}
    assert len(heads) == 8  # those with a role, at most
    assert all((run / name).read_bytes().startswith(PNG) for name in pictures)
    kept = table((run / "heads.csv").read_text())
    assert {(row["layer"], row["head"]) for row in kept} == {(row["layer"], row["head"]) for row in printed}
    assert len(kept) == len(printed) == HEADS
    relations = table((run / "relations.csv").read_text())
    assert {"layer", "head", "query", "query_token", "key", "key_token", "weight"} <= set(relations[0])


def test_one_text_comes_the_same_by_every_way(shell):
    expected = shell(f'attnscope heads --model demo --text "{SENTENCE}" -q')
    assert len(table(expected)) == HEADS
    assert shell("cat text.txt | attnscope heads - -q | cat") == expected


@pytest.mark.e2e
def test_one_text_comes_the_same_by_other_ways(shell):
    expected = shell(f'attnscope heads --model demo --text "{SENTENCE}" -q')
    for line in (
        f'attnscope heads -t "{SENTENCE}" -m demo -q',
        f'attnscope heads "{SENTENCE}" -q',
        "attnscope heads --file text.txt -q",
        "attnscope heads -f - -q < text.txt",
        "cat text.txt | attnscope heads --text - -q",
    ):
        assert shell(line) == expected, line


def test_rows_in_a_pipe(shell):
    assert len(shell("attnscope heads --file text.txt --sort induction -q | head -3").splitlines()) == 3


@pytest.mark.e2e
def test_rows_of_chosen_tokens_and_of_ids_in_a_pipe(shell):
    lines = shell("attnscope relations -f text.txt --query last --key bank --format jsonl -q").splitlines()
    assert {json.loads(line)["query_token"] for line in lines} == {" bank"}
    assert len(table(shell('echo "[0, 423, 1919]" | attnscope keys --ids - -q'))) == 3


def test_batch_makes_a_dataset_of_a_corpus(shell, tmp_path):
    shell("attnscope batch corpus.jsonl --model demo --out runs/corpus -q")
    folder = tmp_path / "runs" / "corpus"
    assert len(rows(folder, "heads")) == 2 * HEADS
    assert [row["id"] for row in rows(folder, "texts")] == ["t0", "t1"]
    assert rows(folder, "relations")


@pytest.mark.e2e
def test_batch_prints_a_dataset_of_a_corpus_in_a_pipe(shell):
    lines = shell("attnscope batch - --input-format jsonl --to-stdout jsonl -q < corpus.jsonl").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["t0", "t1"]
