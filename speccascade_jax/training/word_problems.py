"""Generates word problems about everyday objects, with written solutions, from a seed.

    made://word_problems?split=train&operations=2-6&distractors=0-2&order=forward&examples=100000

A problem is a graph of quantities, as in i-GSM (Ye et al., arXiv 2407.20311): some are given as numbers, each
of the others is computed from one or two quantities, and the question asks for one of them. Statements come
in random order or, with `order=forward`, each after those it depends on. Distractors are not needed for the
answer. The solution has one sentence per operation, in an order in which each can be computed, and ends with
the answer. In both texts a value precedes its object, so that it is looked up in the same way:

    There are 3 more pears than apples. There are 5 apples. There are twice as many nuts as pears. How many
    nuts are there?

    pears = apples + 3 = 5 + 3 = 8 pears. nuts = 2 * pears = 2 * 8 = 16 nuts. The answer is 16.

No two splits share a graph with the same numbers, even with other objects.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from speccascade_jax.core.errors import FieldError

# fmt: off
OBJECTS = (
    "apples", "bags", "balls", "bells", "books", "bottles", "bowls", "boxes", "bricks", "buttons", "cakes",
    "candles", "caps", "cards", "carrots", "chairs", "coins", "cups", "dolls", "drums", "eggs", "figs",
    "flags", "forks", "hats", "jars", "keys", "kites", "lamps", "leaves", "lemons", "maps", "masks", "nails",
    "nuts", "onions", "pears", "pencils", "pens", "pins", "plates", "plums", "pots", "rings", "ropes",
    "shells", "shirts", "shoes", "socks", "spoons", "stamps", "stars", "stones", "tents", "tickets", "toys",
    "trees",
)
# fmt: on
SPLITS = {"train": range(2, 20), "validation": range(1, 2), "test": range(1)}
"""Split -> the residues modulo 20 of its problems' fingerprints."""


class Operation(NamedTuple):
    """A way to compute a quantity from others, and its wording in both texts."""

    operands: int
    amounts: Sequence[int]  # the constants that it may use
    compute: Callable[..., int]  # (values of the operands, amount) -> value
    statement: str  # fields: x is the quantity, y and z its operands, n the amount
    formula: str  # same fields, filled with names or with values


OPERATIONS = (
    Operation(1, range(2, 10), lambda y, n: y + n, "There are {n} more {x} than {y}.", "{y} + {n}"),
    Operation(1, range(2, 10), lambda y, n: y - n, "There are {n} fewer {x} than {y}.", "{y} - {n}"),
    Operation(1, (2,), lambda y, n: n * y, "There are twice as many {x} as {y}.", "{n} * {y}"),
    Operation(1, (3,), lambda y, n: n * y, "There are three times as many {x} as {y}.", "{n} * {y}"),
    Operation(2, (0,), lambda y, z, n: y + z, "There are as many {x} as {y} and {z} together.", "{y} + {z}"),
)


class Quantity(NamedTuple):
    """The definition of a quantity: an operation on others, or just an amount."""

    operation: Operation | None
    operands: tuple[int, ...]  # indices of quantities
    amount: int


@dataclasses.dataclass(frozen=True)
class Problems:
    """A set of problems to generate. Their difficulty is the number of operations that the answer needs."""

    split: str = "train"
    operations: str = "2-6"
    """The number of operations that the answer needs: a number or a range such as 2-6."""
    distractors: str = "0-2"
    """The number of quantities that the answer does not need: a number or a range."""
    examples: int = 10_000
    largest: int = 30
    """The largest value of a quantity."""
    order: str = "random"
    """The order of the statements: a key of ORDERS."""
    seed: int = 0

    def check(self) -> None:
        """Raises FieldError for problems that cannot be generated."""
        if self.split not in SPLITS:
            raise FieldError("split", self.split, f"known: {', '.join(SPLITS)}.")
        if self.order not in ORDERS:
            raise FieldError("order", self.order, f"known: {', '.join(ORDERS)}.")
        for name, (low, high) in (("examples", (1, 10_000_000)), ("largest", (10, 1000))):
            if not low <= getattr(self, name) <= high:
                raise FieldError(name, getattr(self, name), f"it must lie between {low} and {high}.")
        for name, low, high in (("operations", 1, 16), ("distractors", 0, 16)):
            _span(name, getattr(self, name), low, high)

    @property
    def sizes(self) -> tuple[range, range]:
        """The ranges of operations and of distractors."""
        return _span("operations", self.operations, 1, 16), _span("distractors", self.distractors, 0, 16)


def _span(name: str, text: str, low: int, high: int) -> range:
    """Parses `4` or `2-6` as a range. Raises FieldError for other texts, and for values outside [low,
    high]."""
    first, _, last = text.partition("-")
    last = last or first
    digits = first.isdecimal() and last.isdecimal() and len(first + last) < 8
    if not digits or not low <= int(first) <= int(last) <= high:
        raise FieldError(name, text, f"write a number between {low} and {high}, or two as in 2-6.")
    return range(int(first), int(last) + 1)


def parse(query: str) -> Problems:
    """Parses `split=test&operations=4`. Raises FieldError for unknown fields and values."""
    fields = {field.name: field for field in dataclasses.fields(Problems)}
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in fields:
            raise FieldError(
                name, text, f"known: {', '.join(fields)}.", f"word problems have no field {name!r}"
            )
        if fields[name].type is int:
            if not text.isdecimal() or len(text) > 12:
                raise FieldError(name, text, "give an integer.")
            values[name] = int(text)
        else:
            values[name] = text
    problems = Problems(**values)
    problems.check()
    return problems


def read(path: str) -> Iterator[dict[str, Any]]:
    """Yields the examples of `word_problems?QUERY`. Raises FieldError for problems that cannot be
    generated."""
    name, _, query = path.partition("?")
    if name != "word_problems":
        raise FieldError("made", name, "known: word_problems.", f"nothing called {name!r} can be made")
    return examples(parse(query))


def examples(problems: Problems) -> Iterator[dict[str, Any]]:
    """Yields dicts with `source`, `target` and `operations`, a pure function of `problems`."""
    rng = random.Random(f"{problems.seed} {problems.split}")
    operations, distractors = problems.sizes
    made = 0
    while made < problems.examples:
        needed, others = rng.choice(operations), rng.choice(distractors)
        quantities = numbered(rng, graph(rng, needed), problems.largest)
        if quantities is None or fingerprint(quantities) % 20 not in SPLITS[problems.split]:
            continue
        stated = distracted(rng, quantities, others, problems.largest)
        order = ORDERS[problems.order](rng, stated)
        yield written(rng, quantities, stated, order) | {"operations": needed}
        made += 1


def graph(rng: random.Random, operations: int) -> list[tuple[Operation | None, tuple[int, ...]]]:
    """A random graph with this many operations, whose first quantity needs all others.

    It is built from the question down: an operand is new or not yet defined, so there is no cycle.
    """
    defined: dict[int, tuple[Operation | None, tuple[int, ...]]] = {}
    waiting, count = [0], 1
    for _ in range(operations):
        number = waiting.pop(rng.randrange(len(waiting)))
        operation = rng.choice(OPERATIONS)
        operands: list[int] = []
        for _ in range(operation.operands):
            old = [n for n in waiting if n not in operands]
            if old and rng.random() < 0.3:
                operands.append(rng.choice(old))
            else:
                operands.append(count)
                waiting.append(count)
                count += 1
        defined[number] = operation, tuple(operands)
    return [defined.get(number, (None, ())) for number in range(count)]


def numbered(
    rng: random.Random, shape: list[tuple[Operation | None, tuple[int, ...]]], largest: int
) -> list[Quantity] | None:
    """The graph with random numbers such that each quantity is in [1, largest]; None if 20 draws fail."""
    for _ in range(20):
        quantities = [
            Quantity(
                operation,
                operands,
                rng.randint(2, 12) if operation is None else rng.choice(operation.amounts),
            )
            for operation, operands in shape
        ]
        if all(1 <= value <= largest for value in values(quantities)):
            return quantities
    return None


def values(quantities: Sequence[Quantity]) -> list[int]:
    """The value of each quantity."""
    known: dict[int, int] = {}

    def value(number: int) -> int:
        if number not in known:
            operation, operands, amount = quantities[number]
            known[number] = amount if operation is None else operation.compute(*map(value, operands), amount)
        return known[number]

    return [value(number) for number in range(len(quantities))]


def fingerprint(quantities: Sequence[Quantity]) -> int:
    """A hash of the graph and its numbers that does not depend on the objects."""

    def shown(number: int) -> str:
        operation, operands, amount = quantities[number]
        return (
            f"({'' if operation is None else operation.statement} {amount} {' '.join(map(shown, operands))})"
        )

    return int.from_bytes(hashlib.sha256(shown(0).encode()).digest()[:8], "big")


def distracted(
    rng: random.Random, quantities: Sequence[Quantity], count: int, largest: int
) -> list[Quantity]:
    """`quantities` followed by `count` that the answer does not need, each given or computed from earlier
    ones."""
    more = list(quantities)
    for _ in range(count):
        operation = rng.choice((None, *OPERATIONS))
        if operation is not None and operation.operands <= len(more):
            operands = tuple(rng.sample(range(len(more)), operation.operands))
            candidate = Quantity(operation, operands, rng.choice(operation.amounts))
            if 1 <= values([*more, candidate])[-1] <= largest:
                more.append(candidate)
                continue
        more.append(Quantity(None, (), rng.randint(2, 12)))
    return more


def shuffled(rng: random.Random, quantities: Sequence[Quantity]) -> list[int]:
    """The indices of the quantities in random order."""
    return rng.sample(range(len(quantities)), len(quantities))


def forward(rng: random.Random, quantities: Sequence[Quantity]) -> list[int]:
    """The indices of the quantities, each after its operands."""
    waiting, order = set(range(len(quantities))), list[int]()
    while waiting:
        ready = [n for n in sorted(waiting) if waiting.isdisjoint(quantities[n].operands)]
        order.append(rng.choice(ready))
        waiting.remove(order[-1])
    return order


ORDERS: dict[str, Callable[[random.Random, Sequence[Quantity]], list[int]]] = {
    "random": shuffled,
    "forward": forward,
}
"""The orders in which a problem's quantities can be stated."""


def written(
    rng: random.Random, needed: Sequence[Quantity], quantities: Sequence[Quantity], order: Sequence[int]
) -> dict[str, Any]:
    """Both texts of a problem whose answer is the first quantity and needs the quantities in `needed`.
    `order` is the order of its statements."""
    names, numbers = rng.sample(OBJECTS, len(quantities)), values(quantities)
    source = [_statement(quantities[n], names[n], names) for n in order]
    source.append(f"How many {names[0]} are there?")
    known = {n for n, quantity in enumerate(needed) if quantity.operation is None}
    waiting = [n for n in order if n < len(needed) and n not in known]
    target = []
    while waiting:
        number = next(n for n in waiting if known.issuperset(needed[n].operands))
        waiting.remove(number)
        known.add(number)
        by_name, by_value = (_formula(needed[number], column) for column in (names, numbers))
        target.append(f"{names[number]} = {by_name} = {by_value} = {numbers[number]} {names[number]}.")
    target.append(f"The answer is {numbers[0]}.")
    return {"source": " ".join(source), "target": " ".join(target)}


def _statement(quantity: Quantity, name: str, names: Sequence[str]) -> str:
    if quantity.operation is None:
        return f"There are {quantity.amount} {name}."
    operands = dict(zip("yz", (names[n] for n in quantity.operands), strict=False))
    return quantity.operation.statement.format(x=name, n=quantity.amount, **operands)


def _formula(quantity: Quantity, column: Sequence[Any]) -> str:
    """The formula of a quantity with the names or values in `column`."""
    operands = dict(zip("yz", (column[n] for n in quantity.operands), strict=False))
    formula = "" if quantity.operation is None else quantity.operation.formula
    return formula.format(n=quantity.amount, **operands)
