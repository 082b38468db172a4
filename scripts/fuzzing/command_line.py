"""Arguments, configuration files and standard input."""

from __future__ import annotations

import os
import pwd
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fuzzing.cache import compiled, made_of
from fuzzing.made import shallow
from fuzzing.trying import Ended, Try, heads, kind
from fuzzing.words import NASTY, NUMBERS, REGEXES, TEXT, word

NUMBERED = (
    "memory=", "positions=", "--top", "--top-k", "--min-weight", "--device", "--select", "--query", "--seed",
    "--tokens", "--atol", "shard_size=", "batch_tokens=", "num_actors=", "num_gpus_per_actor=",
    "--generate", "--sequences", "--random",
)  # fmt: skip

NAMED = (
    "--model", "--revision", "--file", "--config", "--out", "--sort", "--select", "--device", "--dtype", "--group",
    "device_map=", "memory=", "--top-k", "--set", "--text", "command", "metric", "info", "corpus", "parity", "explain",
    "--answer",
)  # fmt: skip

YAML = (
    "{key}: {value}", "{key}: &a {value}\nmodel: *a", "{key}: [{value}, {value}]", "? {value}\n: 1", "<<: {value}",
    "!!python/object/apply:os.system [{value}]", "{key}: !!timestamp {value}", "{key}: !!int {value}", "{value}",
    "{key}: !!float {value}", "{key}: !!binary {value}", "{key}: !!set {value}", "{key}: !!bool {value}", "- {value}",
    "{key}: !!omap [{value}]", "{key}: !foo {value}", "%YAML {value}\n---\n{key}: 1", "{key}: |\n {value}", "&a [*a]",
    "{key}: \"\\0\\x1b[2J\\u202e\"", "{key}: 2020-13-45", "{key}: 2020-01-01", "{key}: 2001-12-14t21:59:43.10-99:99",
    "---\na: 1\n---\nb: 1", "\t{key}: 1", "{key}: '{value}", "{key}: !!null {value}", "{key}: 1:2:3:4", "{key}: 0b12",
    "{key}: ~", "{key}: \"\\uD800\"", "text: \"\\uD800\"", "{key}: .inf", "{key}: -.nan", "\"{key}\": 1\n{key}: 2",
    "figures: {{key}: {value}}",
)  # fmt: skip
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


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
    if option == "--sequences":
        return Try([rng.choice(("scan", "ablate")), str(shallow()), "-q", "--dry-run", option, value])
    if option == "--random":
        asked = rng.choice((["knockout", "--key", "0"], ["patch", "--corrupted", "the bank"]))
        return Try([*asked, "-q", "--model", str(shallow()), "--text", "the river", option, value])
    if option in ("shard_size=", "batch_tokens=", "num_actors=", "num_gpus_per_actor="):
        return Try(["batch", "-", "--to-stdout", "jsonl", "-q", "--set", option + value], TEXT.encode())
    if option == "--top" and rng.random() < 0.5:
        return Try(["relations", "-q", "--text", TEXT, "--top", value], terminal=True)
    return heads(*_given(option, value), terminal=rng.random() < 0.3)


def _given(option: str, value: str) -> tuple[str, str]:
    """The words that give an option, or a setting `memory=`, a value."""
    return ("--set", option + value) if option.endswith("=") else (option, value)


@kind
def names(rng: random.Random, folder: Path) -> Try:
    option = rng.choice(NAMED)
    said = word(rng)
    if rng.random() < 0.3:
        said += word(rng)
    if option == "--out":
        return heads("--out", str(folder / "runs") + "/" + said.replace("/", "|")[:200], terminal=True)
    if option == "--revision":
        return heads("--model", "owner/none", "--revision", said)
    if option == "command":
        return Try([said])
    if option == "metric":
        return Try(["metrics", said], terminal=True)
    if option == "info":
        return Try(["info", said], terminal=True)
    if option == "corpus":
        return Try(["batch", "-q", said, "--out", str(folder / "runs")])
    if option == "parity":
        return Try(["parity", "-q", "--select", "0", "--out", str(folder / "x") + said[:200].replace("/", "|")])
    if option == "explain":
        return Try(["explain", "-q", "--text", TEXT, "--head", said])
    return heads(*_given(option, said), terminal=True)


KEYS = (
    "model", "text", "top", "top_k", "min_weight", "config", "out", "scale", "select", "positions", "memory", "file",
    "figures", "dpi",
)  # fmt: skip


@kind
def yaml_files(rng: random.Random, folder: Path) -> Try:
    lines = [
        rng.choice(YAML).replace("{key}", rng.choice(KEYS)).replace("{value}", rng.choice((*NASTY, *NUMBERS)))
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    document = rng.choice(
        ("\n".join(lines),) * 12 + (LAUGHS, "[" * 20_000, "{a: " * 20_000, "top: " + "9" * 5000, "- " * 9000)
    )
    path = folder / "run.yaml"
    path.write_bytes(document.encode(errors="surrogatepass"))
    return heads("--config", str(path), "--top", "1")


@kind
def standard_input(rng: random.Random, folder: Path) -> Try:
    stdin = rng.choice((None, folder, b"", b"\xff", b"\x00", b"\x1b[2J", b" \n", "é".encode("utf-16")))
    arguments = rng.choice(
        (["heads", "-q", "--text", "-"], ["heads", "-q", "--file", "-"], ["batch", "-q", "-", "--to-stdout", "jsonl"])
    )
    return Try(arguments, stdin, terminal=rng.random() < 0.5)


WHOLE = (  # commands that need no standard input
    ["heads", "-q", "--out", "runs", "--figures", "top"], ["view", "-q", "--out", "page.html"], ["tokens", "-q"],
    ["keys", "-q"], ["why", "-q", "--head", "0.0"], ["explain", "-q", "--head", "0.0"],
)  # fmt: skip
READS = (  # and those that read it
    ["run", "-"], ["heads", "-q", "--text", "-"], ["view", "-q", "--file", "-"],
    ["heads", "-q", "--ids", "-"], ["tokens", "-q", "--file", "-"], ["batch", "-q", "-", "--to-stdout", "jsonl"],
    ["patch", "-q", "--texts", "-"], ["knockout", "-q", "--texts", "-"], ["heads", "-q", "--chat", "--file", "-"],
)  # fmt: skip


@kind
def closed_streams(rng: random.Random, folder: Path) -> Try:
    """Standard streams that were closed before the command began: what writes files writes them all the same."""
    closed = rng.choice(((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)))
    if rng.random() < 0.5:
        return Try([*rng.choice(READS)], None if 0 in closed else b"\n", closed=closed)

    def after(ended: Ended) -> Iterable[str]:
        return [] if ended.code == 0 else [f"left with {ended.code} where its streams are closed"]

    asked = [*rng.choice(WHOLE), "--model", str(shallow()), "--text", TEXT]
    return Try(asked, None, closed=closed, after=after)


FAR = [f"--define=g{n}=g{n + 1}" for n in range(300)]  # of each other, without an end in sight
EXPRESSIONS = (
    "last", "bank#2", "0-3", "/(a+)+$/", "/((a|a)*)*b/", "/(/", "bank#" + "9" * 400, "9" * 5000, "0-" + "9" * 30,
    "-1", "L0H0", "bank,bank," * 3000, "a" * 5000, "g0", "all", "@x", "(((((", "word:", "re:(a+)+$", "turn:user",
    "!last", "~bank", "bank+1",
)  # fmt: skip


@kind
def expressions(rng: random.Random, folder: Path) -> Try:
    """Tokens as they are asked about."""
    (folder / "text.txt").write_text(f"{TEXT} {'a' * 3000}")
    said = [rng.choice((*EXPRESSIONS, *REGEXES, word(rng))) for _ in range(3)]
    options = rng.sample(("--query", "--key", "--define", "--select", "--group", "--sort"), 2)
    asked = [f"{option}={'g0=' * (option == '--define')}{one}" for option, one in zip(options, said, strict=False)]
    if rng.random() < 0.2:
        count = rng.choice((3, 60, 300))
        last = rng.choice((f"g{count}", f"g{count}", "g0"))
        asked = ["--query=g0", *FAR[:count], f"--define={last}={said[0]}"]
    return heads("--file", str(folder / "text.txt"), "--truncate", "right", *asked, terminal=rng.random() < 0.5)


def _unknown(number: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {number}")


@kind
def environments(rng: random.Random, folder: Path) -> Try:
    """Variables, a home and a cache of models that are not as they should be."""
    hub = folder / "hub" / "hub"
    model = hub / f"models--{word(rng)[:100].replace('/', '|').encode(errors='replace').decode()}"
    (model / "blobs").mkdir(parents=True)
    if rng.random() < 0.3:
        (model / "blobs" / "x").symlink_to("nowhere")
    typed = {"_ATTNSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "attnscope\nheads\n--model\n", "COMP_CWORD": "3"}
    numba = ["heads", "-q", "--engine", "numba", "a"]
    command = rng.choice((["doctor"], ["doctor", "--format", "json"], [], ["metrics"], numba))
    changed: dict[str, str | None] = {"HF_HOME": str(hub.parent), **(typed if not command else {})}
    names = ("COLUMNS", "LANG", "TERM", "HOME", "HF_HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS", "TZ")
    for name in rng.sample(names, rng.choice((0, 1, 2))):
        said = word(rng).replace("../", "")  # what is written there stays in the folder
        changed[name] = rng.choice((*NUMBERS, said.encode(errors="replace").decode()))
    lost, kernel = rng.random() < 0.3, compiled()
    if lost:  # a user whom the system does not know
        changed |= {"HOME": None, "NUMBA_CACHE_DIR": None}

    def before() -> None:
        made_of(*kernel)
        if lost:
            pwd.getpwuid = _unknown

    def after(ended: Ended) -> Iterable[str]:
        if command[:1] == ["doctor"] and ended.code == 2:
            yield "doctor does not say what it can"

    return Try(command, environment=changed, before=before, terminal=True, after=after)


@kind
def large(rng: random.Random, folder: Path) -> Try:
    """What takes more room or time than there is, if it is not refused first."""
    path, what = folder / "large", rng.choice(("sequences", "sparse", "words", "line", "ids", "yaml"))
    if what == "sequences":
        many = rng.choice(("1000000000", "9" * 18))
        return Try([rng.choice(("scan", "ablate")), "-q", "demo", "--dry-run", "--sequences", many])
    if what == "sparse":
        path.touch()
        os.truncate(path, rng.choice((2**30, 2**40)))
        return heads(rng.choice(("--file", "--ids", "--config")), str(path), "--truncate", "right")
    content = {"words": b"bank river " * 11_000_000, "line": b"x" * 120_000_000, "ids": b"[" + b"5," * 10**7 + b"5]"}
    path.write_bytes(content.get(what, b"a: [" + b"1," * 10**7))
    option = {"ids": "--ids", "yaml": "--config"}.get(what, "--file")
    return Try(["heads", "-q", option, str(path), "--truncate", "right"])
