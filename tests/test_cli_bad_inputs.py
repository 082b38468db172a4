"""What cannot be meant, found or read: one line on stderr with the next step, an exit code, and nothing written."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.command_line import ATTNSCOPE, HANGS, call, on_terminal, spawn, tree
from helpers.folders import TOKENIZER_FILES, edit_config, saved

TEXT = ("--text", "the river bank")
LONG = " ".join(["the river bank is green"] * 8)
USAGE, MODEL, INPUT = 2, 3, 4

# what is typed after `attnscope`, the exit code, and a part of the message
CASES = [
    # commands and flags
    (("hedas",), USAGE, "No such command 'hedas'. Did you mean 'heads'?"),
    (("heads", "--txt", "a"), USAGE, "No such option: --txt. Did you mean --text?; `attnscope heads --help all` lists"),
    (("heads", "--text"), USAGE, "'--text' requires an argument"),
    (("heads", "the", "bank"), USAGE, "unexpected extra argument(s) (bank); put a text of several words in quotes"),
    (("heads", "--modle", "demo"), USAGE, "No such option: --modle. Did you mean --model?"),
    (("info", "demo", "other"), USAGE, "unexpected extra argument(s) (other); `attnscope info --help`"),
    (("heads", *TEXT, "--sort", "focsu"), USAGE, "no metric is called 'focsu'; did you mean 'focus'?"),
    (("metrics", "inducton"), USAGE, "no metric is called 'inducton'; did you mean 'induction'?"),
    (("metrics", "zzzz"), USAGE, "`attnscope metrics` lists them"),
    (("heads", *TEXT, "--top", "0"), USAGE, "--top: expected a number from 1, got 0"),
    (("heads", *TEXT, "--top", "many"), USAGE, "'--top'"),
    (("heads", *TEXT, "--top-k", "0"), USAGE, "--top-k: expected a number from 1, or all, got '0'"),
    (("heads", *TEXT, "--top-k", "²"), USAGE, "--top-k: expected a number from 1, or all, got '²'"),
    (("relations", *TEXT, "--top-k", "1" * 5000), USAGE, "--top-k: expected a number"),
    (("relations", *TEXT, "--over", "layers"), USAGE, "'--over': 'layers' is not one of 'heads', 'none'"),
    (("relations", *TEXT, "--query", "zebra"), INPUT, "zebra"),
    (("relations", *TEXT, "--key", "zebra"), INPUT, "zebra"),
    (("relations", *TEXT, "--min-weight", "high"), USAGE, "'--min-weight'"),
    (("relations", *TEXT, "--min-weight", "nan"), USAGE, "--min-weight: expected a number, got nan"),
    (("heads", *TEXT, "--format", "xml"), USAGE, "'xml' is not one of 'table', 'csv'"),
    (("info", "--format", "csv"), USAGE, "'csv' is not one of 'table', 'json'"),
    (("info", "--tokens", "128,many"), USAGE, "--tokens: expected numbers from 1, joined by commas, got '128,many'"),
    (("info", "--tokens", "²"), USAGE, "--tokens: expected numbers"),
    (("heads", *TEXT, "--weights", "logits"), USAGE, "'logits' is not one of 'softmax', 'scores', 'value'"),
    (("heads", *TEXT, "--group", "words", "--weights", "scores"), USAGE, "cannot be summed into one"),
    (("relations", *TEXT, "--group", "words", "--weights", "value"), USAGE, "norms of several keys cannot be summed"),
    (("heads", *TEXT, "--set", "scale=log", "--weights", "scores"), USAGE, "have no log scale"),
    (("heads", *TEXT, "--metrics", "keys_59"), USAGE, "did you mean 'keys_95'?"),
    (("heads", *TEXT, "--metrics", "mass"), USAGE, "mass is measured where keys are named; name them with --key"),
    (("heads", *TEXT, "--by", "layer"), USAGE, "'layer' is not one of 'kv'"),
    (("heads", *TEXT, "--image", "gif"), USAGE, "'gif' is not one of 'png', 'svg', 'pdf'"),
    (("heads", *TEXT, "--truncate", "middle"), USAGE, "'middle' is not one of 'left', 'right'"),
    (("heatmap", *TEXT), USAGE, "nowhere to draw; name a folder with --out"),
    (("rollout", *TEXT, "--group", "lines"), USAGE, "'lines' is not one of 'tokens', 'words', 'sentences'"),
    (("rollout", *TEXT, "--select", "0"), USAGE, "No such option: --select"),
    # selections
    (("heads", *TEXT, "--select", "27"), USAGE, "'27' names layer 27, but this model has layers 0 to 1"),
    (("heads", *TEXT, "--select", "0.9"), USAGE, "'0.9' names head 9, but layer 0 has heads 0 to 3"),
    (("heads", *TEXT, "--select", "first"), USAGE, "cannot read the selection 'first'"),
    (("relations", *TEXT, "--select", "1-0"), USAGE, "runs backwards"),
    (("heads", *TEXT, "--select", "9" * 5000), USAGE, "cannot read the selection"),
    (("heads", *TEXT, "--select", ""), USAGE, "cannot read the selection ''"),
    # devices, dtypes and flags of loading
    (("heads", *TEXT, "--device", "gpu"), USAGE, "expected a device auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
    (("heads", *TEXT, "--device", "cuda:99"), USAGE, "there is no cuda:99 here"),
    (("heads", *TEXT, "--dtype", "int8"), USAGE, "'int8' is not one of 'auto', 'float32'"),
    (("heads", *TEXT, "--set", "device_map=even"), USAGE, "expected a device map of auto"),
    (("heads", *TEXT, "--set", "device_map=auto", "--device", "cpu"), USAGE, "a device map places the model itself"),
    (("heads", *TEXT, "--quantize", "2bit"), USAGE, "'2bit' is not one of '8bit', '4bit'"),
    (("heads", *TEXT, "--revision", "main"), USAGE, "is a folder and has no revisions"),
    (("heads", *TEXT, "--model", ""), USAGE, "the model has no name"),
    # texts and files
    (("heads",), USAGE, "expected one text; give --text TEXT, --file FILE"),
    (("heads", *TEXT, "--file", "{files}/good.txt"), USAGE, "--text and --file were both given"),
    (("heads", "the bank", *TEXT), USAGE, "TEXT and --text were both given; give one of them"),
    (("relations", "the bank", "--file", "{files}/good.txt"), USAGE, "TEXT and --file were both given"),
    (("explain", "the bank", "--toy"), USAGE, "--toy takes no text; leave out the text"),
    (("heads", "{files}/good.txt"), USAGE, "good.txt; --file "),
    (("heads", "absent.txt"), USAGE, "there is no file absent.txt; check the path; --text absent.txt reads the name"),
    (("text", "notes/absent.md"), USAGE, "there is no file notes/absent.md"),
    (("heads", "demo"), USAGE, 'TEXT is demo, the name of a model; give a text: "..." --model demo'),
    (("heads", ""), INPUT, "--text is empty"),
    (("heads", "-"), INPUT, "standard input is empty"),
    (("heads", "--config", "{files}/no_text.yaml"), USAGE, "expected one text; give --text TEXT, --file FILE"),
    (("info", "demo", "--model", "demo"), USAGE, "MODEL and --model were both given; give one of them"),
    (
        ("scan",),
        USAGE,
        "no model was named; usage: attnscope scan MODEL [OPTIONS]; name one as MODEL, for example demo",
    ),
    (("ablate",), USAGE, "no model was named; usage: attnscope ablate MODEL [OPTIONS]; name one as MODEL, for example"),
    (("scan", "demo", "--model", "demo"), USAGE, "MODEL and --model were both given; give one of them"),
    (("ablate", "demo", "--model", "demo"), USAGE, "MODEL and --model were both given; give one of them"),
    (("heads", "--text", ""), INPUT, "--text is empty"),
    (("heads", "--text", " \n"), INPUT, "--text is empty"),
    (("heads", "--text", "-"), INPUT, "standard input is empty"),
    (("heads", "--file", "-"), INPUT, "standard input is empty"),
    (("heads", "--file", "{files}/empty.txt"), INPUT, "empty.txt is empty"),
    (("heads", "--file", "{files}/absent.txt"), INPUT, "there is no file"),
    (("heads", "--file", "{files}"), INPUT, "is a folder; name a file in it"),
    (("heads", "--file", "{files}/latin1.txt"), INPUT, "is not UTF-8: byte 0xE9 at offset 7"),
    (("heads", "--file", "{files}/utf16.txt"), INPUT, "is not UTF-8: byte 0xFF at offset 0"),
    (("heads", "--file", "f" * 300), INPUT, "File name too long"),
    (("heads", "--text", LONG), INPUT, "the text has 41 tokens, the model reads at most 16"),
    (("relations", "--text", LONG), INPUT, "or use --truncate left or --truncate right"),
    (("heads", *TEXT, "--chat"), USAGE, "this model's tokenizer has no chat template"),
    (("heads", "--chat", "--text", "[]", "--model", "demo"), INPUT, "the list of messages is empty"),
    (("heads", "--chat", "--text", '["hi"]', "--model", "demo"), INPUT, 'message 0 of the chat is "hi", not an object'),
    (("heads", "--chat", "--text", '[{{"role": "user"}}]', "--model", "demo"), INPUT, "has no 'content'"),
    (("heads", "--chat", "--file", "{files}/latin1.txt", "--model", "demo"), INPUT, "at offset 7"),
    # where to write
    (("heads", *TEXT, "--out", "{files}/good.txt"), USAGE, "good.txt is no folder"),
    (("heads", *TEXT, "--out", "{files}/good.txt/runs"), USAGE, "good.txt is no folder"),
    (("heatmap", *TEXT, "--out", "{files}/dangling/runs"), USAGE, "dangling is no folder"),
    (("relations", *TEXT, "-q", "--out", "/dev/null"), USAGE, "/dev/null is no folder"),
    # configurations
    (("heads", *TEXT, "--config", "{files}/absent.yaml"), USAGE, "No such file"),
    (("heads", *TEXT, "--config", "{files}"), USAGE, "cannot be read: Is a directory"),
    (("heads", *TEXT, "--config", "{files}/bad.yaml"), USAGE, "is not YAML"),
    (("heads", *TEXT, "--config", "{files}/typo.yaml"), USAGE, "unknown key 'modle'; did you mean 'model'?"),
    (("heads", *TEXT, "--config", "{files}/type.yaml"), USAGE, "top: expected a number or all, got 'many'"),
    (("heads", *TEXT, "--config", "{files}/list.yaml"), USAGE, "holds a list, expected options"),
    (("heads", *TEXT, "--config", "{files}/range.yaml"), USAGE, "--top: expected a number from 1, got 0"),
    (("heads", *TEXT, "--config", "{files}/clash.yaml"), USAGE, "cannot be summed into one"),
    # models
    (("heads", *TEXT, "--model", "./absent"), MODEL, "there is no folder ./absent"),
    (("heads", *TEXT, "--model", "absent.gguf"), MODEL, "there is no file absent.gguf; check the path"),
    (("heads", *TEXT, "--model", "{files}/absent.gguf"), MODEL, "absent.gguf; check the path"),
    (("info", "/no/such/model"), MODEL, "there is no folder /no/such/model"),
    (("heads", *TEXT, "--model", "nobody/nothing", "--offline"), MODEL, "neither a folder nor in the local cache"),
    (("heads", *TEXT, "--model", "a b"), MODEL, "'a b' is neither a folder nor a Hub id"),
    (("heads", *TEXT, "--model", "m" * 300), MODEL, "File name too long"),
    (("heads", *TEXT, "--model", "{models}/good/config.json"), MODEL, "is a file, expected a folder"),
    (("heads", *TEXT, "--model", "{models}/no_tokenizer"), MODEL, "has no tokenizer"),
    (("heads", *TEXT, "--model", "{models}/bad_tokenizer"), MODEL, "tokenizer"),
    (("heads", *TEXT, "--model", "{models}/no_config"), MODEL, "has no config.json"),
    (("heads", *TEXT, "--model", "{models}/bad_config"), MODEL, "is not JSON"),
    (("heads", *TEXT, "--model", "{models}/odd_config"), MODEL, "cannot be read"),
    (("heads", *TEXT, "--model", "{models}/no_weights"), MODEL, "has no weights"),
    (("heads", *TEXT, "--model", "{models}/truncated"), MODEL, "is cut short"),
    (("heads", *TEXT, "--model", "{models}/no_file"), MODEL, "is missing, and the index of the weights names it"),
    (("heads", *TEXT, "--model", "{models}/pickle"), MODEL, "pickle only"),
    (("heads", *TEXT, "--model", "{models}/wrong_shape"), MODEL, "cannot be loaded"),
    (("info", "{models}/mamba"), MODEL, "mamba has no softmax attention to read"),
    (("heads", *TEXT, "--model", "{models}/mamba"), MODEL, "mamba has no softmax attention to read"),
    (("heads", *TEXT, "--model", "{models}/vit"), MODEL, "is not a model of text"),
    (("heads", *TEXT, "--model", "{models}/unknown_type"), MODEL, "does not know the model type 'llama99'"),
    (("heads", *TEXT, "--model", "{models}/remote"), MODEL, "--trust-remote-code"),
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
    for name in ("mamba", "vit"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name}))
        for file in (TOKENIZER_FILES[0], "model.safetensors"):
            shutil.copy(good / file, folder / name)


def typed(arguments, place):
    """The arguments with their folders; commands that load a model read the tiny one unless they name another."""
    words = [word.format(files=place / "files", models=place / "models") for word in arguments]
    loads = words[0] in ("heads", "relations", "heatmap", "rollout")
    names_model = {"--model", "--config"} & set(words) or not loads
    return words if names_model else [words[0], "--model", str(place / "models" / "good"), *words[1:]]


def test_there_are_enough():
    assert len(CASES) >= 45
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize(("arguments", "code", "says"), CASES, ids=lambda value: str(value)[:60])
def test_one_line_the_next_step_and_nothing_written(place, monkeypatch, arguments, code, says):
    monkeypatch.chdir(place / "here")
    before = tree(place)
    result = call(*typed(arguments, place))
    assert (result.code, result.out) == (code, b"")
    assert says in result.err
    assert result.err.startswith("attnscope: ")
    assert result.err.count("\n") == 1
    assert len(result.err) < 1500 or "1111" in result.err or "9999" in result.err
    assert "Traceback" not in result.err
    message, _, step = result.err.rstrip("\n").rpartition("; ")
    assert message
    assert step
    assert tree(place) == before


@pytest.mark.parametrize("index", range(0, len(CASES), 12))
def test_a_process_of_its_own_says_the_same(place, index):
    arguments, code, says = CASES[index]
    result = spawn(*typed(arguments, place), cwd=place / "here")
    assert (result.code, result.out) == (code, b"")
    assert says in result.err
    assert result.err.count("\n") == 1


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
    assert (result.code, result.out) == (USAGE, b"")
    assert result.err == asked.out.decode()
    assert "  heads " in result.err


def test_the_tiny_model_itself_is_good(place):
    call("heads", *TEXT, "--model", str(place / "models" / "good")).ok()
