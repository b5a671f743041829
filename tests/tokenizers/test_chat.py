"""Reads tokenizer.json files, special tokens by role, and chat templates like transformers."""

import dataclasses
import json

import numpy as np
import pytest
from chat_templates import SPECIALS, TEMPLATES, published
from shapes import DECODERS

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface, tokenizer_files
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import model_of
from speccascade_jax.tokenizers.chat import ChatTemplate
from speccascade_jax.tokenizers.tokenizer import Tokenizer, as_user
from speccascade_jax.vocabularies.matching import matched

SYSTEM = {"role": "system", "content": " You are brief. "}
CHAT = [
    {"role": "user", "content": " Why does <ice> float? \n"},
    {"role": "assistant", "content": '<think>\nDensity.\n</think>\n\nBecause it\'s "lighter".'},
    {"role": "user", "content": "Grüße & 東京!"},
]
CHATS = {"one": CHAT[:1], "several": CHAT, "system": [SYSTEM, *CHAT], "answered": CHAT[:2]}


@pytest.mark.parametrize("family", TEMPLATES)
def test_chats_are_rendered_like_transformers(family, tmp_path):
    """Its text, with and without the beginning of an answer, and its tokens."""
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer(published(tmp_path / "it", family, TEMPLATES[family]))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "it")
    refused = 0
    for chat in CHATS.values():
        for begun in (True, False):
            try:
                text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=begun)
            except Exception:  # the template refuses a system's message
                refused += 1
                with pytest.raises(ValueError, match="the chat template says: System role not supported"):
                    ours.template().render(chat, begun)
                continue
            assert ours.template().render(chat, begun) == text
            if begun:
                (row,) = ours.encode_batch([ours.conversation(chat)])
                ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                assert ours.framed(row) == ids
    assert refused == 2 * (family == "gemma2")
    assert as_user([CHAT[0]["content"]], ours) == [ours.conversation(CHAT[:1])]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_special_tokens_have_their_roles_from_the_files_next_to_it(family, tmp_path):
    bos, eos, turns = SPECIALS[family]
    path = published(tmp_path / "it", family)
    tokenizer = Tokenizer(path)
    ids = tokenizer.processor.tokenizer.get_vocab()
    assert tokenizer.eos_id == tokenizer.pad_id == ids[eos] and tokenizer.bos_id == ids.get(bos, -1)
    assert tokenizer.framed([7, 8]) == ([ids[bos]] if bos else []) + [7, 8]
    assert tokenizer.framed([7, 8, 9], 2) == ([ids[bos], 9] if bos else [8, 9])
    assert tokenizer.ends(None) == [turns[-1]] and tokenizer.size == len(ids)
    assert (
        tokenizer.decode([ids[turns[0]], *tokenizer.encode_batch(["Grüße"])[0], tokenizer.eos_id]) == "Grüße"
    )
    surfaces = tokenizer.surfaces()  # of bytes, whatever the file writes for them
    (row,) = tokenizer.encode_batch(["Grüße, 東京 <think>"])
    assert b"".join(surfaces[n].text for n in row).decode() == "Grüße, 東京 <think>"
    assert [surfaces[n].kind for n in (tokenizer.eos_id, tokenizer.encode_batch(["x"])[0][0])] == [
        "eos",
        "piece",
    ]
    other = Tokenizer(published(tmp_path / "other", "gemma2")).surfaces()
    pairs = dict(matched(surfaces, other).tolist())
    assert len(pairs) > 290 and all(other[a].text == surfaces[b].text for a, b in pairs.items())
    path.with_name("tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="no </s>, and no tokenizer_config"):
        Tokenizer(path)


def test_files_next_to_a_tokenizer_are_copied_with_it(tmp_path):
    path = published(tmp_path / "it", "llama", TEMPLATES["llama"])
    (tmp_path / "out").mkdir()
    tokenizer_files.copy(path, tmp_path / "out")
    again = Tokenizer(tmp_path / "out" / "tokenizer.json")
    assert again.conversation(CHAT) == Tokenizer(path).conversation(CHAT)
    assert checkpoints.tokenizer_file(str(tmp_path / "out")).name == "tokenizer.json"
    (tmp_path / "out" / "tokenizer.model").write_bytes(b"x")  # knows less
    assert checkpoints.tokenizer_file(str(tmp_path / "out")).name == "tokenizer.json"


@pytest.mark.full
def test_a_current_folder_decodes_chats(tmp_path):
    """No <pad>, rows of logits that are no tokens, several tokens that end a text."""
    folder = published(tmp_path / "it", "qwen3", TEMPLATES["qwen3"]).parent
    model = model_of(dataclasses.replace(DECODERS["qwen3"], vocab_size=500, max_positions=4096))
    huggingface.save(folder, model, model.init(0), np.float32)

    def decoded(text, **fields):
        cascade = Cascade.load(folder, max_source_length=64, max_new_tokens=24, **fields)
        [output] = cascade.generate([text], method="verifier", temperature=1.0)
        return output, cascade.tokenizer

    whole, tokenizer = decoded("Why?", chat=True)
    assert len(whole.tokens) == 24 and max(whole.tokens) < tokenizer.size < 400
    rendered = tokenizer.conversation([{"role": "user", "content": "Why?"}])
    assert decoded(rendered)[0].tokens == whole.tokens != decoded("Why?")[0].tokens
    end = next(n for n in whole.tokens[4:] if tokenizer.surfaces()[n].text.isalpha())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_id, end]}))
    cut, _ = decoded("Why?", chat=True)
    assert cut.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert cut.text == tokenizer.decode(cut.tokens[:-1])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ValueError, match="no chat template next to"):
        decoded("Why?", chat=True)


BAD = {
    "{% for": "damaged",
    "{{ 1 / 0 }}": "cannot render",
    "{{ ''.__class__.__mro__ }}": "cannot render",
    "{% for n in range(10**9) %}x{% endfor %}": "cannot render",
    "{{ messages[5].content.x }}": "cannot render",
    "{{ raise_exception('no') }}": "says: no",
}


@pytest.mark.parametrize("source", BAD)
def test_a_bad_template_is_one_sentence(source):
    with pytest.raises(ValueError, match=BAD[source]) as error:
        ChatTemplate(source, {}).render(CHAT)
    assert "\n" not in str(error.value)


def test_templates_by_name_and_for_training(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {
                        "name": "default",
                        "template": "{% generation %}a{% "
                        "endgeneration %}"
                        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
                        "{{ m | tojson }}{% endfor %}",
                    },
                ]
            }
        )
    )
    assert ChatTemplate.find(tmp_path, {}).render([{"x": "<é>"}, {}]) == 'a{"x": "<é>"}'
    (tmp_path / "chat_template.jinja").write_text("b")
    assert ChatTemplate.find(tmp_path, {}).render([]) == "b"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.find(tmp_path, {}) is None
