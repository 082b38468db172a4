"""Messages, help, docs and the page are in plain words: a list of others is looked for in all of them.

Names of options and code stand in backticks, hints as `{engine=eager}`, commands in blocks: these are left out.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnscope.cli.option_groups import parameters
from helpers.commands import COMMANDS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import words  # noqa: E402

PAGE_MEAN, PAGE_LONGEST = 25, 40  # words of a sentence, on any page
GENERATED = ("commands.md", "metrics.md")
PLAIN = {  # what is not written, as a pattern of whole words, and what to write
    "came": "got, given, occurred",
    "beside": "next to, with, as well as, compared with",
    "stands?|stood|standing": "is, is placed, occurs, represents",
    "stead": "instead of",
    "nobody": "no one",
    "mend(s|ed|ing)?": "correct, repair",
    "(go|goes|going|gone|went) on": "resume, continue",
    "said|told": "reported, printed, named",
    "dearest": "costliest",
    "talk": "messages",
    "begun": "started",
    "anew": "again",
    "left aside": "ignored",
    "behind": "after",
    "rests? on|resting": "gives most to, depends on",
    "held against": "compared with",
    "foretells?": "predicts",
    r"whose \w+ (is|are|was|were)": "the subject first: the X of Y is",
}
OTHERS = {re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.IGNORECASE): plain for words, plain in PLAIN.items()}
ANY = re.compile(rf"\b(?:{'|'.join(PLAIN)})\b".replace(" ", r"\s+"), re.IGNORECASE)  # one search where there is none
CODE = re.compile(r"`[^`]*`|\{\w+(=[^{}]*)?\}")
FIRST = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES = sorted([*FIRST, *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
PACKAGE = ROOT / "attnscope"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((PACKAGE / "viewer" / "src").rglob("*.js"))


def found_in(text: str) -> list[str]:
    """What is not plain in a text: `came: write got, given, occurred`."""
    words = CODE.sub("", text)
    known = OTHERS.items() if ANY.search(words) else ()
    return [f"{found[0]}: write {plain}" for pattern, plain in known for found in pattern.finditer(words)]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a module shows: strings of several words, and a command's docstring, which is its help."""
    nodes = [*ast.walk(ast.parse(source))]
    parts = {id(part) for one in nodes if isinstance(one, ast.JoinedStr) for part in one.values}
    unseen = parts | {id(one.body[0].value) for one in nodes if has_docstring(one) and not is_command(one)}
    for one in nodes:
        if isinstance(one, ast.JoinedStr):
            yield one.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in one.values)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in unseen:
            yield one.lineno, one.value if " " in one.value.strip() else ""


def has_docstring(node: ast.AST) -> bool:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def is_command(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(one).startswith("with_options(") for one in decorators)


HELP_LONGEST = 25  # words of a sentence in help
SENTENCE = re.compile(r"(?<!e\.g)[.:;](?:\s|$)")
IN_PLACE_OF_A_NOUN = re.compile(
    r"\b(of (which|what|whom)|whose|what (it|they|is|are|was|no|every|each|any|an?|the)|where (it|the|they))\b",
    re.IGNORECASE,
)


def help_texts(command: str) -> Iterator[str]:
    """The paragraphs of a command's help, and the help of each of its options."""
    function = COMMANDS[command][0]
    yield from (" ".join(part.split()) for part in inspect.cleandoc(function.__doc__).split("\n\n"))
    yield from (one.info.help or "" for one in parameters(*function.groups).values() if not one.is_hidden)


def not_short(text: str) -> list[str]:
    """The sentences with over HELP_LONGEST words, or with a relative clause for a noun."""
    sentences = SENTENCE.split(text)
    return [one for one in sentences if len(one.split()) > HELP_LONGEST or IN_PLACE_OF_A_NOUN.search(one)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_nouns_and_short_sentences(command: str) -> None:
    assert {text: bad for text in help_texts(command) if (bad := not_short(text))} == {}


def test_what_is_no_noun_or_too_long_is_noticed() -> None:
    assert not_short("Draw of each head what it sees.") == ["Draw of each head what it sees"]
    assert not_short("A word. " + "word " * 26) == ["word " * 26]
    assert not_short("Keys of each query: a number, or all. " + "word " * 25) == []


def prose(page: str) -> str:
    """A page without its blocks of code, the addresses of its links and its tags; line by line as it was."""
    without = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$|\]\([^)]*\)|<\w+ src=\S+", "", without, flags=re.MULTILINE)


def visible(script: str) -> Iterator[str]:
    """The strings of several words in a script, without those of its comments."""
    code = re.sub(r"/\*.*?\*/|(?<!\S)//[^\n]*", "", script, flags=re.DOTALL)
    for one in re.findall(r'"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`', code):
        yield re.sub(r"\$\{[^{}]*\}", "…", one[1:-1] if " " in one else "")


@pytest.mark.parametrize("letters", ["abc", "def", "ghijklm", "nopqr", "stuvwxyz_"])
def test_messages_and_help_are_plain(letters: str) -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {one}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0][0] in letters
        for line, text in messages(path.read_text("utf-8"))
        for one in found_in(text)
    ]


def test_docs_are_plain() -> None:
    assert not [f"{path.name}: {one}" for path in PAGES for one in found_in(prose(path.read_text("utf-8")))]


def test_the_page_is_plain() -> None:
    shown = [(path.name, text) for path in SCRIPTS for text in visible(path.read_text("utf-8"))]
    assert not [f"{name}: {one}" for name, text in shown for one in found_in(text)]


def test_a_word_is_found_where_it_is_shown() -> None:
    source = '''
def check(self):
    """Not shown: said."""
    raise UsageError(f"expected a number, {self.top} came", "use {adapter=beside}")

@with_options(Text)
def heads(asked):
    """Help: a run goes
    on."""
    return Option(help="`beside`: what `said` means, in the text's stead")
'''
    found = [one.partition(":")[0] for _, text in messages(source) for one in found_in(text)]
    assert sorted(" ".join(one.split()) for one in found) == ["came", "goes on", "stead"]
    page = "A page stands\n\n    said told\n\n```\nbeside\n```\n[told](stead.md) `nobody`\n"
    assert [one.partition(":")[0] for one in found_in(prose(page))] == ["stands", "told"]
    script = 'const said = "told"; // "what he said"\nreturn `a ${said} b beside ${c}`; /* "came of" */'
    assert [one.partition(":")[0] for text in visible(script) for one in found_in(text)] == ["beside"]


@pytest.mark.parametrize("path", [path for path in PAGES if path.name not in GENERATED], ids=lambda path: path.name)
def test_a_page_has_short_sentences(path: Path) -> None:
    counts = words.sentences(path.read_text("utf-8"))
    assert words.mean(path.read_text("utf-8")) <= PAGE_MEAN, "run scripts/words.py"
    assert max(counts, default=0) <= PAGE_LONGEST


def test_words_are_counted_by_sentence() -> None:
    page = """# A heading of five words

One two `attnscope heads --out x` four. Five six, e.g. a name: seven [eight nine](ten.md)!
| a | table |
- an item
  of four
- and one

    attnscope heads "a block of code"

```
more. of. it.
```
![a picture](of.png) Is 1.5 one word? "Yes." It is.
<!-- x: written by a script -->
Left out.
<!-- x end -->
"""
    assert words.sentences(page) == [4, 8, 4, 2, 4, 1, 2]
    assert words.mean(page) == 25 / 7
    assert words.mean("") == 0
