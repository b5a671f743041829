"""The bundled weights: a run changes them only with --ship."""

import json
import shutil

import pytest

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.commands import finetune
from speccascade_jax.config import DEMO, LearnedRuleConfig, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.training import checks

LINES = [{"source": "one two", "target": "eins zwei"}, {"source": "three", "target": "drei"}] * 20
TINY = [
    "--steps=1",
    "--d-model=32",
    "--d-kv=8",
    "--d-ff=32",
    "--num-heads=4",
    "--num-encoder-layers=1",
    "--num-decoder-layers=1",
    "--validation-examples=0",
    "--tokenizer-size=290",
    "--batch-tokens=128",
]


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A copy in the place of the package's folder."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO / "e2e_verifier", folder / "e2e_verifier")
    shutil.copy(DEMO / "e2e_router.json", folder)
    for module in (configs, checks):
        monkeypatch.setattr(module, "DEMO", folder, raising=False)
    return folder


@pytest.fixture
def run(demo, tmp_path):
    """A function that trains for a step by a shipped config, on data at hand."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def trained(*flags):
        return finetune.main(
            [
                "--config=e2e_verifier",
                *TINY,
                f"--train={tmp_path / 'data.jsonl'}",
                f"--validation={tmp_path / 'data.jsonl'}",
                f"--output-dir={tmp_path / 'run'}",
                f"--tokenizer={tmp_path / 'spiece.model'}",
                *flags,
            ]
        )

    return trained


def test_a_run_exports_to_its_own_folder_and_ships_on_request(run, demo, tmp_path):
    before = contents(demo)
    assert run() == 0
    assert contents(demo) == before
    exported = checkpoints.load(tmp_path / "run" / "export")
    assert exported.model.config.d_model == 32 and exported.tokenizer_file().is_file()
    assert run("--ship") == 0
    assert checkpoints.load(demo / "e2e_verifier").model.config.d_model == 32
    assert (demo / "e2e_router.json").read_bytes() == before[str(demo / "e2e_router.json")]


def test_only_ship_writes_among_the_packages_weights(run, demo):
    before = contents(demo)
    for flag in ("--export-dir", "--output-dir"):
        for name in ("e2e_verifier", "another", "../demo/another"):
            assert run(f"{flag}={demo / name}") == 2
    assert finetune.main(["--config=e2e_router", f"--output={demo / 'another.json'}"]) == 2
    assert contents(demo) == before


@pytest.mark.parametrize("name", sorted(configs.available()))
def test_no_config_writes_into_the_package_without_ship(name):
    config = configs.load(name)
    if isinstance(config, TrainConfig):
        places = [config.output_dir, *checks.export_folders(config)]
    elif isinstance(config, LearnedRuleConfig):
        places = [config.output]
    else:
        return
    for place in places:
        checks.check_not_shipped("output", place)
    if config.shipped is None:
        with pytest.raises(FieldError) as error:
            checks.shipped_at(config)
        assert (error.value.field, error.value.value) == ("ship", True)
    else:
        assert checks.shipped_at(config).exists()


def test_shipped_weights_have_one_config():
    names = [
        config.shipped
        for config in map(configs.load, configs.available())
        if isinstance(config, TrainConfig | LearnedRuleConfig) and config.shipped is not None
    ]
    assert len(names) == len(set(names)) == 13


def test_a_router_takes_the_place_of_routers_only(tmp_path, capsys):
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    assert finetune.main(["--config=demo_router", f"--output={tmp_path / 'notes.json'}"]) == 2
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'
    assert str(tmp_path / "notes.json") in capsys.readouterr().err


def test_a_router_is_shipped_on_request(demo, tmp_path, monkeypatch):
    """And its own file is written either way."""
    network = (DEMO / "router.json").read_text()

    def trained(config, replaced):
        (tmp_path / "router.json").write_text(network)
        return {"loss, network": 0.1, "loss, mixture": 0.2}

    monkeypatch.setattr(finetune, "train_rule", trained)
    before = (demo / "e2e_router.json").read_text()
    flags = ["--config=e2e_router", f"--output={tmp_path / 'router.json'}"]
    assert finetune.main(flags) == 0 and (demo / "e2e_router.json").read_text() == before != network
    assert finetune.main([*flags, "--ship"]) == 0 and (demo / "e2e_router.json").read_text() == network
