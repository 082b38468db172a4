"""Which installed fonts have the characters of a text, and token labels and captions as they are drawn.

A stretch of letters that no installed font has is written as the name of its script, `⟨CJK⟩`; a token of nothing else
by its position. Where a line runs from left to right, a stretch from right to left is isolated in it: what follows it,
as the number of a token, keeps its side.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from matplotlib import font_manager, ft2font, get_data_path
from matplotlib.ft2font import FT2Font

from attnscope.errors import BLANKS, FILLERS, numbered, visible
from attnscope.utils.isolation import without_stderr

log = logging.getLogger("attnscope")

BASE_FAMILY = "DejaVu Sans"  # comes with matplotlib
LONGEST_LABEL = 16
VARIATION_SELECTORS = {"\ufe0e", "\ufe0f"}  # choose text or colour for an emoji; drawn, they are empty boxes
NAMED_IN_WARNING = 8
CONTROLS = {chr(code): chr(0x2400 + code) for code in range(0x20)}
SIGNS = {**CONTROLS, **BLANKS, "\n": "↵", "\t": "⇥", "\r": "␍"}  # of a text that is drawn in one line

INSTALL = dict.fromkeys(
    ("CJK", "HANGUL", "HIRAGANA", "KATAKANA"), "Noto Sans CJK (fonts-noto-cjk in Debian and Ubuntu)"
)
INSTALL["emoji or symbol"] = "Symbola (fonts-symbola in Debian and Ubuntu)"

# From 3.11 on, matplotlib lays out a line by Unicode's bidirectional algorithm; before, letter after letter.
BIDIRECTIONAL = hasattr(ft2font, "__libraqm_version__")
ISOLATE, END = "\u2068", "\u2069"
QUOTED = re.compile("“([^“”]*)”")
SCRIPT_STRETCH = re.compile("x(?:[x ]*x)?")  # see `_named`
RIGHT_TO_LEFT_STRETCH = re.compile("R(?:[.M]*R|M)*")  # see `_isolated_stretches`
DIRECTIONS = {"R": "R", "AL": "R", "AN": "R", "NSM": "M", "L": "L", "EN": "L"}
SYMBOLS = ("So", "Sk", "Cn", "Co")  # categories without a script

_missing: set[str] = set()  # of all texts so far: characters that no installed font has


@dataclass(frozen=True)
class Fonts:
    """Families in the order in which glyphs are looked up, the files that bring them, and what none of them has."""

    families: tuple[str, ...] = (BASE_FAMILY,)
    paths: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()


def shown_label(token: str) -> str:
    """A token as one short line, at most 16 characters; blank tokens made visible."""
    text = shown_text(token)
    if text.isspace():
        text = "␣" * len(text)
    if len(text) <= LONGEST_LABEL:
        return text
    cut = LONGEST_LABEL - 1
    while cut > 1 and (unicodedata.category(text[cut])[0] == "M" or "\u200d" in text[cut - 1 : cut + 1]):
        cut -= 1
    return text[:cut] + "…"


def tick_label(token: str, position: int) -> str:
    """A token next to a row or below a column: as `shown_label`, its position alone where no font has its letters."""
    return isolated(str(position) if undrawable(token) else shown_label(token))


def shown_text(text: str) -> str:
    """A text as it is drawn: `legible`, and what no installed font has named as in `caption`."""
    return _named(legible(text))


def legible(text: str) -> str:
    """A text in one line, in which what steers or has no shape is made visible."""
    return visible("".join(char for char in text if char not in VARIATION_SELECTORS), SIGNS, _written)


def caption(text: str) -> str:
    """Words around a figure, in which what no installed font has is named.

    Letters by their script, ⟨CJK⟩, other characters by their number, ⟨1F469⟩; a quoted text of such letters in words.
    """
    words = "text in a script without a font"
    return _named(
        QUOTED.sub(lambda quote: f"{words} ({_scripts(quote[1])})" if undrawable(quote[1]) else quote[0], text)
    )


def undrawable(text: str) -> bool:
    """Whether a text has letters that no installed font has, and no other letter."""
    letters = set(filter(_of_script, text))
    return bool(letters) and letters <= _missing


def _of_script(char: str) -> bool:
    """Whether a character needs a font of its script: letters, and signs as wide as CJK letters (。)."""
    wide = unicodedata.east_asian_width(char) in ("W", "F")
    return char.isalpha() or (wide and unicodedata.category(char)[0] == "P")


def isolated(line: str) -> str:
    """A line whose stretches from right to left, and quoted texts with one, are isolated, where matplotlib heeds that.

    >>> isolated("ل·2/2") == "\u2068ل\u2069·2/2"
    True
    """
    line = line.replace(ISOLATE, "").replace(END, "")
    if not BIDIRECTIONAL or not any(DIRECTIONS.get(unicodedata.bidirectional(char)) == "R" for char in line):
        return line
    parts, end = [], 0
    for quoted in QUOTED.finditer(line):
        whole = _isolated_stretches(quoted[1]) != quoted[1]
        parts += [_isolated_stretches(line[end : quoted.start()])]
        parts += [f"“{ISOLATE}{quoted[1]}{END}”" if whole else quoted[0]]
        end = quoted.end()
    return "".join([*parts, _isolated_stretches(line[end:])])


def _isolated_stretches(text: str) -> str:
    """A text whose stretches from right to left are isolated, each with the blanks and signs within it."""
    kinds = "".join(DIRECTIONS.get(unicodedata.bidirectional(char), ".") for char in text)
    return _replaced(text, RIGHT_TO_LEFT_STRETCH, kinds, lambda stretch: f"{ISOLATE}{stretch}{END}")


def _named(text: str) -> str:
    """A text whose stretches that no font has are named, each with the blanks within it."""
    if not _missing & set(text):
        return text
    kinds = "".join(
        " " if char.isspace() else "x" if char in _missing and unicodedata.category(char) not in SYMBOLS else "."
        for char in text
    )
    text = _replaced(text, SCRIPT_STRETCH, kinds, lambda part: f"⟨{name}⟩" if (name := _scripts(part)) else part)
    return "".join(char if char not in _missing else " " if char.isspace() else numbered(char) for char in text)


def _replaced(text: str, stretch: re.Pattern[str], kinds: str, by: Callable[[str], str]) -> str:
    """A text with other words for each stretch; kinds: a sign for each character, in which stretches are found."""
    parts, end = [], 0
    for match in stretch.finditer(kinds):
        parts += [text[end : match.start()], by(text[match.start() : match.end()])]
        end = match.end()
    return "".join([*parts, text[end:]])


def _scripts(text: str) -> str:
    """The scripts of the letters that no font has: `CJK, Hiragana`."""
    names = {_script(char) for char in text if char in _missing and _of_script(char)}
    return ", ".join(sorted(name if name == "CJK" else name.capitalize() for name in names))


def _written(char: str) -> str:
    """A character that turns the line around by its number; others as a replacement character."""
    return numbered(char) if unicodedata.category(char) == "Cf" or char in FILLERS else "�"


def fonts_for(texts: Iterable[str]) -> Fonts:
    """Fonts that together have every character that any installed font has.

    Logs one warning per process for each character that none has, and from then on `shown_text` writes other words.

        fonts_for(["bank", "銀行"]).families
        ("DejaVu Sans", "Noto Sans CJK SC")
    """
    chars = frozenset("".join(texts)) - _charmap(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")))
    needed = frozenset(char for char in chars if unicodedata.category(char) not in ("Cf", "Cc"))
    fonts = _cover(needed) if needed else Fonts()
    # What an earlier text lacked too has been said.
    if new := sorted(fonts.missing - _missing):
        _missing.update(new)
        scripts = sorted({_script(char) for char in new})
        named = " ".join(new[:NAMED_IN_WARNING]) + (" …" if len(new) > NAMED_IN_WARNING else "")
        by_position = any(map(_of_script, new))
        log.warning(
            "no installed font has %s (%s): %s; install one that has them, such as %s",
            named,
            ", ".join(scripts),
            "their tokens are labelled by position" if by_position else f"drawn as {numbered(new[0])}",
            _fonts_with(scripts),
        )
    return replace(fonts, missing=frozenset(_missing))


def missing_words(labels: Iterable[str]) -> str:
    """Which scripts of token labels no font has, and the fonts that have them; nothing where every label is drawn."""
    letters = {char for label in labels if undrawable(label) for char in label if char in _missing and _of_script(char)}
    if not letters:
        return ""
    font = _fonts_with(sorted({_script(char) for char in letters}))
    return f"a number alone: a token in a script without a font ({_scripts(''.join(letters))}); install {font}"


def _fonts_with(scripts: Iterable[str]) -> str:
    """Fonts that have some scripts, with the packages to install."""
    core = "Noto Sans (fonts-noto-core in Debian and Ubuntu)"
    return " and ".join(sorted({INSTALL.get(script, core) for script in scripts}))


def register(fonts: Fonts) -> None:
    """Make the fonts known to matplotlib, whose own list may be older than they are, and what they lack to us."""
    _missing.update(fonts.missing)
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in fonts.paths:
        if path not in known:
            font_manager.fontManager.addfont(path)


@cache
def _charmap(path: str) -> frozenset[str]:
    """The characters of a font file; none for fonts that cannot be scaled (bitmap emoji) or read."""
    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()


@lru_cache(maxsize=64)
def _cover(needed: frozenset[str]) -> Fonts:
    """Greedily: the font with most of what is missing, until none adds anything."""

    def plainness(path: str) -> tuple[bool, bool, bool, str]:
        name = Path(path).stem.lower()
        return "sans" not in name, "regular" not in name, "bold" in name or "italic" in name or "mono" in name, path

    with without_stderr():  # where fontconfig warns in the words of LANG, whatever these are
        paths = sorted(font_manager.findSystemFonts(), key=plainness)
    families, used, missing = [BASE_FAMILY], [], needed
    while missing and paths:
        best = max(paths, key=lambda path: len(missing & _charmap(path)))
        if not missing & _charmap(best):
            break
        register(Fonts(paths=(best,)))
        families.append(_family(best, needed))
        used.append(best)
        missing -= _charmap(best)
    return Fonts(tuple(families), tuple(used), missing)


def _family(path: str, needed: frozenset[str]) -> str:
    """A collection's face for the text's region: Han characters differ between them."""
    names = sorted({entry.name for entry in font_manager.fontManager.ttflist if entry.fname == path})
    scripts = {unicodedata.name(char, "").split(" ")[0] for char in needed}
    region = "JP" if scripts & {"HIRAGANA", "KATAKANA"} else "KR" if "HANGUL" in scripts else "SC"
    return min(names, key=lambda name: ("Mono" in name, not name.endswith(region), name))


def _script(char: str) -> str:
    if unicodedata.category(char) in SYMBOLS:
        return "emoji or symbol"
    if _of_script(char) and not char.isalpha():  # named by its shape: IDEOGRAPHIC, FULLWIDTH, LEFT
        return "CJK"
    return unicodedata.name(char, "unnamed").split(" ")[0]
