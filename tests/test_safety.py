"""What somebody else wrote runs nothing, steers no terminal, ends in time, and costs one line where it is broken."""

import base64
import ctypes
import hashlib
import json
import os
import pickle
import re
import shutil
import threading
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import attnscope
from attnscope.cli import output
from attnscope.corpus.folder import Journal
from attnscope.errors import LINE, LINES, MESSAGE, InputError, ModelError, UsageError, brief, in_a_line, visible
from attnscope.model import sources as hub
from attnscope.model.checkpoint import check_config, check_counts, check_tokenizer
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.observe.inputs import has_two_types
from attnscope.studies.probes import begins, token_pool
from helpers.command_line import Result, call, on_terminal, spawn
from helpers.folders import edit_config

TEXT = ("--text", "the river bank")
STEERING = "\x1b[2J\x07\x00\x85\x9b31m\u202e\u200b\u2028\u2029"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def steers(text: str) -> set[str]:
    """The characters that a terminal acts on, but for line ends."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo, as somebody else's model."""
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def edit(path: Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refused(*arguments: str, run: Callable[..., Result] = call, **how) -> str:
    """The one line with which a command that ends with 3 is refused."""
    result = run("heads", "-q", *TEXT, *arguments, **how)
    assert (result.code, result.out) == (3, b"")
    assert result.err.count("\n") == 1
    assert not steers(result.err)
    return result.err


# Weights


class Trap:
    """A pickle that leaves a folder behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def index(folder: Path, names: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_a_pickle_that_an_index_of_safetensors_names_is_not_read(folder: Path, tmp_path: Path) -> None:
    import torch

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "weights.bin")
    index(folder, dict.fromkeys(weights, "weights.bin"))
    assert "not a safetensors file, and others can run any code" in refused("--model", str(folder))
    (folder / "weights.bin").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    assert "--allow-pickle" in refused("--model", str(folder))
    (folder / "weights.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    index(folder, dict.fromkeys(weights, "weights.safetensors"))
    assert "damaged" in refused("--model", str(folder))
    assert not (tmp_path / "trapped").exists()


def test_an_index_that_the_config_names_is_not_read_past_the_check(folder: Path, tmp_path: Path) -> None:
    import torch

    weights = load_file(folder / "model.safetensors")
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, folder / "other.bin")
    index(folder, dict.fromkeys(weights, "other.bin"), "other.safetensors.index.json")
    edit_config(folder, transformers_weights="other.safetensors.index.json")
    loaded = load(LoadOptions(model=str(folder)))
    torch.testing.assert_close(loaded.model.model.norm.weight, weights["model.norm.weight"].float())


@pytest.mark.parametrize(
    "name", ["../weights.safetensors", "/etc/passwd", "a/../../b.safetensors", "", 3, None, ["a"], {}]
)
def test_an_index_names_files_beside_it(folder: Path, name: object) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "weights.safetensors")
    index(folder, {"a": name})
    assert "expected files in its folder" in refused("--model", str(folder))


def test_the_file_that_transformers_takes_is_the_one_that_is_judged(folder: Path) -> None:
    index(folder, {"a": "absent.safetensors"})  # beside model.safetensors, which comes first
    assert load(LoadOptions(model=str(folder))).model is not None


# What a person sees


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\x1b[2Jb", "a⟨001B⟩[2Jb"),
        ("a\r\nb\tc", "a b c"),
        ("\u202ea\u2028\x85\x00", "⟨202E⟩a⟨2028⟩⟨0085⟩⟨0000⟩"),
        ("a  b é日", "a  b é日"),
        ("\udcff", "⟨DCFF⟩"),
    ],
)
def test_a_message_is_one_line_without_controls(text: str, line: str) -> None:
    assert in_a_line(text) == line
    assert not steers(line)


def test_a_message_shows_a_line_of_a_value_and_keeps_its_ends() -> None:
    for value in ("x" * 10_000_000, "'" + "x y " * 9999 + "'", '"' + "x " * 9999 + '"', "\x1b" * 9999):
        line = in_a_line(f"expected a number, got {value}; write --top 3")
        assert len(line) <= LINE + len("expected a number, got ; write --top 3")
        assert line.startswith("expected a number, got ")
        assert line.endswith("; write --top 3")
        assert in_a_line(line) == line
    assert len(in_a_line("a b " * 10_000_000)) == MESSAGE
    assert len(brief(["x"] * 9999)) == LINE
    short = "it isn't 'a', " * 20
    assert in_a_line(short) == short


def test_errors_show_no_controls_in_python_either() -> None:
    assert str(InputError("there is no file \x1b[2J", "check")) == "there is no file ⟨001B⟩[2J; check"


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads",),
        ("relations", "--group", "words"),
        ("relations", "--group", "sentences"),
        ("relations", "--top-k", "1"),
        ("rollout",),
        ("text", "--query", "last"),
        ("draw", "--show", "--select", "1.0"),
        ("explain", "--head", "1.0"),
    ],
    ids=" ".join,
)
def test_tables_of_a_hostile_text_and_model_steer_no_terminal(folder: Path, tmp_path: Path, arguments) -> None:
    model = folder.rename(tmp_path / "m\x1b[2J\u202e[bold]x[-x]")

    named = "<\x1b[2J\u202e\u200b>"

    def name_the_last(values) -> None:
        last = max(values["model"]["vocab"], key=values["model"]["vocab"].get)
        values["added_tokens"].append({**values["added_tokens"][-1], "id": 1999, "content": named})
        values["model"]["vocab"] = {named if key == last else key: id for key, id in values["model"]["vocab"].items()}
        values["model"]["merges"] = [
            pair for pair in values["model"]["merges"] if "".join(pair).replace(" ", "") != last
        ]

    edit(model / "tokenizer.json", name_the_last)
    (tmp_path / "text").write_text(f"the bank {STEERING} by {STEERING}the river {named} bank")
    command = (*arguments, "--model", str(model), "--file", str(tmp_path / "text"))
    result = call(*command, columns=200, NO_COLOR="1").ok()
    assert "⟨001B⟩" in result.out.decode()
    assert not steers(result.out.decode())
    assert not steers(result.err)


def test_data_keeps_the_text_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the\x1b[2J \u202ebank")
    result = call("relations", "--file", str(tmp_path / "text"), "-q", "--select", "0.0", columns=100)
    assert "\x1b[2J" not in CODES.sub("", result.out.decode())
    for format in ("csv", "jsonl"):
        out = call(
            "relations", "--file", str(tmp_path / "text"), "-q", "--select", "0.0", "--format", format
        ).out.decode()
        assert ("\x1b" if format == "csv" else "\\u001b") in out
        assert "\u202e" in out


FORMATTED = [
    (command, format)
    for command, formats in {
        ("relations", "--select", "0.0"): ("csv", "tsv", "jsonl"),
        ("explain", "--head", "1.0"): ("jsonl",),
        ("tokens",): ("csv", "jsonl"),
    }.items()
    for format in formats
]


@pytest.mark.parametrize(("command", "format"), FORMATTED)
def test_data_on_a_terminal_does_not_steer_it_and_means_the_same(tmp_path: Path, command, format: str) -> None:
    (tmp_path / "text").write_text(f"the \u9280\u884c {STEERING} bank")
    asked = (*command, "-q", "--file", str(tmp_path / "text"), "--format", format)
    shown, piped = call(*asked, columns=100).out.decode(), call(*asked).out.decode()
    assert not steers(shown.replace("\t", ""))
    assert "\u9280" in shown
    assert "\u202e" in piped
    if format == "jsonl":
        assert [json.loads(line) for line in shown.splitlines()] == [
            json.loads(line) for line in piped.split("\n")[:-1]
        ]
    else:
        assert "⟨001B⟩" in shown


def test_a_batch_on_a_terminal_does_not_steer_it(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": f"the {STEERING} bank"}) + "\n")
    asked = ("batch", str(tmp_path / "corpus.jsonl"), "-q", "--to-stdout", "jsonl")
    shown, piped = call(*asked, columns=100).out.decode(), call(*asked).out.decode()
    assert not steers(shown)
    assert steers(piped)
    assert json.loads(shown) == json.loads(piped)


def test_progress_titles_and_paths_are_foreign_text_too(folder: Path, tmp_path: Path) -> None:
    model = folder.rename(tmp_path / "m\u202e[bold]x[-x]\x9b1m")
    code, shown = on_terminal(["heads", "--model", str(model), *TEXT], 120)
    assert code == 0
    assert "[bold]x[-x]" in shown
    assert not steers(CODES.sub("", shown).replace("\r", "").replace("\x1b", ""))
    code, shown = on_terminal(
        ["draw", "-q", *TEXT, "--figures", "overview", "--out", str(tmp_path / "out\x9b1m\u202e")], 120
    )
    assert code == 0
    assert "out⟨009B⟩1m⟨202E⟩/overview.png" in shown.replace("\n", "")


HEAD = ("--select", "1.0")
EVERY = [
    ("explain", "--head", "1.0"),
    ("draw", *HEAD),
    ("rollout",),
    ("heads", "--figures", "overview,metrics,layers", "--select", "1"),
]


@pytest.mark.parametrize(
    ("image", "commands", "wide"),
    [
        ("svg", [("draw", "--figures", "heads,overview", *HEAD)], "\u56f3\u3000"),
        ("svg", [("explain", "--head", "1.0")], ""),
        pytest.param("svg", [("rollout",)], "", marks=pytest.mark.e2e),
        ("svg", [("heads", "--figures", "metrics", *HEAD)], ""),
        ("png", [("draw", "--figures", "overview", *HEAD)], "\u56f3\u3000"),
        pytest.param("svg", EVERY, "\u56f3\u3000", marks=pytest.mark.e2e),
        pytest.param("png", EVERY, "\u56f3\u3000", marks=pytest.mark.e2e),
        pytest.param("pdf", [*EVERY[:3], ("heads", "--figures", "overview")], "\u56f3\u3000", marks=pytest.mark.e2e),
        pytest.param("pdf", EVERY, "\u56f3\u3000", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(command[0] for command in value),
)
def test_pictures_of_a_hostile_text_and_model_can_be_opened(
    folder: Path, tmp_path: Path, image: str, commands: list[tuple[str, ...]], wide: str
) -> None:
    """By a reader of XML, and no word in them turns the line around; a blank that is wide stays."""
    from xml.etree import ElementTree

    model = folder.rename(tmp_path / "m\x1b[2J\x01\u202e\ufffe")
    (tmp_path / "text").write_text(f"the {STEERING} by {STEERING}\uffff \ufffe")
    asked = ("-q", "--model", str(model), "--file", str(tmp_path / "text"), "--image", image)
    titled = ("--set", f"title={wide}{STEERING.replace(chr(0), '')}\ufffe\uffff")
    for command in commands:
        title = () if command[0] == "explain" else titled
        call(*command, *asked, *title, "--out", str(tmp_path / "o" / command[0])).ok()
    made = sorted((tmp_path / "o").rglob(f"*.{image}"))
    assert len(made) >= len(commands)
    for path in made:
        if image == "svg":
            said = " ".join(ElementTree.parse(path).getroot().itertext())
            assert not steers(said)
            assert not set("\u202e\u200b\ufffe") & set(said)
            without_a_font = "⟨CJK⟩ ⟨001B⟩[2J" in " ".join(said.split())
            assert path.parts[-2] == "explain" or f"{wide}⟨001B⟩[2J" in said or without_a_font
        elif image == "pdf":
            assert path.read_bytes().endswith(b"%%EOF\n")
        else:
            with Image.open(path) as picture:
                assert not steers("".join(map(str, picture.text.values())))


def test_a_table_shows_what_no_cell_was_cleaned_of(capsys, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    output.show("a\x1b[2J\u202eb\nc")
    assert capsys.readouterr().out == "a⟨001B⟩[2J⟨202E⟩b\nc\n"
    assert visible("a\nb", LINES) == "a\nb"


# Values that are none


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n"
    for before, after in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (LAUGHS, "aliases are not taken, and *a is one in line 2"),
        ("model: &a demo\ntext: *a", "aliases are not taken"),
        ("top: " + "9" * 5000, "expected a number from 1, or all, got '999"),
        ("[" * 20_000, "cannot be read"),
        ("top: !!int x", "cannot be read"),
        ("top: !!timestamp x", "cannot be read"),
        ("top: 2020-13-45", "expected a number from 1, or all, got '2020-13-45'"),
        ("top: !!timestamp 2020-01-01", "expected text, got datetime.date"),
        ("top: !!bool x", "cannot be read"),
        ('model: "a\\0b"', "expected text"),
        (r'text: "\uD800"', r"expected text, got '\ud800'"),
        (r'define: ["a=\uD800"]', "expected a list of texts"),
        ("text: [" + "abc, " * 999 + "]", "expected text, got ['abc'"),
        ("x: " + "a b " * 999_999, "is over 1048576 bytes"),
    ],
)  # fmt: skip
def test_a_configuration_of_anything_is_refused_in_one_short_line(tmp_path: Path, document: str, says: str) -> None:
    (tmp_path / "run.yaml").write_text(document)
    result = call("heads", *TEXT, "--config", str(tmp_path / "run.yaml"))
    assert (result.code, result.out) == (2, b"")
    assert says in result.err
    assert result.err.count("\n") == 1
    assert len(result.err) < 600


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("heads", *TEXT, "--set", "memory=1e999GB"), 2, "expected a size of memory, got '1e999GB'"),
        (("heads", *TEXT, "--set", "memory=" + "9" * 5000), 2, "expected a size of memory"),
        (("heads", *TEXT, "--set", f"positions={HUGE}"), 2, "--set positions: expected a whole number from 1 to"),
        (("heads", *TEXT, "--set", "positions=0"), 2, "--set positions: expected a whole number from 1 to"),
        (("heads", *TEXT, "--device", "cuda:" + "9" * 5000), 2, "expected a device"),
        (("heads", *TEXT, "--device", "cuda:²"), 2, "expected a device"),
        (("heads", *TEXT, "--model", "a/b..c"), 3, "is neither a folder nor a Hub id"),
        (("heads", *TEXT, "--model", "a/" + "b" * 120), 3, "is neither a folder nor a Hub id"),
        (("heads", *TEXT, "--model", "~nouser"), 3, "cannot be read"),
        (("heads", *TEXT, "--model", "owner/name", "--revision", "../../x"), 3, "has no revision '../../x'"),
        (("heads", *TEXT, "--model", "owner/name", "--revision", "r" * 5000), 3, "has no revision"),
        (("explain", *TEXT, "--head", "0.0", "--query", "²"), 4, "'²' is not in the text"),
        (("explain", *TEXT, "--head", "0.0", "--query", "9" * 5000), 4, "is not in the text"),
        (("explain", "--toy", "--query", "9" * 5000), 2, "--query: expected a position from 0, or last"),
        (("explain", "--scaling", "--seed", "-1"), 2, "--seed"),
        (("explain", "--scaling", "--seed", HUGE), 2, "--seed"),
        (("\x1b[2J\u202e",), 2, r"No such command '\x1b[2J\u202e'"),
        (("heads", *TEXT, "--select", "\x1b[2J"), 2, "cannot read the selection"),
        (("heads", "--file", "a\x1b[2J\u202e"), 4, "there is no file a⟨001B⟩[2J⟨202E⟩"),
        (("batch", "a\x1b[2J", "--to-stdout", "jsonl"), 2, "there is no file a⟨001B⟩[2J"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_values_beyond_what_can_be_meant(arguments, code: int, says: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (code, b"")
    assert says in result.err
    assert result.err.count("\n") == 1
    assert len(result.err) < 500
    assert not steers(result.err)


def test_a_top_beyond_any_integer_of_a_machine_is_refused() -> None:
    done = call("relations", "-q", *TEXT, "--select", "0.0", "--top-k", "1", "--top", HUGE, columns=100)
    assert (done.code, "from 1, or all" in done.err, done.err.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("value", [[], {}, 3, True, ["llama"], {"a": 1}])
def test_a_model_type_of_another_type(folder: Path, value: object) -> None:
    edit_config(folder, model_type=value)
    assert "model_type" in refused("--model", str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"vision_config": {"depths": [2, 10**9]}},
        {"layers": [{"n_routed_experts": 10**6 + 1}]},
        {"first_k_dense_replace": 10**9},
        {"attention_heads": 10**9},
    ],
    ids=str,
)
def test_a_count_that_no_model_has_is_refused_before_transformers_makes_a_list_of_it(
    folder: Path, changes: dict[str, object]
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=r"config.json says that '\w+' is .*, and no model has more than 1,000,000"):
        check_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 10**7, "n_positions": 10**7, "num_position_embeddings": 10**7, "rope_theta": 10**9},
        {"num_labels": 10**6, "eos_token_id": 2**24, "ngram_vocab_size_base": 20_000_000, "n_ctx": 2**24},
        {"num_parameters": 70 * 10**9, "n_params": 10**9, "n_words": 2 * 10**6, "num_hash_buckets": 3 * 10**6},
    ],
    ids=str,
)
def test_positions_tokens_and_bases_may_be_large(folder: Path, changes: dict[str, object]) -> None:
    edit_config(folder, **changes)
    assert check_config(folder).items() >= changes.items()


@pytest.mark.families
def test_no_config_of_transformers_counts_more() -> None:
    configs = {name: CONFIG_MAPPING[name] for name in CONFIG_MAPPING}
    made = {}
    for name, kind in configs.items():
        with suppress(Exception):  # some need parts of their own
            made[name] = kind().to_dict()
    assert len(made) > 0.9 * len(configs)
    for name, config in made.items():
        check_counts(config, Path(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": 3},
        {"text_config": [1]},
        {"auto_map": 3, "model_type": None},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"num_attention_heads": 10**400},
        {"layer_types": [[]] * 4},
        {"layer_types": 3},
        {"hidden_size": "x"},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": 10**400},
        {"rope_parameters": 3},
        {"quantization_config": 3},
        {"dtype": "\x1b[2J"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_config_whose_values_are_none(folder: Path, changes: dict[str, object]) -> None:
    edit_config(folder, **changes)
    refused("--model", str(folder))


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"3", b"null", b"\xff"], ids=len)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_that_no_reader_takes(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    refused("--model", str(folder))


def test_a_token_beyond_the_embeddings_is_the_models_fault_before_the_forward_pass(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda values: values["model"]["vocab"].update({"Ġbank": 10**6}))
    assert re.search("2000 .* 1000000", refused("--model", str(folder)))
    result = call("batch", "-", "--to-stdout", "jsonl", "-q", "--model", str(folder), stdin=b"the bank\nthe cat\n")
    assert (result.code, len(result.out.splitlines())) == (1, 1)
    assert "1000000" in result.err
    loaded = load(LoadOptions())
    with pytest.raises(InputError, match="has the id 2000"):
        attnscope.capture(loaded, [1, 2000])


def test_standard_input_that_is_closed_or_a_folder(monkeypatch) -> None:
    class Folder:
        buffer = property(lambda self: (_ for _ in ()).throw(IsADirectoryError(21, "Is a directory")))

    for stdin, says in ((None, "standard input is closed"), (Folder(), "standard input can't be read: Is a directory")):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(InputError, match=says):
            attnscope_read()


def attnscope_read() -> str:
    from attnscope.utils.files import read_text

    return read_text("-", None)


def test_a_corpus_from_a_closed_standard_input(monkeypatch) -> None:
    from attnscope.corpus.records import Corpus, find_files

    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="standard input is closed"):
        find_files(Corpus(("-",)))


@pytest.mark.parametrize(
    "changes",
    [{"failures": 3}, {"failures": [{}]}, {"first": "x"}, {"first": []}, {"items": None}, {"rows": 3}, {"more": 1}],
    ids=str,
)
def test_a_journal_of_another_shape_is_damage(tmp_path: Path, changes: dict[str, object]) -> None:
    record = {"first": 0, "items": 1, "texts": 1, "tokens": 5, "digest": "", "rows": {}, "files": {}, "failures": []}
    body = json.dumps(record | changes)
    line = f"{hashlib.sha256(body.encode()).hexdigest()[:16]} {body}\n"
    (tmp_path / "journal.jsonl").write_text(line * 2)
    with pytest.raises(InputError, match="damaged in line 1"):
        Journal(tmp_path)


def test_a_run_json_of_brackets_is_damage(tmp_path: Path) -> None:
    from attnscope.corpus.folder import check_ours

    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="damaged"):
        check_ours(tmp_path)


def test_weights_that_find_no_room_are_an_error_of_the_disk(tmp_path: Path) -> None:
    import resource
    import signal

    import torch

    from attnscope.corpus.folder import DatasetOutput, Shard
    from attnscope.corpus.items import Item
    from attnscope.corpus.rows import ShardWriter

    (tmp_path / ".partial").mkdir()
    writer = ShardWriter(tmp_path, Shard((Item(0, "a", 1, "a", "text"),)), DatasetOutput(weights=True))
    writer._weights = {"0.0": torch.zeros(100_000)}
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# Programs of others


NEVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ (9 ** 9) ** (9 ** 8) }}"
HELD = "{{ strftime_now('') }}"
CHATS = "transformers.utils.chat_template_utils.datetime"


class Held:
    """A clock that never answers: it holds the interpreter, as endless work does, and takes no processor."""

    @staticmethod
    def now() -> None:
        ctypes.PyDLL(None).sleep(60)


@pytest.mark.parametrize(
    "template", [HELD, *(pytest.param(template, marks=pytest.mark.e2e) for template in (NEVER, POWER))]
)
def test_a_template_that_never_ends_is_ended(folder: Path, monkeypatch, template: str) -> None:
    monkeypatch.setattr(CHATS, Held)
    edit(folder / "tokenizer_config.json", lambda values: values.update(chat_template=template))
    says = refused("--model", str(folder), "--chat", ATTNSCOPE_READING_SECONDS="1")
    assert " 1 seconds " in says
    assert "ATTNSCOPE_READING_SECONDS" in says


@pytest.mark.parametrize("work", [HELD, pytest.param(NEVER, marks=pytest.mark.e2e)])
def test_a_batch_goes_on_after_a_text_that_never_ends(folder: Path, monkeypatch, work: str) -> None:
    monkeypatch.setattr(CHATS, Held)
    template = "{% if 'cat' in messages[0].content %}" + work + "{% endif %}{{ messages[0].content }}"
    edit(folder / "tokenizer_config.json", lambda values: values.update(chat_template=template))
    arguments = ("batch", "-", "--to-stdout", "jsonl", "-q", "--chat", "--model", str(folder))
    result = call(*arguments, stdin=b"a bank\na cat\na river\n", ATTNSCOPE_READING_SECONDS="5")
    assert (result.code, len(result.out.splitlines())) == (1, 2)
    assert re.search(r"line 2: .*\b5 seconds", result.err)


def with_pattern(folder: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    edit(folder / "tokenizer.json", lambda values: values.update(pre_tokenizer=split))


def test_a_normalizer_that_says_of_more_than_it_has_is_refused_before_it_is_built(folder: Path) -> None:
    path = folder / "tokenizer.json"
    whole = (8).to_bytes(4, "little") + bytes(8)
    for content, held in ((b"\xff" * 99, False), (whole[:-1], False), (b"abc", False), (whole, True)):
        written = json.loads(path.read_text())
        written["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}
        path.write_text(json.dumps(written))
        with nullcontext() if held else pytest.raises(ModelError, match="damaged normalizer"):
            check_tokenizer(folder)


@pytest.mark.parametrize(
    ("key", "held"),
    [
        (r"\u0070recompiled_charsmap", False),
        (r"precompiled\u005Fcharsma\u0070", False),
        ("".join(rf"\u{ord(letter):04x}" for letter in "precompiled_charsmap"), False),
        (r"\\u0070recompiled_charsmap", True),  # a backslash, and no letter
        (r"\u0050recompiled_charsmap", True),  # another letter
    ],
)
def test_a_normalizer_s_key_may_be_spelled_in_any_way(folder: Path, key: str, held: bool) -> None:
    path, damaged = folder / "tokenizer.json", base64.b64encode(b"abc").decode()
    written = json.loads(path.read_text()) | {"normalizer": {"type": "Precompiled", "KEY": damaged}}
    path.write_text(json.dumps(written, indent=1).replace("KEY", key))
    assert ("precompiled_charsmap" in json.loads(path.read_text())["normalizer"]) is not held
    with nullcontext() if held else pytest.raises(ModelError, match="damaged normalizer"):
        check_tokenizer(folder)


def test_a_normalizer_of_sentencepiece_is_held_to_its_size_too(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    path, whole = folder / "tokenizer.model", (8).to_bytes(4, "little") + bytes(8)

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    piece, other = field(1, field(1, b"the") + b"\x15" + bytes(4)), b"\x98\x01\x07\x23\x24"  # a varint, and a group
    for content, held in ((b"abc", False), (whole[:-1], False), (whole, True), (b"", True)):
        spec = field(1, b"nmt_nfkc") + field(2, content)
        for message in (
            piece + other + field(3, spec),
            field(3, spec) + piece,
            field(3, field(2, whole)) + field(3, spec),
        ):
            path.write_bytes(message)
            with nullcontext() if held else pytest.raises(ModelError, match="damaged normalizer"):
                check_tokenizer(folder)
    path.write_bytes("tekken".encode("utf-16"))  # no message
    check_tokenizer(folder)


def test_a_normalizer_s_content_may_be_spelled_in_any_way(folder: Path) -> None:
    path, whole = folder / "tokenizer.json", base64.b64encode((8).to_bytes(4, "little") + b"\xff" * 8).decode()
    assert "/" in whole
    for content in (whole, whole.replace("/", r"\/"), whole.replace("/", r"\u002f").replace("C", r"\u0043")):
        path.write_text(json.dumps({"normalizer": {"precompiled_charsmap": "CONTENT"}}).replace("CONTENT", content))
        check_tokenizer(folder)
    path.write_text('{"precompiled_charsmap": ""}')
    with pytest.raises(ModelError, match="damaged normalizer"):
        check_tokenizer(folder)


def test_a_panic_of_the_tokenizer_is_one_line(folder: Path) -> None:
    with_pattern(folder, "(?:x+x+)+y")
    result = spawn("heads", "-q", "--model", str(folder), "--text", "x" * 2000)
    assert (result.code, result.out) == (3, b"")
    assert result.err.startswith("attnscope: the model's tokenizer cannot read the text: PanicException: ")
    assert result.err.count("\n") == 1
    result = spawn("heads", "-q", "--model", str(folder), "--text", "the bank").silent()


def test_a_tokenizer_that_never_answers_is_given_up_in_time(folder: Path, monkeypatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("attnscope.inputs.prompt._encode", lambda *_: answered.wait(60))
    assert " 1 seconds " in refused("--model", str(folder), ATTNSCOPE_READING_SECONDS="1")
    answered.set()


def test_tokens_that_decode_without_end_are_given_up_in_time(folder: Path, monkeypatch) -> None:
    loaded = load(LoadOptions(model=str(folder)))
    monkeypatch.setattr(type(loaded.tokenizer), "decode", lambda *_: Held.now())
    monkeypatch.setenv("ATTNSCOPE_READING_SECONDS", "1")
    with pytest.raises(ModelError, match="1 seconds for its vocabulary; choose another model, name token ids"):
        token_pool(loaded)


@pytest.mark.parametrize("asks", [begins, has_two_types])
def test_a_tokenizer_is_asked_small_things_within_a_deadline_too(folder: Path, monkeypatch, asks) -> None:
    loaded, answered = load(LoadOptions(model=str(folder))), threading.Event()
    monkeypatch.setattr(type(loaded.tokenizer), "__call__", lambda *_, **__: answered.wait(60))
    monkeypatch.setenv("ATTNSCOPE_READING_SECONDS", "1")
    with pytest.raises(ModelError, match="more than 1 seconds for one text"):
        asks(loaded)
    answered.set()


@pytest.mark.e2e
def test_a_slow_pattern_is_given_up_in_time(folder: Path) -> None:
    with_pattern(folder, "(?:x+x+)+y")
    text = "the bank " + " ".join(["x" * 23] * 200)  # each tries millions of ways, and none is one too many
    asked = ("--model", str(folder), "--truncate", "right", "--text", text)
    # in a process of its own, which ends: the thread that is given up tries on for half a minute
    assert " 1 seconds " in refused(*asked, run=spawn, ATTNSCOPE_READING_SECONDS="1")


def test_a_plain_text_costs_no_process(folder: Path, monkeypatch) -> None:
    def forked() -> int:
        raise AssertionError("forked")

    loaded = load(LoadOptions(model=str(folder)))
    monkeypatch.setattr(os, "fork", forked)
    assert len(attnscope.capture(loaded, "the bank").prompt) == 3
    assert len(attnscope.capture(load(LoadOptions()), "the bank", chat=True).prompt) > 3  # our own template


def test_no_process_is_left(folder: Path) -> None:
    from attnscope.inputs.prompt import reading

    loaded = load(LoadOptions(model=str(folder)))
    with reading(loaded.tokenizer, "process") as read:
        first = read("the bank", False, 100, None)
        assert read("the bank", False, 100, None) == first
        child = read._child
        with pytest.raises(InputError, match=r"\b3 tokens"):
            read("the bank", False, 1, None)
        assert read._child == child
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert first == attnscope.capture(loaded, "the bank").prompt


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the list of files from /proc")
@pytest.mark.parametrize("listed", [True, False])
def test_a_fork_holds_no_file_of_ours(tmp_path: Path, monkeypatch, listed: bool) -> None:
    from attnscope.utils.isolation import IsolatedCall

    def missing(place: str) -> list[str]:
        raise FileNotFoundError(place)

    listdir = os.listdir
    if not listed:
        monkeypatch.setattr(os, "listdir", missing)
    with (tmp_path / "open").open("w") as ours, IsolatedCall(lambda: listdir("/proc/self/fd"), "process") as there:
        assert ours.fileno() > 3
        assert sorted(map(int, there())) == [0, 1, 2, 3, 4]  # the last is the list's own


@pytest.mark.parametrize("said", ["²", "0", "-1", "x", "9" * 30])
def test_a_deadline_that_is_none(monkeypatch, said: str) -> None:
    monkeypatch.setenv("ATTNSCOPE_READING_SECONDS", said)
    with pytest.raises(UsageError, match="takes whole seconds from 1"):
        attnscope.capture(load(LoadOptions()), "the bank")


def test_a_panic_anywhere_else_leaves_with_3(monkeypatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(asked) -> None:
        raise PanicException("a bug\x1b[2J")

    monkeypatch.setattr(output, "wanted_format", panic)
    result = call("heads", *TEXT)
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert "a bug⟨001B⟩[2J" in result.err


def test_a_hub_id_that_becomes_no_path() -> None:
    with pytest.raises(ModelError):
        hub.fetch("a/b..c")
