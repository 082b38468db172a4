"""Options: each is one field of one group, and everything else about it is read off that field."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer import Option
from typer.testing import CliRunner

from attnscope.cli.app import make_command
from attnscope.cli.batch_options import BatchRun
from attnscope.cli.config import with_options
from attnscope.cli.info import NamedModel
from attnscope.cli.option_groups import _read_plain, fill, held, parameters, recorded
from attnscope.cli.options import PANELS, EngineName, Relations, TextRun
from attnscope.cli.output import Printing
from attnscope.cli.parity import Certified
from attnscope.cli.scan import Scanned, Studied
from attnscope.errors import UsageError
from helpers.command_line import call
from helpers.commands import COMMANDS, context
from helpers.snapshots import as_kept

SHARED = {name: command.groups for name, (command, _) in COMMANDS.items()}


@dataclass(frozen=True, kw_only=True)
class Top:
    panel = "Attention"
    top: Annotated[int, "Rows.", "ROWS", Option("-n", min=1)] = 3
    out_of: Annotated[Literal["all", "some"], Option(help="Of which.")] = "all"
    least: Annotated[float | None, "Of which weight.", Option(min=0)] = None


@dataclass(frozen=True, kw_only=True)
class TopHeads(Top):
    top: Annotated[int, "Heads."] = 5


@dataclass(frozen=True, kw_only=True)
class Again:
    top: Annotated[int, Option(help="The same name, of nobody's child.")] = 5


def homes(groups):
    """Where each long option comes from: {"top-k": {("Relations", "top_k")}}; a varied field is its first group's."""
    found = defaultdict(set)
    for group in groups:
        for name, option in parameters(group).items():
            first = [cls for cls in group.__mro__ if name in vars(cls).get("__annotations__", {})][-1]
            if not option.is_argument:
                found[option.spelled].add((first.__name__, name))
    return found


def test_an_option_is_one_field_of_one_group():
    found = homes([group for groups in SHARED.values() for group in groups])
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == {
        "whole": {("Sources", "whole"), ("Tolerance", "whole")},  # of batch a file, of parity the model
        # of batch after every text, of knockout what is to follow, elsewhere read after the one text
        "answer": {("Sources", "answer"), ("Answered", "answer"), ("Answer", "answer")},
        # of relations how they are listed, of knockout what is cut, of patch what is patched
        "over": {("Ranked", "over"), ("Portions", "over"), ("Patches", "over")},
        "at": {("CacheBudgets", "at"), ("Patches", "at")},  # of knockout the end of a prompt, of patch what is patched
        "method": {
            ("VariantOptions", "method"),
            ("Patches", "method"),
        },  # of ablate a screen, of patch how all is known
        # of relations what keys write to an answer's logit too, over the logit of a foil
        "weights": {("Entries", "weights"), ("Related", "weights")},
        "foil": {("Related", "foil"), ("Answered", "foil")},  # of knockout the effect's too
        "by": {("Heads", "by"), ("Logit", "by")},  # of heads which are averaged, of why what a row is
        "verify": {("EngineChoice", "verify"), ("Logit", "verify")},  # of a text by the oracle, of why by replacing
        "engine": {
            ("EngineName", "engine"),
            ("KernelTexts", "engine"),
        },  # of parity what is compared, elsewhere who computes
        "random": {("Taken", "random"), ("Compared", "random")},  # of ablate sets of heads, of knockout keys
    }
    assert len(found) > 50
    assert homes([Top, TopHeads])["top"] == {("Top", "top")}
    assert len(homes([Top, Again])["top"]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_spelled_twice(command):
    names = [name for one in make_command(command).params for name in (*one.opts, *one.secondary_opts)]
    assert len(names) == len(set(names))


def test_a_short_name_is_of_one_option_everywhere():
    long = defaultdict(set)
    for command in COMMANDS:
        for one in make_command(command).params:
            for name in one.opts:
                if len(name) == 2:
                    long[name].add(max(one.opts, key=len))
    assert {"-m", "-o", "-q", "-s"} <= long.keys()
    assert {name: options for name, options in long.items() if len(options) > 1} == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_groups_and_no_other(command):
    found = make_command(command).params
    options = {name: one for name, one in parameters(*SHARED[command]).items() if not one.is_setting}
    settings = len(parameters(*SHARED[command])) > len(options)
    assert [one.name for one in found] == [*options, *["set"] * settings]
    assert {panel for one in found if (panel := getattr(one, "rich_help_panel", None))} <= set(PANELS)


def test_model_names_the_model_of_every_command_and_an_argument_is_short_for_it():
    found = {name: parameters(*groups) for name, groups in SHARED.items()}
    assert {name for name in found if "model" not in found[name]} == {"metrics", "doctor", "run"}
    assert {name for name in found if "name" in found[name]} == {"info", "scan", "ablate"}
    assert all("-m" in one["model"].info.param_decls for one in found.values() if "model" in one)
    for named in (Scanned(name="tiny"), Scanned(model="tiny")):
        assert (named.asked, named.load_options().model) == ("tiny", "tiny")
    assert NamedModel().load_options().model == "demo"
    for group in (Scanned, Studied):
        with pytest.raises(UsageError, match=f"usage: attnscope {group.COMMAND} MODEL"):
            group()


def test_words_that_help_does_not_list_are_taken():
    assert parameters(EngineName)["engine"].metavar == "auto|eager|fused|probe"
    for command in ("heads", "batch", "compare"):
        assert "auto|eager|fused|probe" in call(command, "--help", "all").out.decode().split()
    for name in ("auto", "eager", "fused", "probe", "tiles", "numba", "triton"):
        assert context("heads", "--engine", name).params["engine"] == name
    refused = call("heads", "--text", "a", "--engine", "fusd")
    assert (refused.code, "expected auto, eager, fused or probe, got 'fusd'" in refused.err) == (2, True)


def test_a_subclass_inherits_what_it_leaves_out():
    below, above = parameters(Top)["top"].info, parameters(TopHeads)["top"].info
    assert (above.help, below.help) == ("Heads.", "Rows.")
    for kept in ("param_decls", "metavar", "min", "rich_help_panel"):
        assert getattr(above, kept) == getattr(below, kept)
    assert (below.param_decls, below.metavar) == (("-n", "--top"), "ROWS")
    placeholders = {name: one.metavar for name, one in parameters(TopHeads).items()}
    assert placeholders == {"top": "ROWS", "out_of": "all|some", "least": "N"}
    assert TopHeads().top == 5


def test_a_command_is_called_with_one_object_per_group():
    given = []
    toy = typer.Typer()

    @toy.command()
    @with_options(TopHeads, Relations)
    def command(*groups):
        """Take them."""
        given.extend(groups)

    assert CliRunner().invoke(toy, ["-n", "7", "--top-k", "all"]).exit_code == 0
    expected = [TopHeads(top=7), Relations(top_k="all")]
    assert [(type(one), vars(one)) for one in given] == [(type(one), vars(one)) for one in expected]
    assert CliRunner().invoke(toy, ["--out-of", "none"]).exit_code == 2


def test_a_file_gives_what_no_flag_gave(tmp_path):
    given = []
    toy = typer.Typer()
    (tmp_path / "run.yaml").write_text("top: 9\ntop_k: 4\nout: runs\nfile: a.txt\nsort: sink\n")

    @toy.command()
    @with_options(Relations, Printing, TextRun)
    def command(*groups):
        """Take them; --top and --sort are options of `heads` alone."""
        given.extend(groups)

    assert CliRunner().invoke(toy, ["--config", str(tmp_path / "run.yaml"), "-o", "there"]).exit_code == 0
    relations, printing, asked = given
    assert (relations.top_k, printing.out, asked.file) == ("4", Path("there"), "a.txt")
    given.clear()
    assert CliRunner().invoke(toy, ["--config", str(tmp_path / "run.yaml"), "-t", "a text"]).exit_code == 0
    relations, printing, asked = given
    assert (printing.out, asked.text, asked.file) == (Path("runs"), "a text", None)


def test_a_folder_is_held_to_the_same_options_as_ever():
    """A folder of an earlier version resumes if options that it does not know are None."""
    asked = BatchRun(sources=["a"], out=Path("o"), tables="relations, heads", group="words", matrices=True)
    assert as_kept("held", asked.held())
    assert held(Top()) == {}


def test_a_manifest_leaves_out_the_text_and_the_talk():
    said = recorded(TextRun(text="a secret", model="m"), Relations(), Printing(out=Path("runs"), format="csv"))
    assert "a secret" not in said.values()
    assert not {"text", "quiet", "verbose", "format", "config"} & set(said)
    assert (said["model"], said["out"], said["top_k"]) == ("m", "runs", "5")


def test_a_library_dataclass_is_filled_by_name():
    @dataclass
    class Target:
        top_k: str = "none"
        group: str = "default"
        other: int = 1

    assert fill(Target, Relations(top_k="3"), other=2) == Target("3", "default", 2)


def test_a_certificate_may_be_written_again_but_not_over_a_folder(tmp_path):
    (tmp_path / "certificate.json").touch()
    assert Certified(out=tmp_path / "certificate.json").out
    with pytest.raises(UsageError, match="is a folder, expected a file; name one: "):
        Certified(out=tmp_path)
    with pytest.raises(UsageError, match=r"certificate\.json is no folder"):
        Certified(out=tmp_path / "certificate.json" / "more.json")


TYPED = (
    *("3", "-1", "007", "0", "1.5", "1e3", "nan", "2048", "9" * 20),
    *("kv", "table", "png", "Table", "all", "./x", "/", "/nowhere/x", "", "a,b", "é"),
)


def descriptors():
    """One option of each kind that Typer converts, by its type and bounds."""
    options = [option for name in COMMANDS for option in make_command(name).params]
    described = [option for option in options if option.type_descriptor.annotation is not bool]
    infos = {
        (str(kind := option.type_descriptor.annotation), info.min, info.max, info.parser): (kind, info, option)
        for option in described
        if (info := option.type_descriptor.parameter_info)
    }
    return list(infos.values())


def test_what_python_reads_is_what_typer_makes_of_it():
    """Without pydantic, which takes longer to import than a server to answer; what is wrong is left to Typer."""
    read = defaultdict(set)
    for kind, info, option in descriptors():
        convert = option.get_runtime_param().coerce
        for text in TYPED:
            value = [text, "b"] if option.multiple or option.nargs == -1 else text
            plain = _read_plain(kind, info, value)
            if plain is not None:
                expected = convert(value, param=option, ctx=None)
                assert (plain, type(plain)) == (expected, type(expected)), (kind, text)
                read[getattr(kind, "__name__", str(kind))].add(text)
    assert {"3", "0", "2048"} <= read["int"]
    assert not {"007", "1.5", "99999999999999999999"} & read["int"]
    assert {"3", "1.5"} <= read["float"]
    assert not {"nan", "1e3"} & read["float"]
    assert {"./x", "/", "/nowhere/x"} <= read["Path"]
    assert {"table", "png", "kv"} <= read["Literal"]
    assert "Table" not in read["Literal"]
    assert read["list"] == read["str"] == set(TYPED)


def test_what_is_out_of_bounds_or_no_path_is_left_to_typer():
    assert [_read_plain(int, Option(min=1, max=9), text) for text in ("0", "1", "9", "10")] == [None, 1, 9, None]
    assert _read_plain(Path, Option(exists=True), ".") is None
    assert _read_plain(Path, Option(), "a\0b") is None
