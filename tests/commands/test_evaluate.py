"""scripts/evaluate.py on a tiny pair: resumed, distributed, and scored like the metrics' own tools."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import SCRIPTS, devices, finish, start_cluster
from refusals import check_about, refusals

from speccascade_jax.commands import evaluate
from speccascade_jax.config import DEMO

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "birds", "sing", "in", "old", "tree", "why", "not"]
CONFIG = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

data = "{data}"
task = Task(train=data, validation=data, test=data, metric="{metric}", max_source_length=32,
            max_target_length=24)
config = TrainConfig(name="tiny", output_dir="", model=T5Config(), task=task)
"""


@pytest.fixture(scope="module")
def tiny(t5_pair, tmp_path_factory):
    """Flags of a tiny pair and a task of 48 examples, one or two references each."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, 7)))

    lines = [
        {"source": f"{text()} {n}", "target": text(), "targets": [text() for _ in range(1 + n % 2)]}
        for n in range(48)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for metric in ("bleu", "rouge2"):
        (folder / f"{metric}.py").write_text(CONFIG.format(data=folder / "data.jsonl", metric=metric))
    return folder, [
        f"--drafter={t5_pair / 'drafter'}",
        f"--verifier={t5_pair / 'verifier'}",
        "--max-source-length=32",
        "--max-new-tokens=24",
        "--temperature=1",
        "--alpha=0.2",
        "--block-size=3",
    ]


def flags(tiny, output, *more, metric="bleu"):
    folder, shared = tiny
    return [
        *shared,
        f"--task={folder / metric}.py",
        "--methods",
        "token_v3",
        "sequence_mean",
        f"--output={output}",
        *more,
    ]


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """The texts of one process with one device."""
    output = tmp_path_factory.mktemp("alone")
    assert evaluate.main(flags(tiny, output, "--batch-size=4")) == 0
    return {name: (output / f"{name}.jsonl").read_bytes() for name in ("token_v3", "sequence_mean")}


def texts(output):
    return {name: (output / f"{name}.jsonl").read_bytes() for name in ("token_v3", "sequence_mean")}


def environment(tmp_path, count=1):
    return {
        **os.environ,
        "XLA_FLAGS": devices(count),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    }


def start(arguments, environment):
    return subprocess.Popen(
        [sys.executable, SCRIPTS / "evaluate.py", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_killed_at_random_points_it_loses_and_repeats_nothing(tiny, alone, tmp_path):
    """SIGKILL once the texts have grown by a random number of bytes, six times."""

    def size():
        return sum(p.stat().st_size for p in (tmp_path / "texts").glob("*.jsonl"))

    arguments, rng, kills = flags(tiny, tmp_path / "texts", "--batch-size=1"), random.Random(0), 0
    total, wanted = sum(map(len, alone.values())), 6
    for n in range(wanted):
        process, goal = start(arguments, environment(tmp_path)), total * (n + rng.random()) / wanted
        while process.poll() is None and size() < goal:
            time.sleep(0.001)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= wanted - 1
    process = start(arguments, environment(tmp_path))
    assert process.wait(timeout=300) == 0, process.stderr.read()
    assert texts(tmp_path / "texts") == alone


@pytest.mark.parametrize(
    "argv, methods",
    [
        (["--config=e2e"], ("verifier", "drafter")),
        (["--config=e2e_lookup"], ("verifier",)),
        (["--config=e2e", "--drafter=lookup"], ("verifier",)),
        (["--config=e2e", f"--drafter=lookup+{DEMO / 'e2e_drafter'}"], ("verifier", "drafter")),
        (["--config=e2e_lookup", "--methods", "speculative"], ("speculative",)),
    ],
)
def test_the_models_are_compared_by_default(argv, methods):
    """Lookup is no model that could decode alone."""
    assert evaluate.parse(argv).compared == methods


@pytest.mark.full
def test_options_that_only_some_methods_read_are_for_those(tiny, tmp_path):
    """The sequence cascade reads no lenience after a marker and verifies no drafts."""
    arguments = flags(
        tiny, tmp_path / "texts", "--limit=1", "--verification=block", "--alpha-after", "cat", "0.5"
    )
    assert evaluate.main(arguments) == 0


@pytest.mark.full
def test_eight_devices_write_the_same_texts(tiny, alone, tmp_path):
    process = start(flags(tiny, tmp_path / "texts", "--batch-size=2"), environment(tmp_path, 8))
    assert process.wait(timeout=300) == 0, process.stderr.read()
    assert texts(tmp_path / "texts") == alone


@pytest.mark.full
@pytest.mark.parametrize("sharers", [1, 2])
def test_two_processes_write_the_same_texts(sharers, tiny, alone, tmp_path):
    """Each process has its share of the examples or of the models."""
    shared = flags(tiny, tmp_path / "texts", "--batch-size=4", f"--tensor-parallel={sharers}")
    finish(start_cluster("evaluate.py", shared, environment(tmp_path)))
    assert texts(tmp_path / "texts") == alone


@pytest.mark.full
def test_a_ray_cluster_writes_the_same_texts(tiny, alone, tmp_path, capsys):
    """Two workers decode shards of 20; a second run finds everything and decodes nothing."""
    pytest.importorskip("ray")
    arguments = flags(
        tiny,
        tmp_path / "texts",
        "--batch-size=4",
        "--ray=local",
        "--ray-workers=2",
        "--shard-size=20",
        f"--summary={tmp_path / 'summary.json'}",
    )
    process = start(arguments, environment(tmp_path) | {"JAX_PLATFORMS": "cpu"})
    assert process.wait(timeout=300) == 0, process.stderr.read()
    assert texts(tmp_path / "texts") == alone
    parts = sorted((tmp_path / "texts").glob("*-shards/part-*.jsonl"))
    assert len(parts) == 6
    assert evaluate.main(arguments) == 0
    first, *_, again, _ = map(json.loads, (tmp_path / "summary.json").read_text().splitlines())
    assert again == first and first["decode_seconds"] is None
    for missing in (f"--output={tmp_path / 'texts'}", ""):
        with refusals() as errors:
            assert evaluate.main([flag for flag in [*arguments, "--cluster=auto"] if flag != missing]) == 2
        check_about(errors[0], "ray", "local")


@pytest.mark.full
def test_figures_are_those_of_the_metrics_own_command_lines(tiny, alone, tmp_path):
    lines = {}
    for metric in ("bleu", "rouge2"):
        summary = tmp_path / f"{metric}.json"
        assert (
            evaluate.main(
                flags(tiny, tmp_path / metric, "--batch-size=4", f"--summary={summary}", metric=metric)
            )
            == 0
        )
        lines[metric] = json.loads(summary.read_text().splitlines()[0])
        assert lines[metric]["method"] == "token_v3"
    outputs = [json.loads(line) for line in (tmp_path / "bleu" / "token_v3.jsonl").read_text().splitlines()]
    references = [json.loads(line)["targets"] for line in (tiny[0] / "data.jsonl").read_text().splitlines()]
    order = [
        next(r for s, r in zip(sources(tiny), references, strict=True) if s == o["source"]) for o in outputs
    ]

    def write(name, rows):  # a line each: a tiny model writes line breaks too
        (tmp_path / name).write_text("".join(" ".join(row.split()) + "\n" for row in rows))
        return tmp_path / name

    hyp = write("own.txt", [o["text"] for o in outputs])
    first, second = (
        write("first.txt", [r[0] for r in order]),
        write("second.txt", [r[1] if len(r) > 1 else "" for r in order]),
    )
    for tokenizer in ("13a", "intl"):
        said = subprocess.run(
            [sys.executable, "-m", "sacrebleu", first, second, "-i", hyp, "-tok", tokenizer, "-b", "-w", "2"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert lines["bleu"][f"BLEU {tokenizer}"].split()[0] == said
        assert f"tok:{tokenizer}" in lines["bleu"][f"BLEU {tokenizer}"]
    assert f"{lines['bleu']['bleu']:.2f}" == lines["bleu"]["BLEU 13a"].split()[0]

    # rouge_score's command takes one reference: only the single-reference examples.
    single = [n for n, r in enumerate(order) if len(r) == 1]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "rouge_score.rouge",
            "--rouge_types=rouge2",
            "--aggregate=False",
            f"--target_filepattern={write('t.txt', [order[n][0] for n in single])}",
            f"--prediction_filepattern={write('p.txt', [outputs[n]['text'] for n in single])}",
            f"--output_filename={tmp_path / 'rouge.csv'}",
        ],
        check=True,
        capture_output=True,
    )
    said = [float(line.split(",")[-1]) for line in (tmp_path / "rouge.csv").read_text().splitlines()[1:]]
    ours = evaluate.statistics("rouge2", [outputs[n]["text"] for n in single], [order[n] for n in single])
    np.testing.assert_allclose(ours[:, 0], said, atol=1e-6)
    low, high = lines["rouge2"]["95%"]
    assert low <= lines["rouge2"]["rouge2"] <= high


def sources(tiny):
    return [json.loads(line)["source"] for line in (tiny[0] / "data.jsonl").read_text().splitlines()]
