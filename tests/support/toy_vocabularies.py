"""Toy vocabularies over the letters a and b: what a drafter of one gives a verifier of another, enumerated,
and the compiled loop on the same. Nothing of the enumeration shares code with the package.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from toys import TableLM, table, table_law, text_law

from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import TOKEN
from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer
from speccascade_jax.vocabularies import SLRS, TLI, UNION
from speccascade_jax.vocabularies.joining import translated
from speccascade_jax.vocabularies.translated import Resized, Source

END, PADDING = "end", "padding"
TARGET = [PADDING, "a", "b", END, "ab", "ba", "aab"]
OWN = [END, PADDING, "b", "a", "bb"]
STEPS = 3
PROMPTS = [(1,), (4, 2)]
"""In target tokens of TARGET; the texts are "a" and "abb"."""


class Words(Tokenizer):
    """A tokenizer whose pieces are given; texts are cut into the longest ones from the left."""

    def __init__(self, pieces):
        self.words = pieces
        self.pad_id, self.eos_id, self.bos_id = pieces.index(PADDING), pieces.index(END), -1
        self.size = len(pieces)

    def surfaces(self):
        roles = {PADDING: "pad", END: "eos"}
        return [
            Surface(roles[piece], b"") if piece in roles else Surface("piece", piece.encode())
            for piece in self.words
        ]

    def cut(self, text):
        tokens = []
        while text:
            piece = max((p for p in self.words if p not in (PADDING, END) and text.startswith(p)), key=len)
            tokens.append(self.words.index(piece))
            text = text[len(piece) :]
        return tokens

    def text(self, tokens):
        return "".join(self.words[t] for t in tokens)

    def encode_batch(self, texts):
        return [self.cut(text) for text in texts]


def shortest(text, pieces):
    """The ids of the fewest pieces that spell `text`; of several the smallest ids."""
    words = [n for n, piece in enumerate(pieces) if piece not in (END, PADDING)]
    for count in itertools.count(1):
        spellings = [
            ids for ids in itertools.product(words, repeat=count) if "".join(pieces[n] for n in ids) == text
        ]
        if spellings:
            return list(min(spellings))


class BranchingTable(TableLM):
    """A TableLM that can be asked after many texts at once."""

    def extend_branches(self, params, tokens, cache, branches):
        rows, count = cache.length.shape[0], len(tokens)
        last = jnp.take_along_axis(cache.tokens, cache.length[:, None] - 1, axis=1)
        above = jnp.argmax(branches.within == 1, axis=1)
        before = jnp.where(branches.depth == 1, jnp.broadcast_to(last, (rows, count)), tokens[above])
        return params[before, tokens]


class Pair:
    """A drafter of `drafter` pieces and a verifier of `target` pieces with `padded` more rows of logits
    each."""

    def __init__(self, target=TARGET, drafter=OWN, padded=0, seeds=(39, 40)):
        self.target, self.drafter = Words(target), Words(drafter)
        self.size = len(target) + padded
        self.tables = table(seeds[0], len(drafter) + padded), table(seeds[1], self.size)

    def own_context(self, prompt, text):
        """What the drafter has read: its own tokens of the prompt, then those of each token after it."""
        context = [0, *self.drafter.cut(self.target.text(prompt))]
        for token in text:
            piece = self.target.words[token] if token < self.target.size else PADDING
            context += (
                [self.drafter.words.index(piece)]
                if piece in self.drafter.words
                else shortest(piece, self.drafter.words)
            )
        return context

    def raw(self, prompt, text):
        """q over the drafter's vocabulary."""
        return table_law(self.tables[0], *self.own_context(prompt, text)[-2:])

    def common(self, q):
        """q over the target's vocabulary, not renormalised."""
        probs = np.zeros(self.size)
        for token, piece in enumerate(self.target.words):
            if piece in self.drafter.words and self.target.words.index(piece) == token:
                probs[token] = q[self.drafter.words.index(piece)]
        return probs

    def tli(self, prompt):
        def law(context):
            probs = self.common(self.raw(prompt, context[1 + len(prompt) :]))
            return probs / probs.sum()

        return law

    def verifier(self, context):
        return table_law(self.tables[1], *context[-2:])

    def law(self, methods, alphas, prompt, **options):
        """The law of texts with TLI; more tables above the pair's may be in `above`."""
        above = [
            lambda context, logits=logits: table_law(logits, *context[-2:])
            for logits in options.pop("above", ())
        ]
        drafter = (self.psi if options.pop("slrs", False) else self.tli)(prompt)
        return text_law(
            [drafter, self.verifier, *above],
            methods,
            alphas,
            prompt,
            steps=STEPS,
            eos=self.target.eos_id,
            **options,
        )

    def psi(self, prompt):
        """How probable it is that what the drafter writes begins with each token, as the longest match."""

        def law(context):
            probs = np.zeros(self.size)

            def write(history, text, mass):
                for token, chance in enumerate(table_law(self.tables[0], *history[-2:])):
                    piece = self.drafter.words[token] if token < self.drafter.size else PADDING
                    if piece == PADDING or self.drafter.words.index(piece) < token:
                        continue  # of several tokens with one text the lowest is written
                    if piece != END and any(w.startswith(text + piece) and w != text + piece for w in words):
                        write([*history, token], text + piece, mass * chance)
                        continue
                    whole = text if piece == END else text + piece
                    match = max((w for w in words if whole.startswith(w)), key=len, default=None)
                    if piece == END and not text:
                        match = END
                    if match is not None:
                        probs[self.target.words.index(match)] += mass * chance

            words = [w for w in self.target.words if w not in (PADDING, END)]
            write(self.own_context(prompt, context[1 + len(prompt) :]), "", 1.0)
            return probs / probs.sum()

        return law

    def models(self, union=False, slrs=False):
        strategy = UNION if union else SLRS if slrs else TLI
        drafter, params = translated(
            BranchingTable(self.tables[0].shape[0]),
            self.tables[0],
            self.drafter,
            self.target,
            self.size,
            None,
            strategy=strategy,
        )
        verifier = TableLM(self.size)
        if union:
            verifier = Resized(verifier, drafter.vocab_size, self.size)
        return (drafter, verifier), (params, self.tables[1])

    def decoded(
        self,
        methods,
        alphas,
        block_sizes,
        rows,
        *,
        union=False,
        slrs=False,
        above=(),
        prompts=PROMPTS,
        seed=0,
        steps=STEPS,
        verification=TOKEN,
        markers=None,
        **options,
    ):
        """The compiled loop: its result, and which prompt each row has. markers: of every row."""
        (drafter, verifier), (drafter_params, params) = self.models(union, slrs)
        params = drafter_params, params
        which = np.arange(rows) % len(prompts)
        tokens = np.zeros((rows, max(map(len, prompts))), np.int32)
        reads = [self.drafter.cut(self.target.text(prompt)) for prompt in prompts]
        read = np.zeros((rows, drafter.reads(tokens.shape[1])), np.int32)
        for n, (prompt, ids) in enumerate(zip(prompts, reads, strict=True)):
            tokens[which == n, : len(prompt)] = prompt
            read[which == n, : len(ids)] = ids
        inputs = Source(tokens, read, np.array([len(ids) for ids in reads], np.int32)[which]), tokens
        for own_table in above:
            params, inputs = (params, own_table), (inputs, tokens)
        sampler = hierarchy(
            [drafter, verifier, *[verifier] * len(above)],
            [METHODS[m] for m in methods],
            block_sizes,
            verification=verification,
        )
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
        return generate(
            sampler,
            params,
            keys,
            inputs,
            np.array([len(p) for p in prompts], np.int32)[which],
            SamplingOptions(**{"temperature": 1.0, **options}),
            jnp.array(alphas),
            max_new_tokens=steps,
            eos_id=self.target.eos_id,
            markers=markers and jax.tree.map(lambda x: np.repeat(x, rows, axis=0), markers),
        ), which
