"""A lenience that changes once certain tokens, a marker, have been written.

The lenience at a position is that of the last marker completed before it, or the row's own alpha before any
marker. Only written tokens count: a marker in the prompt, or one that begins there, has no effect. A marker
applies until the end of the row or until another one is completed. If the same token completes two, the later
one in the row's table counts.

The output distribution is exact with every rule. The lenience depends only on the prefix, so at each position
of a drafted block, including the bonus position, pi is known before the token there is drawn. A marker in
drafted tokens that are rejected disappears with them, because only committed tokens are recorded.

Markers and leniences are traced, so rows with different markers, or none, share a program.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import NO_TOKEN, Markers, Rows, Spans

Array = jax.Array


def begun(markers: Markers, first: Int[Array, " B"]) -> Spans:
    """The spans of rows whose first written token will have position `first`."""
    return Spans(markers, first, jnp.full_like(first, NO_TOKEN))


def window(markers: Markers | None, overhang: int) -> int:
    """The number of recent tokens that a row must keep. Samplers that draft for another one, up to `overhang`
    tokens past the committed ones, need the committed tokens of an unfinished marker."""
    return 0 if markers is None else markers.tokens.shape[-1] + overhang


def committed(rows: Rows) -> Rows:
    """The rows after a round, with the last marker that they have completed."""
    if rows.spans is None:
        return rows
    latest = completed(rows.spans, rows, rows.recent[:, :0])[:, 0]
    return rows._replace(spans=rows.spans._replace(latest=latest))


def lenience(rows: Rows, level: int, draft: Int[Array, "B G"]) -> Float[Array, "B T 1"]:
    """alpha of a level's verifier at each position of `draft` and at the bonus position. T is 1 if no row has
    a marker."""
    alphas = rows.alphas[:, level - 1, None, None]
    if rows.spans is None:
        return alphas
    values = jnp.concatenate([alphas[..., 0], rows.spans.markers.alphas[..., level - 1]], axis=1)
    return jnp.take_along_axis(values, completed(rows.spans, rows, draft) + 1, axis=1)[..., None]


def completed(spans: Spans, rows: Rows, draft: Int[Array, "B G"]) -> Int[Array, "B G+1"]:
    """The last marker completed before each position from rows.start on; -1: none.

    All tokens of `recent` are searched, because in a sampler that drafts for another one the last of them are
    not committed yet, and the spans record only markers that committed tokens have completed.
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
