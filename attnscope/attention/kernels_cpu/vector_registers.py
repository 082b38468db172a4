"""Vector registers for Numba: numbers side by side, loaded and stored at addresses.

Written out, since what LLVM makes of a loop with several sums is half as wide as the registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

from attnscope.attention.kernels_cpu.layout import BLOCK, LANES, NAMES, STRIP

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """LANES numbers of one kind: "float32", "int32" or "bool"."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"{kind}x{LANES}")
        self.number = {"float32": FLOAT, "int32": INT, "bool": ir.IntType(1)}[kind]


@register_default(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(kind.number, LANES))


Floats, Ints, Mask = Vector("float32"), Vector("int32"), Vector("bool")
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
address, f32, i64 = types.int64, types.float32, types.int64


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function for Numba of what its body emits: it gets the builder and the values."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def definition(context: Any, *kinds: Any) -> Any:
            return result(*arguments), lambda target, builder, signature, values: emit(builder, *values)

        names = ["context", *(f"value{number}" for number in range(len(arguments)))]
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        definition.__signature__ = inspect.Signature([inspect.Parameter(name, plain) for name in names])  # type: ignore[attr-defined]
        definition.__name__ = emit.__name__
        return intrinsic(definition)

    return decorate


def _at(builder: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(place, kind.as_pointer())


def _load(builder: Any, place: Any, kind: Any) -> Any:
    return builder.load(_at(builder, place, kind), align=4)


def _call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    width = f".v{LANES}f32"
    signature = ir.FunctionType(kind, [value.type for value in values])
    function = builder.module.globals.get(name + width) or ir.Function(builder.module, signature, name + width)
    return builder.call(function, values)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


@intrinsic
def field(context: Any, record: Any, name: Any) -> Any:
    """The value of a name in the record of NAMES at an address."""
    if not isinstance(name, types.Literal):
        return None
    offset = 8 * NAMES.index(name.literal_value)

    def emit(target: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.load(_at(b, b.add(values[0], ir.Constant(LONG, offset)), LONG), align=8)

    return types.int64(types.int64, name), emit


def _loads(result: Any, kind: Any, align: int = 4) -> Any:
    """A function for Numba: what lies at an address."""

    return emits(result, address)(lambda b, place: b.load(_at(b, place, kind), align=align))


def _stores(value: Any, kind: Any, align: int = 4) -> Any:
    """A function for Numba that puts a value at an address."""

    @emits(types.none, address, value)
    def put(b: Any, place: Any, value: Any) -> Any:
        b.store(value, _at(b, place, kind), align=align)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return put


number, integer, long = _loads(f32, FLOAT), _loads(types.int32, INT), _loads(i64, LONG, align=8)
load_floats, load_integers = _loads(Floats, FLOATS), _loads(Ints, INTS)
put, put_integer, put_long = _stores(f32, FLOAT), _stores(types.int32, INT), _stores(i64, LONG, align=8)
store = _stores(Floats, FLOATS)


splat = emits(Floats, f32)(lambda b, value: _splat(b, value, FLOATS))
integers = emits(Ints, types.int32)(lambda b, value: _splat(b, value, INTS))
# first, first + 1, ...
ascending = emits(Ints, types.int32)(lambda b, first: b.add(_splat(b, first, INTS), ir.Constant(INTS, [*range(LANES)])))


def _of_each_pair(instruction: str) -> Any:
    """A function for Numba: an instruction of LLVM on each pair of numbers."""
    return emits(Floats, Floats, Floats)(lambda b, x, y: getattr(b, instruction)(x, y))


plus, minus, times, over = map(_of_each_pair, ("fadd", "fsub", "fmul", "fdiv"))
as_floats = emits(Floats, Ints)(lambda b, values: b.sitofp(values, FLOATS))
where = emits(Floats, Mask, Floats, Floats)(lambda b, mask, x, y: b.select(mask, x, y))
at_least = emits(Mask, Floats, Floats)(lambda b, x, y: b.fcmp_ordered(">=", x, y))
equal = emits(Mask, Ints, Ints)(lambda b, x, y: b.icmp_signed("==", x, y))
below = emits(Mask, Ints, Ints)(lambda b, x, y: b.icmp_signed("<", x, y))
both = emits(Mask, Mask, Mask)(lambda b, x, y: b.and_(x, y))
fma = emits(Floats, Floats, Floats, Floats)(lambda b, x, y, z: _call(b, "llvm.fma", FLOATS, x, y, z))  # x y + z
# A mask as a number, the first of its lanes the lowest bit; and the place of the lowest bit of a number other than 0.
bits = emits(i64, Mask)(lambda b, mask: b.zext(b.bitcast(mask, ir.IntType(LANES)), LONG))
lowest = emits(i64, i64)(lambda b, value: b.cttz(value, ir.Constant(ir.IntType(1), 1)))


def _reduce(b: Any, values: Any, pick: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(INT, width), list(range(a, a + width))) for a in (0, width))
        values = pick(b.shuffle_vector(values, values, low), b.shuffle_vector(values, values, high))
    return b.extract_element(values, ir.Constant(INT, 0))


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


larger = emits(Floats, Floats, Floats)(_larger)  # of each pair; y where x is NaN
least = emits(Floats, Floats, Floats)(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))  # of each pair
total = emits(f32, Floats)(lambda b, values: _reduce(b, values, b.fadd))
largest_lane = emits(f32, Floats)(lambda b, values: _reduce(b, values, partial(_larger, b)))


@emits(f32, f32)
def above(b: Any, x: Any) -> Any:
    """The next larger number."""
    whole, zero = b.bitcast(x, INT), ir.Constant(FLOAT, 0.0)
    moved = b.select(b.fcmp_ordered(">", x, zero), b.add(whole, ir.Constant(INT, 1)), b.sub(whole, ir.Constant(INT, 1)))
    return b.bitcast(b.select(b.fcmp_ordered("==", x, zero), ir.Constant(INT, 1), moved), FLOAT)


EXP2 = (1.0, 6.9314700e-1, 2.4022242e-1, 5.5507336e-2, 9.6715130e-3, 1.3264727e-3)  # 2**f, |f| <= 1/2, to 1e-7
LOG2E, MAGIC, LEAST = 1.4426950408889634, 1.5 * 2**23 + 127, -88.03


@emits(Floats, Floats)
def clamped(b: Any, t: Any) -> Any:
    """t, or the least that `exp` takes; NaN stays."""
    least = _constant(LEAST)
    return b.select(b.fcmp_ordered(">", least, t), least, t)


@emits(Floats, Floats)
def exp(b: Any, t: Any) -> Any:
    """exp t to 2e-7, for t from LEAST, where it is 0, to 88; NaN of NaN."""
    moved = _call(b, "llvm.fma", FLOATS, t, _constant(LOG2E), _constant(MAGIC))  # the whole part, in the lowest bits
    whole = b.fsub(moved, _constant(MAGIC))
    part = _call(b, "llvm.fma", FLOATS, t, _constant(LOG2E), b.fneg(whole))
    power = _constant(EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power = _call(b, "llvm.fma", FLOATS, power, part, _constant(coefficient))
    two = b.bitcast(b.shl(b.bitcast(moved, INTS), ir.Constant(INTS, [23] * LANES)), FLOATS)
    return b.fmul(power, two)


@emits(types.none, *[i64] * 8)
def product(b: Any, a: Any, a_row: Any, m: Any, m_row: Any, depth: Any, c: Any, c_row: Any, more: Any) -> Any:
    """BLOCK rows of `a` times `depth` rows of STRIP columns of `m`, into `c`; added to it with `more`.

    All but depth in bytes. The sums stay in registers, and are added to `c` when they are whole: fewer digits are lost.
    more: 0 or 1, written out; of one that a loop changes LLVM made wrong code.
    """
    places = [(row, half) for row in range(BLOCK) for half in range(STRIP // LANES)]
    width = 4 * LANES

    def moved(base: Any, *steps: Any) -> Any:
        for step in steps:
            base = b.add(base, step)
        return base

    def cell(row: int, half: int) -> Any:
        return moved(c, b.mul(c_row, ir.Constant(LONG, row)), ir.Constant(LONG, half * width))

    # A loop over the depth. Its counter and sums are phi nodes: no memory, but registers from one turn to the next.
    before = b.block
    names = ("loop", "ended", "adding", "putting", "after")
    loop, ended, adding, putting, after = (b.append_basic_block(name) for name in names)
    b.branch(loop)
    b.position_at_end(loop)
    step = b.phi(LONG)
    sums = [b.phi(FLOATS) for _ in places]
    for total_phi in sums:
        total_phi.add_incoming(_constant(0.0), before)
    step.add_incoming(ir.Constant(LONG, 0), before)

    # A number of `a` is spread over a register once for all columns of the strip.
    row_m, row_a = moved(m, b.mul(step, m_row)), moved(a, b.mul(step, ir.Constant(LONG, 4)))
    halves = [_load(b, moved(row_m, ir.Constant(LONG, half * width)), FLOATS) for half in range(STRIP // LANES)]
    new = []
    for (row, half), total_phi in zip(places, sums, strict=True):
        if half == 0:
            spread_a = _splat(b, _load(b, moved(row_a, b.mul(a_row, ir.Constant(LONG, row))), FLOAT), FLOATS)
        new.append(_call(b, "llvm.fma", FLOATS, spread_a, halves[half], total_phi))
    following = b.add(step, ir.Constant(LONG, 1))
    step.add_incoming(following, loop)
    for total_phi, value in zip(sums, new, strict=True):
        total_phi.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", following, depth), loop, ended)

    # Two ends instead of a choice inside: see `more`.
    b.position_at_end(ended)
    b.cbranch(b.icmp_signed("!=", more, ir.Constant(LONG, 0)), adding, putting)
    for block in (adding, putting):
        b.position_at_end(block)
        for place, value in zip(places, new, strict=True):
            value = b.fadd(value, _load(b, cell(*place), FLOATS)) if block is adding else value
            b.store(value, _at(b, cell(*place), FLOATS), align=4)
        b.branch(after)
    b.position_at_end(after)
    return ir.Constant(ir.IntType(8).as_pointer(), None)
