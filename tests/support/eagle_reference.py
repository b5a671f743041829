"""EAGLE-3 heads in plain numpy, a token at a time and without caches: what a head's logits should be."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import expit

NOWHERE = -1e9  # the logit of a token that cannot be drafted


class Reference:
    """Of a pair's model and parameters, for texts of at most `size` tokens. Rotary positions are default
    ones."""

    def __init__(self, model, params, size=64):
        self.config, self.size = model.config.drafter, size

        @jax.jit
        def read(text):
            network = model.merged(params).verifier
            cache = network.start(1, size, jnp.float32)
            x, states, _ = network.advance_with_states(text[None], cache, self.config.layers)
            return states[:, 0], network.logits(x)[0]

        self.compiled = read
        self.arrays = {
            path[1:]: np.asarray(x.get_value(), np.float64)
            for path, x in nnx.to_flat_state(params)
            if path[0] == "drafter"
        }
        self.table = self.arrays.get(("embedding",), np.asarray(params["verifier"]["embedding"][...]))

    def read(self, text):
        """The verifier's states [N, T, D] of a text [T], and its logits [T, V]."""
        padded = np.pad(np.asarray(text, np.int32), (0, self.size - len(text)))
        states, logits = self.compiled(padded)
        return np.asarray(states, np.float64)[:, : len(text)], np.asarray(logits, np.float64)[: len(text)]

    def features(self, text):
        """[T, D] of a text [T], from the verifier's states."""
        return self.linear(np.concatenate(self.read(text)[0], axis=-1), "projection")

    def linear(self, x, *path):
        return x @ self.arrays[(*path, "kernel")] + self.arrays.get((*path, "bias"), 0)

    def norm(self, x, *path):
        root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.norm_epsilon)
        return x / root * self.arrays[(*path, "scale")]

    def heads(self, x, name, position):
        """[H, K] of one token; rotated unless position is None."""
        c = self.config
        x = self.linear(x, "layer", "attention", name).reshape(-1, c.d_kv)
        if position is None:
            return x
        if c.head_norms:
            x = self.norm(x, "layer", "attention", f"{name}_norm")
        half = c.d_kv // 2
        angle = position * c.rope_theta ** -(np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
        )

    def logits(self, text, read):
        """[T, V] after each token of a text [T] of which the verifier has read the first `read` tokens."""
        c, features, outputs, keys, values, laws = self.config, self.features(text), [], [], [], []
        for place, token in enumerate(text):
            feature = np.zeros(c.d_model)
            if place:
                feature = features[place - 1] if place <= read else outputs[place - 1]
            normed = self.norm(feature, "layer", "feature_norm")
            both = np.concatenate([self.norm(self.table[token], "layer", "embedding_norm"), normed])
            keys.append(self.heads(both, "key", place - 1))
            values.append(self.heads(both, "value", None))
            query = self.heads(both, "query", place - 1)
            seen = slice(min(place, 1), None)  # the first token has no feature
            attended = np.zeros_like(query)
            for head, vector in enumerate(query):
                group = head // (c.num_heads // c.num_kv_heads)
                scores = np.array([key[group] for key in keys[seen]]) @ vector / np.sqrt(c.d_kv)
                weights = np.exp(scores - scores.max())
                attended[head] = weights / weights.sum() @ np.array([value[group] for value in values[seen]])
            x = normed if c.norm_before_residual else feature
            x = x + self.linear(attended.reshape(-1), "layer", "attention", "out")
            inner = self.norm(x, "layer", "mlp_norm")
            gate = self.linear(inner, "layer", "mlp", "gate")
            x = x + self.linear(
                gate * expit(gate) * self.linear(inner, "layer", "mlp", "up"), "layer", "mlp", "down"
            )
            outputs.append(x)
            scores = self.linear(self.norm(x, "norm"), "head")
            law = np.full(c.vocab_size, NOWHERE)
            law[np.arange(len(scores)) + self.arrays.get(("offsets",), np.zeros(len(scores))).astype(int)] = (
                scores
            )
            laws.append(law)
        return np.array(laws)
