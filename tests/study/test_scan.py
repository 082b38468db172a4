"""The demo's atlas, its folder, a scan that goes on, and what the command says."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import attnscope
from attnscope.api.ablate import AblateOptions, named_sets
from attnscope.cli import output
from attnscope.cli.output import Top
from attnscope.cli.study_tables import contrasts, left_out, named_sheet, probe_answers, probe_sheet
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.study_figures import probe_dots, probes_words, save_probes
from attnscope.model.loading import DEMO_FOLDER, wrap
from attnscope.model.selection import LINEAR, StackLayer, select
from attnscope.observe.atlas import roles_by_head
from attnscope.studies import atlas as scan_room
from attnscope.studies.ablation_search import selected
from attnscope.studies.atlas import ScanStudy, named_by, plan, read_trial
from attnscope.studies.atlas import load_atlas as read_back
from attnscope.studies.probes import Measure, token_pool, trials
from helpers.atlases import made_atlas
from helpers.command_line import call
from helpers.families import tiny_model
from helpers.parity_models import roused_model
from helpers.why_families import wrapped

PAGE = Path(__file__).parents[2] / "docs" / "atlas.md"
PLACE = ("layer", "head", "probe", "against")
EXPECTED = {
    "induction": {"L3H0", "L3H1"},
    "previous-token": {"L1H5", "L2H1"},
    "offset-2": {"L1H4"},
    "long-range-copying": {"L3H0", "L3H1"},
}


@pytest.fixture(scope="module")
def scanned(demo, tmp_path_factory):
    """The demo's atlas of a fresh scan, and the folder it was written to."""
    folder = tmp_path_factory.mktemp("atlas")
    return ScanStudy(demo, plan(demo)).run(folder), folder


@pytest.fixture(scope="module", params=["packed", pytest.param("scanned", marks=pytest.mark.e2e)])
def kept(request, tmp_path_factory):
    """The demo's atlas and a folder of it: that of the package, which a fresh scan is held against, and a fresh one."""
    if request.param == "scanned":
        return request.getfixturevalue("scanned")
    folder = shutil.copytree(DEMO_FOLDER / "atlas", tmp_path_factory.mktemp("packed") / "atlas")
    return read_back(folder), folder


@pytest.fixture(scope="module")
def some(demo, tmp_path_factory):
    """A scan of three of the demo's trials, with what was planned and the folder."""
    planned, folder = plan(demo), tmp_path_factory.mktemp("some")
    short = [one for one in planned.trials if one.name in ("repeated p10", "offsets", "sink")]
    planned = replace(planned, trials=short)
    return ScanStudy(demo, planned).run(folder), planned, folder


def heads_of(roles):
    """{role: its heads}."""
    return {role: {head for head, names in roles.items() if role in names} for role in EXPECTED}


def test_the_demos_heads_are_named(kept):
    found, folder = kept
    assert heads_of(roles_by_head(found.roles)) == EXPECTED
    assert heads_of(json.loads((folder / "atlas.json").read_text())["roles"]) == EXPECTED


def test_the_atlas_in_the_package_is_of_its_weights(demo):
    """`python scripts/demo_atlas.py` makes it again."""
    packed = read_back(DEMO_FOLDER / "atlas")
    assert packed.fits(demo) is True
    assert packed.facts["model"]["weights_sha256"] == {
        "model.safetensors": hashlib.sha256((DEMO_FOLDER / "model.safetensors").read_bytes()).hexdigest()
    }
    assert packed.facts["model"]["name"] == "demo"


def test_some_of_its_trials_show_what_the_atlas_in_the_package_says(some):
    found, planned, _ = some
    packed = read_back(DEMO_FOLDER / "atlas")
    shown = {(one.probe, one.against): one.effects for one in packed.findings}
    assert len(found.findings) == sum(len(trial.contrasts) for trial in planned.trials) > 10
    for one in found.findings:
        for name in ("score", "null", "effect", "low", "high", "low_all", "high_all", "p", "n"):
            fresh, before = getattr(one.effects, name), getattr(shown[one.probe, one.against], name)
            np.testing.assert_allclose(fresh, before, atol=1e-3, err_msg=f"{one.probe} {name}")
    assert found.facts["near_uniform"] == pytest.approx(packed.facts["near_uniform"], abs=1e-3)
    assert found.facts["ids_sha256"] == packed.facts["ids_sha256"]
    for place, names in found.roles.items():
        assert set(names) == set(packed.roles[place]) - {"induction", "long-range-copying"}


@pytest.mark.e2e
def test_a_fresh_scan_names_what_the_atlas_in_the_package_names(scanned):
    packed = read_back(DEMO_FOLDER / "atlas")
    assert packed.roles == scanned[0].roles
    np.testing.assert_allclose(
        [one.effects.score for one in packed.findings], [one.effects.score for one in scanned[0].findings], atol=1e-3
    )


def test_the_demos_induction_heads_copy_from_afar_where_it_finds_the_needle(kept):
    """And what docs/atlas.md says of that."""
    found, folder = kept
    [copied] = [one.effects for one in found.findings if one.probe == "long-range-copying"]
    assert np.flatnonzero(copied.score >= 0.8).tolist() == [18, 19]
    assert (np.delete(copied.score, [18, 19]) <= 0.1).all()
    told = json.loads((folder / "atlas.json").read_text())["long_range_copying"]
    assert told["runs"] == 64 + 32 + 16 + 8
    assert set(copied.n) == {told["counted"]}
    assert list(told["recall"]) == ["64", "128", "256", "512"]
    recall, page = told["recall"], " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"on the demo {told['counted']} of {told['runs']}, with recall {recall['64']:.2f} at 64 tokens" in page
    assert f"and {recall['512']:.2f} at 512. There L3H0 scores {copied.score[18]:.2f}" in page
    assert f"and L3H1 {copied.score[19]:.2f}, and no other" in page


def test_a_kept_atlas_reads_back_as_it_was(kept, tmp_path):
    found, folder = kept
    again = read_back(folder)
    assert (again.heads, again.roles, again.facts) == (found.heads, found.roles, found.facts)
    assert again.table().equals(found.table())
    assert again.named("previous-token") == {1: (5,), 2: (1,)}
    assert again.named("offset-4") == {}
    with pytest.raises(InputError, match="holds no whole atlas"):
        read_back(tmp_path)
    (tmp_path / "atlas.json").write_text(json.dumps({"schema": "atlas/0"}))
    shutil.copy(folder / "atlas.parquet", tmp_path)
    with pytest.raises(InputError, match=r"'atlas/0'.*'atlas/3'"):
        read_back(tmp_path)


@pytest.mark.e2e
def test_a_stranger_has_no_induction_head(real_model_folder):
    if "stories" not in real_model_folder.name:
        pytest.skip("said of the other model")
    from attnscope.model.loading import load
    from attnscope.model.options import LoadOptions

    loaded = load(LoadOptions(model=str(real_model_folder)))
    planned = plan(loaded)
    repeated = replace(planned, trials=[one for one in planned.trials if one.name.startswith("repeated")])
    assert not [names for names in ScanStudy(loaded, repeated).run().roles.values() if "induction" in names]


def test_the_picture_colours_the_heads_that_are_named_and_lists_probes_that_name_none(kept):
    found, folder = kept
    assert save_probes(found, folder, "demo") == folder / "probes.png"
    assert (folder / "probes.png").read_bytes().startswith(b"\x89PNG")
    note, foot = probes_words(found, ["offset 3", "sink, no begin token"])
    assert note.splitlines()[0].endswith("64 sequences, seed 0")
    assert foot.endswith(": offset 3; sink, no begin token")
    assert probes_words(found, []) == (note, "")
    [one] = [one for one in found.findings if (one.probe, one.against) == ("induction p50", "other")]
    dots = probe_dots(one)
    assert dots.effect_N[18:20] == pytest.approx(one.effects.effect[18:20])
    assert (dots.low_N <= dots.effect_N).all()
    assert np.flatnonzero(dots.named_N).tolist() == [18, 19]


def test_the_table_holds_every_contrast_of_every_head(kept):
    found, folder = kept
    table = pq.read_table(folder / "atlas.parquet")
    assert table.equals(found.table().cast(table.schema))
    assert len(table) == 24 * len(found.findings)
    row = next(row for row in table.to_pylist() if (row["layer"], row["head"], row["probe"]) == (3, 0, "induction p50"))
    assert row["against"] == "other"
    assert row["low_all"] <= row["low"] <= row["effect"] <= row["high"] <= row["high_all"]
    assert row["effect"] == pytest.approx(row["score"] - row["null"])
    assert row["n"] == 64


def test_a_scan_that_was_stopped_goes_on_and_ends_the_same(demo, some, tmp_path, monkeypatch):
    found, planned, folder = some
    shutil.copytree(folder / "readings", tmp_path / "readings")
    left = sorted((tmp_path / "readings").glob("*.npz"))[:1]
    for path in left:
        path.unlink()
    read_now = []

    def watched(loaded, trial, *how):
        read_now.append(trial.name.replace(" ", "-"))
        return read_trial(loaded, trial, *how)

    monkeypatch.setattr(scan_room, "read_trial", watched)
    again = ScanStudy(demo, planned).run(tmp_path)
    assert sorted(read_now) == [path.stem for path in left]
    assert again.table().equals(found.table())
    assert again.facts == found.facts


def test_another_scan_is_not_mixed_in(demo, some):
    with pytest.raises(UsageError, match="another scan: seed was 0, now 1;"):
        ScanStudy(demo, plan(demo, seed=1)).run(some[2])


def test_a_model_whose_layers_see_summaries_of_tokens_is_refused():
    with pytest.raises(ModelError, match=r"no head of deepseek_v4 looks from the \d+ tokens of a probe at the same"):
        attnscope.scan(wrapped(roused_model("deepseek_v4")), sequences=2, pool=range(10, 60))


def test_the_pool_leaves_out_what_is_no_ordinary_token(demo):
    pool = token_pool(demo)
    texts = [demo.tokenizer.decode([token]) for token in pool]
    assert not set(pool) & {*demo.tokenizer.all_special_ids}
    assert all(text.strip().isprintable() and text.strip() for text in texts)
    every = sorted(demo.tokenizer.get_vocab().values())
    assert every.index(pool[0]) > 100
    assert every.index(pool[-1]) < len(every) - 100
    with pytest.raises(InputError, match="names the id 99999"):
        token_pool(demo, [*range(5, 50), 99999])


SCALES, RUNS = (0.02, 0.1, 0.3), 20  # of a model's weights, and models of each


def random_model(scale, seed, demo, sequences=64, **sizes):
    """The atlas of a decoder that has learned nothing."""
    sizes = {"initializer_range": scale, "max_position_embeddings": 128} | sizes
    loaded = wrap(tiny_model("llama", seed=seed, **sizes), demo.tokenizer)
    return ScanStudy(loaded, plan(loaded, sequences=sequences, seed=seed, pool=range(5, 90))).run()


def test_one_random_model_names_nobody(demo):
    found = random_model(0.1, 0, demo, sequences=32, num_hidden_layers=2, max_position_embeddings=64)
    assert not any(found.roles.values())
    assert len(found.facts["near_uniform"]) == 8


@pytest.mark.slow
def test_random_weights_name_nobody(demo):
    """A family-wise p of 0.05 comes in 5 % of runs; t above 10 names heads in many, for it grows with the sequences."""
    fired, above_10, of_induction = (dict.fromkeys(SCALES, 0) for _ in range(3))
    for scale in SCALES:
        for seed in range(RUNS):
            found = random_model(scale, seed, demo)
            assert not any(found.roles.values())
            above_10[scale] += any((one.effects.t > 10).any() for one in found.findings)
            induction = [one.effects for one in found.findings if one.probe == "induction p25"]
            of_induction[scale] += any((one.t > 10).any() for one in induction)
            fired[scale] += any((one.p <= 0.05).any() for one in induction)
    print(f"of {RUNS} runs per scale: induction p <= 0.05 in {fired}")  # noqa: T201
    print(f"t above 10: in any probe {above_10}, in induction {of_induction}")  # noqa: T201
    assert max(fired.values()) <= 4
    assert sum(fired.values()) <= 8


# the command


def named_lines(result):
    """What a scan prints of each head that it names: head and role."""
    return [tuple(line.split()[:2]) for line in result.out.decode().splitlines() if re.match(r" L\dH\d ", line)]


def expected_lines(atlas):
    named = [(head, role) for head, roles in roles_by_head(atlas.roles).items() for role in roles]
    return sorted([*named, ("L1H0", "near_uniform")])


def test_the_command_prints_the_heads_that_are_named(kept, monkeypatch):
    monkeypatch.setattr("attnscope.studies.atlas.ScanStudy.run", lambda *given, **how: kept[0])
    result = call("scan", "demo", "-q", "--sequences", "2", columns=120).silent()
    assert sorted(named_lines(result)) == expected_lines(kept[0])


@pytest.mark.e2e
def test_the_command_prints_and_writes(scanned, tmp_path):
    """From the readings of the same scan, which it would else make again."""
    shutil.copytree(scanned[1] / "readings", tmp_path / "a" / "readings")
    result = call("scan", "demo", "-q", "--out", str(tmp_path / "a"), columns=120).silent()
    assert sorted(named_lines(result)) == expected_lines(scanned[0])
    assert (tmp_path / "a" / "atlas.parquet").exists()


EVIDENCE = {  # role: the probes whose lower bound names it, and what the bound is above
    "induction": (r"induction p\d+", "other"),
    "self": ("offset 0", "best other offset"),
    "previous-token": ("offset 1", "best other offset"),
    "offset-2": ("offset 2", "best other offset"),
    "sink": ("sink", "uniform"),
    "long-range-copying": ("long-range-copying", "moved span"),
}


def shown_at(columns, sheet, monkeypatch, capsys):
    """The lines of a sheet on so many columns, none of them cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    output.show(sheet())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    return lines


@pytest.mark.parametrize("columns", [80, 200])
def test_every_named_head_is_shown_with_the_probe_that_named_it(kept, columns, monkeypatch, capsys):
    lines = shown_at(columns, lambda: named_sheet(kept[0], None), monkeypatch, capsys)
    rows = {(row["layer"], row["head"], row["probe"], row["against"]): row for row in kept[0].table().to_pylist()}
    shown = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match(r" L\dH\d ", line)]
    assert {role for _, role, *_ in shown} == {*EVIDENCE, "near_uniform"}
    for name, role, probe, *numbers in shown:
        if role == "near_uniform":
            continue
        pattern, against = EVIDENCE[role]
        assert re.fullmatch(pattern, probe)
        row = rows[int(name[1]), int(name[3]), probe, against]
        assert row["low_all"] >= 0.3
        interval = f"[{row['low_all']:z.2f}, {row['high_all']:z.2f}]"
        assert numbers == [f"{row['score']:z.2f}", f"{row['null']:z.2f}", f"{row['effect']:+z.2f} {interval}"]


def test_of_the_periods_of_induction_the_one_that_decided_is_shown(kept):
    findings = [one for one in kept[0].findings if one.probe.startswith("induction") and one.against == "other"]
    bounds = sorted((float(one.effects.low_all[18]) for one in findings), reverse=True)
    assert float(named_by("induction", kept[0].findings, 18).effects.low_all[18]) == bounds[1]


@pytest.mark.parametrize("columns", [80, 200])
def test_every_head_on_one_probe_on_request(kept, columns, monkeypatch, capsys):
    found = contrasts(kept[0], "induction p50")
    lines = shown_at(columns, lambda: probe_sheet(kept[0], found, None, columns), monkeypatch, capsys)
    assert len([line for line in lines if re.match(r" L\dH\d ", line)]) == 24
    missing = [line for line in left_out(kept[0], "induction p50", Top(), columns) if "narrow" in line]
    assert missing == ["not shown on a narrow terminal: shuffled, copying, JS"] * (columns == 80)


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ("induction p50", ["induction: L3H0, L3H1"]),
        ("sink", ["sink: L1H2, L1H3, L3H0, L3H1"]),
        ("offset 2", ["offset-2: L1H4"]),
        ("offset 5", ["offset 5 names no role: see its effects"]),
    ],
)
def test_a_probe_has_an_answer_the_heads_that_it_names(kept, probe, expected):
    assert probe_answers(kept[0], probe) == expected


def test_a_probe_that_names_no_head_says_how_far_the_best_one_is(kept):
    [probe] = [name for name in kept[0].probes() if name.startswith("duplicate-token")][:1]
    [line] = probe_answers(kept[0], probe)
    rows = [row for row in kept[0].table(probe=probe).to_pylist() if row["against"] == "other"]
    best = max(rows, key=lambda row: row["effect"])
    interval = f"[{best['low_all']:z.2f}, {best['high_all']:z.2f}]"
    effect = f"L{best['layer']}H{best['head']} {best['effect']:+z.2f} {interval}"
    assert line.startswith(f"duplicate-token: no head: largest effect {effect}; the rule is lower bound >= 0.3")


def test_the_answer_of_a_probe_is_said_in_a_pipe_too(two, monkeypatch):
    monkeypatch.setattr("attnscope.api.scan.save_probes", lambda *given: None)  # `two` has drawn them
    said = call("scan", "demo", "--sequences", "2", "--out", str(two[1]), "--probe", "induction p25").ok().err
    assert "induction: no head: largest effect L" in said


@pytest.mark.parametrize(
    ("sequences", "said"), [(40, ["no p under 64 sequences: it is of all 60 effects at once"]), (64, [])]
)
def test_many_heads_take_more_sequences_for_p_and_a_line_says_so(sequences, said):
    made = made_atlas(DEMO_FOLDER, {}, heads=(10, 6))
    effects = replace(made.findings[0].effects, n=np.full(60, sequences), p=np.full(60, np.nan))
    atlas = replace(made, findings=[replace(made.findings[0], effects=effects)])
    assert left_out(atlas, "sink", Top(top="all"), 200)[:-2] == said


def test_what_it_would_take_is_said_before_anything_is_read(demo, tmp_path):
    result = call("scan", "demo", "--dry-run", "--sequences", "4", "--out", str(tmp_path / "a")).ok()
    planned = plan(demo, sequences=4)
    assert f"long-range-copying): {planned.tokens} tokens x 4 layers" in result.out.decode()
    assert not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The command on two sequences, with --out and on a terminal; and its folder."""
    folder = tmp_path_factory.mktemp("two")
    shown = call("scan", "demo", "--sequences", "2", "--format", "table", "--out", str(folder), columns=80).ok()
    return shown, folder


def test_few_sequences_have_no_interval_and_no_role(two, monkeypatch):
    """A pipe has every probe, of the readings that lie there."""
    monkeypatch.setattr("attnscope.api.scan.save_probes", lambda *given: None)  # `two` has drawn them
    rows = call("scan", "demo", "--sequences", "2", "--out", str(two[1]), "-q", "--format", "jsonl").silent().records
    assert {row["low_all"] for row in rows} == {None}
    table = pq.read_table(two[1] / "atlas.parquet").to_pylist()
    scores, written = ({tuple(map(row.get, PLACE)): row["score"] for row in of} for of in (rows, table))
    assert scores == pytest.approx(written, nan_ok=True)
    assert json.loads((two[1] / "atlas.json").read_text())["roles"] == {}
    assert (two[1] / "probes.png").exists()


def test_whatever_is_named_is_said_with_its_condition(kept, two):
    found, folder = kept
    said = {rule.role: rule.condition for rule in found.rules()}
    assert set(said) == {role for roles in found.roles.values() for role in roles} | {"near_uniform"}
    assert said.items() <= json.loads((folder / "atlas.json").read_text())["rules"].items()
    result = two[0]  # no interval, so no role
    assert [line.split(":")[0] for line in result.err.splitlines() if "mean Jensen-Shannon" in line] == ["near_uniform"]
    assert not [line for line in result.err.splitlines() if "lower bound" in line]
    marked = next(line for line in result.out.decode().splitlines() if "L1H0" in line)
    assert float(marked.split()[-1]) < 0.15
    assert " near_uniform  JS to uniform " in marked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--probe", "inducton"],
            "did you mean induction p10, induction p25, induction p50, induction p100?; the probes are ",
        ),
        (["--probe", "induction"], "there is no probe 'induction'; did you mean induction p10, induction p25, "),
        (["--probe", "zzzz"], "there is no probe 'zzzz'; the probes are induction p10; "),
        (["--sequences", "1"], "--sequences: expected a whole number from 2 to 1,000,000, got '1'"),
        (["--pool", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_bad_inputs_in_one_line(arguments, said):
    result = call("scan", "demo", "--sequences", "4", "-q", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (result.code, b"", 1)
    assert result.code in (2, 4)
    assert said in result.err


def previous(query, key, value, g, beta, output_final_state=False, **kwargs):
    """A rule in place of the delta rule: head 1 writes minus twice the value before each, the others each token's."""
    output = value.clone()
    output[:, 1:, 1] = -2 * value[:, :-1, 1]
    return output, value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1])


def test_the_probes_of_a_linear_head_are_asked_of_shares_of_its_map(hybrid, monkeypatch):
    monkeypatch.setattr("transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule", previous)
    [offsets] = [one for one in trials(range(100, 130), count=2) if one.name == "offsets"]
    read = read_trial(hybrid, offsets)
    back = dict(zip(read.heads, read.values[Measure("distinct", "1 back")].T.tolist(), strict=True))
    assert list(back) == [
        (layer, head) for layer in (*(StackLayer(of, LINEAR) for of in range(3)), 3) for head in range(4)
    ]
    linear = {head: values for head, values in back.items() if head[0] != 3}
    assert linear == {(layer, head): [float(head == 1)] * 2 for layer, head in linear}


@pytest.mark.e2e
def test_a_planted_linear_head_is_named_and_found_by_its_role(hybrid, tmp_path, monkeypatch):
    """A map with signs: |w| as a share of its row is what the probes are asked of."""
    monkeypatch.setattr("transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule", previous)
    planned = plan(hybrid, sequences=32)
    offsets = replace(planned, trials=[trial for trial in planned.trials if trial.name == "offsets"])
    atlas = ScanStudy(hybrid, offsets).run(tmp_path)
    linear = [StackLayer(layer, LINEAR) for layer in range(3)]
    assert atlas.heads == tuple((layer, head) for layer in (*linear, 3) for head in range(4))
    named = {head: roles for head, roles in atlas.roles.items() if head[0] != 3}
    assert named == {(layer, head): (("previous-token",) if head == 1 else ("self",)) for layer, head in named}
    back = read_back(tmp_path)
    assert back.roles == atlas.roles
    assert back.table().equals(atlas.table())
    assert {row["stack"] for row in back.table().to_pylist()} == {"decoder", "linear"}

    # Who asks for the role gets them, and who knows no linear layers gets those of attention alone.
    chosen = selected("@previous-token", hybrid.geometry, back.by_role())
    assert chosen.heads == tuple((layer, 1) for layer in linear)
    with pytest.raises(InputError, match="names no self head"):
        select("@self", hybrid.geometry.heads_by_layer, back.by_role())
    sets, of = named_sets(hybrid, None, AblateOptions(atlas=tmp_path))
    assert of is not None
    assert [(item.name, str(item)) for item in sets][-1] == ("previous-token", "linear L0H1 linear L1H1 linear L2H1")
