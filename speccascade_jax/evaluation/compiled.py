"""Analyses the text of a program compiled for an accelerator: its loops, what they read from memory and copy,
and whether they wait for the host.

Sizes are those in memory, where the last axes of an array are padded to whole tiles.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Set
from functools import cached_property

BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "bf16": 16,
    "f16": 16,
    "s64": 64,
    "u64": 64,
    "f64": 64,
}  # all others have 32, except for eight-bit floats
ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(")
HOST = ("infeed", "outfeed", "send", "recv")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SAME = ("get-tuple-element", "tuple", "bitcast", "optimization-barrier", "while", "copy-done", "reshape")
"""Operations whose result is or contains their operand."""
UNREAD = ("parameter", "constant", "iota", "after-all", "partition-id", "call", "conditional", *SAME[:-1])
SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = ("dynamic-update-slice", "scatter")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program, with its layout."""

    kind: str
    shape: tuple[int, ...]
    layout: str

    @property
    def fast(self) -> bool:
        """Whether it is in VMEM or a smaller memory on the chip, not in HBM."""
        return "S(" in self.layout

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from fastest to slowest, without those of size 1."""
        axes = self.layout.split(":")[0]
        numbers = [int(n) for n in axes.split(",") if n] or range(len(self.shape))[::-1]
        return tuple(n for n in numbers if n < len(self.shape) and self.shape[n] > 1)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        sizes, tile = list(self.shape), re.search(r"T\(([\d,]+)\)", self.layout)
        axes = [int(n) for n in self.layout.split(":")[0].split(",") if n]
        for axis, entries in zip(axes, map(int, tile[1].split(",")[::-1]) if tile else (), strict=False):
            sizes[axis] = -(-sizes[axis] // entries) * entries
        return math.prod(sizes) * (8 if self.kind.startswith("f8") else BITS.get(self.kind, 32)) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    arrays: tuple[Array, ...]  # all parts of a tuple
    operation: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    def called(self, how: str) -> str:
        match = re.search(rf"{how}=%([^\s,)]+)", self.rest)
        return match[1] if match else ""

    @property
    def index(self) -> int:
        """The index of the tuple's part that it selects, or of the parameter that it is."""
        match = re.search(r"index=(\d+)" if self.operation == "get-tuple-element" else r"^(\d+)", self.rest)
        return int(match[1]) if match else 0

    @property
    def made(self) -> tuple[int, int]:
        """The bytes of its results, in HBM and on the chip."""
        arrays = self.arrays
        if self.operation.endswith("-start"):  # (destination, source, ...), or the other way round
            arrays = arrays[:1] if self.operation == "copy-start" else arrays[1:2]
        fast = sum(x.bytes for x in arrays if x.fast)
        return sum(x.bytes for x in arrays) - fast, fast


class Computation(dict[str, Instruction]):
    """A computation's instructions by name, in order."""

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.values() if instruction.is_root)

    def origin(self, instruction: Instruction) -> Instruction:
        """The instruction that made an array, through those that only pass it on."""
        while instruction.operation in SAME and instruction.operands:
            instruction = self[instruction.operands[0]]
        return instruction

    def users(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.values() if name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Loop:
    body: str
    times: int | None  # None: depends on the data
    inside: str  # the computation that contains it


class Program:
    """A program's text, parsed."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry, current = "", Computation()
        for line in text.splitlines():
            if line[:1] in "%E" and (match := COMPUTATION.match(line)) and line.endswith("{"):
                current = self.computations[match[1]] = Computation()
                self.entry = match[1] if line[0] == "E" else self.entry
            elif match := INSTRUCTION.match(line):
                root, name, shape, operation, rest = match.groups()
                inner = rest[: rest.index(")")] if ")" in rest else rest
                arrays = tuple(
                    Array(kind, tuple(int(n) for n in sizes.split(",") if n), layout or "")
                    for kind, sizes, layout in ARRAY.findall(shape)
                )
                current[name] = Instruction(
                    name, arrays, operation, tuple(re.findall(r"%([^\s,)]+)", inner)), rest, bool(root)
                )

    @cached_property
    def loops(self) -> list[Loop]:
        return [
            Loop(instruction.called("body"), self._times(instruction.called("condition")), name)
            for name, computation in self.computations.items()
            for instruction in computation.values()
            if instruction.operation == "while"
        ]

    def _times(self, condition: str) -> int | None:
        """The number of iterations of a loop whose condition compares a counter with a constant."""
        computation = self.computations[condition]
        root = computation.root
        if root.operation == "compare" and "direction=LT" in root.rest and root.arrays[0].shape == ():
            for name in root.operands:
                match = re.match(r"(\d+)\)", computation[name].rest)
                if computation[name].operation == "constant" and match:
                    return int(match[1])
        return None

    @cached_property
    def rounds(self) -> Loop:
        """The loop over rounds: the outermost one whose number of iterations depends on the data. Raises
        ValueError if there is none.
        """
        open_ended = [loop for loop in self.loops if loop.times is None]
        bodies = {loop.body for loop in open_ended}
        for loop in open_ended:
            if loop.inside not in bodies:
                return loop
        raise ValueError("the program has no loop over rounds.")

    def within(self, name: str, times: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
        """(instruction, its location, the number of times it runs) for all instructions of a computation,
        including its loops and branches; a fusion is one instruction."""
        computation = self.computations[name]
        for instruction in computation.values():
            yield instruction, computation, times
            if instruction.operation == "while":
                often = self._times(instruction.called("condition")) or 1
                yield from self.within(instruction.called("body"), times * often)
            for branch in self._branches(instruction):
                yield from self.within(branch, times)

    def _branches(self, instruction: Instruction) -> list[str]:
        if instruction.operation not in ("call", "conditional"):
            return []
        names = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
        called = (
            re.findall(r"%([^\s,]+)", names[1])
            if names
            else [instruction.called(how) for how in ("to_apply", "true_computation", "false_computation")]
        )
        return [name for name in called if name in self.computations]

    def bytes_read(self, name: str) -> int:
        """The bytes that a computation reads from HBM; for an array that it slices, only the slices count."""
        return sum(times * self._read(instruction, where) for instruction, where, times in self.within(name))

    def _read(self, instruction: Instruction, where: Computation) -> int:
        if (
            instruction.operation in UNREAD
            or instruction.operation.endswith("-done")
            or "AllocateBuffer" in instruction.rest
            or "ConcatBitcast" in instruction.rest
        ):
            return 0
        if instruction.operation.endswith("-start"):  # moves an array to VMEM or back, or to another chip
            source = where[instruction.operands[0]].arrays[:1] if instruction.operands[0] in where else ()
            moved = min((x.bytes for x in instruction.arrays if x.count > 1), default=0)
            return 0 if not source or source[0].fast else moved
        body = (
            self.computations.get(instruction.called("calls")) if instruction.operation == "fusion" else None
        )
        total = 0
        for place, name in enumerate(instruction.operands):
            operand = where.get(name)
            if operand is None or len(operand.arrays) != 1 or operand.arrays[0].fast:
                continue
            whole = operand.arrays[0].bytes
            if body is not None:
                total += self._read_in_fusion(body, place, whole)
            elif instruction.operation in SLICES:
                total += min(whole, sum(x.bytes for x in instruction.arrays)) if place == 0 else whole
            elif instruction.operation not in IN_PLACE or place:
                total += whole
        return total

    def _read_in_fusion(self, body: Computation, place: int, whole: int) -> int:
        names = [
            instruction.name
            for instruction in body.values()
            if instruction.operation == "parameter" and instruction.index == place
        ]
        total, seen = 0, set(names)
        while names:
            name = names.pop()
            for user in body.users(name):
                if user.operation in SAME and user.name not in seen:
                    names.append(user.name)
                    seen.add(user.name)
                elif user.operation in SLICES and user.operands[0] == name:
                    total += sum(x.bytes for x in user.arrays)
                elif user.operation == "fusion":
                    inner = self.computations[user.called("calls")]
                    if _only_moves(inner):  # copied to another layout: reads of the copy count
                        names.append(user.name)
                    else:
                        total += self._read_in_fusion(inner, user.operands.index(name), whole)
                elif not (user.operation in IN_PLACE and user.operands[0] == name):
                    return whole
        return min(total, whole)

    def temporaries(self) -> tuple[int, int]:
        """The peak bytes of temporaries, besides arguments and results, in HBM and on the chip, in the order
        of the instructions."""
        return self._held(self.entry)

    def _held(self, name: str) -> tuple[int, int]:
        where = self.computations[name]
        buffers: dict[str, list[frozenset[str]]] = {}  # for each part of a value, the makers of its buffers
        for instruction in where.values():
            buffers[instruction.name] = self._buffers(instruction, where, buffers)
        last = {
            made: instruction.name
            for instruction in where.values()
            for operand in (instruction.name, *instruction.operands)
            for part in buffers.get(operand, ())
            for made in part
        }
        kept = frozenset().union(*buffers[where.root.name])
        ending: dict[str, list[str]] = {}
        for made, user in last.items():
            ending.setdefault(user, []).append(made)
        live, peak = [0, 0], [0, 0]
        for instruction in where.values():
            if buffers[instruction.name] == [{instruction.name}] and instruction.name not in kept:
                live = [x + size for x, size in zip(live, instruction.made, strict=True)]
            bodies = (
                [instruction.called("body")]
                if instruction.operation == "while"
                else self._branches(instruction)
            )
            inner = [max(sizes) for sizes in zip((0, 0), *map(self._held, bodies), strict=True)]
            peak = [max(x, now + size) for x, now, size in zip(peak, live, inner, strict=True)]
            for made in ending.get(instruction.name, []):
                if made not in kept:
                    live = [x - size for x, size in zip(live, where[made].made, strict=True)]
        return peak[0], peak[1]

    def _buffers(
        self, instruction: Instruction, where: Computation, known: dict[str, list[frozenset[str]]]
    ) -> list[frozenset[str]]:
        """The instructions that made the buffers of each part of a value."""

        def joined(name: str) -> frozenset[str]:
            return frozenset().union(*known.get(name, ()))

        if instruction.operation == "parameter" or (
            instruction.operation == "constant" and not instruction.operands
        ):
            return [frozenset()] * max(len(instruction.arrays), 1)
        if instruction.operation == "tuple":
            return [joined(name) for name in instruction.operands]
        if instruction.operation == "get-tuple-element" and instruction.operands[0] in known:
            parts = known[instruction.operands[0]]
            return [
                parts[instruction.index]
                if instruction.index < len(parts)
                else joined(instruction.operands[0])
            ]
        if instruction.operation in ("while", "optimization-barrier") and instruction.operands[0] in known:
            return known[instruction.operands[0]]
        same = [
            name
            for place, name in enumerate(instruction.operands)
            if name in known
            and (
                instruction.operation in SAME
                or instruction.operation.endswith("-done")
                or "ConcatBitcast" in instruction.rest
                or self._in_place(instruction, place)
            )
        ]
        return [frozenset().union(*map(joined, same))] if same else [frozenset({instruction.name})]

    def _in_place(self, instruction: Instruction, place: int) -> bool:
        """Whether an instruction writes its result into that operand."""
        if instruction.operation in IN_PLACE:
            return place == 0
        if instruction.operation != "fusion":
            return False
        body = self.computations[instruction.called("calls")]
        last = body.origin(body.root)
        first = body.origin(body[last.operands[0]]) if last.operation in IN_PLACE else last
        return first is not last and first.operation == "parameter" and first.index == place

    def faults(self, name: str, kept: Set[tuple[str, int]]) -> dict[str, list[str]]:
        """Unwanted operations in a loop's body: kind -> one line per instance.

        kept: (dtype, number of entries) of the weights and caches, including those of a single layer. Copies
        that overlap with computation do not count.
        """
        problems: dict[str, list[str]] = {"host transfers": [], "copies": [], "changes of layout": []}
        for instruction, where, times in self.within(name):
            if instruction.operation.split("-")[0] in HOST or re.search(
                r"custom_call_target=\"[^\"]*callback", instruction.rest
            ):
                problems["host transfers"].append(f"{times} x {instruction.operation} {instruction.name}")
            source = self._moved(instruction, where)
            if source is None or not {(x.kind, x.count) for x in instruction.arrays} & kept:
                continue
            [array, *_] = instruction.arrays
            same = array.order == source.order and array.shape == source.shape
            problems["copies" if same else "changes of layout"].append(
                f"{times} x {instruction.name}: {array.kind}{list(array.shape)}, {array.bytes / 1e6:.2g} MB"
            )
        return problems

    def _moved(self, instruction: Instruction, where: Computation) -> Array | None:
        """The array that an instruction moves, if it does nothing else."""
        if instruction.operation == "fusion":
            if not _only_moves(self.computations[instruction.called("calls")]):
                return None
        elif instruction.operation not in ("copy", "transpose"):
            return None
        source = where.get(instruction.operands[0])
        return source.arrays[0] if source and source.arrays else None

    def collectives(self, name: str) -> int:
        """The number of collective operations between chips."""
        return sum(
            times
            for instruction, _, times in self.within(name)
            if instruction.operation.removesuffix("-start") in COLLECTIVES
        )


def _only_moves(body: Computation) -> bool:
    """Whether a fusion changes an array's layout and does nothing else."""
    others = {x.operation for x in body.values()} - {"parameter", "bitcast", "reshape"}
    return bool(others) and others <= {"copy", "transpose"}
