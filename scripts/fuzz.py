"""Hostile input of many kinds, tried on the command line: `python scripts/fuzz.py --tries 5000 --seed 1`.

One process imports everything and forks for each try. Whatever a try does, it must end in time, with an exit code that
the README lists, at most one line of error and no line longer than a message may be; nothing that steers a terminal
reaches stderr or a terminal's stdout, no traceback and no "internal error". Prints how many tries of each kind ended
with which code, and each that was flagged; leaves with 1 where there is one.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope import shown
from attnscope.model.loading import DEMO_FOLDER

CODES = {0, 1, 2, 3, 4, 5}
ERRORS = {2, 3, 4, 5}
DEADLINE = 120.0  # seconds of one try
LONGEST_LINE = shown.MESSAGE + len("attnscope: ")

# Words that are hostile anywhere.
NASTY = (
    "\x1b[2J\x1b]0;owned\x07", "a\x00b", "\u202egnp.exe", "a\u200bb\u200d\ufeff", "\x9b31m\x85", "a\u2028b\u2029c",
    "a\rb\tc\nd", "\ud800", "[bold red]x[/x]", "[/]", "{model=x}", "{0}{a!r}", "%s%n", "../../etc/passwd",
    "/etc/passwd", "~nouser/x", "~", "..", "-", "--", "", " ", "'", '"', "²", "٣", "a" * 5000, "a b " * 2000,
    "'" + "x y " * 400 + "'", "日本👩‍👩‍👧é", "a/b..c", "a--b", "a/b/c", ".git", "refs/../x", "\\", "nul", "*",
    "**/*", "[", "{",
)  # fmt: skip
NUMBERS = (
    "1e999GB", "1e999", "9" * 400, "9" * 5000, "1" + "0" * 400, "-1", "0", "²", "٣", "nan", "inf", "-inf", "1e400",
    "0x10", "1_000", "+5", " 5", "5 ", "", "1.5", "1e5", "99999999999999999999", "2147483648", "-99999999999999999999",
    "1GB", "1e-9TB", "٣GB",
)  # fmt: skip
JSONS: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, 10**400, 1e308, "", "x", "²", NASTY[0], [], [1], [[]], ["x"] * 3, {}, {"a": 1},
    {"a": {"a": {}}},
)  # fmt: skip
RAW_JSON = (
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": NaN, "a": Infinity}', b'{"\\ud800": "\\u0000"}', b"\x00" * 64,
    b'{"a"\x1b[2J: 1}',
)  # fmt: skip
NUMBERED = (
    "--memory", "--positions", "--top", "--top-k", "--min-weight", "--device", "--select", "--query", "--seed",
    "--tokens", "--atol", "--shard-size", "--batch-tokens", "--num-actors", "--num-gpus-per-actor",
    "--generate",
)  # fmt: skip
NAMED = (
    "--model", "--revision", "--file", "--config", "--out", "--sort", "--select", "--device", "--dtype", "--group",
    "--device-map", "--memory", "--top-k", "--text", "command", "metric", "info", "corpus", "parity", "explain",
    "--answer",
)  # fmt: skip
CONFIGURED = (
    "model_type", "text_config", "auto_map", "architectures", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_size", "head_dim", "vocab_size", "max_position_embeddings", "layer_types",
    "rope_parameters", "torch_dtype", "dtype", "sliding_window", "quantization_config", "transformers_weights",
    "tie_word_embeddings", "_attn_implementation", "attn_implementation", "is_decoder", "tokenizer_class",
)  # fmt: skip
TOKENIZERS = (
    "BertTokenizer", "T5Tokenizer", "GPT2Tokenizer", "CanineTokenizer", "ByT5Tokenizer", "Wav2Vec2CTCTokenizer",
    "TapasTokenizer", "LayoutLMv3Tokenizer", "WhisperTokenizer", "CpmAntTokenizer", "NoTokenizer", "os.system", "",
)  # fmt: skip
TEMPLATES = (
    "{{ raise_exception('\x1b[2J\u202e') }}", "{% for %}", "{{ messages[9].x.y }}", "{{ 1/0 }}",
    "\x1b[2J{{ messages }}",
    "{{ ''.__class__.__mro__ }}", "{{ 'a' * 10 }}", "{% include 'x' %}", "{{ range(10**9) }}", "", "{{ '\\ud800' }}",
    "{{ 9 ** 9 ** 9 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
)  # fmt: skip
RATES = (16_000, 16_000, 44_100, 0, 1, 2**32 - 1)  # samples per second
FILES = ("../x.safetensors", "/etc/passwd", "x.bin", "absent.safetensors", ".", "", "x.safetensors", *NASTY)
TEXT = "the river bank and the river"


@dataclass(frozen=True)
class Try:
    """One command: its arguments, its standard input (None: closed), whether its stdout is a terminal."""

    arguments: list[str]
    stdin: bytes | Path | None = b""
    terminal: bool = False


@dataclass(frozen=True)
class Ended:
    """How a try ended; code is None where it had to be killed."""

    code: int | None
    out: bytes
    err: bytes


Kind = Callable[[random.Random, Path], Try]
KINDS: dict[str, Kind] = {}


def kind(make: Kind) -> Kind:
    """A kind of hostile input, by its name."""
    KINDS[make.__name__] = make
    return make


def heads(*arguments: str, **how: Any) -> Try:
    """`attnscope heads` of a short text."""
    return Try(["heads", "-q", *arguments, *([] if {"--text", "--file"} & set(arguments) else ["--text", TEXT])], **how)


def model_folder(folder: Path, **config: Any) -> Path:
    """A copy of the demo, its config changed."""
    target = folder / "model"
    shutil.copytree(DEMO_FOLDER, target, ignore=shutil.ignore_patterns("*.md", "training.json", "LICENSE"))
    if config:
        edit(target / "config.json", lambda values: values.update(config))
    return target


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object in a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8", errors="surrogatepass")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON document, the first of a long list alone."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in list(entries)[:40]:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damage(rng: random.Random, path: Path) -> None:
    """A JSON file with one of its values replaced, removed or moved; or all of it."""
    if rng.random() < 0.2:
        path.write_bytes(rng.choice(RAW_JSON))
        return

    def change(values: dict[str, Any]) -> None:
        for _ in range(rng.choice((1, 1, 2))):
            *way, last = rng.choice(list(places(values)))
            holder: Any = values
            for step in way:
                holder = holder[step]
            if rng.random() < 0.2:
                del holder[last]
            else:
                holder[last] = rng.choice(JSONS)

    try:
        edit(path, change)
    except (LookupError, TypeError):  # the second change met what the first had left
        path.write_bytes(rng.choice(RAW_JSON))


@kind
def numbers(rng: random.Random, folder: Path) -> Try:
    option = rng.choice(NUMBERED)
    value = rng.choice(NUMBERS)
    if option == "--device":
        return heads("--device", f"cuda:{value}")
    if option == "--query":
        return Try(["explain", "-q", *rng.choice((["--toy"], ["--text", TEXT, "--head", "0.0"])), "--query", value])
    if option == "--seed":
        return Try(["explain", "-q", "--scaling", "--seed", value])
    if option == "--tokens":
        return Try(["info", "demo", "--tokens", value])
    if option == "--atol":
        return Try(["parity", "-q", "--atol", value, "--select", "0"])
    if option in ("--shard-size", "--batch-tokens", "--num-actors", "--num-gpus-per-actor"):
        return Try(["batch", "-", "--to-stdout", "jsonl", "-q", option, value], TEXT.encode())
    if option == "--top" and rng.random() < 0.5:
        return Try(["relations", "-q", "--text", TEXT, "--top", value], terminal=True)
    return heads(option, value, terminal=rng.random() < 0.3)


@kind
def names(rng: random.Random, folder: Path) -> Try:
    option = rng.choice(NAMED)
    word = rng.choice(NASTY).replace("\x00", "\x01")  # no argument holds a NUL
    if rng.random() < 0.3:
        word += rng.choice(NASTY).replace("\x00", "")
    if option == "--out":
        return heads("--out", str(folder / "runs") + "/" + word.replace("/", "|")[:200], terminal=True)
    if option == "--revision":
        return heads("--model", "owner/none", "--revision", word)
    if option == "command":
        return Try([word])
    if option == "metric":
        return Try(["metrics", word], terminal=True)
    if option == "info":
        return Try(["info", word], terminal=True)
    if option == "corpus":
        return Try(["batch", "-q", word, "--out", str(folder / "runs")])
    if option == "parity":
        return Try(["parity", "-q", "--select", "0", "--out", str(folder / "x") + word[:200].replace("/", "|")])
    if option == "explain":
        return Try(["explain", "-q", "--text", TEXT, "--head", word])
    return heads(option, word, terminal=True)


YAML = (
    "{key}: {value}", "{key}: &a {value}\nmodel: *a", "{key}: [{value}, {value}]", "? {value}\n: 1", "<<: {value}",
    "!!python/object/apply:os.system [{value}]", "{key}: !!timestamp {value}", "{key}: !!int {value}", "{value}",
    "{key}: !!float {value}", "{key}: !!binary {value}", "{key}: !!set {value}", "{key}: !!bool {value}", "- {value}",
    "{key}: !!omap [{value}]", "{key}: !foo {value}", "%YAML {value}\n---\n{key}: 1", "{key}: |\n {value}", "&a [*a]",
    "{key}: \"\\0\\x1b[2J\\u202e\"", "{key}: 2020-13-45", "{key}: 2020-01-01", "{key}: 2001-12-14t21:59:43.10-99:99",
    "---\na: 1\n---\nb: 1", "\t{key}: 1", "{key}: '{value}", "{key}: !!null {value}", "{key}: 1:2:3:4", "{key}: 0b12",
    "{key}: ~", "{key}: .inf", "{key}: -.nan", "\"{key}\": 1\n{key}: 2",
)  # fmt: skip
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


@kind
def yaml_files(rng: random.Random, folder: Path) -> Try:
    keys = (
        "model",
        "text",
        "top",
        "top_k",
        "min_weight",
        "config",
        "out",
        "scale",
        "select",
        "positions",
        "memory",
        "file",
    )
    lines = [
        rng.choice(YAML).replace("{key}", rng.choice(keys)).replace("{value}", rng.choice((*NASTY, *NUMBERS)))
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    document = rng.choice(
        ("\n".join(lines),) * 12 + (LAUGHS, "[" * 20_000, "{a: " * 20_000, "top: " + "9" * 5000, "- " * 9000)
    )
    path = folder / "run.yaml"
    path.write_bytes(document.encode(errors="surrogatepass"))
    return heads("--config", str(path), "--top", "1")


@kind
def configs(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    if rng.random() < 0.5:
        key = rng.choice(CONFIGURED)
        edit(model / "config.json", lambda values: values.update({key: rng.choice(JSONS)}))
    else:
        damage(rng, model / rng.choice(("config.json",) * 3 + ("generation_config.json",)))
    return heads("--model", str(model)) if rng.random() < 0.7 else Try(["info", str(model)], terminal=True)


@kind
def weights(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    file, index = model / "model.safetensors", model / "model.safetensors.index.json"
    content = file.read_bytes()
    trapped = pickle.dumps(Trap(folder / "trapped"))
    what = rng.choice(("index", "index", "header", "cut", "pickle", "flip", "other list"))
    if what in ("index", "other list"):
        name = rng.choice(FILES)
        if 0 < len(name) < 50 and not {*name} & {*"/\x00\ud800"} and name not in ("..", "."):
            (model / name).write_bytes(rng.choice((trapped, content, b"")))
        listed = rng.choice((name, name, *JSONS))
        mapped: Any = rng.choice(({"a": listed}, {"a": "model.safetensors", "b": listed}, listed))
        document = {"metadata": rng.choice(({}, *JSONS)), "weight_map": mapped}
        if what == "other list":
            index = model / "other.safetensors.index.json"
            edit(model / "config.json", lambda values: values.update(transformers_weights=index.name))
        else:
            file.unlink()
        index.write_text(json.dumps(document), encoding="utf-8")
        if rng.random() < 0.1:
            damage(rng, index)
    elif what == "header":
        header = rng.choice((*RAW_JSON, *(json.dumps({"a": one}).encode() for one in JSONS)))
        file.write_bytes(rng.choice((len(header), 2**63, 0)).to_bytes(8, "little") + header + bytes(64))
    elif what == "cut":
        file.write_bytes(content[: rng.randrange(200)])
    elif what == "flip":
        place = rng.randrange(3000)
        file.write_bytes(content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :])
    else:
        file.write_bytes(trapped)
    return heads("--model", str(model))


class Trap:
    """A pickle that leaves a folder behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@kind
def adapters(rng: random.Random, folder: Path) -> Try:
    import numpy as np
    from safetensors.numpy import save_file

    values = {"peft_type": "LORA", "base_model_name_or_path": "demo", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 2}
    values |= {"target_modules": ["q_proj"], "revision": None, "auto_mapping": None, "modules_to_save": None}
    edit(folder / "adapter_config.json", lambda config: config.update(values))
    shapes = {"lora_A": (1, 192), "lora_B": (192, 1)}
    part = "base_model.model.model.layers.{}.self_attn.q_proj.{}.weight"
    tensors = {part.format(i, name): np.ones(shapes[name], np.float32) for i in range(4) for name in shapes}
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights)
    what = rng.choice(("config", "config", "base", "cut"))
    if what == "config":
        damage(rng, folder / "adapter_config.json")
    elif what == "base":
        edit(folder / "adapter_config.json", lambda config: config.update(base_model_name_or_path=rng.choice(NASTY)))
    else:
        weights.write_bytes(weights.read_bytes()[: rng.randrange(weights.stat().st_size)])
    return heads("--model", str(folder), "--adapter", rng.choice(("merged", "beside")))


@kind
def gguf_files(rng: random.Random, folder: Path) -> Try:
    names = ("general.architecture", "llama.block_count", "tokenizer.ggml.tokens", *NASTY)
    document = b"GGUF" + struct.pack("<IQQ", rng.choice((3, 3, 2, 9)), rng.choice((0, 0, 1, 2**63)), 2)
    for name in rng.choices(names, k=2):
        said = name.encode(errors="surrogatepass")
        value = rng.choice((struct.pack("<IQ", 8, 5) + b"llama", struct.pack("<II", 4, rng.randrange(2**32)), b""))
        document += struct.pack("<Q", rng.choice((len(said), len(said), 2**62))) + said + value
    path = folder / "model.gguf"
    path.write_bytes(rng.choice((document, document, document[:20], b"GGUF", b"")))
    return heads("--model", str(path)) if rng.random() < 0.7 else Try(["info", str(path)], terminal=True)


@kind
def tokenizers(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    what = rng.choice(("json", "json", "config", "class", "ids", "special", "template", "pattern"))
    if what == "json":
        damage(rng, model / "tokenizer.json")
    elif what == "config":
        damage(rng, model / "tokenizer_config.json")
    elif what == "class":
        edit(
            model / "tokenizer_config.json",
            lambda values: values.update(tokenizer_class=rng.choice((*TOKENIZERS, *JSONS))),
        )
    elif what == "ids":
        edit(
            model / "tokenizer.json",
            lambda values: values["model"]["vocab"].update({"bank": rng.choice((10**6, 2**31, 2000))}),
        )
    elif what == "special":
        words = [word.replace("\ud800", "?") or "x" for word in NASTY]
        edit(
            model / "tokenizer.json",
            lambda values: values["added_tokens"].append(
                {**values["added_tokens"][-1], "id": 1999, "content": rng.choice(words)}
            ),
        )
    elif what == "template":
        edit(
            model / "tokenizer_config.json",
            lambda values: values.update(chat_template=rng.choice((*TEMPLATES, *JSONS))),
        )
        return heads("--model", str(model), "--chat", terminal=True)
    else:
        split = {
            "type": "Split",
            "pattern": {"Regex": rng.choice(("(", "[", "(?<=a+)b", "\\p{Nope}", "(?:x+x+)+y", ""))},
        }
        split |= {"behavior": rng.choice(("Isolated", "Nope")), "invert": False}
        edit(model / "tokenizer.json", lambda values: values.update(pre_tokenizer=split))
    text = rng.choice((TEXT, "\x1b[2J" + TEXT, rng.choice(NASTY).replace("\x00", "") or "x"))
    return heads("--model", str(model), "--text", text, terminal=rng.random() < 0.5)


@kind
def texts(rng: random.Random, folder: Path) -> Try:
    words = [rng.choice((*NASTY[:8], *NASTY[8:13], *TEXT.split())) for _ in range(rng.randrange(1, 9))]
    text = " ".join(words)[:3000]
    path = folder / "text.txt"
    path.write_bytes(text.encode(errors="surrogatepass"))
    command = rng.choice(("heads", "relations", "rollout", "explain"))
    more = {"explain": ["--head", "1.0"], "relations": ["--group", rng.choice(("words", "sentences"))]}.get(command, [])
    source = rng.choice((["--file", str(path)], ["--file", "-"]))
    return Try([command, "-q", "--truncate", "right", *source, *more], path.read_bytes(), rng.random() < 0.8)


@kind
def sounds(rng: random.Random, folder: Path) -> Try:
    wide, channels, rate = rng.choice((8, 16, 24, 32, 40, 0, 65535)), rng.choice((1, 2, 0, 65535)), rng.choice(RATES)
    data = rng.randbytes(rng.choice((0, 1, 700, 4000)))
    form = struct.pack("<HHIIHH", rng.choice((1, 1, 3, 65534)), channels, rate, 0, 4, wide)
    parts = b"WAVEfmt " + struct.pack("<I", rng.choice((16, 16, 0))) + form + b"data"
    parts += struct.pack("<I", rng.choice((len(data), 2**32 - 1))) + data
    document = b"RIFF" + struct.pack("<I", len(parts)) + parts
    start = rng.choice((b"", b"", b"fLaC", b"OggS", b"ID3", rng.randbytes(9)))
    path = folder / f"{rng.choice(('sound.wav', 'a b.mp3', 'x.flac'))}"
    path.write_bytes(start + document[: rng.choice((len(document), 30))])
    return Try(["heads", "--audio", rng.choice((str(path), "-"))], path.read_bytes(), terminal=True)


@kind
def chats(rng: random.Random, folder: Path) -> Try:
    messages = [
        {"role": rng.choice(("user", "assistant", *NASTY)), "content": rng.choice(NASTY)}
        for _ in range(rng.randrange(4))
    ]
    document = rng.choice((messages, [rng.choice(JSONS)], rng.choice(JSONS), {"messages": messages}))
    chat = json.dumps(document).encode() if rng.random() < 0.8 else b"[" + rng.choice(RAW_JSON)
    return Try(["heads", "-q", "--chat", "--truncate", "right", "--file", "-"], chat, terminal=True)


@kind
def corpora(rng: random.Random, folder: Path) -> Try:
    rows = [
        json.dumps(
            {rng.choice(("text", "id", "messages", "spans", "\x1b")): rng.choice((*JSONS, *NASTY)) for _ in range(2)}
            | rng.choice(({}, {"text": TEXT, "spans": {"a": rng.choice((*JSONS, [[rng.choice(JSONS)] * 2]))}}))
        ).encode()
        for _ in range(rng.randrange(4))
    ]
    suffix = rng.choice(("jsonl", "csv", "txt", "parquet", "jsonl.gz", "txt.zst", "odd"))
    stem = rng.choice(("corpus", "a\x1b[2Jb", "\u202egnp", "a b", "a\nb", "[x]", "é"))
    path = folder / f"{stem}.{suffix}"
    path.write_bytes(b"\n".join([*rows, rng.choice((*RAW_JSON, TEXT.encode()))]))
    where = rng.choice(
        (["--out", str(folder / "runs")], ["--to-stdout", "jsonl"], ["--dry-run", "--out", str(folder / "runs")])
    )
    more = rng.choice(
        (
            [],
            ["--strict"],
            ["--id-field", rng.choice(NASTY[:4]).replace("\x00", "")],
            ["--chat"],
            ["--text-field", "id"],
            ["--spans", "a"],
        )
    )
    return Try(["batch", "-q", str(path), *where, *more])


@kind
def folders(rng: random.Random, folder: Path) -> Try:
    """An output folder that a run has left, damaged."""
    import hashlib

    (folder / "corpus.txt").write_text(TEXT)
    runs = folder / "runs"
    runs.mkdir()
    record = {"first": 0, "items": 1, "texts": 1, "tokens": 5, "digest": "x", "rows": {}, "files": {}, "failures": []}
    record[rng.choice(list(record))] = rng.choice((*JSONS, [{}], [{"item": "x"}], [JSONS]))
    body = json.dumps(record)
    line = f"{hashlib.sha256(body.encode()).hexdigest()[:16]} {body}\n"
    journal = rng.choice((line.encode(), line.encode() * 2, b"\x1b[2J\n\n", *(one + b"\nx" for one in RAW_JSON)))
    (runs / "journal.jsonl").write_bytes(journal)
    options = {"schema": 2, "options": {"model": NASTY[0]}}
    options[rng.choice(("schema", "options", "options"))] = rng.choice(
        (*JSONS, {NASTY[0]: NASTY[2], "model": "x" * 9999})
    )
    (runs / "run.json").write_bytes(rng.choice((*RAW_JSON, *([json.dumps(options).encode()] * 9))))
    if rng.random() < 0.4:  # get past the options: let the journal be read
        (runs / "run.json").unlink()
        (runs / "journal.jsonl").rename(folder / "kept")
        made = fork(Try(["batch", "-q", str(folder / "corpus.txt"), "--tables", "heads", "--out", str(runs)]), folder)
        if made.code == 0:
            (folder / "kept").replace(runs / "journal.jsonl")
    return Try(["batch", "-q", str(folder / "corpus.txt"), "--tables", "heads", "--out", str(runs)])


@kind
def standard_input(rng: random.Random, folder: Path) -> Try:
    stdin = rng.choice((None, folder, b"", b"\xff", b"\x00", b"\x1b[2J", b" \n", "é".encode("utf-16")))
    arguments = rng.choice(
        (["heads", "-q", "--text", "-"], ["heads", "-q", "--file", "-"], ["batch", "-q", "-", "--to-stdout", "jsonl"])
    )
    return Try(arguments, stdin, terminal=rng.random() < 0.5)


@kind
def pictures(rng: random.Random, folder: Path) -> Try:
    image = rng.choice(("pdf", "pdf", "svg", "png"))
    text = "a " + " b ".join(rng.choice(NASTY[:8]) for _ in range(2))
    (folder / "text.txt").write_bytes(text.encode(errors="replace"))
    more = ["--file", str(folder / "text.txt"), "--image", image, "--out", str(folder / "runs")]
    command = rng.choice((["heatmap", "-q", "--select", "0.0"], ["rollout", "-q"], ["explain", "-q", "--head", "0.0"]))
    return Try([*command, *more])


def fork(one: Try, folder: Path) -> Ended:
    """Run a command in a fork of this process, its streams in files."""
    streams = [folder / name for name in (".in", ".out", ".err")]
    for path in streams:
        path.write_bytes(b"")
    if isinstance(one.stdin, bytes):
        streams[0].write_bytes(one.stdin)
    child = os.fork()
    if not child:
        _run(one, folder, [one.stdin if isinstance(one.stdin, Path) else streams[0], *streams[1:]])
    code, until = None, time.monotonic() + DEADLINE
    while code is None and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0 if ended else 0.005)
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Ended(code, streams[1].read_bytes(), streams[2].read_bytes())


class Screen(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _run(one: Try, folder: Path, streams: list[Path]) -> None:
    """In the fork: be `attnscope ARGUMENTS`. Never returns."""
    from attnscope.cli import main

    os.setsid()
    os.chdir(folder)
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "200", "ATTNSCOPE_READING_SECONDS": "2"}
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False) if streams[0].is_file() else _Folder()))
    sys.stdin = None if one.stdin is None else stdin  # so Python has it where it was closed
    out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = (Screen if one.terminal else io.TextIOWrapper)(out, encoding="utf-8")
    sys.stderr = io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    try:
        main(one.arguments)
    except SystemExit as left:
        sys.stdout.flush()
        os._exit(int(left.code or 0))
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(99)


class _Folder(io.RawIOBase):
    """Standard input where it is a folder: every read fails."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def steers(text: str) -> list[str]:
    """The characters of a text that steer a terminal, as code points; a joiner may stand in an emoji."""
    found = {char for char in text if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}} - {"\n"}
    return sorted(f"U+{ord(char):04X}" for char in found) if shown.visible(text, shown.LINES) != text else []


def faults(one: Try, ended: Ended, folder: Path) -> list[str]:
    """What is wrong with how a try ended."""
    err = ended.err.decode(errors="surrogateescape")
    lines = err.splitlines()
    found = []
    if ended.code not in CODES:
        found.append("took too long" if ended.code is None else f"left with {ended.code}")
    if "Traceback" in err or "internal error" in err or "panicked" in err:
        found.append("a traceback or an internal error")
    if steering := steers(err) or (steers(ended.out.decode(errors="surrogateescape")) if one.terminal else []):
        found.append(f"sent {', '.join(steering)}")
    if ended.code in ERRORS and (len(lines) != 1 or not err.startswith("attnscope: ")):
        found.append(f"{len(lines)} lines of error")
    if any(len(line) > LONGEST_LINE for line in lines):
        found.append(f"a line of {max(map(len, lines))} characters")
    if (folder / "trapped").exists():
        found.append("a pickle was run")
    return found


@dataclass
class Report:
    """Tries by kind and exit code, and what was flagged."""

    codes: dict[str, Counter[int | None]] = field(default_factory=dict)
    flagged: list[str] = field(default_factory=list)


def fuzz(tries: int, seed: int, only: tuple[str, ...] = (), seconds: float = float("inf")) -> Report:
    """So many tries, of every kind in turn, or as many as fit into the seconds; the seed and its number make each."""
    report, until, kinds = Report(), time.monotonic() + seconds, only or tuple(KINDS)
    for number in range(tries):
        if time.monotonic() > until:
            break
        name = kinds[number % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder = Path(place) / "here"  # what it stands in is a folder of its own, too
            folder.mkdir()
            one = KINDS[name](random.Random(f"{seed} {name} {number}"), folder)
            ended = fork(one, folder)
            report.codes.setdefault(name, Counter())[ended.code] += 1
            for fault in faults(one, ended, folder):
                said = ended.err.decode(errors="replace").strip()[-300:]
                report.flagged.append(f"{name} {number}: {fault}: {[word[:80] for word in one.arguments]}: {said!r}")
    return report


def import_everything() -> None:
    """What commands import, before the first fork; threads do not live through one."""
    import importlib
    import pkgutil

    import torch

    import attnscope

    late = "matplotlib.pyplot peft pyarrow.ipc pyarrow.parquet rich.progress rich.table safetensors.torch seaborn yaml"
    for name in [*(module.name for module in pkgutil.walk_packages(attnscope.__path__, "attnscope.")), *late.split()]:
        if not name.endswith("__main__") and ".triton_kernel." not in name:  # Triton may not be here
            importlib.import_module(name)
    for name in ("auto.tokenization_auto", "llama.modeling_llama", "llama.tokenization_llama"):
        importlib.import_module(f"transformers.models.{name}")
    with suppress(ModuleNotFoundError):  # what some versions of typer import while a command runs, and pydantic with it
        importlib.import_module("typer._adapters")
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), default=[])
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_everything()
    report = fuzz(asked.tries, asked.seed, tuple(asked.kind), asked.seconds)
    for name, codes in report.codes.items():
        counts = "  ".join(f"{code}: {count}" for code, count in sorted(codes.items(), key=str))
        print(f"{name:16}{sum(codes.values()):6} tries   exit {counts}")
    for line in report.flagged:
        print(f"flagged: {line}")
    print(f"{sum(sum(codes.values()) for codes in report.codes.values())} tries, {len(report.flagged)} flagged")
    return 1 if report.flagged else 0


if __name__ == "__main__":
    sys.exit(main())
