"""A server whose block sizes follow the load: what it reports, and which requests keep their own."""

import dataclasses
import json

import pytest

pytest.importorskip("starlette")

from served_toys import ask, raw, serving, toy_lookup, toy_model, toy_models

from speccascade_jax.commands.serve import fixed
from speccascade_jax.config import DEMO, DecodeConfig, load
from speccascade_jax.core.errors import FieldError
from speccascade_jax.settings import Settings


@pytest.mark.full
def test_a_request_with_a_seed_keeps_its_block_size_and_reports_it():
    model = toy_model(("speculative",), rows=2, by_load=True)
    [lane] = model.lanes.values()
    assert lane.lane.plan.block_sizes == (0, 1, 2)
    with serving(model) as (url, _):
        answers = [
            ask(url, {"prompt": "201", **fields})
            for fields in (
                {"seed": 3, "n": 4},
                {"seed": 3, "block_size": 1},
                {"n": 4},
                {"block_size": "load"},
            )
        ]
        stream = raw(url, json.dumps({"prompt": "201", "seed": 3, "stream": True}).encode())
        events = stream.makefile().read()
        metrics = ask(url, path="/metrics")[1]
    assert [answer.get("block_size") for _, answer, _ in answers[:3]] == [2, 1, "load"]
    assert (answers[3][0], answers[3][1]["error"]["param"]) == (400, "block_size")
    assert '"block_size": 2' in events or '"block_size":2' in events
    settings = dataclasses.replace(model.defaults, seed=3)
    wanted = [output.text for output in model.cascade.generate(["201"] * 4, settings)]
    assert [choice["text"] for choice in answers[0][1]["choices"]] == wanted
    [size] = [line.split()[-1] for line in metrics.splitlines() if line.startswith("speccascade:block_size{")]
    assert float(size) in lane.lane.plan.block_sizes


def test_block_sizes_are_fixed_by_default():
    assert all(lane.scheduler.blocks is None for lane in toy_model().lanes.values())


@pytest.mark.parametrize(
    "model",
    [
        lambda by_load: toy_models(1, "speculative", by_load),
        lambda by_load: toy_models(3, ("token_v3", "opt"), by_load, alpha=(0.4, 0.05), block_size=(1, 2)),
        toy_lookup,
    ],
    ids=["one model", "three models", "looked up"],
)
def test_drafts_of_one_size_are_refused(model):
    model(False)
    with pytest.raises(FieldError) as error:
        model(True)
    assert (error.value.field, error.value.value) == ("block_size", "load")


def test_the_largest_size_is_that_of_the_config(tmp_path):
    demo = load("demo", DecodeConfig)
    run = dataclasses.replace(demo, block_size="load")
    assert fixed(run, "demo").block_size == demo.block_size
    for size, kept in (("load", 5), ("adaptive", 5), (7, 7)):
        path = tmp_path / f"{size}.py"
        path.write_text(
            "from speccascade_jax.config import DecodeConfig\n"
            f"config = DecodeConfig(drafter={str(DEMO)!r}, verifier={str(DEMO)!r}, block_size={size!r})\n"
        )
        assert fixed(run, str(path)).block_size == kept


def test_only_servers_accept_load():
    with pytest.raises(FieldError) as error:
        Settings(block_size="load").check()
    assert (error.value.field, error.value.value) == ("block_size", "load")
