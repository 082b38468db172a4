"""Encoders, and encoder-decoders with their three stacks: what is read of each, told apart, listed and drawn."""

import json
from dataclasses import replace

import pyarrow.compute as pc
import pytest
import torch
import transformers

import attnscope
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.drawing import drawings
from attnscope.export.export import manifest
from attnscope.hooks import generation
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import KNOWN
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import DEMO_FOLDER, wrap
from attnscope.model.selection import CAUSAL, MIXING, STACKS, select_stacks
from attnscope.model.tasks import task_of
from attnscope.observe.request import CaptureSpec, LayerKey, PerLayer, Request
from attnscope.observe.run import prepare, target_lines
from helpers import made_tokenizers
from helpers.command_line import call
from helpers.families import tiny_config
from helpers.folders import TOKENIZER_FILES

SOURCE, TARGET = "the financial bank is located on river bank", "Mary saw John"
WIDTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
BART = WIDTH | {"encoder_attention_heads": 4, "decoder_attention_heads": 8, "vocab_size": 2000}
BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
EVERY = Request(relations=True, top_k=None, maps="all", weights=True)


def random(model):
    """With weights large enough for heads to differ."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bart(demo):
    config = transformers.BartConfig(**BART)
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager")
    return wrap(random(model), demo.tokenizer, "tiny-bart")


@pytest.fixture(scope="module")
def bert(demo):
    config = transformers.BertConfig(**BERT, vocab_size=2000)
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation="eager")
    return wrap(random(model), demo.tokenizer, "tiny-bert")


@pytest.fixture(scope="module")
def seen(bart):
    return attnscope.capture(bart, SOURCE, target=TARGET, request=EVERY)


@pytest.mark.parametrize("named", ["its config", "its decoder's config", "its tokenizer"])
def test_a_target_has_no_end_token_whoever_names_it(named):
    parts = [
        tiny_config("bert", vocab_size=20, is_decoder=decoder, add_cross_attention=decoder) for decoder in (False, True)
    ]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts, decoder_start_token_id=1)
    if named != "its tokenizer":
        (config if named == "its config" else config.decoder).eos_token_id = 2
    tokenizer = made_tokenizers.wordpiece()
    tokenizer.eos_token = None
    assert tokenizer("the bank").input_ids[-1] == tokenizer.sep_token_id == 2
    model = random(transformers.EncoderDecoderModel._from_config(config, attn_implementation="eager"))
    seen = attnscope.capture(wrap(model, tokenizer), "the river", target="the bank.")
    assert seen.queries.tokens == ("[CLS]", "the", "bank", ".")
    assert seen.prompt.tokens[-1] == "[SEP]"


def test_a_language_after_the_end_token_is_what_the_decoder_begins_with_as_it_was_trained():
    words = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁bank")]
    tokenizer = transformers.MBartTokenizer(vocab=words, src_lang="en_XX", tgt_lang="de_DE")
    made = transformers.MBartForConditionalGeneration._from_config(tiny_config("mbart", vocab_size=40))
    seen = attnscope.capture(wrap(random(made), tokenizer), "the bank", target="the bank")
    labels = torch.tensor([tokenizer(text_target="the bank").input_ids])
    trained = made.prepare_decoder_input_ids_from_labels(labels)[0].tolist()
    assert trained[-1] == tokenizer.eos_token_id
    assert list(seen.queries.ids) == trained[:-1]
    assert seen.queries.tokens[0] == "de_DE"


def outputs(loaded, seen):
    """What transformers itself gives for the same tokens, by stack."""
    source, target = (torch.tensor([prompt.ids]) for prompt in (seen.prompt, seen.queries))
    found = loaded.model(source, decoder_input_ids=target, output_attentions=True, use_cache=False)
    return {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions, "cross": found.cross_attentions}


def test_every_stack_is_the_models_own(bart, seen):
    assert list(seen.stacks) == ["encoder", "decoder", "cross"]
    for kind, matrices in outputs(bart, seen).items():
        weights = seen.of(kind).weights
        assert list(weights) == [LayerKey(layer, kind) for layer in range(len(matrices))]
        for layer, expected in enumerate(matrices):
            torch.testing.assert_close(weights[layer], expected[0], rtol=0, atol=1e-6)
    assert seen.failures == []
    assert seen.unmeasured == []


@pytest.mark.parametrize("engine", ["tiles", "numba"])
def test_the_fused_engines_give_the_same(bart, seen, engine):
    fused = attnscope.capture(bart, SOURCE, target=TARGET, request=EVERY, engine=engine, verify=True)
    assert fused.facts["largest_difference_to_eager"] < 1e-5
    found = {way for check in fused.calls for way in check.answered_by.values()}
    assert {way for ways in manifest(fused, {}, {})["answered_by"].values() for way in ways} == found
    for kind, one in fused.stacks.items():
        for layer in range(len(one.weights)):
            torch.testing.assert_close(one.weights[layer], seen.of(kind).weights[layer], rtol=0, atol=1e-5)
    both = (one.table("layer").select(list(one.every.scores)).to_pandas() for one in (fused, seen))
    first, second = both
    assert (abs(first - second) / second.abs().clip(1)).max().max() < 1e-5  # effective keys are counted in whole ones


def test_an_encoder_looks_both_ways(bert):
    looked = attnscope.capture(bert, SOURCE, request=EVERY)
    ids = torch.tensor([looked.prompt.ids])
    for layer, expected in enumerate(bert.model(ids, output_attentions=True).attentions):
        torch.testing.assert_close(looked.weights[layer], expected[0], rtol=0, atol=1e-6)
    assert looked.stacks == {"encoder": looked}
    assert {head.name for head in looked.heads} >= {"L0H0", "L1H3"}, "of one stack a number alone says it"
    assert set(looked.table().column("stack").to_pylist()) == {"encoder"}
    assert int(looked.relations().column("key").to_numpy().max()) == len(looked.prompt) - 1
    assert any(head.strongest.key > head.strongest.query for head in looked.heads)


def test_distances_in_an_encoder_count_to_both_sides(bert):
    looked = attnscope.capture(bert, SOURCE, request=EVERY)
    place = torch.arange(len(looked.prompt)).float()
    far_QK = (place[:, None] - place).abs()
    for engine in ("eager", "tiles", "numba"):
        again = attnscope.capture(bert, SOURCE, engine=engine)
        for head in again.heads:
            expected = (looked.weights[head.layer][head.head] * far_QK).sum(-1).mean()
            assert head.score["distance"] == pytest.approx(float(expected), abs=1e-5)


def test_metrics_are_null_where_they_say_nothing(seen):
    for head in seen.heads:
        for name, value in head.score.items():
            if head.stack not in KNOWN[name].stacks:
                assert value != value, (head.name, name)
    cross = [head for head in seen.heads if head.stack == "cross"]
    assert all(head.score["entropy"] == head.score["entropy"] for head in cross)
    assert {"induction", "local_mass_32"} <= {
        name for name, one in KNOWN.items() if {*one.stacks} <= {*CAUSAL, *MIXING}
    }


def test_entropy_of_cross_attention_by_hand(seen):
    weights = seen.of("cross").weights[1][2].double()
    expected = -(weights * weights.log()).sum(-1).mean()
    [head] = [head for head in seen.heads if head.name == "cross L1H2"]
    assert head.score["entropy"] == pytest.approx(float(expected), abs=1e-5)


def test_tables_list_all_stacks_with_the_texts_that_they_read(seen):
    table = seen.table("focus").to_pylist()
    assert len(table) == 2 * 4 + 3 * 8 + 3 * 8
    assert [row["stack"] for row in table].count("cross") == 24
    assert list(seen.table().column_names)[-2:] == ["stack", "type"]
    source, target = seen.prompt.tokens, seen.queries.tokens
    for row in seen.relations().to_pylist():
        queries, keys = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}[
            row["stack"]
        ]
        assert (row["query_token"], row["key_token"]) == (queries[row["query"]], keys[row["key"]])
        assert row["weight"] == pytest.approx(
            float(seen.of(row["stack"]).weights[row["layer"]][row["head"], row["query"], row["key"]])
        )
    keys = seen.key_table().to_pylist()
    tokens = {row["position"]: row["token"] for row in keys if row["stack"] == "cross"}
    assert [tokens[place] for place in range(len(tokens))] == list(source)
    assert sum(row["received"] for row in keys if row["stack"] == "cross") == pytest.approx(1, abs=1e-5)


def test_heads_are_ranked_over_all_stacks(seen):
    focus = [head.score["focus"] for head in seen.kept_heads("focus")]
    assert focus == sorted(focus, reverse=True)
    assert {head.stack for head in seen.kept_heads("focus")} == {"encoder", "decoder", "cross"}


def test_the_target_is_read_as_it_is_trained(bart, demo, seen):
    """The start token, then the text's own tokens: each query makes the token after it."""
    own = demo.tokenizer(TARGET)["input_ids"]
    assert list(seen.queries.ids) == [2, *own]
    assert seen.facts["target"] == {"ids": [2, *own], "generated": False}
    by_ids = attnscope.capture(bart, SOURCE, target=own, request=EVERY)
    assert by_ids.queries.ids == seen.queries.ids


def test_a_target_that_nobody_gave_is_what_the_model_makes(bart):
    source = torch.tensor([attnscope.capture(bart, SOURCE, target="a").prompt.ids])
    made = bart.model.generate(source, do_sample=False, num_beams=1, max_new_tokens=5)[0].tolist()
    run = prepare(bart, CaptureSpec(SOURCE, generate=5))
    assert run.facts["target"]["generated"]
    assert prepare(bart, CaptureSpec(SOURCE)).facts["target"]["generated"], "also where no length is given"
    assert list(run.prompt.ids) == (made[:-1] if made[-1] == bart.model.generation_config.eos_token_id else made)


@pytest.mark.parametrize(
    ("generate", "end", "most", "expected"),
    [
        (100, None, 64, (11, "positions of the decoder", "11 of 100 tokens, as many as the decoder reads")),
        (None, None, 64, (11, "positions of the decoder", "11 tokens, as many as the decoder reads")),
        (None, None, 3, (3, "default number", "3 tokens, the most by default")),
        (5, None, 64, (5, "number asked for", "5 tokens")),
        (1, None, 64, (1, "number asked for", "1 token")),
        (5, "the third", 64, (2, "end token", "2 of 5 tokens, then the end token")),
        (None, "the third", 64, (2, "end token", "2 tokens, then the end token")),
    ],
)
def test_a_target_says_how_many_tokens_were_made_of_how_many_and_what_ended_them(
    bart, monkeypatch, generate, end, most, expected
):
    monkeypatch.setattr(generation, "MOST_MADE", most)
    config, geometry = (
        transformers.GenerationConfig(decoder_start_token_id=2),
        replace(bart.geometry, decoder_positions=12),
    )
    monkeypatch.setattr(bart.model, "generation_config", config)
    config.forced_eos_token_id = 7  # belongs to a length of the config's own
    loaded = replace(bart, geometry=geometry)
    if end:
        config.eos_token_id = prepare(loaded, CaptureSpec(SOURCE, generate=5)).prompt.ids[3]
    run = prepare(loaded, CaptureSpec(SOURCE, generate=generate))
    count, why, words = expected
    assert len(run.prompt) == 1 + count
    facts = {"ids": list(run.prompt.ids), "generated": True, "asked": generate, "made": count, "stopped_by": why}
    assert run.facts["target"] == facts
    [line] = target_lines(run)
    assert f" ({words}); " in line


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1", {"decoder": {1: (0, 1)}}),
        ("cross.0.1", {"cross": {0: (1,)}}),
        ("cross L0H1", {"cross": {0: (1,)}}),
        ("enc", {"encoder": {0: (0, 1), 1: (0, 1)}}),
        ("enc.0-1.*,dec.last", {"encoder": {0: (0, 1), 1: (0, 1)}, "decoder": {1: (0, 1)}}),
        ("ENCODER.*.0, 0.1", {"encoder": {0: (0,), 1: (0,)}, "decoder": {0: (1,)}}),
    ],
)
def test_selections_of_stacks(expression, expected):
    heads = {kind: {0: 2, 1: 2} for kind in ("encoder", "decoder", "cross")}
    assert select_stacks(expression, heads, "decoder") == expected


@pytest.mark.parametrize("expression", ["cross.0", "cross", "dec.1", "dec.last"])
@pytest.mark.parametrize("heads", [{"encoder": {0: 2}}, {"encoder": {0: 2}, "decoder": {}}])
def test_a_stack_that_is_not_there(expression, heads):
    with pytest.raises(UsageError, match="this model shows encoder layers"):
        select_stacks(expression, heads, "encoder")


def test_a_selection_keeps_heads_of_its_stacks_alone(bart):
    kept = attnscope.capture(bart, SOURCE, target=TARGET, request=EVERY, select="cross.1.2,0")
    names = [head.name for head in kept.kept_heads()]
    assert names == [*(f"L0H{head}" for head in range(8)), "cross L1H2"]
    assert set(pc.unique(kept.relations().column("stack")).to_pylist()) == {"decoder", "cross"}
    assert dict(kept.of("encoder").weights) == {}


def test_there_is_a_drawing_per_stack(seen):
    made = drawings(seen)
    assert list(made) == ["encoder", "decoder", "cross"]
    cross = made["cross"].maps[0]
    assert cross.labels_Q == seen.queries.labels
    assert cross.labels_K == seen.prompt.labels
    assert made["cross"].heads[0] == "cross L0H0"
    assert made["decoder"].heads[0] == "L0H0"


def test_layers_are_those_of_their_stack():
    found = PerLayer({LayerKey(2, "cross"): "kept"})
    assert found[2] == found[2, "cross"] == "kept"
    assert 2 in found
    assert (2, "decoder") not in found
    with pytest.raises(UsageError, match=r"expected the number of a layer, got '2'; write \[2\]$"):
        found["2"]
    with pytest.raises(UsageError, match=r"expected the number of a layer, got 'L2H0'; .*matrix\('L1H4'\)$"):
        found["L2H0"]


def test_tasks_and_geometry():
    assert task_of(transformers.BartConfig(**BART)) == "seq2seq"
    assert task_of(transformers.BertConfig()) == "encoder"
    assert task_of(transformers.BertConfig(is_decoder=True)) == "decoder"
    assert task_of(transformers.LlamaConfig()) == "decoder"
    geometry = geometry_of(transformers.BartConfig(**BART), count=False)
    assert {kind: [one.heads for one in layers.values()] for kind, layers in geometry.stacks.items()} == {
        "encoder": [4, 4],
        "decoder": [8, 8, 8],
        "cross": [8, 8, 8],
    }
    assert set(geometry.stacks) <= set(STACKS)


def test_the_seam_says_of_which_stack_a_call_is(bart):
    called = []
    ids = torch.arange(5, 12)[None]
    inputs = {"decoder_input_ids": torch.arange(5, 12)[None]}  # as long as the source: no shape tells them apart
    listen(bart.model, ids, lambda call: called.append((call.stack, call.layer, call.call)), **inputs)
    pairs = [(kind, layer, 0) for layer in range(3) for kind in ("decoder", "cross")]
    assert called == [("encoder", 0, 0), ("encoder", 1, 0), *pairs]


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"target": " "}, InputError, "the target is empty"),
        ({"target": TARGET, "generate": 3}, UsageError, "a target was given, and one is to be generated"),
        ({"answer": "yes"}, UsageError, "only a causal model has an answer after"),
        ({"keep": Request(query="zebra")}, InputError, "is not in the text"),
        ({"target": "the " * 2000}, InputError, "the decoder reads at most"),
        ({"select": "vision.1"}, UsageError, "names vision layers"),
    ],
)
def test_what_cannot_be_asked_of_two_texts(bart, how, error, says):
    with pytest.raises(error, match=says):
        prepare(bart, CaptureSpec(SOURCE, **how))


def test_a_model_of_sound_is_given_no_text(demo):
    sizes = WIDTH | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 2000}
    config = transformers.WhisperConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with pytest.raises(ModelError, match=r"sound, .*text"):
        prepare(wrap(model, demo.tokenizer, "tiny-whisper"), CaptureSpec(SOURCE, target=TARGET))


def test_a_stack_of_which_nothing_is_kept_is_named(demo):
    """ProphetNet's cross-attention has the rows of several predicted tokens below each other."""
    sizes = {"hidden_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 200, "ngram": 2}
    sizes |= {f"num_{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    model = transformers.ProphetNetModel(transformers.ProphetNetConfig(**sizes))
    seen = attnscope.capture(wrap(random(model), demo.tokenizer), [6, 7, 8, 9], target=[7, 8, 9])
    assert list(seen.stacks) == ["encoder", "decoder"]
    assert [line for line in seen.unmeasured if line.startswith("cross")] == [
        "cross: its layers attend over something else than tokens"
    ]


def test_a_target_for_a_causal_model(demo):
    with pytest.raises(UsageError, match="a target is for an encoder-decoder"):
        prepare(demo, CaptureSpec(SOURCE, target=TARGET))


@pytest.fixture(scope="module")
def folders(bart, bert, tmp_path_factory):
    root = tmp_path_factory.mktemp("stacks")
    for name, loaded in (("bart", bart), ("bert", bert)):
        loaded.model.save_pretrained(root / name)
        for file in TOKENIZER_FILES:
            (root / name / file).write_bytes((DEMO_FOLDER / file).read_bytes())
    return root


@pytest.mark.e2e
def test_a_run_with_all_its_files(folders, tmp_path):
    out = tmp_path / "run"
    asked = ["--text", SOURCE, "--target", TARGET, "--out", str(out), "--select", "cross.1.4-5,enc.0.1"]
    call("heads", "--model", str(folders / "bart"), *asked, "--figures", "heads").ok()
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"heads.csv", "relations.csv", "manifest.json", "encoder/heads/L00H01.png"} <= files
    assert {f"cross/heads/L01H{head:02d}.png" for head in (4, 5)} <= files
    said = json.loads((out / "manifest.json").read_text())
    assert said["prompt"]["text"] == SOURCE
    assert said["options"]["target"] == TARGET
    assert {call["stack"] for call in said["calls"]} == {"encoder", "decoder", "cross"}
    call("heads", str(out), "--out", str(tmp_path / "again"), "--figures", "heads").ok()
    assert (tmp_path / "again" / "heads.csv").read_bytes() == (out / "heads.csv").read_bytes()
    asked[3] = "another"
    other = call("heads", "--model", str(folders / "bart"), *asked, "--figures", "heads")
    assert "target was" in other.err
    assert other.code == 2


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("scan", "a scan is for a causal model"),
        ("explain", "an explanation is for a causal model or an encoder"),
    ],
)
def test_what_is_not_for_an_encoder_decoder(folders, tmp_path, command, says):
    model = str(folders / "bart")
    asked = {
        "scan": [model, "--out", str(tmp_path / "out")],
        "explain": ["--model", model, "--text", SOURCE, "--head", "L0H0"],
    }[command]
    done = call(command, *asked)
    assert says in done.err
    assert done.code == 3
    assert "Traceback" not in done.err


def test_an_encoder_is_explained_with_every_step_held_to_the_models(folders):
    done = call("explain", "--model", str(folders / "bert"), "--text", SOURCE, "--head", "L1H2").ok()
    steps = done.records
    assert all(check["holds"] for step in steps for check in step.get("checks", ()))
    [mask] = [step for step in steps if step.get("name") == "mask"]
    assert mask["why"] == "In an encoder a token may look both ways."
    assert "sees all of them" in mask["formula"]


def test_an_encoder_read_alone(folders):
    done = call("heads", "--model", str(folders / "bart"), "--set", "task=encoder", "--text", SOURCE).ok()
    assert [(row["stack"], row["type"]) for row in done.rows] == [("encoder", "")] * 2 * 4


@pytest.mark.parametrize(("task", "says"), [("decoder", "looks ahead"), ("seq2seq", "it is an encoder")])
def test_a_task_that_the_model_is_not_made_for(folders, task, says):
    with pytest.raises(ModelError, match=says):
        attnscope.load(str(folders / "bert"), task=task)
