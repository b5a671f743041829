"""A method, truncation or other choice that is added by one entry in one file of the package decodes under
its name.

Each test of the law that such an entry has stands elsewhere; here a copy of the package is extended, and read
anew by another process, as tables are complete when they are imported.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import SENTENCES, shuffled

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.tokenizers.tokenizer import train_tokenizer
from speccascade_jax.vocabularies import Strategy

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "speccascade_jax"
TEXTS = ["the house is small", "a dog"]
LIMITS = {"max_source_length": 32, "max_new_tokens": 12}

RULE = '''

def patient(s: Scores, alpha: Alpha, patience: float) -> Array:
    """Defers where max q < patience max p - alpha."""
    return alpha + _max(s.q) < patience * _max(s.p)


PATIENCE = {"patience": Knob(1.0, 0, 9, "of patient: how much surer the verifier has to be")}
METHODS["patient"] = Method(
    _cascade(patient, knobs=PATIENCE), 0, 1, "the verifier is surer", knobs=PATIENCE, name="patient"
)
'''
JOINING = """

VOCABULARIES["whole"] = Strategy("whole", "as tli, by a head that keeps all of its columns")
"""


def shipped_sampler() -> str:
    """examples/ensemble.py with an entry in place of its config."""
    lines = (REPOSITORY / "examples" / "ensemble.py").read_text().partition("\nconfig = ")[0].splitlines()
    source = "\n".join(line for line in lines if "speccascade_jax.config" not in line)
    return (
        f'\n\n{source}\n\nSAMPLERS["mean"] = Scheme(lambda models: Mean(*models), "the mean", name="mean")\n'
    )


EXTENDED = {  # the file, and before what its entry stands: "" is the end
    "rule": ("core/rules.py", "TRAINED = ", RULE),
    "sampler": ("core/samplers/named.py", "", shipped_sampler()),
    "vocabulary": ("vocabularies/__init__.py", "Vocabulary = ", JOINING),
}

DECODING = """
import dataclasses, json, sys
from speccascade_jax.serving.models import SERVABLE
from speccascade_jax.config import DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.vocabularies import VOCABULARIES

drafter, foreign, verifier, texts, limits = json.loads(sys.argv[1])
assert "patience" in {field.name for field in dataclasses.fields(DecodeConfig)}
assert {"patient", "mean"} <= {*SERVABLE}
same = {"verifier": verifier, "dtype": "float32", "temperature": 1.0, **limits}
written = {}
for name, run in {
    "rule": DecodeConfig(drafter=drafter, method="patient", patience=0.1, **same),
    "impatient": DecodeConfig(drafter=drafter, method="patient", patience=9.0, **same),
    "sampler": DecodeConfig(drafter=drafter, method="mean", **same),
    "vocabulary": DecodeConfig(drafter=foreign, vocabulary="whole", **same),
}.items():
    cascade = Cascade.from_config(run)
    written[name] = [[o.tokens, o.origin] for o in cascade.generate(texts, run.settings)]
assert cascade.strategy is VOCABULARIES["whole"] and cascade.foreign
print(json.dumps(written))
"""


@pytest.fixture(scope="module")
def foreign(t5_pair, tmp_path_factory):
    """The folder of a drafter with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("foreign")
    shape = T5Config(
        vocab_size=304, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_encoder_layers=1, num_decoder_layers=1
    )
    model = T5Model(shape)
    huggingface.save(folder, model, model.init(3), np.float32)
    train_tokenizer(shuffled([text.lower() for text in SENTENCES]), folder / "spiece.model", 290)
    return folder


@pytest.fixture(scope="module")
def written(t5_pair, foreign, tmp_path_factory):
    """What the extended package decodes."""
    folder = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__", "demo")
    shutil.copytree(REPOSITORY / PACKAGE, folder / PACKAGE, ignore=ignored)
    for file, before, entry in EXTENDED.values():
        path = folder / PACKAGE / file
        source = path.read_text()
        assert not before or source.count(f"\n{before}") == 1
        place = source.index(f"\n{before}") + 1 if before else len(source)
        path.write_text(source[:place] + entry.lstrip() + source[place:])
    given = json.dumps([str(t5_pair / "drafter"), str(foreign), str(t5_pair / "verifier"), TEXTS, LIMITS])
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", DECODING, given], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("entry", EXTENDED)
def test_an_entry_in_one_file_decodes(written, entry):
    assert all(tokens for tokens, _ in written[entry])


@pytest.mark.full
def test_the_knob_of_a_rule_is_read(written):
    assert written["rule"] != written["impatient"]


@pytest.mark.full
def test_a_way_to_join_vocabularies_is_an_object(foreign, t5_pair):
    """The package is not changed."""
    whole = Strategy("whole", "as tli, by a head that keeps all of its columns")
    texts = [
        [output.tokens for output in cascade.generate(TEXTS, block_size=3)]
        for cascade in (
            Cascade.load(foreign, t5_pair / "verifier", vocabulary=vocabulary, **LIMITS)
            for vocabulary in (whole, "tli")
        )
    ]
    assert texts[0] == texts[1]
