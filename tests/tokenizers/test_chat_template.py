"""Untrusted templates: limits on time, memory and length, and one sentence for each fault."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from speccascade_jax.tokenizers import chat_worker
from speccascade_jax.tokenizers.chat import ChatTemplate

pytest.importorskip("jinja2")
USER = [{"role": "user", "content": "Why?"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WHERE_ASKED = "{% if messages[0].content == 'X' %}" + LOOP + "{% endif %}{{ messages[0].content }}"


@pytest.fixture
def hurried(monkeypatch):
    """A second for a conversation."""
    monkeypatch.setattr(chat_worker, "SECONDS", 1)


def test_a_template_that_loops_ends_in_time_and_serves_the_next(hurried):
    template = ChatTemplate(WHERE_ASKED, {})
    began = time.monotonic()
    with pytest.raises(ValueError):
        template.render([{"role": "user", "content": "X"}])
    assert time.monotonic() - began < 10
    assert template.render(USER) == "Why?"


@pytest.mark.full
def test_waiting_behind_a_looping_template_is_bounded(hurried):
    template, began = ChatTemplate(WHERE_ASKED, {}), time.monotonic()

    def refused(_):
        with pytest.raises(ValueError):
            template.render([{"role": "user", "content": "X"}])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(refused, range(16)))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ '%99999999999d' % 1 }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ '\\ud800' }}",
        "{{ [1] * 10 ** 10 }}",
    ],
)
def test_an_unusable_rendering_is_refused(source):
    with pytest.raises(ValueError) as error:
        ChatTemplate(source, {}).render(USER)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_an_incomplete_character_in_a_message_reaches_the_template():
    template = ChatTemplate("{{ messages[0].content | length }}", {})
    assert template.render([{"role": "user", "content": "\ud800"}]) == "1"


@pytest.mark.parametrize(
    "templates",
    [
        [],
        [3],
        ["{{ x }}"],
        [{"template": "a"}],
        [{"name": ["default"], "template": "a"}],
        [{"name": "default", "template": 3}],
        [{"name": "rag", "template": "a"}],
        {"default": "a"},
        3,
    ],
)
def test_several_templates_without_a_default_are_refused(templates, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(ValueError) as error:
        ChatTemplate.find(tmp_path, {})
    assert str(tmp_path) in str(error.value)


def test_a_worker_that_died_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.worker.end()
    with pytest.raises(ValueError):
        template.render(USER)
    assert template.render(USER) == "Why?"
