"""The stacks of attention that a model may have, and how their layers and heads are called.

A causal model has one, its decoder; BERT has one, its encoder; an encoder-decoder has three: encoder, decoder, and the
attention of the decoder to what the encoder read.

Which layers and heads are meant: "27", "27.3", "L27H3", "0-3.*", "last", "L-1", "*.0", "@role", "cross.3.2".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

from attnscope.errors import InputError, UsageError, brief
from attnscope.utils.display import head_name, number_list

T = TypeVar("T")
DECODER, ENCODER, CROSS, VISION = "decoder", "encoder", "cross", "vision"
# Maps of their own that layers of a decoder may have: over tokens and summaries of several tokens (DeepSeek-V4's
# compressed sparse and heavily compressed attention); the difference of two heads' weights (differential attention).
CSA, HCA, DIFFERENCE = "csa", "hca", "difference"
LINEAR = "linear"  # layers without a softmax whose rule is linear in its values: a signed map per head
CHANNELS = "channels"  # the same where every channel has its own map: shown is the mean of |w| over channels
# Those of the Byte Latent Transformer next to its decoder over bytes: the model whose entropies cut patches; the local
# encoder, over bytes; each patch over its bytes; patches over patches; bytes over patches.
PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING = "patcher", "local", "pooling", "global", "unpooling"
OVER_PATCHES = (POOLING, GLOBAL, UNPOOLING)
CROSSING = {POOLING: LOCAL, UNPOOLING: DECODER}  # the part of the model that each belongs to
CAUSAL = (PATCHER, LOCAL, DECODER)  # that read one text from left to right
OF_TWO_TEXTS = (ENCODER, DECODER, CROSS)  # those of an encoder-decoder
# In the order in which a forward pass comes to them.
SOFTMAX = (ENCODER, PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING, DECODER, CROSS, VISION, CSA, HCA)
MIXING = (LINEAR, CHANNELS)
STACKS = (*SOFTMAX, DIFFERENCE, *MIXING)
CAUSAL_LM, ENCODER_ONLY, SEQ2SEQ, VISION_ONLY = TASKS = ("decoder", "encoder", "seq2seq", "vision")  # read at
NAMES = {
    CAUSAL_LM: "a causal model",
    ENCODER_ONLY: "an encoder",
    SEQ2SEQ: "an encoder-decoder",
    VISION_ONLY: "a vision tower",
}
TEXT_TASKS = (CAUSAL_LM, ENCODER_ONLY, SEQ2SEQ)  # the tasks of models that read text


def main_stack(task: str) -> str:
    """The stack that a layer's number means where no one names one: of an encoder-decoder its decoder.

    >>> main_stack("seq2seq")
    'decoder'
    """
    return {ENCODER_ONLY: ENCODER, VISION_ONLY: VISION}.get(task, DECODER)


def prefix(stack: str) -> str:
    """What precedes a layer's number where a model has several stacks: `cross `, and nothing for the decoder's."""
    return "" if stack == DECODER else f"{stack} "


def _compared(by: Callable[[Any, Any], bool]) -> Any:
    """A comparison of a StackLayer with any index: by number, then by stack."""
    return lambda layer, other: by(_order(layer), _order(other)) if isinstance(other, int) else NotImplemented


def _order(layer: int) -> tuple[int, str]:
    return int(layer), stack_of(layer)


class StackLayer(int):
    """The index of a layer of another stack than the model's own; not equal to the layer of the same number there.

    >>> {3: "attention", StackLayer(3, LINEAR): "linear"}[3], str(StackLayer(3, LINEAR))
    ('attention', 'linear 3')
    """

    stack: str

    def __new__(cls, index: int, stack: str) -> StackLayer:
        layer = super().__new__(cls, index)
        layer.stack = stack
        return layer

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # what a copy is made of
        return int(self), self.stack

    @property
    def prefix(self) -> str:
        """What precedes its number in a name."""
        return prefix(self.stack)

    def __repr__(self) -> str:
        return f"{self.prefix}{int(self)}"

    def __hash__(self) -> int:
        return hash(_order(self))

    __eq__, __ne__ = _compared(operator.eq), _compared(operator.ne)
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)


def stack_of(layer: int, plain: str = "") -> str:
    """The stack that a layer's index names, plain where it names none."""
    return layer.stack if isinstance(layer, StackLayer) else plain


def is_causal(stack: str) -> bool:
    """Whether its tokens see none after them."""
    return stack in CAUSAL


def looks_back(stack: str) -> bool:
    """Whether a token has no weight for any after it, by a mask or because a state is written token by token."""
    return is_causal(stack) or mixes(stack)


def metrics_stack(stack: str, ahead: float) -> str:
    """The stack whose metrics a layer has: an encoder's where all its queries see the next key, a decoder's where none.

    Layers whose channels have maps of their own have the metrics of linear ones. ahead: the share of queries that do;
    NaN of one query, where the stack's own name says it.

    >>> metrics_stack("decoder", ahead=1.0)
    'encoder'
    """
    if stack == CHANNELS:
        return LINEAR
    if is_causal(stack) and ahead == 1:
        return ENCODER
    return DECODER if is_bidirectional(stack) and ahead == 0 else stack


def is_bidirectional(stack: str) -> bool:
    """Whether its tokens are of a text, and see those after them too."""
    return stack == ENCODER


def is_cross(stack: str) -> bool:
    """Whether its keys are of another text than its queries."""
    return stack == CROSS


def is_vision(stack: str) -> bool:
    """Whether its tokens are of pictures."""
    return stack == VISION


def is_over_patches(stack: str) -> bool:
    """Whether its queries or keys are patches of bytes, which the pass alone finds."""
    return stack in OVER_PATCHES


def is_linear(stack: str) -> bool:
    """Whether its maps are those of linear layers, signed."""
    return stack == LINEAR


GATED_AFTER = "a gate or norm of the layer's own comes after the map"  # why nothing says what such a head writes


def mixes(stack: str) -> bool:
    """Whether its layers mix tokens by a rule without a softmax."""
    return stack in MIXING


def has_summaries(stack: str) -> bool:
    """Whether its keys are summaries of several tokens too."""
    return stack in (CSA, HCA)


def has_decoder_heads(stack: str) -> bool:
    """Whether its heads are those of a decoder, over tokens or over summaries of them."""
    return stack == DECODER or has_summaries(stack)


def sides(stack: str, source: T, target: T) -> tuple[T, T]:
    """Of the two texts of an encoder-decoder, those that the queries and the keys of a stack are of.

    >>> sides("cross", "the text", "its translation")
    ('its translation', 'the text')
    """
    return source if stack == ENCODER else target, target if stack == DECODER else source


_COUNT = r"\*|last|\d{1,18}(?:-\d{1,18})?|(?<=[LH])-\d{1,18}"
_PART = re.compile(rf"^(?:L?(?P<layers>{_COUNT}))(?:(?:\.H?|H)(?P<heads>{_COUNT})?)?$", re.IGNORECASE)
# What is typed for a part, and what it means.
_MEANT = (
    (re.compile(r"all|every|any|:", re.IGNORECASE), "write `*` for all heads of all layers"),
    (re.compile(r"h(?:ead)?[ _]?(?P<head>\d{1,9})", re.IGNORECASE), "write `*.{head}` for that head of every layer"),
    (re.compile(r"layer[ _]?(?P<layer>\d{1,9})", re.IGNORECASE), "write `{layer}` for all heads of a layer"),
    (re.compile(r"first", re.IGNORECASE), "write `0` for the first layer"),
    (
        re.compile(r"L?(?P<layer>\d{1,9})[.H]+(?P<low>\d{1,9})-L?(?P=layer)[.H]+(?P<high>\d{1,9})", re.IGNORECASE),
        "write `{layer}.{low}-{high}` for these heads of a layer",
    ),
    (re.compile(r"(?P<layer>\d{1,9})/(?P<head>\d{1,9})"), "write `{layer}.{head}` for a head of a layer"),
)
# Heads as other programs list them: (3, 1), [[2, 2], [3, 0]] and a3.1.
_PAIR = re.compile(r"[(\[]\s*(\d{1,18})\s*,\s*(\d{1,18})\s*[)\]]")
_NODE = re.compile(r"^a(\d{1,18})\.h?(\d{1,18})$", re.IGNORECASE)
_LAYERS = re.compile(r"^\d{1,18}-\d{1,18}$")
_STACKS = "|".join(("enc", "dec", "diff", *STACKS))
_STACK = re.compile(rf"^(?P<stack>{_STACKS})(?:[. ]+(?P<rest>.*))?$", re.IGNORECASE)
GRAMMAR = (
    "a layer `27`, a head `27.3` or `L27H3`, ranges `0-3.*`, `last` or `L-1`, `*.0`, `@role`, `cross.3.2`, by commas"
)
COUNTING = "counting starts at 0"
MODEL = "this model"
HeadIndex = tuple[int, int]  # layer, head
HeadsByLayer = Mapping[int, Sequence[int]]
HeadsByRole = Mapping[str, HeadsByLayer]  # of an atlas


def select(
    expression: str,
    heads_by_layer: Mapping[int, int],
    named: HeadsByRole | None = None,
    of: str = MODEL,
    stack: str = "",
    mixing: Mapping[int, str] = MappingProxyType({}),
) -> dict[int, tuple[int, ...]]:
    """The heads that an expression names, by layer.

    heads_by_layer: {layer index: number of heads} of the layers with attention. named: see `resolve_roles`. of: what
    has these heads; other than a model, it may lack layers that have attention. stack: what they are called where they
    are not the plain ones. mixing: the layers with a map of another stack, and which. Returns {layer: heads}, both
    sorted. Raises UsageError for a part that cannot be read, or that names a layer or head that is not there, and what
    `resolve_roles` raises.

        >>> select("last.0-1,L0H3", {0: 4, 1: 4})
        {0: (3,), 1: (0, 1)}
    """
    if not heads_by_layer:
        raise UsageError(f"{expression!r} names layers with attention, and {of} has none", "name others, or none")
    chosen: dict[int, set[int]] = {}
    layers = sorted(heads_by_layer)
    if named is not None:  # heads of other stacks are none of these
        named = {role: {at: of[at] for at in of if not stack_of(at)} for role, of in named.items()}
    for part in resolve_roles(expression, named).split(","):
        match = _PART.match(part)
        if not match:
            read = ((form.fullmatch(part), advice) for form, advice in _MEANT)
            meant = (advice.format(**match.groupdict()) for match, advice in read if match)
            raise UsageError(f"cannot read the selection {part!r}", next(meant, f"write {GRAMMAR}"))
        every_layer = match["layers"] == "*"
        part = f"{stack}.{part}" if stack else part
        for layer in _numbers(match["layers"], layers, "layer", part, of, stack, mixing):
            heads = range(heads_by_layer[layer])
            if every_layer and match["heads"] and match["heads"][0].isdigit():  # layers may differ in width
                heads_here = [h for h in _digits(match["heads"], part) if h in heads]
                if not heads_here and all(_digits(match["heads"], part)[0] >= n for n in heads_by_layer.values()):
                    _numbers(match["heads"], heads, "head", part, f"layer {layer}", stack * (of == MODEL))
            else:
                heads_here = _numbers(
                    match["heads"] or "*", heads, "head", part, f"layer {layer}", stack * (of == MODEL)
                )
            chosen.setdefault(layer, set()).update(heads_here)
    return {layer: tuple(sorted(chosen[layer])) for layer in sorted(chosen) if chosen[layer]}


def select_layers(
    expression: str,
    heads_by_layer: Mapping[int, int],
    plain: str,
    named: HeadsByRole | None = None,
    takes: str = "a study changes",
) -> dict[int, tuple[int, ...]]:
    """As `select`, of layers of several stacks, whose indices name them; plain: of those that name none.

    takes: as of `select_stacks`.

    >>> select_layers("1,linear.0.3", {1: 2, StackLayer(0, LINEAR): 4}, "decoder")
    {linear 0: (3,), 1: (0, 1)}
    """
    heads: dict[str, dict[int, int]] = {}
    for layer, count in heads_by_layer.items():
        heads.setdefault(stack_of(layer, plain), {})[int(layer)] = count
    main = plain if plain in heads else next(iter(heads), plain)
    try:
        chosen = select_stacks(expression, heads, main, named, takes=takes)
    except UsageError as error:
        others = [stack for stack in heads if stack != main]
        if not others or "its map is" in error.hint:
            raise
        raise UsageError(error.message, f"{error.hint}; of {others[0]} layers write `{others[0]}.0.3`") from error
    by_number = {(stack_of(layer, plain), int(layer)): layer for layer in heads_by_layer}
    layers = {by_number[stack, number]: of_layer for stack in chosen for number, of_layer in chosen[stack].items()}
    return dict(sorted(layers.items()))


def may_be_one_head(expression: str) -> bool:
    """Whether an expression can name a single head: a role may, a layer, a range and a list do not.

    >>> may_be_one_head("L1H4"), may_be_one_head("cross.1.4"), may_be_one_head("1"), may_be_one_head("0-3.1")
    (True, True, False, False)
    """
    stack = _STACK.match(expression)
    match = _PART.match(expression if stack is None else stack["rest"] or "*")
    if match is None:
        return "," not in _PAIR.sub("", expression)  # a role, or what `select` refuses
    layer, head = match["layers"], match["heads"] or "*"
    return layer != "*" and head != "*" and not any(count[1:].count("-") for count in (layer, head))


def select_stacks(
    expression: str | None,
    heads: Mapping[str, Mapping[int, int]],
    plain: str,
    named: HeadsByRole | None = None,
    of: str = MODEL,
    takes: str = "",
) -> dict[str, dict[int, tuple[int, ...]]]:
    """The heads that an expression names, by stack: `cross.3.2`, `enc.0-3.*`, `dec`; of the plain stack without a name.

    expression: None for all. heads: {stack: {layer index: number of heads}}. takes: what has no use for others that
    there are. Raises as `select`, and UsageError for a stack that is not there.

        >>> select_stacks("1,cross.0.3", {"decoder": {0: 4, 1: 4}, "cross": {0: 4, 1: 4}}, "decoder")
        {'decoder': {1: (0, 1, 2, 3)}, 'cross': {0: (3,)}}
        >>> select_stacks("1", {"linear": {0: 2, 1: 2}}, "decoder")
        {'linear': {1: (0, 1)}}
    """
    if expression is None:
        return {stack: everything(of_stack) for stack, of_stack in heads.items()}
    parts: dict[str, list[str]] = {}
    with_heads = [stack for stack, layers in heads.items() if layers]  # Pegasus-X's encoder shows no head
    if len(with_heads) == 1 and with_heads[0] in MIXING:  # of a model without attention
        plain = with_heads[0]
    for part in resolve_roles(expression, named).split(","):
        match = _STACK.match(part)
        stack = next(stack for stack in STACKS if stack.startswith(match["stack"].lower())) if match else plain
        if stack not in with_heads:
            raise UsageError(
                f"{part!r} names {stack} layers, and {takes or f'{of} shows'} {' and '.join(with_heads)} layers",
                f"write {GRAMMAR}",
            )
        parts.setdefault(stack, []).append(part if match is None else match["rest"] or "*")
    mixing = {layer: other for other in MIXING for layer in heads.get(other, ())}
    called = {stack: "" if stack == plain and stack not in MIXING else stack for stack in heads}
    return {
        stack: select(",".join(parts[stack]), heads[stack], of=of, stack=called[stack], mixing=mixing)
        for stack in heads
        if stack in parts
    }


def resolve_roles(expression: str, named: HeadsByRole | None) -> str:
    """The expression with the heads themselves in place of every `@role`.

    named: the heads of every role that there is, none where an atlas names none; None without an atlas. Raises
    UsageError without an atlas and for a role that there is not, InputError for one that no head has.

        >>> resolve_roles("@induction,last", {"induction": {3: (0, 1)}})
        'L3H0,L3H1,last'
    """
    if not isinstance(expression, str):
        raise UsageError(f"expected heads as a text, got {brief(expression)}", "write them as 27.3,last")
    parts: list[str] = []
    for part in _pieces(expression):
        role = part[1:]
        if not part.startswith("@"):
            parts.append(part)
            continue
        if named is None:
            raise UsageError(
                f"@{role} needs an atlas, and there is none",
                "make one: attnscope scan MODEL --out DIR, and name it with {atlas=DIR}",
            )
        if role not in named:
            raise UsageError(f"there is no role {role!r}", f"the roles are {', '.join(named)}")
        if not named[role]:
            roles = ", ".join(f"@{name}" for name, heads in named.items() if heads) or "no role at all"
            raise InputError(f"the atlas names no {role} head", f"it names {roles}")
        parts.append(",".join(head_name(*head) for head in pairs(named[role])))
    return ",".join(parts)


def _pieces(expression: str) -> list[str]:
    """The parts of an expression between commas, heads that are written as other programs do among them.

    Raises UsageError for what may be heads or layers.

    >>> _pieces("[[2, 2], [3, 0]]"), _pieces("(3,1),a3.2,last")
    (['L2H2', 'L3H0'], ['L3H1', 'L3H2', 'last'])
    """
    expression = expression.strip()
    if expression.startswith("[") and _PAIR.fullmatch(expression):
        inside = expression[1:-1].replace(" ", "")
        raise UsageError(f"{expression} may be one head or two layers", f"write {inside.replace(',', '.')} or {inside}")
    expression = _PAIR.sub(r"L\1H\2", expression)
    if expression[:1] + expression[-1:] in ("[]", "()"):
        expression = expression[1:-1]
    pieces = [_NODE.sub(r"L\1H\2", piece.strip().strip("\"'")) for piece in expression.split(",")]
    ranges = [piece for piece in pieces if _LAYERS.match(piece)]
    for before, after in pairwise(ranges):
        if int(before.split("-")[1]) >= int(after.split("-")[0]):
            raise UsageError(
                f"{before} and {after} are layers, and not one after the other",
                f"write heads {','.join(ranges[:9]).replace('-', '.')}, or layers in order",
            )
    return pieces


def everything(heads_by_layer: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Every head of every layer with attention."""
    return {layer: tuple(range(heads)) for layer, heads in sorted(heads_by_layer.items())}


def pairs(selection: Mapping[int, Iterable[int]]) -> list[tuple[int, int]]:
    """The selection as (layer, head) pairs, in order."""
    return [(layer, head) for layer, heads in selection.items() for head in heads]


def stack_columns(columns: Iterable[Sequence[HeadIndex]], names: Sequence[str] = ("stack",)) -> dict[str, list[str]]:
    """A column of stacks for each column of heads, of a table with any head of a linear layer; none elsewhere.

    >>> stack_columns([[(3, 0), (StackLayer(3, LINEAR), 0)]])
    {'stack': ['decoder', 'linear']}
    """
    stacks = {
        name: [stack_of(layer, DECODER) for layer, _ in heads] for name, heads in zip(names, columns, strict=False)
    }
    return stacks if any(map(is_linear, chain(*stacks.values()))) else {}


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers by runs without a gap: [0, 1, 2, 5] -> [[0, 1, 2], [5]]."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in group] for _, group in groups]


def as_ranges(numbers: Iterable[int]) -> str:
    """Numbers as a selection writes them: [0, 1, 2, 5] -> `0-2,5`."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in consecutive(numbers))


def one_head(text: str, heads: Mapping[str, Mapping[int, int]], plain: str) -> tuple[str, int, int]:
    """The stack, layer and head that `L2H3`, `2.3` or `cross L2H3` names; UsageError unless it is exactly one.

    heads: {stack: {layer: number of heads}}.

    >>> one_head("L2H3", {"decoder": {2: 4}}, "decoder")
    ('decoder', 2, 3)
    """
    # More than one in any model: a role, or two layers where `2.3` was meant.
    if "@" in text:
        raise UsageError(f"head {text} names a role, expected one head", "write it as L2H3 or 2.3")
    if two := re.fullmatch(r"\s*([0-9]+)\s*,\s*([0-9]+)\s*", text):
        raise UsageError(
            f"head {text} names two layers, expected one head", f"write L{two[1]}H{two[2]} or {two[1]}.{two[2]}"
        )
    chosen = select_stacks(text, heads, plain)
    places = [(stack, layer, head) for stack, of in chosen.items() for layer, head in pairs(of)]
    if len(places) != 1:
        ends = dict.fromkeys(head_name(layer, head) for _, layer, head in (*places[:1], *places[-1:]))
        raise UsageError(
            f"head {text} names {len(places)} heads, expected one", f"write one of them: {' to '.join(ends) or 'L2H3'}"
        )
    return places[0]


def written_heads(heads: Iterable[HeadIndex], heads_by_layer: Mapping[int, int]) -> str:
    """Heads as `select` reads them, as short as it can be; heads_by_layer: as of `select`.

    >>> written_heads([(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)], {0: 2, 1: 2, 2: 2})
    '0-1,2.1'
    """
    groups = groupby(sorted(set(heads)), lambda head: head[0])
    by_layer = {layer: [head for _, head in group] for layer, group in groups}
    whole = [layer for layer, numbers in by_layer.items() if len(numbers) == heads_by_layer[layer]]
    some = [f"{at}.{run}" for at in by_layer if at not in whole for run in as_ranges(by_layer[at]).split(",")]
    return ",".join([*filter(None, [as_ranges(whole)]), *some])


def _digits(text: str, part: str) -> list[int]:
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if high < low:
        raise UsageError(
            f"the range {text} in {part!r} runs backwards",
            f"write {high}-{low}" + f", or {text.replace('-', '.')} for one head" * (text == part),
        )
    if high - low > 1_000_000:
        raise UsageError(f"the range {text} in {part!r} is longer than any model", f"write {GRAMMAR}")
    return list(range(low, high + 1))


def _numbers(
    text: str,
    present: Sequence[int],
    unit: str,
    part: str,
    where: str,
    stack: str = "",
    mixing: Mapping[int, str] = MappingProxyType({}),
) -> list[int]:
    """The layers or heads that a count means. unit: "layer" or "head"; where: what has those that are present."""
    if text == "*":
        return list(present)
    if text.lower() == "last":
        return [present[-1]]
    kind = f"{stack} {unit}" if stack and unit == "layer" else unit
    if text.startswith("-"):
        number = int(text)
        if not 1 <= -number <= len(present):
            raise UsageError(
                f"{part!r} names {unit} {number}, but {where} has {len(present)} {kind}{'s' * (len(present) != 1)}",
                "-1 is the last of them",
            )
        return [present[number]]
    # The first number that is not there is named, with what it would be.
    numbers = _digits(text, part)
    absent = next((number for number in numbers if number not in present), None)
    if absent is None:
        return numbers
    # A model's layer before its last one that attends is there, but has no attention.
    if not stack and (absent in mixing or (where == MODEL and absent < present[-1])):
        its_map = f"; its map is {mixing[absent]}.{absent}" if absent in mixing else ""
        raise UsageError(
            f"{part!r} names layer {absent}, which has no attention over the text",
            f"layers with attention: {number_list(present)}{its_map}",
        )
    gaps = " with attention" * (where == MODEL and not stack and list(present) != list(range(present[-1] + 1)))
    has = f"{kind}s{gaps} {number_list(present)}" if len(present) > 1 else f"one {kind}{gaps}, {present[0]}"
    advice = f"choose a channel with {{channel={absent}}}" if (stack, unit) == (CHANNELS, "head") else COUNTING
    raise UsageError(f"{part!r} names {unit} {absent}, but {where} has {has}", advice)
