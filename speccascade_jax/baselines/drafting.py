"""The parts that token cascades and BiLD share: a drafter that decides when to stop, and a verifier that
reads its tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Shaped

from speccascade_jax.core.protocols import NO_TOKEN, Block, Cache, LanguageModel, Origin, Params, Rows
from speccascade_jax.core.rounds import after, append
from speccascade_jax.core.samplers import Autoregressive

Array = jax.Array
CAP = 10  # most drafter tokens before the verifier's turn: the paper's cap, BiLD's window
NARROW = 4  # width of the verifier's program for few tokens


def draft_while_confident(
    drafter: Autoregressive,
    params: Params,
    cache: Cache,
    rows: Rows,
    threshold: Float[Array, " B"],
    cap: int,
    eos_id: int,
) -> tuple[Block, Cache, Int[Array, " B"]]:
    """The drafter's next tokens, its cache, and the number of its calls.

    A row stops before the first position where max q < threshold, after eos_id, and after `cap` or rows.room
    tokens. It is called once more if it stopped before the end of the text, so that its cache covers its last
    token. The block has cap + 1 columns: room for the verifier's token.
    """

    def ask(carry: tuple) -> tuple:
        drafted, cache, last, passes, writing = carry
        at = rows._replace(recent=last[:, None], start=rows.start + passes, room=writing.astype(jnp.int32))
        block, cache, _ = drafter.step(params, cache, at, NO_TOKEN)
        trusted = writing & (jnp.max(block.untransformed[:, 0], axis=-1) >= threshold) & (drafted.size < cap)
        block = block._replace(
            origin=jnp.full_like(block.origin, Origin.DRAFT), size=trusted.astype(jnp.int32)
        )
        drafted, last = append(drafted, block), last_token(block, last)
        on = trusted & (last != eos_id) & (drafted.size < rows.room)
        return drafted, cache, last, passes + writing, on

    nothing = jnp.zeros_like(rows.room)
    columns, laws = (len(nothing), cap + 1), (len(nothing), cap + 1, drafter.model.vocab_size)
    blank = Block(
        jnp.zeros(columns, jnp.int32),
        jnp.zeros(laws),
        jnp.zeros(laws),
        jnp.zeros(columns, jnp.int32),
        nothing,
    )
    drafted, cache, _, passes, _ = lax.while_loop(
        lambda carry: jnp.any(carry[-1]), ask, (blank, cache, rows.last, nothing, rows.room > 0)
    )
    return drafted, cache, passes


def read(
    verifier: LanguageModel, params: Params, tokens: Int[Array, "B N"], count: Int[Array, ""], cache: Cache
) -> tuple[Float[Array, "B N V"], Cache]:
    """verifier.extend by at least the first `count` tokens: none, NARROW or all N. The logits of skipped
    tokens are 0."""
    width = tokens.shape[1]

    def reading(size: int) -> Callable[[Cache], tuple[Array, Cache]]:
        def extend(cache: Cache) -> tuple[Array, Cache]:
            logits, longer = verifier.extend(params, tokens[:, :size], cache)
            return jnp.pad(logits, ((0, 0), (0, width - size), (0, 0))), longer

        return extend

    def nothing(cache: Cache) -> tuple[Array, Cache]:
        return jnp.zeros((*tokens.shape, verifier.vocab_size)), cache

    narrow = min(NARROW, width)
    branch = jnp.where(count == 0, 0, jnp.where(count <= narrow, 1, 2))
    return lax.switch(branch, [nothing, reading(narrow), reading(width)], cache)


def at(x: Shaped[Array, "B N ..."], column: Int[Array, " B"]) -> Shaped[Array, "B ..."]:
    """x[b, column[b]] for every row b."""
    return jnp.take_along_axis(x, column.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def last_token(block: Block, last: Int[Array, " B"]) -> Int[Array, " B"]:
    """The last token of each row after `block`: the block's last token, or `last` for an empty block."""
    return after(block, last[:, None])[:, 0]
