"""Parity of encoders and of encoder-decoders: every stack at level full, and what is wrong in one stack is named there.

Shapes: B text, T token, Q query, K key, E model width.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.certificate.check import ATOL, ParityReport, certificate, check_parity, in_words, parity_table, verify
from attnscope.errors import UsageError
from attnscope.hooks.modules import ModuleRun
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import read
from attnscope.reference import reader
from attnscope.reference.layouts import ENCODERS, FAMILIES, UNREAD, UNREAD_ENCODERS, layout_of
from attnscope.reference.positions import relative_bias
from attnscope.reference.projections import LayerInputs
from helpers.command_line import call
from helpers.families import few
from helpers.parity_models import as_loaded, in_half
from helpers.parity_stacks import SOURCE, TARGET, WINDOW, parity_of, stack_model, texts_for, tiny_stacks


def words(text: str) -> list[str]:
    return text.split()


# Those that differ from each other; and those that are built as one of them, which only slow tests measure.
ENCODER = words(
    "bert roberta distilbert electra embedding_gemma2_text modernbert openai_privacy_filter rembert roformer xlm"
)
SEQ2SEQ = words("bart m2m_100 marian mvp t5 t5gemma umt5 whisper")
ALIKE = words(
    """
    bert-generation big_bird camembert data2vec-text dpr ernie eurobert flaubert gte jina_embeddings_v3 layoutlm
    markuplm megatron-bert nomic_bert roberta-prelayernorm roc_bert splinter tapas tipsv2_text_model ultrabert
    visual_bert xmod
    """
)
ALIKE_SEQ2SEQ = words(
    """
    blenderbot blenderbot-small mbart mt5 nllb-moe pegasus plbart seamless_m4t speech_to_text switch_transformers
    """
)
STACKS = ["encoder", "decoder", "cross"]
IN_HALF = ["bert", "modernbert", "openai_privacy_filter", "bart", "mvp", "t5", "whisper"]
LAYERS = 4


@pytest.fixture(scope="module")
def t5() -> Any:
    return stack_model("t5")


def assert_full(report: ParityReport, stacks: list[str]) -> None:
    """The one assertion of this file: all layers of these stacks, level full, weights and output within 1e-5."""
    assert (report.levels, report.verdict) == (dict.fromkeys(stacks, "full"), True), report.largest()
    assert [(one.stack, one.layer) for one in report.layers] == [(k, n) for k in stacks for n in range(LAYERS)]
    for layer in report.layers:
        assert layer.implementation.weights is not None
        assert max(layer.implementation.weights, layer.implementation.output_relative or 0) <= ATOL


def and_slowly(families: list[str], alike: list[str]) -> list[Any]:
    return [*families, *(pytest.param(family, marks=pytest.mark.slow) for family in alike)]


@pytest.mark.parametrize("family", and_slowly(ENCODER, ALIKE))
def test_encoders(family: str) -> None:
    assert_full(parity_of(stack_model(family)), ["encoder"])


@pytest.mark.parametrize("family", and_slowly(SEQ2SEQ, ALIKE_SEQ2SEQ))
def test_encoder_decoders(family: str) -> None:
    assert_full(parity_of(stack_model(family)), STACKS)


def test_no_row_of_the_tables_is_idle() -> None:
    gemma = tiny_stacks("t5gemma").encoder.model_type
    used = {gemma, "albert", *ENCODER, *ALIKE, *SEQ2SEQ, *ALIKE_SEQ2SEQ}
    assert set(ENCODERS) <= used
    assert not set(ENCODERS) & {*FAMILIES, *UNREAD, *UNREAD_ENCODERS}


def test_the_readme_counts_them() -> None:
    count = len({*ENCODER, *ALIKE, *SEQ2SEQ, *ALIKE_SEQ2SEQ})
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"and {count} encoders and encoder-decoders" in readme


@pytest.mark.parametrize("family", sorted(UNREAD_ENCODERS))
def test_what_is_not_full_says_why(family: str) -> None:
    report = parity_of(stack_model(family))
    assert report.level in ("scores", "none")
    assert all(layer.why.startswith(UNREAD_ENCODERS[family]) for layer in report.layers)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_scores(family: str) -> None:
    report = parity_of(stack_model(family), level="scores")
    assert (set(report.levels.values()), report.verdict) == ({"scores"}, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.families)])
@pytest.mark.parametrize("family", few(IN_HALF, also=("openai_privacy_filter",)))
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """Both the float32 copy and the run itself; nothing is said of other keys, as no layer chooses any."""
    model = in_half(stack_model(family), dtype)
    texts = {name: one.to(dtype) if one.is_floating_point() else one for name, one in texts_for(model).items()}
    report = check_parity(as_loaded(model), **texts)
    assert (report.level, report.verdict) == ("full", True), report.largest()
    assert {layer.why for layer in report.layers} == {""}
    assert all(layer.rounding.weights for layer in report.layers)


def test_albert_adds_and_norms_in_its_attention_module() -> None:
    """Its layers are one module that runs several times: read from what enters and leaves it."""
    model = stack_model("albert")
    layer, differences = as_loaded(model).geometry.layers[0], []

    def compare(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = LayerInputs(
            layout_of(model.config),
            dict(module.named_parameters()),
            model.config,
            layer,
            args[0],
            torch.arange(SOURCE),
            arguments={"hidden_states": args[0]},
            stack="encoder",
        )
        differences.append((output[0] - reader.read(given).output_BTE).abs().max())

    attention = model.encoder.albert_layer_groups[0].albert_layers[0].attention
    attention.register_forward_hook(compare, with_kwargs=True)
    model(input_ids=texts_for(model)["prompt"])
    assert len(differences) == LAYERS
    assert max(differences) <= ATOL


# Models that compute something else: the stack and the layer are named.


def shift_the_bias(model: Any) -> None:
    """The last layer of T5's encoder is handed the bias of the distance beside."""
    attention = model.encoder.block[3].layer[0].SelfAttention

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"position_bias": kwargs["position_bias"].roll(1, dims=-1)}

    attention.register_forward_pre_hook(change, with_kwargs=True)


def look_at_the_decoder(model: Any) -> None:
    """Keys of one layer's cross-attention are made of other states than the encoder's."""
    attention = model.model.decoder.layers[3].encoder_attn
    attention.k_proj.register_forward_hook(lambda module, args, out: out.flip(1))


def look_back_alone(model: Any) -> None:
    """A causal mask in one layer of an encoder."""
    attention = model.model.encoder.layers[3].self_attn

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        mask_QK = torch.full((1, 1, SOURCE, SOURCE), torch.finfo(torch.float32).min).triu(1)
        return args, kwargs | {"attention_mask": mask_QK}

    attention.register_forward_pre_hook(change, with_kwargs=True)


CORRUPTIONS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "T5's bias shifted": ("t5", shift_the_bias, "encoder"),
    "keys of other states": ("bart", look_at_the_decoder, "cross"),
    "an encoder that looks back alone": ("bart", look_back_alone, "encoder"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_layer_fails_and_is_named(what: str) -> None:
    family, corrupt, kind = CORRUPTIONS[what]
    model = stack_model(family)
    corrupt(model)
    report = parity_of(model)
    assert [(layer.stack, layer.layer) for layer in report.failures] == [(kind, 3)]
    assert in_words(report.failures[0], report).startswith(f"{kind} layer 3: weights differ")


# Oracles that are wrong: the assertion that passes for the right one must catch each, in the stack where it is wrong.


def causal_everywhere(given: LayerInputs) -> LayerInputs:
    return replace(given, stack="decoder")


def both_ways_everywhere(given: LayerInputs) -> LayerInputs:
    return replace(given, stack="encoder")


def next_bucket(table_NH: torch.Tensor, *positions: torch.Tensor, **how: Any) -> torch.Tensor:
    return relative_bias(table_NH.roll(1, 0), *positions, **how)


def farther(table_NH: torch.Tensor, *positions: torch.Tensor, **how: Any) -> torch.Tensor:
    return relative_bias(table_NH, *positions, **how | {"max_distance": 2 * how["max_distance"]})


def failing(model: Any) -> set[str]:
    return {layer.stack for layer in parity_of(model).failures}


@pytest.mark.parametrize(
    ("family", "wrong", "where"),
    [
        ("bert", causal_everywhere, {"encoder"}),
        ("bart", causal_everywhere, {"encoder"}),
        ("bart", both_ways_everywhere, {"decoder"}),
        ("modernbert", causal_everywhere, {"encoder"}),
    ],
)
def test_a_wrong_direction_is_caught(
    family: str, wrong: Callable[[LayerInputs], LayerInputs], where: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reader.visible
    monkeypatch.setattr(reader, "visible", lambda given: right(wrong(given)))
    assert failing(stack_model(family)) == where


@pytest.mark.parametrize("wrong", [next_bucket, farther])
def test_a_wrong_bucket_is_caught(wrong: Callable[..., torch.Tensor], t5: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "relative_bias", wrong)
    assert failing(t5) == {"encoder", "decoder"}


def test_keys_from_the_decoder_are_caught(t5: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one length, where the shapes tell nothing."""
    texts = {name: ids_BT[:, :TARGET] for name, ids_BT in texts_for(t5).items()}
    assert check_parity(as_loaded(t5), **texts).holds
    right = ModuleRun.source_BSE.fget

    def wrong(run: ModuleRun) -> torch.Tensor | None:
        return None if right(run) is None else run.hidden_BTE

    monkeypatch.setattr(ModuleRun, "source_BSE", property(wrong))
    failures = check_parity(as_loaded(t5), **texts).failures
    assert [(layer.stack, layer.layer) for layer in failures] == [("cross", layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_is_caught(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reader.visible

    def wrong(given: LayerInputs) -> torch.Tensor:
        layer = given.layer
        return right(replace(given, layer=replace(layer, window=layer.window + by) if layer.window else layer))

    monkeypatch.setattr(reader, "visible", wrong)
    report = parity_of(stack_model("modernbert"))
    sliding = [layer.index for layer in as_loaded(stack_model("modernbert")).geometry.layers if layer.window]
    assert [layer.layer for layer in report.failures] == sliding != []


# What is selected, said and written.


def test_heads_are_selected_by_stack(t5: Any) -> None:
    report = parity_of(t5, select="cross.1.0-1,2")
    assert [(layer.stack, layer.layer) for layer in report.layers] == [("decoder", 2), ("cross", 1)]
    assert report.holds
    with pytest.raises(UsageError, match="layer 7"):
        parity_of(t5, select="enc.7")


def test_certificate_summary_and_table_say_the_stack(t5: Any) -> None:
    loaded, texts = as_loaded(t5), texts_for(t5)
    report = check_parity(loaded, **texts)
    written = certificate(report, loaded, **texts)
    assert (written["text"]["tokens"], written["source"]["tokens"]) == (TARGET, SOURCE)
    assert written["levels"] == dict.fromkeys(STACKS, "full")
    assert [layer["stack"] for layer in written["layers"]] == [kind for kind in STACKS for _ in range(LAYERS)]
    summary = verify(loaded, **texts)
    names = [f"{prefix}{layer}" for prefix in ("encoder ", "", "cross ") for layer in range(LAYERS)]
    assert (summary["holds"], list(summary["largest_difference"])) == (True, names)
    rows = parity_table(report)
    assert rows.column_names[-1] == "stack"
    assert rows.column("stack").to_pylist() == [layer["stack"] for layer in written["layers"]]


def test_a_source_belongs_to_two_texts_alone(t5: Any) -> None:
    loaded, ids_BT = as_loaded(t5), texts_for(t5)["prompt"]
    with pytest.raises(UsageError, match="reads two texts"):
        check_parity(loaded, ids_BT)
    with pytest.raises(UsageError, match="leave out source"):
        check_parity(as_loaded(stack_model("bert")), ids_BT, source=ids_BT)


def test_what_the_texts_cannot_show_is_said_of_its_stack(t5: Any) -> None:
    texts = texts_for(t5)
    short = {**texts, "prompt": texts["prompt"][:, :1]}
    assert check_parity(as_loaded(t5), **short).too_short == ("decoder: any weight but 1",)
    loaded = as_loaded(stack_model("modernbert"))
    for tokens, unseen in ((WINDOW + 1, (f"the window of {WINDOW}",)), (WINDOW + 2, ())):
        ids_BT = texts_for(loaded.model)["prompt"][:, :tokens]
        assert check_parity(loaded, ids_BT).too_short == unseen


# The command line, on saved models.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {}
    for family in ("bert", "bart"):
        made[family] = tmp_path_factory.mktemp(family)
        stack_model(family, vocab_size=2000).save_pretrained(made[family])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_FOLDER / file, made[family])
    return made


def test_the_command_on_an_encoder(folders: Mapping[str, Path]) -> None:
    done = call("parity", "--model", str(folders["bert"]), "--text", "the river bank", "--format", "jsonl")
    rows = done.records
    assert [(row["layer"], row["stack"], row["level"], row["holds"]) for row in rows] == [
        (layer, "encoder", "full", True) for layer in range(LAYERS)
    ]
    assert (done.code, done.err.splitlines()[-1].partition(";")[0]) == (0, "parity holds: 4 at level full")


def test_the_command_on_two_texts(folders: Mapping[str, Path], tmp_path: Path) -> None:
    texts = ("--text", "the river bank", "--target", "a bank")
    written = tmp_path / "certificate.json"
    done = call(
        *("parity", "--model", str(folders["bart"]), *texts, "--format", "table", "--out", str(written)), columns=200
    ).ok()
    named = [line.split("full")[0].strip() for line in done.out.decode().splitlines() if "full" in line]
    assert named == [f"{prefix}L{layer}" for prefix in ("encoder ", "", "cross ") for layer in range(LAYERS)]
    said = "parity holds: encoder 4 at level full, decoder 4 at level full, cross 4 at level full; "
    assert done.err.splitlines()[-1].startswith(said)
    assert {layer["stack"] for layer in json.loads(written.read_text())["layers"]} == set(STACKS)


def test_heads_verified(folders: Mapping[str, Path]) -> None:
    texts = ("--text", "the river bank", "--target", "a bank")
    call("heads", "--model", str(folders["bart"]), *texts, "--verify").ok()
    seen = read(load(LoadOptions(model=str(folders["bart"]))), CaptureSpec(texts[1], target=texts[3], verify=True))
    parity = seen.facts["parity"]
    assert (parity["holds"], parity["levels"]) == (True, dict.fromkeys(STACKS, "full"))


def test_a_target_is_refused_where_there_is_no_decoder(folders: Mapping[str, Path]) -> None:
    done = call("parity", "--model", str(folders["bert"]), "--text", "a", "--target", "b")
    assert done.code == 2
    assert "leave out --target" in done.err
