"""The knobs of rules, from settings to texts, with different values in one batch."""

import dataclasses

from toys import Digits, TableLM, table

from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import Settings


def cascade():
    return Cascade(
        (TableLM(4),) * 2, (table(39, 4), table(40, 4)), Digits(), max_source_length=16, max_new_tokens=6
    )


def test_each_row_of_a_batch_is_decoded_with_its_own_values():
    """Rules of several kinds, some with a knob; there are more texts than rows."""
    kinds = [
        {"method": "relaxed", "relaxed_top_k": 1},
        {"method": "relaxed", "relaxed_top_k": 3},
        {"method": "cactus"},
        {"method": "relaxed_ratio", "relaxed_top_k": 2},
    ]
    each = [
        Settings(temperature=1.0, alpha=0.5, seed=n, block_size=2, **kind) for n in range(9) for kind in kinds
    ]
    texts = ["201", "1", "10"] * (len(each) // 3)
    many = [output.tokens for output in cascade().generate(texts, each, batch_size=4)]
    alone = cascade()
    for n, (text, settings) in enumerate(zip(texts, each, strict=True)):
        [output] = alone.generate([text], settings, first_index=n)
        assert many[n] == output.tokens
    same = [dataclasses.replace(settings, relaxed_top_k=4) for settings in each]
    assert many != [output.tokens for output in alone.generate(texts, same, batch_size=4)]  # the control
