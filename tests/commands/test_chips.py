"""Plans for chips that are not available, and the file that replaces the weights."""

import json

import numpy as np
import pytest
from refusals import check_about, refusals

from speccascade_jax.commands import plan
from speccascade_jax.commands.chips import plan_for_chips
from speccascade_jax.config import load
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation import tpus
from speccascade_jax.models.eagle import EAGLE
from speccascade_jax.models.presets import QWEN3_8B
from speccascade_jax.planning.readings import Reading
from speccascade_jax.settings import Settings

NAMES = ("drafter", "verifier")


def made_reading(seed=0, texts=12, length=20):
    """What models might say: ratios of either sign, texts of several lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, length, texts)
    probs = rng.uniform(0.3, 1, (2, texts, lengths.max()))
    for t, n in enumerate(lengths):
        probs[:, t, n:] = 1
    return Reading(np.array([[1.0, 0.8], [0.8, 1.0]]), probs, lengths)


def test_a_reading_survives_a_round_trip(tmp_path):
    reading, path = made_reading(), str(tmp_path / "a.json")
    reading.save(path, NAMES, Settings(temperature=0.5))
    again = Reading.load(path, NAMES, Settings(temperature=0.5))
    assert (again.lengths == reading.lengths).all()
    np.testing.assert_allclose(again.probs, reading.probs, atol=1e-6)
    for way in VERIFICATIONS.values():
        np.testing.assert_allclose(
            again.runs(0, way, 5).survival(5), reading.runs(0, way, 5).survival(5), atol=1e-5
        )


@pytest.mark.parametrize("flag", ["tokenizer", "router"])
def test_measured_acceptances_replace_no_file_that_is_read(flag, tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("kept")
    with refusals() as errors:
        assert plan.main([f"--{flag}={path}", f"--acceptance-to={path}"]) == 2
    check_about(errors[0], "acceptance_to", str(path))
    assert f"--{flag}" in str(errors[0]) and path.read_text() == "kept"


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"kind": "something else"},
        lambda content: content | {"names": ["another", "verifier"]},
        lambda content: content | {"names": None},
        lambda content: content | {"temperature": 1.0},
        lambda content: content | {"truncations": {}},
        lambda content: content | {"acceptance": [[0.5]]},
        lambda content: content | {"acceptance": [[1, 2], [2, 1]]},
        lambda content: content | {"probs": []},
        lambda content: content | {"probs": [[[0.5], [0.5, 0.5]]]},
        lambda content: content | {"probs": [[[0.5], [float("nan")]]]},
        lambda content: {k: v for k, v in content.items() if k != "probs"},
        lambda content: [content],
    ],
)
def test_another_file_is_refused(change, tmp_path):
    path = tmp_path / "a.json"
    made_reading().save(str(path), NAMES, Settings())
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(FieldError) as refused:
        Reading.load(str(path), NAMES, Settings())
    check_about(refused.value, "acceptance_from", path)


def test_drafters_that_read_their_verifier_are_refused(tmp_path, monkeypatch):
    """They have no separate pass that could be compiled."""
    path = tmp_path / "a.json"
    made_reading().save(str(path), NAMES, Settings(method="speculative"))
    monkeypatch.setattr(tpus, "devices_of", lambda name: [None] * 4)
    monkeypatch.setattr(tpus, "shapes_of", lambda run: [EAGLE, QWEN3_8B])
    with pytest.raises(FieldError) as refused:
        plan_for_chips(load("demo").by("speculative"), NAMES, "v5e:2x2", str(path), 4, None)
    check_about(refused.value, "drafter", NAMES[0])


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--acceptance-from=a.json"], "acceptance_from", "a.json"),
        (["--requests-per-second=5"], "requests_per_second", 5.0),
        (["--tokens=5"], "tokens", 5),
        (["--tpu=v5e:2x2", "--cluster=auto"], "cluster", "auto"),
        (["--acceptance-from=a.json", "--cluster=auto"], "acceptance_from", "a.json"),
    ],
)
def test_flags_for_other_machines_require_each_other(flags, field, value):
    with refusals() as errors:
        assert plan.main(["--config=demo", *flags]) == 2
    check_about(errors[0], field, value)


@pytest.fixture
def acceptance(tmp_path):
    path = tmp_path / "a.json"
    made_reading().save(str(path), NAMES, Settings())
    return path


class TestWithTheCompiler:
    """What TPU's compiler is needed for."""

    @pytest.fixture(autouse=True)
    def compiler(self):
        pytest.importorskip("libtpu")

    @pytest.mark.parametrize(
        ("flags", "field", "value"),
        [
            (["--tpu=v5e:2x2"], "acceptance_from", None),
            (["--tpu=v9:2x2"], "tpu", "v9:2x2"),
            (["--tpu=v5e:2x2", "--acceptance-from=a", "--check"], "check", True),
            (["--tpu=v5e:2x2", "--acceptance-from=a", "--input=t"], "input", "t"),
            (["--tpu=v5e:2x2", "--acceptance-from=/missing"], "acceptance_from", "/missing"),
            (["--tpu=v5e:2x2", "--acceptance-from=a", "--requests-per-second=0"], "requests_per_second", 0.0),
        ],
    )
    def test_unplannable_arguments_are_refused(self, flags, field, value):
        with refusals() as errors:
            assert plan.main(["--config=demo", *flags]) == 2
        check_about(errors[0], field, value)

    def test_a_plan_and_the_chips_it_needs(self, t5_pair, acceptance, tmp_path, capsys):
        """No weights are read: the folders contain only shapes."""
        for name in NAMES:
            (tmp_path / name).mkdir()
            shape = json.loads((t5_pair / name / "config.json").read_text())
            shape |= {"num_decoder_layers": 8} if name == "verifier" else {}
            (tmp_path / name / "config.json").write_text(json.dumps(shape))
        config, out = tmp_path / "pair.py", tmp_path / "planned.py"
        config.write_text(
            "from speccascade_jax.config import DecodeConfig\n"
            f"config = DecodeConfig(drafter={str(tmp_path / 'drafter')!r}, "
            f"verifier={str(tmp_path / 'verifier')!r}, max_source_length=24, max_new_tokens=16)\n"
        )
        flags = f"--config={config} --tpu=v5e:2x2 --acceptance-from={acceptance} --max-block=4"
        load_flags = f"--requests-per-second=1000 --tokens=12 --first-token-ms=100 --output={out}"
        assert plan.main([*flags.split(), *load_flags.split()]) == 0
        said = capsys.readouterr().out
        assert "Chips needed: " in said and "in the loop: host transfers" in said
        chosen = load(str(out))
        assert chosen.batch_size in (1, 2, 4, 8, 16, 32, 64, 128)
        assert chosen.verification in VERIFICATIONS

    def test_costs_follow_from_bytes_and_products(self, t5_pair):
        """A call reads the decoder's weights and the head once and the caches of all rows; a chip with little
        arithmetic is bound by its products, which grow with the tokens."""
        from speccascade_jax import checkpoints
        from speccascade_jax.evaluation import chips, tpus

        config = checkpoints.config_of(str(t5_pair / "verifier"))
        here = chips.Chips("v5e:2x2", 1, "float32", 24, 16)
        member = chips.DescribedModel(config, here)
        width = config.num_heads * config.d_kv
        attention = (
            8 * config.d_model * width - 2 * config.d_model * width
        )  # cross keys, values: in the prefill
        weights = attention + 3 * config.d_model * config.d_ff + config.d_model * config.vocab_size
        assert member.weight_bytes == pytest.approx(4 * weights, rel=0.03)  # norms and position biases
        lines = member.call_seconds(8, 4)
        assert lines[1] == (member.weight_bytes + 8 * member.row_bytes) / here.chip.bandwidth
        slow = here.chip._replace(rate=1e6)
        object.__setattr__(here, "chip", slow)
        lines = member.call_seconds(8, 4)
        assert lines[4] - lines[3] == pytest.approx(lines[2] - lines[1]) and lines[2] > 1.9 * lines[1] > 0
        assert tpus.checked("v5e:2x2") != slow

    def test_models_that_do_not_fit_are_refused(self, t5_pair):
        from speccascade_jax import checkpoints
        from speccascade_jax.evaluation import chips

        config = checkpoints.config_of(str(t5_pair / "verifier"))
        here = chips.Chips("v5e:2x2", 1, "float32", 24, 16)
        object.__setattr__(here, "chip", here.chip._replace(memory=1000.0))
        members = [chips.DescribedModel(config, here)] * 2
        with pytest.raises(FieldError) as refused:
            next(chips.plans_by_rows(members, NAMES, made_reading(), 4, "need"))
        check_about(refused.value, "tensor_parallel", 1)
