"""Which installed fonts have the characters of a text, and token labels as they are drawn."""

import logging
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from matplotlib import font_manager, get_data_path
from matplotlib.ft2font import FT2Font

from attnscope.apart import without_stderr
from attnscope.shown import BLANKS, FILLERS, numbered, visible

log = logging.getLogger("attnscope")

BASE_FAMILY = "DejaVu Sans"  # comes with matplotlib
LONGEST_LABEL = 16
VARIATION_SELECTORS = {"\ufe0e", "\ufe0f"}  # choose text or colour for an emoji; drawn, they are empty boxes
NAMED_IN_WARNING = 8
CONTROLS = {chr(code): chr(0x2400 + code) for code in range(0x20)}
SIGNS = {**CONTROLS, **BLANKS, "\n": "↵", "\t": "⇥", "\r": "␍"}  # of a text that is drawn in one line

INSTALL = {"emoji or symbol": "Symbola", "CJK": "Noto Sans CJK", "HANGUL": "Noto Sans CJK", "HIRAGANA": "Noto Sans CJK"}

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


def shown_text(text: str) -> str:
    """A text as it is drawn: what steers or has no shape made visible, and as numbers what no installed font has."""
    drawn = "".join(char for char in text if char not in VARIATION_SELECTORS)
    return "".join(numbered(char) if char in _missing else char for char in visible(drawn, SIGNS, _written))


def _written(char: str) -> str:
    """A character that turns the line around by its number; others as a replacement character."""
    return numbered(char) if unicodedata.category(char) == "Cf" or char in FILLERS else "�"


def fonts_for(texts: Iterable[str]) -> Fonts:
    """Fonts that together have every character that any installed font has.

    Logs one warning per process for each character that none has, and from then on `shown_label` writes its number.

        fonts_for(["bank", "銀行"]).families
        ("DejaVu Sans", "Noto Sans CJK SC")
    """
    chars = frozenset("".join(texts)) - _charmap(_base_path())
    needed = frozenset(char for char in chars if unicodedata.category(char) not in ("Cf", "Cc"))
    fonts = _cover(needed) if needed else Fonts()
    _warn_once(fonts.missing)
    return replace(fonts, missing=frozenset(_missing))


def register(fonts: Fonts) -> None:
    """Make the fonts known to matplotlib, whose own list may be older than they are, and what they lack to us."""
    _missing.update(fonts.missing)
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in fonts.paths:
        if path not in known:
            font_manager.fontManager.addfont(path)


def _base_path() -> str:
    return str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))


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
    with without_stderr():  # where fontconfig warns in the words of LANG, whatever these are
        paths = sorted(font_manager.findSystemFonts(), key=_plainness)
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


def _plainness(path: str) -> tuple[bool, bool, bool, str]:
    name = Path(path).stem.lower()
    return "sans" not in name, "regular" not in name, "bold" in name or "italic" in name or "mono" in name, path


def _family(path: str, needed: frozenset[str]) -> str:
    """A collection's face for the text's region: Han characters differ between them."""
    names = sorted({entry.name for entry in font_manager.fontManager.ttflist if entry.fname == path})
    scripts = {unicodedata.name(char, "").split(" ")[0] for char in needed}
    region = "JP" if scripts & {"HIRAGANA", "KATAKANA"} else "KR" if "HANGUL" in scripts else "SC"
    return min(names, key=lambda name: ("Mono" in name, not name.endswith(region), name))


def _warn_once(missing: frozenset[str]) -> None:
    new = sorted(missing - _missing)
    if not new:
        return
    _missing.update(new)
    scripts = sorted({_script(char) for char in new})
    named = " ".join(new[:NAMED_IN_WARNING]) + (" …" if len(new) > NAMED_IN_WARNING else "")
    log.warning(
        "no installed font has %s (%s): drawn as ⟨%04X⟩; install one that has them, such as %s",
        named,
        ", ".join(scripts),
        ord(new[0]),
        " and ".join(sorted({INSTALL.get(script, "Noto Sans") for script in scripts})),
    )


def _script(char: str) -> str:
    if unicodedata.category(char) in ("So", "Sk", "Cn", "Co"):
        return "emoji or symbol"
    return unicodedata.name(char, "unnamed").split(" ")[0]
