"""An answer, generated or given: its rows are those of the model's own generation, and its tokens have names.

Shapes: L layer, H head, Q query, K key, S step of a generation.
"""

import json
import logging
import re
import shlex
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

import attnscope
from attnscope.errors import ForwardError, InputError, ModelError, UsageError
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.generation import _StopStrings, continuation, ends, start_token, watched_steps
from attnscope.inputs.prompt import Prompt, from_chat, from_text
from attnscope.inputs.tokens import find
from attnscope.metrics.metrics import LOOKBACKS
from attnscope.model import libraries as generating
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load, wrap
from attnscope.model.options import LoadOptions
from attnscope.observe.collect import observe
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec, Request
from attnscope.observe.run import answer_lines, prepare
from helpers.command_line import call
from helpers.families import few, tiny_config
from helpers.made_tokenizers import MAKERS
from helpers.own import attentions
from helpers.pages import Read
from helpers.parity_models import TYPES, as_loaded, ids_for, rouse, roused_model
from helpers.pretrained import pretrained
from helpers.stack_families import TYPES as OF_STACKS
from helpers.stack_families import tiny as of_stacks

TEXT = "the financial bank is located on"
EITHER_ENGINE = pytest.mark.parametrize("engine", ["eager", "fused"])
FAMILIES = {"gpt2": {}, "mistral": {"sliding_window": 6}, "gemma2": {"sliding_window": 6}}
MODELS = ["demo", "stories260K-llama", *FAMILIES]
IDS = torch.randint(6, 120, (9,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.families) if name in ("stories260K-llama", "gpt2") else name
        for name in MODELS
    ],
)
def loaded(request: pytest.FixtureRequest, demo: LoadedModel) -> LoadedModel:
    """The demo, real weights, and tiny models with and without windows; the tiny ones read the demo's tokens."""
    if request.param in FAMILIES:
        return tiny(demo, request.param, **FAMILIES[request.param])
    return demo if request.param == "demo" else load(LoadOptions(model=str(pretrained(request.param))))


def tiny(demo: LoadedModel, family: str, **overrides: object) -> LoadedModel:
    model = roused_model(family, **overrides)
    model.generation_config.eos_token_id = None  # random weights end at once, or never
    return replace(as_loaded(model), tokenizer=demo.tokenizer)


def steps_of(loaded: LoadedModel, prompt_ids: Sequence[int], count: int) -> tuple[list[int], list[list[torch.Tensor]]]:
    """What the plain model generates, and its weights: S lists of L tensors (H, Q, K)."""
    ids = torch.tensor([prompt_ids])
    made = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    return made.sequences[0, len(prompt_ids) :].tolist(), [[one[0] for one in step] for step in made.attentions]


def assert_rows(seen: Observation, steps: Sequence[Sequence[torch.Tensor]], first: int) -> None:
    """Every row that generation made is the observation's; a cache with a window holds the last keys alone."""
    for number, step in enumerate(steps):
        for layer, weights_HQK in enumerate(step):
            last = first + number
            found_HQK = seen.weights[layer][:, :first] if number == 0 else seen.weights[layer][:, last - 1 : last]
            keys = weights_HQK.shape[-1]
            torch.testing.assert_close(found_HQK[..., last - keys : last], weights_HQK, atol=1e-5, rtol=0)
            assert not found_HQK[..., : last - keys].any()


def texts_of(loaded: LoadedModel) -> object:
    return IDS if loaded.name in FAMILIES else TEXT


@EITHER_ENGINE
def test_rows_are_those_of_the_models_own_generation(loaded: LoadedModel, engine: str) -> None:
    seen = attnscope.capture(loaded, texts_of(loaded), engine=engine, generate=12)
    at = seen.prompt.answer
    ids, steps = steps_of(loaded, seen.prompt.ids[:at], 12)
    assert list(seen.prompt.ids[at:]) == ids == seen.facts["generated"]["ids"]
    assert len(steps) == len(ids) > 3
    assert_rows(seen, steps, at)
    wrong = [[one.roll(1, -1) for one in step] for step in steps]
    with pytest.raises(AssertionError):
        assert_rows(seen, wrong, at)


def by_loops(loaded: LoadedModel, prompt: Prompt) -> dict[str, np.ndarray]:
    """Chuang et al.'s ratio over the plain model's matrices, of the keys that have weight, (L, H) per metric."""
    at, count = prompt.answer, len(prompt)
    found = {}
    for name, first in (("lookback", 0), ("lookback_without_key0", 1)):
        ratios_LHQ = []
        for weights_HQK in (one.double() for one in attentions(loaded.model, prompt.ids)):
            rows = []
            for query in range(at, count - 1):
                seen = [key for key in range(count) if weights_HQK[:, query, key].any()]
                context = [key for key in seen if first <= key < at]
                if context:
                    a = weights_HQK[:, query, context].mean(-1)
                    rows.append(a / (a + weights_HQK[:, query, [key for key in seen if key >= at]].mean(-1)))
            ratios_LHQ.append(torch.stack(rows).mean(0))
        found[name] = torch.stack(ratios_LHQ).numpy()
    return found


def assert_lookbacks(seen: Observation, expected: dict[str, np.ndarray]) -> None:
    assert list(expected) == list(LOOKBACKS)
    for name, values_LH in expected.items():
        score = seen.columns.scores[name]
        np.testing.assert_allclose(score.value, values_LH.ravel(), atol=1e-5, rtol=0)
        np.testing.assert_allclose(score.null, 0.5, atol=1e-6, rtol=0)


@EITHER_ENGINE
def test_the_lookback_ratio_is_that_of_loops_over_the_models_own_matrices(loaded: LoadedModel, engine: str) -> None:
    seen = attnscope.capture(loaded, texts_of(loaded), engine=engine, generate=12)
    assert_lookbacks(seen, by_loops(loaded, seen.prompt))
    with pytest.raises(AssertionError):
        assert_lookbacks(seen, by_loops(loaded, replace(seen.prompt, answer=seen.prompt.answer + 1)))


def test_it_is_the_mean_over_the_steps_of_a_generation_as_the_authors_code_takes_it(demo: LoadedModel) -> None:
    seen = attnscope.capture(demo, TEXT, generate=12)
    at = seen.prompt.answer
    ratios = []
    for step in steps_of(demo, seen.prompt.ids[:at], 12)[1][1:]:  # in the first there is no new token to look at
        weights_LHK = torch.stack(step)[:, :, -1]
        context, new = weights_LHK[..., :at].mean(-1), weights_LHK[..., at:].mean(-1)
        ratios.append(context / (context + new))
    np.testing.assert_allclose(seen.columns.scores["lookback"].value, torch.stack(ratios).mean(0).ravel(), atol=1e-5)


@EITHER_ENGINE
def test_texts_of_one_pass_look_back_as_they_do_alone_and_null_is_null(demo: LoadedModel, engine: str) -> None:
    prompts = [from_text(demo.tokenizer, TEXT, answer=answer) for answer in (" the river bank", None, " a", " the old")]
    together = observe(demo, prompts, Request(), engine=ENGINES[engine])
    for prompt, seen, rows in zip(prompts, together, (2, 0, 0, 1), strict=True):
        assert {layer["answer"] for layer in seen.support.values()} == {rows}
        value = seen.columns.scores["lookback"].value
        assert np.isnan(value).all() == (rows == 0)
        if rows:
            assert_lookbacks(seen, by_loops(demo, prompt))
    assert "lookback" not in observe(demo, prompts[1:2], Request())[0].columns.scores


def test_it_is_null_where_no_key_of_the_prompt_is_seen_or_none_but_the_first(demo: LoadedModel) -> None:
    narrow = tiny(demo, "mistral", sliding_window=2)
    seen = attnscope.capture(narrow, [7], answer=[8, 9, 10, 11])
    assert {layer["answer"] for layer in seen.support.values()} == {1}  # the first new token's row alone sees key 0
    assert {layer["answer_beyond_0"] for layer in seen.support.values()} == {0}
    assert np.isnan(seen.columns.scores["lookback_without_key0"].value).all()
    assert not np.isnan(seen.columns.scores["lookback"].value).any()


def greedy(loaded: LoadedModel, ids: Sequence[int], count: int) -> list[int]:
    """The likeliest token, one after another, without a cache and without a mask."""
    found = list(ids)
    for _ in range(count):
        with torch.no_grad():
            found.append(int(loaded.model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(ids) :]


@EITHER_ENGINE
def test_a_pad_token_that_is_the_begin_token_masks_nothing(engine: str) -> None:
    """Without an explicit mask, transformers takes the begin token for padding: rows are off by 0.99."""
    loaded = load(LoadOptions())
    loaded.tokenizer.pad_token = loaded.tokenizer.bos_token
    loaded.model.generation_config.pad_token_id = loaded.tokenizer.bos_token_id
    seen = attnscope.capture(loaded, TEXT, engine=engine, generate=4)
    at = seen.prompt.answer
    assert seen.prompt.ids[0] == loaded.tokenizer.pad_token_id
    assert list(seen.prompt.ids[at:]) == greedy(loaded, seen.prompt.ids[:at], 4)
    ids = torch.tensor([seen.prompt.ids[:at]])
    how = {"max_new_tokens": 4, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    trapped = loaded.model.generate(ids, **how).attentions[0]
    assert max(float((seen.weights[n][:, :at, :at] - one[0]).abs().max()) for n, one in enumerate(trapped)) > 0.9


# Decoders whose positions begin behind the row of the padding token, and leave out padding tokens.
BEHIND_PADDING = [
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
]


@pytest.mark.parametrize("family", few(BEHIND_PADDING, also=["roberta"]))
def test_an_answer_has_the_positions_of_one_pass(demo: LoadedModel, family: str) -> None:
    """`generate` counts from 0, and a cache counts padding tokens: answer and rows would be of two models."""
    loaded = tiny(demo, family)
    pad = loaded.model.config.pad_token_id
    for prompt in (IDS, [*IDS[:3], pad, *IDS[3:6], pad]):
        seen = attnscope.capture(loaded, prompt, generate=5, request=Request())
        assert seen.facts["generated"]["ids"] == greedy(loaded, prompt, 5)


def test_a_padding_token_in_an_answer_has_the_position_of_one_pass(demo: LoadedModel) -> None:
    loaded = tiny(demo, "roberta-prelayernorm")
    pad = loaded.model.config.pad_token_id
    loaded.model.get_output_embeddings().bias[pad] += 14
    made = attnscope.capture(loaded, IDS, generate=12, request=Request()).facts["generated"]["ids"]
    assert {pad} < set(made)
    assert made == greedy(loaded, IDS, 12)


def test_a_target_that_begins_with_the_padding_token_has_the_positions_of_one_pass(demo: LoadedModel) -> None:
    parts = [tiny_config("roberta", is_decoder=decoder, add_cross_attention=decoder) for decoder in (False, True)]
    pad = parts[1].pad_token_id
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts, decoder_start_token_id=pad)
    model = (
        transformers.EncoderDecoderModel._from_config(both, attn_implementation="eager").eval().requires_grad_(False)
    )
    rouse(model)
    loaded, ids = replace(as_loaded(model), tokenizer=demo.tokenizer), torch.tensor([IDS])
    facts = attnscope.capture(loaded, IDS, generate=8, request=Request()).facts
    assert facts["largest_difference_to_steps"] < 1e-5
    target = facts["target"]["ids"]
    assert target[0] == pad
    with torch.no_grad():
        rows_TV = model(ids, decoder_input_ids=torch.tensor([target]), use_cache=False).logits[0]
    assert rows_TV[:-1].argmax(-1).tolist() == target[1:]


def test_rows_behind_a_token_that_generation_adds_are_refused(demo: LoadedModel) -> None:
    with pytest.raises(ModelError, match=r'adds token 0 to the text .*; give the answer with answer="TEXT"'):
        attnscope.capture(tiny(demo, "xlm"), IDS, generate=4)


# Types whose steps see other keys than one pass over the text does, or take time steps without their least value.
UNLIKE_ONE_PASS = {"moshi", "nemotron_h", "zamba2"}
# Types that choose keys by scores: the length of the text decides between two of one score.
BY_SCORES = {"axk2", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"}
NOT_GENERATING = {"blt", "hrm_text", "musicgen", "musicgen_melody", "xlm"}  # in transformers' or their own code
LOOKING_AHEAD = {"cpmant", "xlnet"}


def below_the_likeliest(loaded: LoadedModel, prompt: Prompt) -> torch.Tensor:
    """By how much the logit of each token of an answer is below the highest of the row before it, in one pass: (S,)."""
    with torch.no_grad():
        rows_SV = loaded.model(torch.tensor([prompt.ids]), use_cache=False).logits[0, prompt.answer - 1 : -1]
    return rows_SV.amax(-1) - rows_SV.gather(-1, torch.tensor(prompt.ids[prompt.answer :])[:, None])[:, 0]


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama", "moshi", "prophetnet") else pytest.param(name, marks=pytest.mark.families)
        for name in sorted(set(TYPES) - LOOKING_AHEAD)
    ],
)
def test_the_row_before_each_token_predicts_it_or_the_run_says_why_not(demo: LoadedModel, family: str) -> None:
    loaded, ids = tiny(demo, family), ids_for(family, tokens=14)[0].tolist()
    if family in NOT_GENERATING:
        with pytest.raises(ModelError, match=r"cannot generate|adds token"):
            attnscope.capture(loaded, ids, generate=8, request=Request())
        return
    seen = attnscope.capture(loaded, ids, generate=8, request=Request())
    notes = " ".join(seen.facts.get("notes", ()))
    apart = seen.facts["largest_difference_to_steps"] > 1e-5
    assert apart == ("generated from other rows" in notes)
    assert apart == (family in UNLIKE_ONE_PASS) or family in BY_SCORES
    unlikely = int((below_the_likeliest(loaded, seen.prompt) > 1e-4).sum())
    if family == "prophetnet":
        assert unlikely
        assert "rows of their own" in notes
    elif not apart:
        assert (f"{unlikely} of 8 generated tokens are not the likeliest" in notes) == bool(unlikely)


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LENGTH_DEPENDENT = [  # beyond 16 positions; and how many the config says
    ({"rope_type": "dynamic", "factor": 4.0}, 16),
    ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **FACTORS}, 64),
]


@pytest.mark.families
@pytest.mark.parametrize(("rotary", "most"), LENGTH_DEPENDENT, ids=["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length_make_other_rows_beyond_their_first_positions(
    demo: LoadedModel, rotary: dict, most: int
) -> None:
    loaded = tiny(demo, "llama", rope_parameters={"rope_theta": 10000.0, **rotary}, max_position_embeddings=most)
    for tokens, beyond in ((4, False), (14, True)):
        seen = attnscope.capture(loaded, IDS[:4] + [7] * (tokens - 4), generate=8, request=Request())
        assert (seen.facts["largest_difference_to_steps"] > 0.01) == beyond
        assert ("generated from other rows" in " ".join(seen.facts.get("notes", ()))) == beyond


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) & set(OF_STACKS)))
def test_the_row_before_each_token_of_a_target_predicts_it_or_the_run_says_why_not(
    demo: LoadedModel, family: str
) -> None:
    model = of_stacks(family)
    loaded = replace(as_loaded(model), tokenizer=demo.tokenizer)
    model.generation_config.update(eos_token_id=None, decoder_start_token_id=start_token(loaded) or 0)
    seen = attnscope.capture(loaded, IDS, generate=8, request=Request())
    target, notes = seen.facts["target"]["ids"], " ".join(seen.facts.get("notes", ()))
    assert seen.facts["largest_difference_to_steps"] < 1e-5
    given = {"decoder_input_ids": torch.tensor([target]), "use_cache": False}
    with torch.no_grad():
        likeliest = model(torch.tensor([IDS]), **given).logits[0, :-1].argmax(-1).tolist()
    unlikely = sum(one != made for one, made in zip(likeliest, target[1:], strict=True))
    if family == "prophetnet":
        assert "rows of their own" in notes
    else:
        assert (f"{unlikely} of 8 generated tokens are not the likeliest" in notes) == bool(unlikely)


def test_steps_of_another_text_are_far_from_a_pass(demo: LoadedModel) -> None:
    with watched_steps(demo.model) as steps:
        made = continuation(demo, IDS, 4, ENGINES["eager"]).ids
    for ids, far in (([*IDS, *made], False), ([*IDS[:-1], 7, *made], True), (IDS, None)):
        states = demo.model.base_model(torch.tensor([ids]))[0][0]
        difference = steps.difference(states)
        assert difference is None if far is None else (difference > 0.1) == far
        assert difference is None or (difference < 1e-5) != far
    assert steps.others(made) == 0
    assert steps.others([made[0], *made[:-1]]) == sum(one != other for one, other in pairwise(made))


def test_steps_are_those_of_the_thread_that_watches_them(demo: LoadedModel) -> None:
    with watched_steps(demo.model) as steps:
        other = Thread(target=lambda: demo.model(torch.tensor([IDS])))
        other.start()
        other.join()
        assert (steps.states, steps.likeliest) == ([], [])
        demo.model(torch.tensor([IDS]))
    assert (len(steps.states), len(steps.likeliest)) == (1, 1)


def test_tokens_that_the_generation_config_chose_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(LoadOptions())
    plain = attnscope.capture(loaded, TEXT, generate=4, request=Request())
    assert plain.facts["largest_difference_to_steps"] < 1e-5
    assert "notes" not in plain.facts
    loaded.model.generation_config.update(suppress_tokens=[plain.facts["generated"]["ids"][0]])
    seen = attnscope.capture(loaded, [TEXT, TEXT], generate=4, request=Request())[1]
    unlikely = int((below_the_likeliest(loaded, seen.prompt) > 0).sum())
    assert 0 < unlikely < 4
    said = f"{unlikely} of 4 generated tokens are not the likeliest of their rows: suppress_tokens of the"
    assert said in seen.facts["notes"][0]
    assert [record.message for record in caplog.records] == 2 * seen.facts["notes"]


def test_sampling_and_beams_of_the_models_own_config_are_left_aside_and_the_rest_is_not() -> None:
    loaded = load(LoadOptions())
    config = loaded.model.generation_config
    config.update(do_sample=True, temperature=5.0, num_beams=3, num_return_sequences=2)
    plain = attnscope.capture(loaded, TEXT, generate=4).facts["generated"]["ids"]
    assert plain == greedy(loaded, from_text(loaded.tokenizer, TEXT).ids, 4)
    assert (config.do_sample, config.num_beams) == (True, 3)
    config.update(suppress_tokens=[plain[0]])
    assert plain[0] not in attnscope.capture(loaded, TEXT, generate=4).facts["generated"]["ids"]


def with_settings(folder: Path, **settings: object) -> str:
    """A copy of the demo whose generation config says more."""
    shutil.copytree(DEMO_FOLDER, folder)
    path = folder / "generation_config.json"
    own = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(own | settings), encoding="utf-8")
    return str(folder)


WATERMARK = {"bias": 9.0, "greenlist_ratio": 0.25, "hashing_key": 7, "seeding_scheme": "lefthash", "context_width": 1}


@pytest.mark.parametrize(
    ("settings", "aside"),
    [
        ({"stop_strings": ["new c", "nothing"]}, []),
        ({"watermarking_config": WATERMARK}, []),
        ({"use_mtp": True, "prompt_lookup_num_tokens": 3, "cache_implementation": "static"}, []),
        ({"max_length": 3, "forced_eos_token_id": 5, "num_beams": 4, "guidance_scale": 1, "token_healing": False}, []),
        ({"penalty_alpha": 0.6, "top_k": 4, "dola_layers": "high"}, ["dola_layers", "penalty_alpha"]),
        (
            {"max_time": 1e-9, "token_healing": True, "guidance_scale": 9},
            ["guidance_scale", "max_time", "token_healing"],
        ),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_a_model_generates_alike_from_its_folder_and_wrapped(
    settings: dict, aside: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(LoadOptions(model=with_settings(tmp_path / "m", **settings)))
    wrapped = wrap(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), loaded.tokenizer)
    before = wrapped.model.generation_config.to_dict()
    facts = [prepare(one, CaptureSpec(TEXT, generate=4)).facts["generated"] for one in (loaded, wrapped)]
    assert facts[0] == facts[1]
    assert facts[0].get("ignored", []) == aside
    ours = [record for record in caplog.records if record.name.startswith("attnscope.")]
    chosen = [record for record in ours if "not the likeliest" in record.message]
    assert bool(chosen) == ("watermarking_config" in settings)
    named = [record for record in ours if record not in chosen]
    assert len(named) == 2 * bool(aside)
    assert all(name in record.message for record in named for name in aside)
    assert wrapped.model.generation_config.to_dict() == before
    ids = torch.tensor([from_text(loaded.tokenizer, TEXT).ids])
    followed = {name: one for name, one in settings.items() if name in ("stop_strings", "watermarking_config")}
    own = load(LoadOptions()).model.generate(ids, max_new_tokens=4, tokenizer=loaded.tokenizer, **followed)
    assert facts[0]["ids"] == own[0, ids.shape[1] :].tolist()
    assert (facts[0]["ids"] == [265, 586, 1501, 16]) == (not followed), "what is followed changes this answer"
    assert facts[0]["stopped_by"] == ("stop string" if "stop_strings" in settings else "number asked for")


def test_every_setting_of_transformers_is_followed_or_has_no_part_in_an_answer_or_is_named(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(GenerationConfig):
        def __init__(self, **settings: object) -> None:
            self.look_twice = settings.pop("look_twice", None)
            super().__init__(**settings)

    known = generating.FOLLOWED | {generating.STOP} | generating.LENGTH | generating.CHANCE_AND_BEAMS | generating.MEANS
    named = {"constraints", "dola_layers", "force_words_ids", "guidance_scale", "max_time", "penalty_alpha"}
    others = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known
    assert others == named | {"token_healing"}
    monkeypatch.setattr(demo.model, "generation_config", Later(look_twice=True, eos_token_id=1))
    facts = attnscope.capture(demo, TEXT, generate=2, request=Request()).facts["generated"]
    assert facts == {"asked": 2, "ids": [265, 586], "stopped_by": "number asked for", "ignored": ["look_twice"]}
    assert "look_twice" in caplog.text


def test_a_model_that_stops_by_its_own_code_is_not_said_to_have_made_all(demo: LoadedModel) -> None:
    class Hasty(type(demo.model)):
        def generate(self, *args: object, **kwargs: object) -> torch.Tensor:
            return super().generate(*args, **kwargs)[:, :-1]

    hasty = Hasty(demo.model.config).eval()
    hasty.load_state_dict(demo.model.state_dict())
    run = prepare(replace(demo, model=hasty), CaptureSpec(TEXT, generate=3))
    assert run.facts["generated"] == {"asked": 3, "ids": [265, 586], "stopped_by": "the model's own code"}
    assert list(answer_lines(run)) == ["generated 2 of 3 tokens, where its own code stops: the new(7-8)"]


def test_lengths_that_a_generation_config_says_are_no_messages_of_transformers(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = logging.getLogger("transformers")
    monkeypatch.setattr(theirs, "handlers", [*theirs.handlers, caplog.handler])
    for settings in ({"max_length": 20, "min_length": 50}, {"min_length": 3, "min_new_tokens": 50}):
        config = GenerationConfig(eos_token_id=586, **settings)
        monkeypatch.setattr(demo.model, "generation_config", config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = attnscope.capture(demo, TEXT, generate=3, request=Request())
        assert len(seen.facts["generated"]["ids"]) == 3, "the end token is not made before the least length"
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


@pytest.mark.parametrize("tokenizer", ["byte", "llama"])
def test_a_stop_string_ends_a_text_where_transformers_own_criterion_does(tokenizer: str) -> None:
    made = MAKERS[tokenizer]()
    text = "the financial bank 日本 is on the river"
    ids, stops = list(made(text)["input_ids"]), ["an", "al b", "日", "本 is", "river", "x"]
    for stop in [*stops, stops]:
        strings = [stop] if isinstance(stop, str) else stop
        theirs, ours = StopStringCriteria(made, strings), _StopStrings(made, strings)
        for count in range(1, len(ids) + 1):
            assert ours.ends(ids[:count]) == bool(theirs(torch.tensor([ids[:count]]), None)), (stop, count)


def test_the_end_token_is_the_last_of_the_answer_and_more_are_not_asked_for(demo: LoadedModel) -> None:
    ended = attnscope.capture(demo, TEXT, generate=8, request=Request())
    assert ended.facts["generated"] == {"asked": 8, "ids": [265, 586, 1501, 16, 1], "stopped_by": "end token"}
    assert ended.prompt.text == TEXT + " the new castle.</s>"
    cut = attnscope.capture(demo, TEXT, generate=2, request=Request())
    assert cut.facts["generated"] == {"asked": 2, "ids": [265, 586], "stopped_by": "number asked for"}
    one = prepare(demo, CaptureSpec(TEXT, generate=1))
    assert list(answer_lines(one)) == ["generated 1 token: the(7)"]


@pytest.mark.parametrize("chat", [False, True])
def test_made_are_the_rows_whose_likeliest_next_tokens_are_the_answer(demo: LoadedModel, chat: bool) -> None:
    loaded = chatting() if chat else demo
    seen = attnscope.capture(loaded, TEXT, generate=4, chat=chat, request=Request(query="made"))
    made, answer = (list(find(seen.prompt, name).positions) for name in ("made", "answer"))
    assert seen.chosen.query.positions == tuple(made)
    with torch.no_grad():
        likeliest = loaded.model(torch.tensor([seen.prompt.ids])).logits[0].argmax(-1)
    assert likeliest[made].tolist() == [seen.prompt.ids[at] for at in answer]
    if not chat:  # where it says one token over and over
        assert likeliest[answer].tolist() != [seen.prompt.ids[at] for at in answer]


def test_made_is_text_without_an_answer_and_in_quotes(demo: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"^'made' .*not in .* 0 <s>"):
        attnscope.capture(demo, TEXT, query="made")
    said = from_text(demo.tokenizer, "she made a bank", answer=" of sand")
    assert find(said, "made").positions == tuple(at - 1 for at in find(said, "answer").positions)
    quoted = find(said, '"made"').positions
    assert "".join(said.plain[at] for at in quoted).strip() == "made"


@pytest.mark.parametrize("value", [5, [5], {"new": 1}])
def test_stop_strings_that_are_no_texts_are_refused(
    value: object, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.model.generation_config, "stop_strings", value)
    with pytest.raises(ModelError, match=r"expected texts as stop_strings .* correct its generation_config\.json"):
        attnscope.capture(demo, TEXT, generate=2)


def test_true_is_no_number_of_new_tokens(demo: LoadedModel) -> None:
    with pytest.raises(UsageError, match="number of new tokens from 1, got True"):
        attnscope.capture(demo, TEXT, generate=True)


def test_a_model_that_cannot_generate_is_said(demo: LoadedModel) -> None:
    class Silent(type(demo.model)):
        @classmethod
        def can_generate(cls) -> bool:
            return False

    silent = replace(demo, model=Silent(demo.model.config).eval())
    with pytest.raises(ModelError, match='answer="TEXT"'):
        attnscope.capture(silent, TEXT, generate=2)

    class Broken(type(demo.model)):
        def generate(self, *args: object, **kwargs: object) -> None:
            raise ValueError("no cache of this kind\nand more")

    with pytest.raises(ModelError, match="no cache of this kind;"):
        attnscope.capture(replace(demo, model=Broken(demo.model.config).eval()), TEXT, generate=2)


# An answer that is given.


def test_a_given_answer_is_read_as_one_text_with_its_prompt(demo: LoadedModel) -> None:
    answer = " the river bank"
    seen = attnscope.capture(demo, TEXT, answer=answer)
    plain = attnscope.capture(demo, TEXT + answer)
    assert seen.prompt == replace(plain.prompt, answer=7)
    assert all(torch.equal(seen.weights[layer], plain.weights[layer]) for layer in plain.weights)
    assert "generated" not in seen.facts
    of_ids = attnscope.capture(demo, plain.prompt.ids[:7], answer=plain.prompt.ids[7:])
    assert (of_ids.prompt.ids, of_ids.prompt.answer) == (plain.prompt.ids, 7)
    again = attnscope.capture(demo, replace(seen.prompt, answer=None), answer=[1])
    assert again.prompt.parts == {"prompt": range(10), "answer": range(10, 11), "made": range(9, 10)}
    assert again.prompt.characters[:10] == seen.prompt.characters


def test_the_models_own_answer_given_back_is_the_same_text(demo: LoadedModel) -> None:
    made = attnscope.capture(demo, TEXT, generate=4).prompt
    given = from_text(demo.tokenizer, TEXT, answer=made.text.removeprefix(TEXT))
    assert made == given


@pytest.mark.parametrize("tokenizer", ["byte", "llama", "slow"])
def test_prompt_and_answer_meet_between_two_tokens(tokenizer: str) -> None:
    made = MAKERS[tokenizer]()
    for text, answer in (("the bank", " on river"), ("the bank", "\nthe bank 日本"), ("the bank 日", "!")):
        prompt = from_text(made, text, answer=answer)
        assert prompt.ids == from_text(made, text + answer).ids
        said = "".join(prompt.plain[at] for at in prompt.parts["answer"])
        assert said.lstrip() == answer.lstrip()


def test_a_token_across_the_border_is_refused(demo: LoadedModel) -> None:
    with pytest.raises(InputError, match="end of the text"):
        from_text(demo.tokenizer, "the financial ba", answer="nk is")
    spaced = from_text(demo.tokenizer, "the financial ", answer="bank is")
    assert spaced == from_text(demo.tokenizer, "the financial", answer=" bank is")


# Chats.


def chatting(header: str = "{% if add_generation_prompt %}assistant: {% endif %}") -> LoadedModel:
    loaded = load(LoadOptions())
    turns = "{% for one in messages %}{{ one.role + ': ' + one.content + '\n' }}{% endfor %}"
    loaded.tokenizer.chat_template = turns + header
    return loaded


@pytest.mark.parametrize("header", [True, False])
def test_in_a_chat_the_answer_is_the_assistants_turn(header: bool) -> None:
    loaded = chatting() if header else chatting("")
    seen = attnscope.capture(loaded, "where is the bank", chat=True, generate=3, request=Request())
    at, assistant = seen.prompt.answer, seen.prompt.turns[-1]
    opened = "user: where is the bank\n" + "assistant: " * header
    assert "".join(seen.prompt.plain[:at]) == opened
    assert [turn.name for turn in seen.prompt.turns] == ["user", "assistant"]
    assert "".join(seen.prompt.plain[assistant.start : at]) == opened[len("user: where is the bank\n") :]
    assert assistant.stop == len(seen.prompt)
    given = from_chat(loaded.tokenizer, "where is the bank", answer="on the river")
    assert given.text == opened + "on the river"
    assert "".join(given.plain[one] for one in find(given, "answer").positions) == " " * header + "on the river"
    assert (given.turns[-1].name, given.turns[-1].stop) == ("assistant", len(given))
    assert find(given, "user").positions[-1] < given.turns[-1].start


def test_a_chat_that_was_answered_already_is_refused() -> None:
    chat = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    with pytest.raises(InputError, match="assistant's own turn"):
        attnscope.capture(chatting(), chat, chat=True, generate=3)


# Names.


def test_prompt_and_answer_name_tokens_where_there_is_an_answer(demo: LoadedModel) -> None:
    prompt = from_text(demo.tokenizer, TEXT, answer=" the river bank")
    assert find(prompt, "prompt").positions == tuple(range(7))
    assert find(prompt, "answer").positions == (7, 8, 9)
    assert find(prompt, "answer,^last").positions == (7, 8)
    assert find(prompt, "answer", {"answer": "bank#1"}).positions == (3,)
    for name in ("prompt", "answer"):
        with pytest.raises(InputError, match=f"^'{name}' .*not in .* 0 <s>"):
            find(replace(prompt, answer=None), name)
    written = from_text(demo.tokenizer, "the answer is a prompt", answer=" answer")
    assert find(written, '"answer"').positions == find(replace(written, answer=None), "answer").positions


@EITHER_ENGINE
def test_the_mass_that_an_answer_gives_its_prompt(demo: LoadedModel, engine: str) -> None:
    seen = attnscope.capture(demo, TEXT, engine=engine, generate=4, query="answer", key="prompt")
    at, steps = seen.prompt.answer, attnscope.capture(demo, TEXT, engine="eager", generate=4).weights
    expected = [float(head[at:, :at].sum(-1).mean()) for layer in steps.values() for head in layer]
    assert [head.mass for head in seen.heads] == pytest.approx(expected, abs=2e-6)


# Commands.


def said(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def test_a_run_says_what_was_generated_and_is_repeated_with_it(tmp_path: Path) -> None:
    made, again, ranked = tmp_path / "a", tmp_path / "b", ("--sort", "lookback", "--select", "1.*")
    done = call("relations", TEXT, "--generate", "8", "--query", "answer", "--select", "1.4", "-o", str(made)).ok()
    generated, how_to_go_on = done.err.splitlines()[1:3]
    assert generated == "generated 5 of 8 tokens, the last the end token: the new castle.</s>(7-11)"
    assert how_to_go_on == "the model ended its answer after 5 tokens; --answer TEXT reads a longer one that you give"
    assert "query answer: the new castle.</s>(7-11)" in done.err.splitlines()
    manifest = said(made)
    assert manifest["generated"] == {"asked": 8, "ids": [265, 586, 1501, 16, 1], "stopped_by": "end token"}
    assert (manifest["options"]["generate"], manifest["prompt"]["answer"]) == (8, 7)
    for folder in (again, made):  # the second time it is the same run
        repeated = call("relations", str(made), "-o", str(folder)).ok()
        assert "answer: the new castle.</s>(7-11)" in repeated.err.splitlines()
        assert repeated.out == done.out
    first, second = (call("heads", *words, *ranked, "-q") for words in ((TEXT, "--generate", "8"), (str(made),)))
    assert len(first.out.splitlines()) == 7
    assert first.out != second.out  # all queries, and those of the answer
    column = [[line.split(b",")[-1] for line in one.out.splitlines()] for one in (first, second)]
    assert column[0] == column[1]
    whole = call("relations", TEXT + " the new castle.</s>", "--query", "7:", "-o", str(made))
    assert whole.code == 2
    assert "(12 tokens, from 7 on the answer), now" in whole.err


def test_an_answer_in_a_manifest_stands_within_its_tokens(tmp_path: Path) -> None:
    call("relations", TEXT, "--answer", " the river", "-q", "-o", str(tmp_path)).ok()
    manifest = said(tmp_path)
    for answer in (0, 9, -1, 1.5, True, "7"):
        manifest["prompt"]["answer"] = answer
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        done = call("relations", str(tmp_path))
        assert (done.code, done.out) == (2, b"")
        assert f"{tmp_path / 'manifest.json'} " in done.err
        assert "which tokens" in done.err


@pytest.mark.parametrize(
    "command",
    [
        ("relations", "--over", "heads"),
        ("draw", "--show", "--select", "1.4"),
        ("view", "--out", "{}/page.html"),
        ("text", "--select", "1.4"),
        ("rollout",),
        ("keys",),
    ],
    ids=lambda command: command[0],
)
def test_every_command_of_a_text_takes_an_answer(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *rest = (word.format(tmp_path) for word in command)
    done = call(name, TEXT, "--answer", " the river bank", "--query", "answer", *rest).ok()
    assert "answer: the river bank(7-9)" in done.err.splitlines()
    assert "query answer: the river bank(7-9)" in done.err.splitlines()


def test_a_page_generates_for_both_its_sides_and_knows_their_answers(tmp_path: Path) -> None:
    page = tmp_path / "two.html"
    done = call("view", TEXT, "--compare-text", "the river bank is", "--generate", "3", "--out", str(page)).ok()
    assert [line.split(":")[0] for line in done.err.splitlines() if line.startswith("generated")] == [
        "generated 3 tokens"
    ] * 2
    assert [side["answer"] for side in Read(page.read_bytes()).said["sides"]] == [7, 5]


LONG = "the" + " bank" * 505
REFUSED = [
    (("--generate", "0"), 2, "--generate: expected a whole number from 1 to 1,000,000,000, got '0'"),
    (("--generate", "-3"), 2, "--generate: expected a whole number from 1"),
    (("--generate", "many"), 2, "--generate: expected a whole number"),
    (
        ("--generate", "2", "--answer", " x"),
        2,
        "an answer was given, and one is to be generated; leave out --generate or --answer",
    ),
    (("--answer", " "), 4, "the answer is empty; give an answer with at least one word, or use --generate 8"),
    (("--generate", "2", "--truncate", "left"), 2, "an answer needs the whole text"),
    (("--answer", " x", "--truncate", "right"), 2, "leave out --truncate"),
    (
        ("--text", LONG, "--generate", "8"),
        4,
        "the text has 507 tokens and 8 more were asked for, the model reads at most",
    ),
    (("--text", LONG, "--generate", "8"), 4, "; ask for at most 5"),
    (("--text", LONG, "--answer", " bank" * 8), 4, "text and answer have 515 tokens, the model reads at most 512"),
    (("--ids", "-", "--answer", " x"), 2, "--answer needs a text, and --ids gives token ids"),
    (
        ("{}", "--generate", "4"),
        2,
        "a run is repeated with its own tokens, and no answer after them; leave out --generate or --answer, or add",
    ),
    (("--from", "{}", "--answer", " x"), 2, "a run is repeated with its own tokens, and no answer after them"),
    (("--text", TEXT, "--sort", "lookback"), 2, "--sort lookback needs an answer; add --generate N, or --answer"),
    (("--text", TEXT, "--metrics", "lookback"), 2, "--metrics lookback needs an answer; add --generate N"),
    (("--text", TEXT, "--query", "answer"), 4, "'answer' is not in the text; the tokens are 0 <s>"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    call("relations", TEXT, "-q", "-o", str(folder)).ok()
    return folder


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_answered_is_said_in_a_line(
    run_folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    words = [word.format(run_folder) for word in arguments]
    texts = {"--text", "--ids", "--from", str(run_folder)}
    done = call("heads", *([] if texts & set(words) else [TEXT]), *words, stdin=b"[0, 5]")
    assert (done.code, done.out) == (code, b"")
    lines = done.err.splitlines()
    assert message in lines[-1]
    assert all(line.startswith("settings from ") for line in lines[:-1])


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"generate": 0}, UsageError, "use generate=8"),
        ({"generate": "8"}, UsageError, "got '8'"),
        ({"generate": 2, "answer": " x"}, UsageError, "an answer was given, and one is to be generated"),
        ({"answer": ""}, InputError, "the answer is empty"),
        ({"answer": [5]}, UsageError, "give both as text, or both as token ids"),
        ({"generate": 600}, InputError, "the text has 7 tokens and 600 more were asked for"),
    ],
    ids=str,
)
def test_python_is_told_the_same(demo: LoadedModel, how: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attnscope.capture(demo, TEXT, **how)


def test_ids_take_an_answer_of_ids(demo: LoadedModel) -> None:
    for how, message in (({"answer": " x"}, "both as token ids"), ({"answer": [9999]}, "token 0 has the id 9999")):
        with pytest.raises((UsageError, InputError), match=message):
            attnscope.capture(demo, [0, 423], **how)


PAGE = (Path(__file__).parents[1] / "docs" / "asking.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("line", "talk"), re.findall(r'^attnscope (heads ".*)\n((?:.+\n)+?)```', PAGE, re.MULTILINE))
def test_the_page_shows_what_is_said(line: str, talk: str) -> None:
    assert set(talk.splitlines()) < set(call(*shlex.split(line)).err.splitlines())


@pytest.mark.parametrize("end", [(3, 4), torch.tensor([3, 4])])
def test_end_tokens_may_be_a_tuple_or_a_tensor(demo: LoadedModel, end: object) -> None:
    model = tiny(demo, "llama")
    model.model.generation_config.eos_token_id = end
    assert [ends(model, token) for token in (3, 4, 5)] == [True, True, False]


def test_own_settings_are_known_while_another_thread_generates(demo: LoadedModel) -> None:
    model = tiny(demo, "llama").model
    model.generation_config.stop_strings, model.generation_config.max_time = ["the"], 9.0
    with generating.following(model, 4):
        assert generating.stop_strings(model) == ("the",)
        assert generating.ignored_settings(model) == ("max_time",)
    assert not generating._replaced


def test_a_hook_that_fails_while_the_model_generates_is_named(demo: LoadedModel) -> None:
    loaded = tiny(demo, "llama")
    own = loaded.model.generation_config
    loaded.model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ForwardError, match=r"a hook of .* failed in the forward pass of llama: division by zero"):
        continuation(loaded, [0, 5], 4, ENGINES["eager"])
    assert loaded.model.generation_config is own
