"""Hierarchies of toys in plain Python, a token at a time, and the exact law of the texts they write.

Drafts are verified by token, or by AsABlock as a whole.

The recursion of hierarchical speculative decoding (Mohri et al., arXiv 2510.19705), with a deferral rule or
none at each level. Like toys.py it shares no code with the package's rules, sampling or decoding.

    Hierarchy(tables, methods, alphas, sizes).text_law(prompt, steps)    every choice, with its probability
    Hierarchy(...).decoded(prompt, most, Uniforms(table))                 one text, from given random numbers
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from toys import target, transform

Law = tuple[float, ...]
Context = tuple[int, ...]
DRAFT, CORRECTION, BONUS, MODEL = range(4)
MODULUS = 97


class Written(NamedTuple):
    """A token of a block, with the law handed up with it."""

    token: int
    untransformed: Law  # from untransformed distributions, which rules read
    sampled: Law
    level: int = 0
    kind: int = MODEL
    span: tuple[float, float] = (0.0, 1.0)  # where the uniform lies that decided on it; only a bug reads it


Block = tuple[Written, ...]


class Choices:
    """Takes a given path through a tree of choices, then first branches; `mass` is the path's chance."""

    def __init__(self, path: list[int]):
        self.path, self.taken, self.mass = path, [], 1.0

    def among(self, chances) -> int:
        open_ = [n for n, chance in enumerate(chances) if chance > 1e-15]
        at = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append((at, len(open_)))
        self.mass *= chances[open_[at]]
        return open_[at]

    def accepts(self, level, position, q: float, pi: float, span) -> tuple[bool, tuple[float, float]]:
        low, high = span
        edge = min(max(pi / q, low), high)
        accepted = self.among([(edge - low) / (high - low), (high - edge) / (high - low)]) == 0
        return accepted, (low, edge) if accepted else (edge, high)

    def stands(self, level, position, chance: float) -> bool:
        return self.among([chance, 1 - chance]) == 0

    def draw(self, level, position, weights) -> int:
        return self.among(np.asarray(weights) / np.sum(weights))

    def count(self, level, **numbers) -> None:
        pass

    def begin(self, position) -> None:
        pass

    def end(self) -> None:
        pass


def every(run: Callable[[Choices], Any]) -> dict[Any, float]:
    """What `run` may return -> its probability, over all paths."""
    law, path = defaultdict(float), []
    while path is not None:
        choices = Choices(path)
        outcome = run(choices)
        law[outcome] += choices.mass
        taken = choices.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        path = [at for at, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return dict(law)


class Uniforms:
    """Decides by a table of uniforms [levels, 2, L]: draws and acceptances, by position."""

    def __init__(self, table):
        self.table, self.counts = table, Counter()

    def number(self, level, role, position) -> float:
        return float(self.table[level][role][position])

    def accepts(self, level, position, q, pi, span):
        return self.number(level, 1, position) * q < pi, span

    def stands(self, level, position, chance):
        return self.number(level, 1, position) < chance

    def draw(self, level, position, weights):
        cumulative = np.cumsum(weights)
        return int(np.argmax(cumulative > self.number(level, 0, position) * cumulative[-1]))

    def count(self, level, **numbers):
        self.counts.update({(level, name): number for name, number in numbers.items()})

    def begin(self, position):
        pass

    def end(self):
        pass


class UniformsOfRounds(Uniforms):
    """By tables [2, L, the widths of the rounds ...], one for each level: where the outermost round began,
    how far into it the next one, and so on, and the offset in the innermost."""

    def __init__(self, table):
        super().__init__(table)
        self.begun = []

    def number(self, level, role, position):
        return float(self.table[level][role][(self.begun[0], *np.diff([*self.begun, position]))])

    def begin(self, position):
        self.begun.append(position)

    def end(self):
        self.begun.pop()


class Hierarchy:
    """`tables` from the smallest model up: logits [V, V, V] of an order-2 model, or [MODULUS, V] of one
    that reads its whole context. `options`: temperature and truncations."""

    def __init__(self, tables, methods, alphas, sizes, hand_over="need", eos=-1, **options):
        self.tables, self.methods, self.alphas, self.sizes = tables, methods, alphas, sizes
        self.hand_over, self.eos = hand_over, eos
        self.options = {"temperature": 1.0, **options}
        self.model, self.raised, self.blocks, self.committed = map(
            cache, (self.model, self.raised, self.blocks, self.committed)
        )

    # Laws

    def state(self, context: Context) -> Context:
        """All of a context that matters."""
        return (0, *context)[-2:] if self.tables[0].ndim == 3 else context

    def model(self, level: int, state: Context) -> tuple[Law, Law]:
        """A model's own law and the one it samples from."""
        at = state if self.tables[0].ndim == 3 else (hashed(state),)
        logits = self.tables[level][at].astype(np.float64)
        probs = np.exp(logits - logits.max())
        probs = probs / probs.sum()
        return tuple(map(float, probs)), tuple(map(float, transform(probs, **self.options)))

    def raised(
        self, level: int, untransformed: Law | None, sampled: Law | None, state: Context
    ) -> tuple[Law, Law]:
        """What level's rule makes of the laws handed up; a lossless level does not need them."""
        p, shaped = self.model(level, state)
        if self.lossless(level):
            return p, shaped
        q, p, qs, ps = map(np.array, (untransformed, p, sampled, shaped))
        rule = self.methods[level - 1]
        how = self.alphas[level - 1], self.options["temperature"] == 0
        return (
            tuple(map(float, target(rule, q, p, q, p, *how))),
            tuple(map(float, target(rule, q, p, qs, ps, *how))),
        )

    def chain(self, level: int, context: Context) -> tuple[Law, Law]:
        """The law of level's texts."""
        state = self.state(context)
        return self.raised(level, *self.chain(level - 1, context), state) if level else self.model(0, state)

    def lossless(self, level: int) -> bool:
        return self.methods[level - 1] == "speculative"

    # Decoding. `level` is a model's number; 0 drafts.

    def ended(self, block: Block) -> bool:
        return bool(block) and block[-1].token == self.eos

    def block(
        self, level: int, context: Context, need: int, surplus: bool, choices, past_eos: bool = False
    ) -> Block:
        """`need` tokens of level's, fewer only at an end of sequence, more only where a surplus is kept."""
        block: Block = ()
        while len(block) < need and (past_eos or not self.ended(block)):
            left = need - len(block)
            here = context + tokens(block)
            if level == 0:
                untransformed, sampled = self.model(0, self.state(here))
                token = choices.draw(0, len(here), sampled)
                choices.count(0, passes=1)
                block += (Written(token, untransformed, sampled),)
            else:
                block += self.round(level, here, left, None if surplus else left, choices)
        return block

    def round(self, level: int, context: Context, left: int | None, room: int | None, choices) -> Block:
        """A verification by `level` of what the level below drafts: at most `room` tokens, where no more
        than `left` are needed."""
        size = self.sizes[level - 1]
        if self.hand_over == "need" and left is not None:
            size = min(size, left - 1)
        extra = not self.lossless(level)  # a rule needs the lower law at the bonus position, too
        # The compiled sampler draws a known number of tokens from the smallest model without looking.
        looks = isinstance(choices, Choices) or level > 1 or (self.hand_over == "need" and left is not None)
        choices.begin(len(context))
        drafted = self.drafted(level - 1, context, size + extra, self.surplus(level), choices, not looks)
        draft, beyond = self.submitted(level, drafted, size)
        written = self.verified(level, context, draft, beyond, choices)
        choices.end()
        kept = written[:room]
        accepted = min(sum(w.kind == DRAFT for w in written), len(kept))
        choices.count(level, rounds=1, drafted=len(draft), accepted=accepted, emitted=len(kept))
        return kept

    def surplus(self, level: int) -> bool:
        """Whether level is handed more than it asked for. Not under a rule: one token more than is submitted
        is drafted there, and which token a block ends with depends on what the tokens are."""
        return self.hand_over == "keep" and self.lossless(level)

    def drafted(
        self, level: int, context: Context, need: int, surplus: bool, choices, past_eos: bool = False
    ) -> Block:
        if not isinstance(choices, Choices):
            return self.block(level, context, need, surplus, choices, past_eos)
        drafts, chances = self.blocks(level, self.state(context), need, surplus)
        return drafts[choices.among(chances)]

    def blocks(self, level: int, state: Context, need: int, surplus: bool):
        """The law of block(), made once for all paths that come by."""
        law = defaultdict(float)
        for block, mass in every(lambda choices: self.block(level, state, need, surplus, choices)).items():
            law[tuple(w._replace(level=0, kind=DRAFT) for w in block)] += mass
        return list(law), list(law.values())

    def submitted(self, level: int, drafted: Block, size: int) -> tuple[Block, Written | None]:
        """The draft, and what else was drafted for its law at the bonus position."""
        if self.lossless(level) or len(drafted) <= size:  # else an end of sequence, which no bonus follows
            return drafted, None
        return drafted[:size], drafted[size]

    def verified(self, level: int, context: Context, draft: Block, beyond: Written | None, choices) -> Block:
        written: Block = ()
        for entry in draft:
            here = context + tokens(written)
            law = self.raised(level, entry.untransformed, entry.sampled, self.state(here))
            accepted, span = choices.accepts(
                level, len(here), entry.sampled[entry.token], law[1][entry.token], self.reused(entry.span)
            )
            if not accepted:
                rest = np.maximum(np.subtract(law[1], entry.sampled), 0)
                token = choices.draw(level, len(here), rest)
                return (*written, self.corrected(token, law, entry, rest, level, span))
            written += (self.accepted(law, entry, span),)
            if entry.token == self.eos:
                return written
        law = self.bonus_law(level, beyond, context + tokens(written))
        token = choices.draw(level, len(context) + len(written), law[1])
        return (*written, Written(token, *law, level, BONUS))

    # What bugs are planted in

    def reused(self, span):
        """What is known of the uniform that decides on a token: it is fresh, whatever decided below."""
        return 0.0, 1.0

    def accepted(self, law, entry: Written, span) -> Written:
        return Written(entry.token, *law, entry.level, DRAFT)

    def corrected(self, token: int, law, entry: Written, rest, level: int, span) -> Written:
        return Written(token, *law, level, CORRECTION)

    def bonus_law(self, level: int, beyond: Written | None, context: Context) -> tuple[Law, Law]:
        return self.raised(level, *(beyond[1:3] if beyond else (None, None)), self.state(context))

    # Texts

    def committed(self, state: Context) -> dict[Context, float]:
        """The law of a round of the largest model."""
        return every(lambda choices: tokens(self.round(len(self.sizes), state, None, None, choices)))

    def text_law(self, prompt: Context, steps: int) -> dict[Context, float]:
        """Every text of at most `steps` tokens (shorter only after eos) -> its probability."""
        texts, open_texts = defaultdict(float), {(): 1.0}
        while open_texts:
            grown = defaultdict(float)
            for text, mass in open_texts.items():
                for more, chance in self.committed(self.state(prompt + text)).items():
                    longer = (text + more)[:steps]
                    closed = len(longer) == steps or longer[-1] == self.eos
                    (texts if closed else grown)[longer] += mass * chance
            open_texts = grown
        return dict(texts)

    def decoded(self, prompt: Context, limit: int, uniforms: Uniforms) -> Block:
        block: Block = ()
        while len(block) < limit and not self.ended(block):
            block += self.round(len(self.sizes), prompt + tokens(block), None, limit - len(block), uniforms)
        return block


def tokens(block: Block) -> Context:
    return tuple(w.token for w in block)


def hashed(context: Context) -> int:
    """A number below MODULUS that every token of a context changes, at its own place."""
    return sum((token + 1) * (7 * n * n + n + 1) for n, token in enumerate(context)) % MODULUS


def deviation(law: dict[Context, float], right: dict[Context, float]) -> float:
    return max(abs(law.get(text, 0.0) - right.get(text, 0.0)) for text in {*law, *right})


class AsABlock(Hierarchy):
    """Drafts are verified as a whole (Sun et al., arXiv 2403.10444, Algorithm 2), towards a level's law."""

    def verified(self, level, context, draft, beyond, choices):
        laws, rests, weight, chances = [], [], 1.0, []
        for n, entry in enumerate(draft):
            law = self.raised(
                level, entry.untransformed, entry.sampled, self.state(context + tokens(draft[:n]))
            )
            rest = np.maximum(weight * np.array(law[1]) - entry.sampled, 0)
            chances.append(self.chance(weight, rest.sum()))
            weight = self.weight(weight, law[1][entry.token] / entry.sampled[entry.token])
            laws.append(law)
            rests.append(rest)
        written, chances = (), [*chances[1:], weight]
        for number in range(len(draft), 0, -1):
            if choices.stands(level, len(context) + number - 1, chances[number - 1]):
                written = tuple(map(self.accepted, laws[:number], draft, [(0.0, 1.0)] * number))
                break
        for number, entry in enumerate(written):
            if entry.token == self.eos:
                return written[: number + 1]
        here = len(context) + len(written)
        if len(written) == len(draft):
            law = self.bonus_law(level, beyond, context + tokens(written))
            return (*written, Written(choices.draw(level, here, law[1]), *law, level, BONUS))
        law, rest = laws[len(written)], rests[len(written)]
        token = choices.draw(level, here, rest)
        return (*written, self.corrected(token, law, draft[len(written)], rest, level, (0.0, 1.0)))

    def weight(self, weight: float, ratio: float) -> float:
        return min(1.0, weight * ratio)

    def chance(self, weight: float, rest: float) -> float:
        """That exactly so many tokens stand, where no more do. In this order it is 1 where the weight is."""
        total = rest + (1 - weight)
        return rest / total if total > 0 else 0.0


class Stopping(AsABlock):
    """Blocks of the smallest model's end before a token whose law they find unsure, which they know without
    the token."""

    def submitted(self, level, drafted, size):
        draft, beyond = super().submitted(level, drafted, size)
        for n, entry in enumerate(draft):
            if level == 1 and n and max(entry.sampled) < 0.5:
                return draft[:n], entry
        return draft, beyond


# Wrong variants


class LowerLaw(Hierarchy):
    """Tokens that came from below keep the law they came with."""

    def accepted(self, law, entry, span):
        return super().accepted(entry[1:3], entry, span)


class ResidualLaw(Hierarchy):
    """Replaced tokens are handed up with the residual, which they were drawn from."""

    def corrected(self, token, law, entry, rest, level, span):
        residual = tuple(map(float, rest / rest.sum()))
        return super().corrected(token, (residual, residual), entry, rest, level, span)


class ReusedUniform(Hierarchy):
    """A token is accepted with the same uniform at every level: exact, by where that uniform may lie."""

    def reused(self, span):
        return span

    def accepted(self, law, entry, span):
        return super().accepted(law, entry, span)._replace(span=span)

    def corrected(self, token, law, entry, rest, level, span):
        return super().corrected(token, law, entry, rest, level, span)._replace(span=span)


class BonusFromP(Hierarchy):
    """The bonus is drawn from the verifier, whatever the rule."""

    def bonus_law(self, level, beyond, context):
        return self.model(level, self.state(context))


class Picky(Hierarchy):
    """A draft ends before the first token that its own law finds unlikely."""

    def submitted(self, level, drafted, size):
        draft, beyond = super().submitted(level, drafted, size)
        for n, entry in enumerate(draft):
            if n and entry.sampled[entry.token] < 0.3:
                return draft[:n], entry
        return draft, beyond


class SurplusUnderARule(Hierarchy):
    """With keep, a rule's bonus takes the law of whatever token the surplus ends with."""

    def surplus(self, level):
        return self.hand_over == "keep"

    def submitted(self, level, drafted, size):
        if self.lossless(level) or len(drafted) <= size:
            return drafted, None
        return drafted[:-1], drafted[-1]


class LeftoverKept(Hierarchy):
    """After a bonus, the tokens beyond the accepted draft begin the next one, with the laws of their new
    places."""

    def text_law(self, prompt, steps):
        texts, open_texts = defaultdict(float), {((), ()): 1.0}
        while open_texts:
            grown = defaultdict(float)
            for (text, leftover), mass in open_texts.items():
                for (more, rest), chance in self.seeded(self.state(prompt + text), leftover).items():
                    longer = (text + more)[:steps]
                    if len(longer) == steps or longer[-1] == self.eos:
                        texts[longer] += mass * chance
                    else:
                        grown[longer, rest] += mass * chance
            open_texts = grown
        return dict(texts)

    def seeded(self, state, leftover):
        level, size = len(self.sizes), self.sizes[-1]

        def run(choices):
            block: Block = ()
            for token in leftover:
                block += (Written(token, *self.chain(level - 1, state + tokens(block))),)
            while len(block) < size and not self.ended(block):
                block += self.round(level - 1, state + tokens(block), None, None, choices)
            written = self.verified(level, state, block[:size], None, choices)
            passed = written[-1].kind == BONUS
            return tokens(written), tokens(block[size:]) if passed else ()

        return every(run)
