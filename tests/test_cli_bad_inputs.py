"""What cannot be meant, found or read: one line on stderr with the next step, an exit code, and nothing written."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.command_line import ATTNSCOPE, HANGS, call, on_terminal, spawn, tree
from helpers.folders import TOKENIZER_FILES, edit_config, saved
from helpers.snapshots import as_kept

TEXT = ("--text", "the river bank")
LONG = " ".join(["the river bank is green"] * 8)
USAGE, MODEL, INPUT = 2, 3, 4
# What a library says, how many devices there are, where the tests run, and names of hundreds of letters.
VARIES = re.compile(
    r"(?<=read: )[^;]*|(?<=loaded: )[^;]*|(?<=damaged: )[^;]*|(?<=runs: )/\S*|(?<=here )\(.*?\)|(.)\1{20,}\S*"
)

# What is typed after `attnscope`, and the exit code; `snapshots/messages.json` has the messages.
CASES = [
    # commands and flags
    (("hedas",), USAGE),
    (("heads", "--txt", "a"), USAGE),
    (("heads", "--text"), USAGE),
    (("heads", "the", "bank"), USAGE),
    (("heads", "--modle", "demo"), USAGE),
    (("info", "demo", "other"), USAGE),
    (("heads", *TEXT, "--sort", "focsu"), USAGE),
    (("metrics", "inducton"), USAGE),
    (("metrics", "zzzz"), USAGE),
    (("heads", *TEXT, "--top", "0"), USAGE),
    (("heads", *TEXT, "--top", "many"), USAGE),
    (("heads", *TEXT, "--top-k", "0"), USAGE),
    (("heads", *TEXT, "--top-k", "²"), USAGE),
    (("relations", *TEXT, "--top-k", "1" * 5000), USAGE),
    (("relations", *TEXT, "--over", "layers"), USAGE),
    (("relations", *TEXT, "--query", "zebra"), INPUT),
    (("relations", *TEXT, "--key", "zebra"), INPUT),
    (("relations", *TEXT, "--min-weight", "high"), USAGE),
    (("relations", *TEXT, "--min-weight", "nan"), USAGE),
    (("heads", *TEXT, "--format", "xml"), USAGE),
    (("info", "--format", "csv"), USAGE),
    (("info", "--tokens", "128,many"), USAGE),
    (("info", "--tokens", "²"), USAGE),
    (("heads", *TEXT, "--weights", "logits"), USAGE),
    (("heads", *TEXT, "--group", "words", "--weights", "scores"), USAGE),
    (("relations", *TEXT, "--group", "words", "--weights", "value"), USAGE),
    (("heads", *TEXT, "--set", "scale=log", "--weights", "scores"), USAGE),
    (("heads", *TEXT, "--metrics", "keys_59"), USAGE),
    (("heads", *TEXT, "--metrics", "mass"), USAGE),
    (("heads", *TEXT, "--by", "layer"), USAGE),
    (("heads", *TEXT, "--image", "gif"), USAGE),
    (("heads", *TEXT, "--truncate", "middle"), USAGE),
    (("draw", *TEXT), USAGE),
    (("rollout", *TEXT, "--group", "lines"), USAGE),
    (("rollout", *TEXT, "--select", "0"), USAGE),
    # what a person types who knows other tools, or has just begun
    (("head", "the bank"), USAGE),
    (("--json", "heads", "the bank"), USAGE),
    (("--top", "3", "heads", "the bank"), USAGE),
    (("heads", "the bank", "demo"), USAGE),
    (("heads", "the bank", "L1H4"), USAGE),
    (("explain", "the bank", "L1H4"), USAGE),
    (("compare", "the bank", "the river"), USAGE),
    (("serve", "demo"), USAGE),
    (("metrics", "focus", "entropy"), USAGE),
    (("heads", *TEXT, "--layer", "3"), USAGE),
    (("heads", *TEXT, "--steps"), USAGE),
    (("heads", *TEXT, "-v", "-q", "--json"), USAGE),
    (("heads", *TEXT, "--dtype", "fp16"), USAGE),
    (("heads", *TEXT, "--quantize", "int8"), USAGE),
    (("heads", *TEXT, "--format", "xls"), USAGE),
    (("heads", *TEXT, "--dpi", "200"), USAGE),
    (("heads", *TEXT, "--set", "nonsense=7"), USAGE),
    (("heatmap", *TEXT, "--figures", "head", "--out", "runs"), USAGE),
    (("heatmap", *TEXT, "--cmap", "virdis", "--out", "runs"), USAGE),
    (("heatmap", *TEXT, "--out", "map.gif"), USAGE),
    (("view", *TEXT), USAGE),
    (("view", *TEXT, "--out", "page"), USAGE),
    (("view", *TEXT, "--out", "page.pdf"), USAGE),
    (("batch",), USAGE),
    (("batch", "absent.jsonl", "--out", "runs"), USAGE),
    (("batch", "{files}/pairs.jsonl"), USAGE),
    (("batch", "{files}/pairs.jsonl", "--out", "runs", "--tables", "head"), USAGE),
    (("batch", "{files}/good.txt", "--out", "runs", "--text-field", "body"), USAGE),
    (("heads", "{files}/pairs.jsonl"), USAGE),
    (("knockout", *TEXT), USAGE),
    (("knockout", *TEXT, "--keep", "stream"), USAGE),
    (("patch", *TEXT), USAGE),
    (("patch", "--texts", "{files}/lone.jsonl", "-q"), USAGE),
    (("why", *TEXT), USAGE),
    (("why", *TEXT, "--head", "L1H4", "--query", "17", "-q"), INPUT),
    (("explain", *TEXT), USAGE),
    (("compare", *TEXT), USAGE),
    (("compare", *TEXT, "--align", "x"), USAGE),
    (("serve", "--idle", "5"), USAGE),
    (("doctor", "--fix"), USAGE),
    # selections
    (("heads", *TEXT, "--select", "27"), USAGE),
    (("heads", *TEXT, "--select", "0.9"), USAGE),
    (("heads", *TEXT, "--select", "first"), USAGE),
    (("relations", *TEXT, "--select", "1-0"), USAGE),
    (("heads", *TEXT, "--select", "9" * 5000), USAGE),
    (("heads", *TEXT, "--select", ""), USAGE),
    (("patch", *TEXT, "--corrupted", ""), INPUT),
    (("compare", *TEXT, "--compare-text", " "), INPUT),
    (("view", *TEXT, "--compare-text", "", "--out", "page.html"), INPUT),
    (("knockout", *TEXT, "--key", "bank", "--foil", ""), INPUT),
    (("compare", *TEXT, "--with", "the wide river"), USAGE),
    (("knockout", *TEXT, "--key", "bank", "--mode", "zero"), USAGE),
    (("heads", *TEXT, "--out", "heads.xlsx"), USAGE),
    (("heads", *TEXT, "--out", "heads.docx"), USAGE),
    (("draw", *TEXT, "--out", "map.jpg", "--select", "L1H4"), USAGE),
    (("draw", *TEXT, "--out", "map.png", "--select", "L1H4", "--cmap", "zzzz"), USAGE),
    # devices, dtypes and flags of loading
    (("heads", *TEXT, "--device", "gpu"), USAGE),
    (("heads", *TEXT, "--device", "cuda:99"), USAGE),
    (("heads", *TEXT, "--dtype", "int8"), USAGE),
    (("heads", *TEXT, "--set", "device_map=even"), USAGE),
    (("heads", *TEXT, "--set", "device_map=auto", "--device", "cpu"), USAGE),
    (("heads", *TEXT, "--quantize", "2bit"), USAGE),
    (("heads", *TEXT, "--revision", "main"), USAGE),
    (("heads", *TEXT, "--model", ""), USAGE),
    # texts and files
    (("heads",), USAGE),
    (("heads", *TEXT, "--file", "{files}/good.txt"), USAGE),
    (("heads", "the bank", *TEXT), USAGE),
    (("relations", "the bank", "--file", "{files}/good.txt"), USAGE),
    (("explain", "the bank", "--toy"), USAGE),
    (("heads", "{files}/good.txt"), USAGE),
    (("heads", "absent.txt"), USAGE),
    (("text", "notes/absent.md"), USAGE),
    (("heads", "absent/run1"), USAGE),
    (("heads", "demo"), USAGE),
    (("heads", ""), INPUT),
    (("heads", "-"), INPUT),
    (("heads", "--config", "{files}/no_text.yaml"), USAGE),
    (("info", "demo", "--model", "demo"), USAGE),
    (("scan",), USAGE),
    (("ablate",), USAGE),
    (("scan", "demo", "--model", "demo"), USAGE),
    (("ablate", "demo", "--model", "demo"), USAGE),
    (("heads", "--text", ""), INPUT),
    (("heads", "--text", " \n"), INPUT),
    (("heads", "--text", "-"), INPUT),
    (("heads", "--file", "-"), INPUT),
    (("heads", "--file", "{files}/empty.txt"), INPUT),
    (("heads", "--file", "{files}/absent.txt"), INPUT),
    (("heads", "--file", "{files}"), INPUT),
    (("heads", "--file", "{files}/latin1.txt"), INPUT),
    (("heads", "--file", "{files}/utf16.txt"), INPUT),
    (("heads", "--file", "f" * 300), INPUT),
    (("heads", "--text", LONG), INPUT),
    (("relations", "--text", LONG), INPUT),
    (("heads", *TEXT, "--chat"), USAGE),
    (("heads", "--chat", "--text", "[]", "--model", "demo"), INPUT),
    (("heads", "--chat", "--text", '["hi"]', "--model", "demo"), INPUT),
    (("heads", "--chat", "--text", '[{{"role": "user"}}]', "--model", "demo"), INPUT),
    (("heads", "--chat", "--file", "{files}/latin1.txt", "--model", "demo"), INPUT),
    # what one model, or one text, cannot have
    (("patch", "{files}/pairs.jsonl"), USAGE),
    (("heads", "--ids", "0 1 2"), INPUT),
    (("heads", *TEXT, "--target", "le chat"), USAGE),
    (("heads", *TEXT, "--picture", "{files}/good.txt"), MODEL),
    (("patch", *TEXT, "--corrupted", "the wide river bank", "--what", "pattern", "-q"), INPUT),
    (("patch", *TEXT, "--corrupted", "the wide river bank", "--what", "key", "-q"), INPUT),
    (("why", *TEXT, "--head", "1", "-q"), USAGE),
    (("explain", *TEXT, "--head", "1,4", "-q"), USAGE),
    (("knockout", *TEXT, "--key", "river", "--over", "head"), USAGE),
    # where to write
    (("heads", *TEXT, "--out", "{files}/good.txt"), USAGE),
    (("heads", *TEXT, "--out", "{files}/good.txt/runs"), USAGE),
    (("draw", *TEXT, "--out", "{files}/dangling/runs"), USAGE),
    (("relations", *TEXT, "-q", "--out", "/dev/null"), USAGE),
    # configurations
    (("heads", *TEXT, "--config", "{files}/absent.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}"), USAGE),
    (("heads", *TEXT, "--config", "{files}/bad.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}/typo.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}/type.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}/list.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}/range.yaml"), USAGE),
    (("heads", *TEXT, "--config", "{files}/clash.yaml"), USAGE),
    # models
    (("heads", *TEXT, "--model", "./absent"), MODEL),
    (("heads", *TEXT, "--model", "absent.gguf"), MODEL),
    (("heads", *TEXT, "--model", "{files}/absent.gguf"), MODEL),
    (("info", "/no/such/model"), MODEL),
    (("heads", *TEXT, "--model", "nobody/nothing", "--offline"), MODEL),
    (("heads", *TEXT, "--model", "a b"), MODEL),
    (("heads", *TEXT, "--model", "m" * 300), MODEL),
    (("heads", *TEXT, "--model", "{models}/good/config.json"), MODEL),
    (("heads", *TEXT, "--model", "{models}/no_tokenizer"), MODEL),
    (("heads", *TEXT, "--model", "{models}/bad_tokenizer"), MODEL),
    (("heads", *TEXT, "--model", "{models}/no_config"), MODEL),
    (("heads", *TEXT, "--model", "{models}/bad_config"), MODEL),
    (("heads", *TEXT, "--model", "{models}/odd_config"), MODEL),
    (("heads", *TEXT, "--model", "{models}/no_weights"), MODEL),
    (("heads", *TEXT, "--model", "{models}/truncated"), MODEL),
    (("heads", *TEXT, "--model", "{models}/no_file"), MODEL),
    (("heads", *TEXT, "--model", "{models}/pickle"), MODEL),
    (("heads", *TEXT, "--model", "{models}/wrong_shape"), MODEL),
    (("info", "{models}/reformer"), MODEL),
    (("heads", *TEXT, "--model", "{models}/reformer"), MODEL),
    (("heads", *TEXT, "--model", "{models}/resnet"), MODEL),
    (("heads", *TEXT, "--model", "{models}/unknown_type"), MODEL),
    (("heads", *TEXT, "--model", "{models}/remote"), MODEL),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with every file and model that the cases name."""
    root = tmp_path_factory.mktemp("place")
    _files(root / "files")
    _models(root / "models")
    (root / "here").mkdir()
    return root


def _files(folder: Path) -> None:
    folder.mkdir()
    contents = {
        "good.txt": b"the river bank",
        "empty.txt": b"",
        "latin1.txt": b"the caf\xe9",
        "utf16.txt": "the bank".encode("utf-16"),
        "bad.yaml": b"text: [a",
        "typo.yaml": b"modle: demo",
        "type.yaml": b"top: many",
        "list.yaml": b"- top",
        "range.yaml": b"top: 0",
        "no_text.yaml": b"top: 3",
        "clash.yaml": b"group: words\nweights: scores",
        "pairs.jsonl": b'{"text": "a river", "corrupted": "a field"}\n',
        "lone.jsonl": b'{"id": 7, "text": "a river"}\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "dangling").symlink_to(folder / "nowhere")


def _models(folder: Path) -> None:
    good = saved(folder / "good", vocab_size=2000, num_hidden_layers=2, max_position_embeddings=16)

    tokenizer = json.loads((good / TOKENIZER_FILES[1]).read_text())
    (good / TOKENIZER_FILES[1]).write_text(json.dumps(tokenizer | {"chat_template": None}))

    def copy(name: str, *without: str) -> Path:
        return Path(shutil.copytree(good, folder / name, ignore=shutil.ignore_patterns(*without)))

    copy("no_tokenizer", "tokenizer*")
    (copy("bad_tokenizer") / "tokenizer.json").write_text('{"model": 3}')
    copy("no_config", "config.json")
    (copy("bad_config") / "config.json").write_text("{")
    edit_config(copy("odd_config"), num_attention_heads="four")
    copy("no_weights", "model.safetensors")
    weights = copy("truncated") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights.parent.parent / "good" / weights.name), "a")}
    (copy("no_file", "model.safetensors") / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy("pickle", "model.safetensors") / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    edit_config(copy("wrong_shape"), hidden_size=32)
    edit_config(copy("unknown_type"), model_type="llama99")
    edit_config(copy("remote"), model_type="llama99", auto_map={"AutoModelForCausalLM": "code.Model"})
    for name in ("reformer", "resnet"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name}))
        for file in (TOKENIZER_FILES[0], "model.safetensors"):
            shutil.copy(good / file, folder / name)


def typed(arguments):
    """The arguments with their folders; commands that load a model read the tiny one unless they name another."""
    words = [word.format(files="../files", models="../models") for word in arguments]
    loads = words[0] in ("heads", "relations", "draw", "rollout")
    names_model = {"--model", "--config"} & set(words) or not loads
    return words if names_model else [words[0], "--model", "../models/good", *words[1:]]


@pytest.fixture(scope="module")
def refused(place):
    """{what was typed: how it ended}, of all cases."""
    before, here = tree(place), os.getcwd()
    os.chdir(place / "here")
    try:
        results = {arguments: call(*typed(arguments)) for arguments, _ in CASES}
    finally:
        os.chdir(here)
    assert tree(place) == before, "something was written"
    return results


def in_words(arguments):
    return " ".join(word if len(word) < 60 else f"{word[:20]}..." for word in arguments)


def test_there_are_enough():
    assert len(CASES) >= 45
    assert len({in_words(arguments) for arguments, _ in CASES}) == len(CASES)


def test_messages_are_as_they_were(refused):
    """What each says, in one file: a change of words is `UPDATE_SNAPSHOTS=1 pytest -n 0` of this file."""
    messages = {in_words(arguments): VARIES.sub("...", result.err.rstrip()) for arguments, result in refused.items()}
    assert as_kept("messages", messages)


@pytest.mark.parametrize(("arguments", "code"), CASES, ids=lambda value: str(value)[:60])
def test_one_line_and_the_next_step(arguments, code, refused):
    result = refused[arguments]
    assert (result.code, result.out) == (code, b"")
    assert result.err.startswith("attnscope: ")
    assert result.err.count("\n") == 1
    assert len(result.err) < 1500 or "1111" in result.err or "9999" in result.err
    assert "Traceback" not in result.err
    message, _, step = result.err.rstrip("\n").rpartition("; ")
    assert message
    assert step


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=() if index % 48 == 0 else pytest.mark.e2e) for index in range(0, len(CASES), 12)],
)
def test_a_process_of_its_own_says_the_same(place, refused, index):
    arguments, code = CASES[index]
    result = spawn(*typed(arguments), cwd=place / "here")
    assert (result.code, result.out, result.err) == (code, b"", refused[arguments].err)


def test_binary_tables_are_refused_on_a_terminal(place):
    for format in ("parquet", "arrow"):
        code, shown = on_terminal(["heads", *TEXT, "--format", format], 100)
        assert code == 2
        assert shown.startswith(f"attnscope: --format {format} is binary; redirect it")


def test_bytes_of_the_command_line_that_are_not_utf8(place):
    done = subprocess.run([*ATTNSCOPE, "heads", "--text", b"the caf\xe9"], capture_output=True, timeout=HANGS)
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"--text is not UTF-8: byte 0xE9 at offset 7" in done.stderr


def test_a_folder_without_permission(place, tmp_path, monkeypatch):
    """The permission is taken away, and for root, who may write anywhere, the system's answer is what others get."""
    tmp_path.chmod(0o500)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
    result = call("heads", *TEXT, "--model", str(place / "models" / "good"), "--out", str(tmp_path / "runs"))
    assert result.code == 2
    assert "is not writable" in result.err


def test_no_command_gets_the_help():
    result, asked = call(), call("--help")
    assert (result.code, result.out, result.err) == (0, asked.out, "")
    assert b"  heads " in result.out


def test_the_tiny_model_itself_is_good(place):
    call("heads", *TEXT, "--model", str(place / "models" / "good")).ok()
