"""Lenience by span: a lenience that changes once certain tokens, a marker, have been written.

The lenience at a position is that of the last marker completed before it, or the row's own alpha before any
marker. Only written tokens count: a marker in the prompt, or one that begins there, has no effect. A marker
holds to the end of the row, or until another one is completed. Where two are completed by the same token, the
later one in the row's table decides.

That is exact with every rule. The lenience depends on the prefix alone, so at each place of a drafted block,
the bonus position included, pi is known before the token there is drawn: of the committed tokens and those
drafted before it. A marker of drafted tokens that are rejected goes with them, since nothing is remembered
but what was committed.

Markers and leniences are traced: rows with other markers, or none, share a program.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import NO_TOKEN, Markers, Rows, Spans

Array = jax.Array


def begun(markers: Markers, first: Int[Array, " B"]) -> Spans:
    """The spans of rows whose first token to be written has position `first`."""
    return Spans(markers, first, jnp.full_like(first, NO_TOKEN))


def window(markers: Markers | None, overhang: int) -> int:
    """The number of last tokens that a row must keep. Samplers that draft for another one, `overhang` tokens
    past the committed ones, look back as far as the committed tokens of an unfinished marker."""
    return 0 if markers is None else markers.tokens.shape[-1] + overhang


def committed(rows: Rows) -> Rows:
    """The rows after a round, with the marker that they have completed last."""
    if rows.spans is None:
        return rows
    latest = completed(rows.spans, rows, rows.recent[:, :0])[:, 0]
    return rows._replace(spans=rows.spans._replace(latest=latest))


def lenience(rows: Rows, level: int, draft: Int[Array, "B G"]) -> Float[Array, "B T 1"]:
    """alpha of a level's verifier at each position that follows the committed tokens and those of `draft`
    before it, the bonus position included; T is 1 where no row has a marker."""
    alphas = rows.alphas[:, level - 1, None, None]
    if rows.spans is None:
        return alphas
    values = jnp.concatenate([alphas[..., 0], rows.spans.markers.alphas[..., level - 1]], axis=1)
    return jnp.take_along_axis(values, completed(rows.spans, rows, draft) + 1, axis=1)[..., None]


def completed(spans: Spans, rows: Rows, draft: Int[Array, "B G"]) -> Int[Array, "B G+1"]:
    """The marker that was completed last before each position from rows.start on; -1: none.

    All tokens of `recent` are searched: in a sampler that drafts for another one, the last of them are not
    committed yet, and the spans know only the marker that committed tokens have completed.
    """
    kept, (count, longest) = rows.recent.shape[1], spans.markers.tokens.shape[1:]
    written = rows.start[:, None] + jnp.arange(-kept, 0) >= spans.first[:, None]
    text = jnp.concatenate([jnp.where(written, rows.recent, NO_TOKEN), draft], axis=1)
    size, before = text.shape[1], ((0, 0), (longest - 1, 0))
    text = jnp.pad(text, before, constant_values=NO_TOKEN)
    ends = text[:, jnp.arange(size)[:, None] + jnp.arange(longest)][:, :, None]  # [B, W, 1, L]
    markers = spans.markers.tokens[:, None]  # [B, 1, M, L]
    complete = jnp.all((ends == markers) | (markers == NO_TOKEN), axis=-1) & (markers[..., -1] != NO_TOKEN)
    number = jnp.where(complete, jnp.arange(count), NO_TOKEN).max(axis=-1)
    place = jnp.where(number == NO_TOKEN, NO_TOKEN, jnp.arange(size) * count + number)
    last = lax.cummax(place, axis=1)[:, kept - 1 :]
    return jnp.where(last == NO_TOKEN, spans.latest[:, None], last % count)
