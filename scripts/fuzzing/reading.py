"""Texts, chats, and what reads them: tokenizers and templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fuzzing.made import copied, lines, llava, model_folder, picture, sound, whisper
from fuzzing.trying import Try, heads, kind
from fuzzing.words import JSONS, NASTY, RAW_JSON, TEXT, damage, edit, word

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
LARGE = ("{{ ('a' * 6000000000)|length }}", "{% set a = ['x' * 10**9] * 9 %}{{ a|join }}")  # and quickly made
TWICE = {"type": "Replace", "pattern": {"String": "i"}, "content": "ii"}
# What a tokenizer makes of every text before it is cut up.
NORMALIZERS: tuple[Any, ...] = (
    {"type": "Precompiled", "precompiled_charsmap": "/" * 4000}, {"type": "Precompiled", "precompiled_charsmap": ""},
    *({"type": "Sequence", "normalizers": [TWICE] * count} for count in (20, 27, 31)), {"type": "Nope"},
    {"type": "Replace", "pattern": {"Regex": "(?:i+i+)+y"}, "content": ""}, {"type": "Prepend", "prepend": "x" * 10**6},
)  # fmt: skip
PATTERNS = ("(?:x+x+)+y", "(?:i+i+)+y", "(", "(?<=a+)b", "")


@kind
def targets(rng: random.Random, folder: Path) -> Try:
    """Words beside the text that are tokenised too, by a tokenizer that is slow, large or in a panic."""
    hears = rng.random() < 0.7
    model = copied(whisper() if hears else llava(), folder)
    split = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": rng.choice(PATTERNS)}}
    key, said = rng.choice((("normalizer", rng.choice(NORMALIZERS)), ("pre_tokenizer", split)))
    edit(model / "tokenizer.json", lambda values: values.update({key: said}))
    words = rng.choice(("i" * 2000, "x" * 2000, "hi", "i", word(rng)))
    given = folder / ("tone.wav" if hears else "field.png")
    given.write_bytes(sound() if hears else picture().read_bytes())
    if not hears:
        return heads("--model", str(model), "--text", "a", "--picture", str(given), "--answer", words)
    if rng.random() < 0.3:
        (folder / "corpus.jsonl").write_bytes(lines({"media": str(given), "target": words}))
        fields = ["--audio-field", "media", "--target-field", "target"]
        return Try(["batch", "-q", "corpus.jsonl", "--to-stdout", "jsonl", "--model", str(model), *fields])
    command = rng.choice((["heads"], ["view", "--out", "page.html"]))
    return Try([*command, "-q", "--model", str(model), "--audio", str(given), f"--target={words}"])


@kind
def tokenizers(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    what = rng.choice(("json", "json", "config", "class", "ids", "special", "pattern", "normalizer"))
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
    elif what == "normalizer":
        edit(model / "tokenizer.json", lambda values: values.update(normalizer=rng.choice(NORMALIZERS)))
    elif what == "special":
        words = [one.replace("\ud800", "?") or "x" for one in NASTY]
        edit(
            model / "tokenizer.json",
            lambda values: values["added_tokens"].append(
                {**values["added_tokens"][-1], "id": 1999, "content": rng.choice(words)}
            ),
        )
    else:
        split = {
            "type": "Split",
            "pattern": {"Regex": rng.choice(("(", "[", "(?<=a+)b", "\\p{Nope}", "(?:x+x+)+y", ""))},
        }
        split |= {"behavior": rng.choice(("Isolated", "Nope")), "invert": False}
        edit(model / "tokenizer.json", lambda values: values.update(pre_tokenizer=split))
    text = rng.choice((TEXT, "\x1b[2J" + TEXT, word(rng) or "x"))
    return heads("--model", str(model), "--text", text, terminal=rng.random() < 0.5)


@kind
def templates(rng: random.Random, folder: Path) -> Try:
    model, said = model_folder(folder), rng.choice((*TEMPLATES * 3, *LARGE * 3, *JSONS))
    edit(model / "tokenizer_config.json", lambda values: values.update(chat_template=said))
    seconds = {"ATTNSCOPE_READING_SECONDS": "20" if said in LARGE else "2"}
    return heads("--model", str(model), "--chat", terminal=True, environment=seconds)


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
def chats(rng: random.Random, folder: Path) -> Try:
    part = {"type": rng.choice(("text", "image", *NASTY)), "text": rng.choice((*NASTY, *JSONS))}
    call = {"function": {"name": "f", "arguments": rng.choice((*NASTY, *JSONS))}}
    contents = [{"content": one} for one in (rng.choice(NASTY), rng.choice(NASTY), [part], [rng.choice(JSONS)])]
    contents += [{"content": None, "tool_calls": rng.choice(([call], rng.choice(JSONS)))}, {"value": rng.choice(NASTY)}]
    messages = [
        {rng.choice(("role", "role", "from")): rng.choice(("user", "assistant", *NASTY)), **rng.choice(contents)}
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
    suffix = rng.choice(("jsonl", "json", "csv", "tsv", "txt", "parquet", "jsonl.gz", "txt.zst", "odd"))
    stem = rng.choice(("corpus", "a\x1b[2Jb", "\u202egnp", "a b", "a\nb", "[x]", "é"))
    path = folder / f"{stem}.{suffix}"
    path.write_bytes(b"\n".join([*rows, rng.choice((*RAW_JSON, TEXT.encode()))]))
    if suffix == "json" and rng.random() < 0.7:
        path.write_bytes(rng.choice((b"[%s]", b'{"data": [%s]}', b"[%s")) % b",".join(rows))
    where = rng.choice(
        (["--out", str(folder / "runs")], ["--to-stdout", "jsonl"], ["--dry-run", "--out", str(folder / "runs")])
    )
    more = rng.choice(
        (
            [],
            ["--set", "strict=true"],
            ["--set", "id_field=" + rng.choice(NASTY[:4]).replace("\x00", "")],
            ["--answer-field", rng.choice(("id", "text", "answer"))],
            ["--chat"],
            ["--text-field", rng.choice(("id", "spans.a", "spans.a.0", ".", "id..a"))],
            ["--spans", "a"],
        )
    )
    return Try(["batch", "-q", str(path), *where, *more])
