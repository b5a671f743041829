"""What the host sends to programs and reads from them in one piece."""

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.loop import Requests
from speccascade_jax.scheduling.programs import Packing, Seeds, key_data, with_keys


def test_packed_arrays_come_back_as_they_were():
    rng = np.random.default_rng(0)
    tree = {
        "tokens": jnp.asarray(rng.integers(-9, 9, (3, 5)), jnp.int32),
        "counts": (jnp.arange(3, dtype=jnp.int32), [jnp.asarray(rng.random((3, 2, 4)), jnp.float32)]),
        "history": None,
        "empty": jnp.zeros((3, 0), jnp.int32),
        "last": jnp.asarray(rng.integers(0, 9, (3, 2, 2)), jnp.int32),
    }
    packing = Packing(jax.eval_shape(lambda: tree))
    arrays = jax.jit(packing.pack)(tree)
    assert {name: x.shape for name, x in arrays.items()} == {"int32": (3, 10), "float32": (3, 8)}
    back = packing.unpack({name: np.asarray(x) for name, x in arrays.items()})
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)


def test_a_rows_key_is_its_number_folded_into_the_key_of_its_seed():
    seeds, numbers = [0, 7, 7, 2**40], [3, 0, 2**32 - 1, 3]
    made = Seeds(np.stack([key_data(seed) for seed in seeds]), np.array(numbers, np.uint32))
    requests = with_keys(Requests._make((made, *[None] * (len(Requests._fields) - 1))))
    for key, seed, number in zip(requests.keys, seeds, numbers, strict=True):
        assert key == jax.random.fold_in(jax.random.key(seed), np.uint32(number))
