"""What is known of families by name: in one table, of names that transformers knows, and nowhere else."""

import ast
import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import attnscope
from attnscope.model.families import FAMILIES, Family, family, family_of
from helpers.families import BYPASS, WITHOUT_ATTENTION, of_all_families

ROOT = Path(attnscope.__file__).parent
# Entries that transformers does not know, and why they are there.
NOT_OF_TRANSFORMERS: dict[str, str] = {}
# Names of families that are words of another kind elsewhere.
# A kind of layer, and how such layers' attributes begin; how a comparison pairs tokens.
OTHER_WORDS = {"model/geometry.py": {"mamba"}, "api/compare.py": {"align"}}
# What is known of families, and of llama.cpp's architectures, many of which have a family's name.
TABLES = ("model/families.py", "model/gguf.py")


def words(source):
    """Every string literal of a source."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def names_in(source):
    """The model types among the string literals of a source; nearly no source has to be parsed."""
    known = {*CONFIG_MAPPING_NAMES, *FAMILIES}
    return known & set(words(source)) if known & set(re.findall(r"[\"']([\w-]+)[\"']", source)) else set()


@of_all_families
def test_every_name_is_one_that_transformers_knows():
    assert set(FAMILIES) - set(CONFIG_MAPPING_NAMES) == set(NOT_OF_TRANSFORMERS)


def test_every_entry_says_something():
    assert [name for name, known in FAMILIES.items() if known == Family()] == []


@pytest.mark.parametrize("unknown", ["llama", "no_such_family", "", None])
def test_other_names_get_the_defaults(unknown):
    assert family(unknown) == Family()


def test_the_family_of_what_has_no_config():
    assert family_of(object()) == Family()


def test_those_without_softmax():
    assert {name for name in FAMILIES if family(name).without_softmax} == set(WITHOUT_ATTENTION)


def test_no_family_is_named_elsewhere():
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place not in TABLES and not place.startswith("reference/"):
            assert names_in(path.read_text(encoding="utf-8")) <= OTHER_WORDS.get(place, set()), place
    assert names_in('if config.model_type == "jetmoe": pass') == {"jetmoe"}


def test_families_outside_the_interface_are_those_that_were_found_so():
    assert {name for name in BYPASS if name in FAMILIES and not family(name).bypasses_interface} == set()
