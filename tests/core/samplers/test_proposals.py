"""Drafts from outside the loop: the law does not depend on what is proposed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import after, quick, table_of
from toys import TableLM, chi_square, sequence_law, table

from speccascade_jax.core.loop import generate
from speccascade_jax.core.randomness import draw
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.samplers import speculative as samplers
from speccascade_jax.core.samplers.proposals import Matched, Proposed
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN, verify


@dataclasses.dataclass(frozen=True)
class Fixed(Matched):
    """Proposes the same tokens in every round, of which each row submits as many as its last token says."""

    def step(self, params, caches, rows, eos_id):
        proposals, cache = caches
        tokens = jnp.broadcast_to(jnp.array([1, 2, 0], jnp.int32), proposals.tokens.shape)
        proposals = proposals._replace(tokens=tokens, size=rows.last % 4)
        return super().step(params, (proposals, cache), rows, eos_id)


def proposed(method, alpha, rows, logits, steps, verification=TOKEN, markers=None):
    """What the compiled loop writes with these drafts."""
    sampler = Fixed(
        Autoregressive(Proposed(4, 3, None)), TableLM(4), METHODS[method], 3, verification=verification
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(rows))
    result = generate(
        sampler,
        ((), logits),
        keys,
        np.ones((rows, 1), np.int32),
        np.ones(rows, np.int32),
        SamplingOptions(1.0),
        jnp.array([alpha]),
        max_new_tokens=steps,
        eos_id=3,
        markers=markers and jax.tree.map(lambda x: np.repeat(x, rows, axis=0), markers),
    )
    return np.asarray(result.tokens)


@pytest.mark.parametrize(
    "method,alpha,verification",
    quick(
        ("speculative", 0.0, TOKEN),
        ("token_v3", 0.4, TOKEN),
        ("token_v3", 0.9, TOKEN),
        ("speculative", 0.0, BLOCK),
        ("token_v3", 0.4, BLOCK),
        ("token_v3", 0.9, BLOCK),
        among=[
            ("speculative", 0.0, TOKEN),
            ("token_v3", 0.4, TOKEN),
            ("token_v3", 0.9, BLOCK),
        ],
    ),
)
def test_the_law_does_not_depend_on_what_is_proposed(method, alpha, verification, rows):
    """Lossless: the verifier's law. token_v3: that of the rule on one-hot drafts, enumerated. At 0.9 it takes
    many candidates, and those at the bonus position must not be among them: that is p's."""
    logits, steps = table(40, 4), 3
    texts = proposed(method, alpha, rows, logits, steps, verification)
    law = sequence_law([logits], [], [], (1,), steps=steps, eos=3)
    if method == "token_v3":
        assert chi_square(texts, law) < 1e-6
        law = enumerated(logits, alpha, steps)
    assert chi_square(texts, law) > 1e-4


def test_lenience_by_span(rows):
    """What is proposed completes the marker as what is drafted does."""
    logits, steps, markers = table(40, 4), 4, [((2, 0), (0.95,))]
    texts = proposed("token_v3", 0.1, rows, logits, steps, markers=table_of([markers]))
    assert chi_square(texts, enumerated(logits, after(markers, (0.1,)), steps)) > 1e-4
    assert chi_square(texts, enumerated(logits, 0.1, steps)) < 1e-4  # the control


@pytest.mark.full
def test_the_law_test_fails_where_another_token_is_drawn_anew(rows, monkeypatch):
    """At a mismatch the verifier's own token counts; the wrong version draws once more from p."""

    def wrong(accept_u, draw_u, draft, pi, *ways):
        verdict = verify(accept_u, draw_u, draft, pi, *ways)
        at = verdict.num_accepted[:, None]
        u, law = jnp.take_along_axis(draw_u, at, axis=1), jnp.take_along_axis(pi, at[..., None], axis=1)
        return verdict._replace(next_token=draw(u[:, 0], law[:, 0]))

    monkeypatch.setattr(samplers, "verify", wrong)
    jax.clear_caches()
    try:
        texts = proposed("speculative", 0.0, rows, table(40, 4), 3)
        assert chi_square(texts, sequence_law([table(40, 4)], [], [], (1,), steps=3, eos=3)) < 1e-4
    finally:
        jax.clear_caches()


def enumerated(logits, alpha, steps):
    """Rounds as Fixed proposes: the draft is kept where p(draft) >= (1 - alpha) max p, else a sample of p.
    alpha may be a function of what is written."""
    drafts, texts = (1, 2, 0), {}

    def p(context):
        row = np.exp(logits[context[-2], context[-1]].astype(float))
        return row / row.sum()

    def write(text, mass, left, at):
        if (text[-1] == 3 and len(text) > 2) or len(text) == steps + 2:
            texts[text[2:]] = texts.get(text[2:], 0) + mass
            return
        law, lenience = p(text), alpha(text[2:])[0] if callable(alpha) else alpha
        if at < left and law[drafts[at]] >= (1 - lenience) * law.max():
            write((*text, drafts[at]), mass, left, at + 1)
            return
        for token, chance in enumerate(law):
            stays = at < left and token == drafts[at]  # drawn from p, but it is the draft: the round goes on
            write((*text, token), mass * chance, left if stays else token % 4, at + 1 if stays else 0)

    write((0, 1), 1.0, 1, 0)
    return texts
