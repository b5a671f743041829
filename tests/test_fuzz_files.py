"""A thousand random files: each is read and used, or refused in one sentence, quickly and in little memory. A
separate process reads them, so that a hang, a crash or a full memory is a test result. The kind and the
number in a failure's message reproduce a file.
"""

import random
import shutil
from collections import Counter

import pytest
from hostile import Reader, check_refused
from variations import FILES


@pytest.fixture(scope="module")
def read():
    reader = Reader(bounded=True)
    yield reader
    reader.stop()


@pytest.mark.parametrize("kind", FILES)
def test_every_file_is_used_or_refused_in_a_sentence(kind, read, tmp_path, full):
    pytest.importorskip({"tokenizer": "tokenizers", "template": "jinja2"}.get(kind, "json"))
    draw, quick, every = FILES[kind]
    kinds = Counter()
    for number in range(every if full else quick):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = read(draw(random.Random(f"{kind} {number}"), folder), f"used {kind}")
        kinds[outcome.kind] += 1
        try:
            if outcome.kind != "loaded":
                check_refused(outcome)
        except AssertionError as error:
            raise AssertionError(f"{kind} {number}: {error}") from None
        shutil.rmtree(folder)
    assert kinds["loaded"] and kinds["ValueError"], kinds  # what is right is read, what is wrong refused
