"""Parameters split over the devices of several processes: each reads only its part of a checkpoint."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from processes import devices, finish, free_address, start_code
from shapes import TINY_T5

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.checkpoints.arrays import Placement, Stored, chunks, put_parts
from speccascade_jax.models import model_of
from speccascade_jax.parallel import tensor_mesh, tensor_sharding

EIGHT_HEADS = dataclasses.replace(TINY_T5, num_heads=8, vocab_size=448)


def saved(folder, config, to):
    model = model_of(config)
    checkpoints.save(folder / to, Checkpoint(model, model.init(0), None, "memory"), to)
    return folder / to


@pytest.mark.parametrize("to", list(checkpoints.FORMATS))
@pytest.mark.parametrize("shared", [True, False], ids=["separate layers", "stacked layers"])
def test_parts_equal_those_of_the_whole_array(to, shared, tmp_path, monkeypatch):
    """One device represents another process's, so that every array that would be split is read in parts."""
    if to == "huggingface" and not shared:
        pytest.skip("Hugging Face's T5 has one table of relative positions")
    config = dataclasses.replace(EIGHT_HEADS, shared_position_bias=shared)
    path, cut = saved(tmp_path, config, to), partial(tensor_sharding, tensor_mesh(1), config)
    whole = checkpoints.load(path, sharding=cut).params
    read = []

    def parts(array, where, dtype):
        rows = array.shape[0] // 2
        read.append(array.shape)
        halves = [array[(slice(*ends), slice(None))] for ends in ((0, rows), (rows, array.shape[0]))]
        columns = [array[(slice(None), slice(*ends))] for ends in ((0, 16), (16, array.shape[1]))]
        np.testing.assert_array_equal(np.concatenate(halves), np.concatenate(columns, axis=1))
        return put_parts(array, where, dtype)

    monkeypatch.setattr("speccascade_jax.checkpoints.arrays.put_parts", parts)
    monkeypatch.setattr(
        Placement, "takes_part", lambda self, path, shape: any(self.sharding(path, shape).spec)
    )
    for a, b in zip(
        *(jax.tree.leaves(params) for params in (whole, checkpoints.load(path, sharding=cut).params)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert len(read) > 8


def test_a_part_that_is_not_finite_is_named(tmp_path, monkeypatch):
    path = saved(tmp_path, EIGHT_HEADS, "native")
    monkeypatch.setattr(Placement, "takes_part", lambda self, path, shape: len(shape) > 1)
    monkeypatch.setattr(np, "isfinite", lambda x: np.zeros(1, bool))
    with pytest.raises(ValueError, match="not finite"):
        checkpoints.load(path, sharding=partial(tensor_sharding, tensor_mesh(1), EIGHT_HEADS))


@pytest.mark.parametrize("columns,reads", [([(2, 4), (4, 6)], 1), ([(0, 2), (4, 6)], 2), ([(2, 4)] * 2, 1)])
def test_a_process_reads_what_its_devices_hold_once(columns, reads, monkeypatch):
    """Adjacent parts are read together, gaps are not read, and parts that two devices hold are read once."""
    values, asked = np.arange(24.0).reshape(4, 6), []
    places = {n: (slice(None), slice(*ends)) for n, ends in enumerate(columns)}
    where = SimpleNamespace(addressable_devices_indices_map=lambda shape: places)
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda shape, where, held: [*map(held, places.values())]
    )
    monkeypatch.setattr(jax, "block_until_ready", lambda made: made)

    def read(index):
        asked.append(values[index].size)
        return values[index]

    held = put_parts(Stored(values.shape, values.dtype, read), where, np.float32)
    np.testing.assert_array_equal(held, [values[index] for index in places.values()])
    assert len(asked) == reads and sum(asked) == 8 * len(set(columns))


def test_chunks_are_small_and_halved():
    assert chunks((4096, 4096), 4) == [512, 512]
    assert chunks((96, 64), 4) == [96, 64] and chunks((3 * 2**20,), 4) == [196_608]
    assert Stored((2, 3), np.float32, lambda index: np.ones((2, 3))[index]).T.shape == (3, 2)


MEASURE = """
import json, jax
from functools import partial
from types import SimpleNamespace
from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface
from speccascade_jax.cluster import joined
from speccascade_jax.parallel import decoding_mesh, tensor_sharding

asked = 0

class Counting:
    '''A safetensors file, whose arrays are counted as they are read: it is mapped, not read.'''

    def __init__(self, opened):
        self.opened = opened

    def __enter__(self):
        return Counting(self.opened.__enter__())

    def __exit__(self, *error):
        return self.opened.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def __getitem__(self, index):
        return counted(self.opened[index])

    def get_tensor(self, name):
        return counted(self.opened.get_tensor(name))

    def get_slice(self, name):
        return Counting(self.opened.get_slice(name))

def counted(array):
    global asked
    asked += array.nbytes
    return array

def read():
    return asked + int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))

opened = huggingface.safe_open
huggingface.safe_open = lambda *names, **options: Counting(opened(*names, **options))
with joined({cluster!r}) as job:
    shares = {{}}
    for path in {paths!r}:
        before = read()
        config = checkpoints.config_of(path)
        params = checkpoints.load(path, sharding=partial(tensor_sharding, decoding_mesh(4), config)).params
        leaves = jax.tree.leaves(params)
        held = sum({{(n, str(s.index)): s.data.nbytes for n, x in enumerate(leaves)
                    for s in x.addressable_shards}}.values())
        shares[path] = (read() - before) / held, held / sum(x.nbytes for x in leaves)
    print(json.dumps(shares))
"""


@pytest.mark.full
def test_each_of_two_processes_reads_its_share(tmp_path):
    config = dataclasses.replace(
        EIGHT_HEADS, d_model=1024, d_kv=128, d_ff=4096, num_encoder_layers=1, num_decoder_layers=1
    )
    paths, cluster = [str(saved(tmp_path, config, to)) for to in checkpoints.FORMATS], free_address()
    processes = [
        start_code(MEASURE.format(cluster=f"{cluster},2,{n}", paths=paths), XLA_FLAGS=devices(2))
        for n in range(2)
    ]
    for said in finish(processes):
        for read, held in json.loads(said.splitlines()[-1]).values():
            assert read <= 1.2 and 0.49 < held < 0.52
