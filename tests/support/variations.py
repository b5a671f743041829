"""Files at random that are nearly right: tokenizers, routers, chat templates, API keys. Each is drawn by a
random.Random, so that a number reproduces it."""

import json
import os

from speccascade_jax.learned.rules import FEATURES

VALUES = (
    None,
    True,
    0,
    1,
    -1,
    2,
    255,
    2**24,
    2**31 - 1,
    2**32,
    4_000_000_000,
    10**18,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "</s>",
    "\u2581",
    "\ud800",
    "\0",
    "(",
    "(a+)+$",
    "x" * 10_000,
    [],
    {},
    [[]],
    ["a", 1],
    [0] * 1000,
    {"type": "x"},
    {"type": "Sequence"},
)
SIZES = (-1, 0, 1, 2, 5, 8, 511, 10**6, 2**32, 4 * 10**9, 10**18, 2**63, 2**64)
OF_FILES = (
    "empty",
    "cut",
    "flipped",
    "pipe",
    "folder",
    "endless",
    "sparse",
    "itself",
    "deep",
    "no text",
    "BOM",
)


# ---- any JSON --------------------------------------------------------------------------------------------


def places(value, path=()):
    """The path of every value within a JSON value, its own first."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, child in children:
        yield from places(child, (*path, name))


def at(value, path):
    for name in path:
        value = value[name]
    return value


def vary(rng, value):
    """One value within `value` is dropped, replaced, doubled or swapped with another; in place."""
    inner = [path for path in places(value) if path]
    if not inner:
        return
    shallow = [path for path in inner if len(path) <= 3]
    path = rng.choice(shallow if rng.random() < 0.7 else inner)
    holder, name = at(value, path[:-1]), path[-1]
    action = rng.choice(("drop", "replace", "replace", "swap", "double"))
    if action == "drop":
        del holder[name]
    elif action == "replace":
        holder[name] = rng.choice(VALUES)
    elif action == "swap":
        other = rng.choice(inner)
        if path[: len(other)] != other[: len(path)]:  # neither holds the other
            there = at(value, other[:-1])
            holder[name], there[other[-1]] = there[other[-1]], holder[name]
    elif isinstance(holder, list):
        holder.insert(name, holder[name])
    else:
        holder[f"{name}2"] = holder[name]


def place(rng, path, content, kind=None):
    """Puts `content` at `path`, or what `kind` makes of it: damaged bytes, or no file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "itself":
        path.symlink_to(path.name)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, rng.choice((1, 2**16, 2**28, 2**40)))
    else:
        path.write_bytes(damaged(rng, content, kind))


def damaged(rng, content, kind):
    if kind == "empty":
        return b""
    if kind == "cut":
        return content[: rng.randrange(len(content) + 1)]
    if kind == "flipped":
        raw = bytearray(content or b"x")
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return bytes(raw)
    if kind == "deep":
        return rng.choice((b"[", b'{"a":')) * 100_000
    if kind == "no text":
        return rng.randbytes(rng.choice((1, 8, 100)))
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")) + content if kind == "BOM" else content


def dumped(value):
    return json.dumps(value).encode()


# ---- tokenizer.json --------------------------------------------------------------------------------------


def token(number, content, **more):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags, **more}


SPECIALS = ("<pad>", "</s>", "<unk>", "<s>")
LETTERS = [chr(n) for n in range(97, 123)] + list("\u2581.,0123456789")
WORDS = (*SPECIALS, *LETTERS, "th", "the", "\u2581the", "\u2581cat")
BYTES = [f"<0x{n:02X}>" for n in range(256)]


def bases():
    """A right tokenizer.json of each kind of model."""
    added = [token(n, name) for n, name in enumerate(SPECIALS)]
    ids = {piece: n for n, piece in enumerate(WORDS)}
    frame = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    unigram = {
        "type": "Unigram",
        "unk_id": 2,
        "byte_fallback": True,
        "vocab": [[piece, -float(n)] for n, piece in enumerate((*WORDS, *BYTES))],
    }
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": False,
        "vocab": ids,
        "merges": [["t", "h"], ["th", "e"]],
    }
    piece = {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##"}
    return [
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
        for parts in (
            {
                "normalizer": None,
                "pre_tokenizer": metaspace,
                "post_processor": frame,
                "decoder": metaspace,
                "model": unigram,
            },
            {
                "normalizer": {"type": "NFC"},
                "pre_tokenizer": metaspace,
                "post_processor": None,
                "decoder": {"type": "Fuse"},
                "model": bpe,
            },
            {
                "normalizer": {"type": "Lowercase"},
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": frame,
                "decoder": None,
                "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": ids},
            },
            {
                "normalizer": None,
                "pre_tokenizer": {"type": "BertPreTokenizer"},
                "post_processor": {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 3]},
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
                "model": {**piece, "max_input_chars_per_word": 100, "vocab": ids},
            },
        )
    ]


def padding(rng):
    return {
        "strategy": rng.choice(("BatchLongest", {"Fixed": rng.choice(SIZES)})),
        "direction": rng.choice(("Left", "Right")),
        "pad_to_multiple_of": rng.choice((*[None] * 20, *SIZES)),
        "pad_id": rng.choice((*[0] * 20, *SIZES)),
        "pad_type_id": 0,
        "pad_token": rng.choice(("<pad>", "none", "")),
    }


def truncation(rng):
    return {
        "direction": rng.choice(("Left", "Right")),
        "max_length": rng.choice(SIZES),
        "strategy": rng.choice(("LongestFirst", "OnlyFirst", "OnlySecond")),
        "stride": rng.choice(SIZES),
    }


def pattern(rng):
    texts = (
        "",
        " ",
        "a",
        "(?=\u2581)",
        "(",
        "(a*)*b",
        "(?:a|aa)+$",
        ".{1000000}",
        "\\",
        "$",
        "^",
        "(?=)",
        "\ud800",
    )
    return {rng.choice(("Regex", "String")): rng.choice(texts)}


def pre_tokenizer(rng):
    return {
        "type": rng.choice(
            (
                "Split",
                "ByteLevel",
                "Metaspace",
                "Punctuation",
                "Digits",
                "FixedLength",
                "UnicodeScripts",
                "CharDelimiterSplit",
                "WhitespaceSplit",
                "Sequence",
                "x",
            )
        ),
        "pattern": pattern(rng),
        "behavior": rng.choice(("Isolated", "Removed", "MergedWithPrevious", "Contiguous", "x")),
        "invert": rng.choice((False, True)),
        "add_prefix_space": rng.choice((False, True)),
        "trim_offsets": True,
        "use_regex": rng.choice((False, True)),
        "replacement": rng.choice(("\u2581", "", "ab", "\0")),
        "prepend_scheme": rng.choice(("always", "never", "first")),
        "individual_digits": True,
        "delimiter": rng.choice((" ", "", "ab")),
        "length": rng.choice(SIZES),
        "pretokenizers": rng.choice(([], [{"type": "Whitespace"}], [{"type": "x"}], None)),
    }


def normalizer(rng):
    return {
        "type": rng.choice(
            (
                "Replace",
                "Prepend",
                "Precompiled",
                "NFKC",
                "StripAccents",
                "Strip",
                "ByteLevel",
                "Nmt",
                "Sequence",
                "x",
            )
        ),
        "pattern": pattern(rng),
        "content": rng.choice(("", "\u2581", "a" * 1000, "\ud800")),
        "prepend": rng.choice(("", "\u2581", "x" * 1000)),
        "strip_left": True,
        "strip_right": True,
        "precompiled_charsmap": rng.choice(
            ("", "AAAA", "BAAAAAAAAAAA", "/" * 16, "BAAAAP////9hAA==", "?", None)
        ),
        "normalizers": rng.choice(([], [{"type": "NFC"}], [{"type": "x"}], 3)),
    }


def post_processor(rng):
    def pieces():
        return [
            rng.choice(
                (
                    {"Sequence": {"id": rng.choice("AAABC"), "type_id": rng.choice((0, 1, *SIZES))}},
                    {"SpecialToken": {"id": rng.choice(("</s>", "<s>", "none")), "type_id": 0}},
                )
            )
            for _ in range(rng.randint(0, 3))
        ]

    names = rng.sample(("</s>", "<s>", "none"), rng.randint(0, 3))
    return {
        "type": rng.choice(
            ("TemplateProcessing",) * 3 + ("BertProcessing", "RobertaProcessing", "ByteLevel")
        ),
        "single": pieces(),
        "pair": pieces(),
        "special_tokens": {
            name: {
                "id": rng.choice((name, "x")),
                "ids": [rng.choice((1, 1, 3, *SIZES)) for _ in range(rng.choice((0, 1, 1, 2)))],
                "tokens": rng.choice(([name], [], ["x", "y"])),
            }
            for name in names
        },
        "sep": ["</s>", rng.choice(SIZES)],
        "cls": ["<s>", rng.choice(SIZES)],
        "trim_offsets": True,
        "add_prefix_space": rng.choice((False, True)),
    }


def decoder(rng):
    return {
        "type": rng.choice(
            (
                "Strip",
                "Replace",
                "ByteFallback",
                "ByteLevel",
                "CTC",
                "BPEDecoder",
                "Metaspace",
                "Sequence",
                "x",
            )
        ),
        "content": rng.choice((" ", "", "ab", "\u2581")),
        "start": rng.choice(SIZES),
        "stop": rng.choice(SIZES),
        "pattern": pattern(rng),
        "pad_token": rng.choice(("<pad>", "")),
        "word_delimiter_token": rng.choice(("|", "")),
        "cleanup": True,
        "suffix": rng.choice(("</w>", "")),
        "replacement": rng.choice(("\u2581", "")),
        "prepend_scheme": "always",
        "decoders": rng.choice(
            ([], [{"type": "Fuse"}], [{"type": "Strip", "content": " ", "start": 2**40, "stop": 0}])
        ),
    }


def added_token(rng):
    return token(
        rng.choice((0, 1, 2, 39, 40, 41, 300, *SIZES)),
        rng.choice(("", " ", "a", "</s>", "<x>", "\ud800", "x" * 10_000)),
        normalized=rng.choice((False, True)),
        special=rng.choice((False, True)),
        lstrip=rng.choice((False, True)),
        single_word=rng.choice((False, True)),
    )


PARTS = {
    "padding": padding,
    "truncation": truncation,
    "pre_tokenizer": pre_tokenizer,
    "normalizer": normalizer,
    "post_processor": post_processor,
    "decoder": decoder,
}


def tokenizer(rng, folder):
    """A tokenizer.json in the folder, one to three things of it changed."""
    described = rng.choice(bases())
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        part = rng.choice((*PARTS, "added", "id", "any", "any", "any"))
        if part in PARTS:
            described[part] = PARTS[part](rng)
        elif part == "added" and isinstance(described.get("added_tokens"), list):
            described["added_tokens"].append(added_token(rng))
        elif part == "id":
            vocabulary = (
                (described.get("model") or {}).get("vocab") if isinstance(described.get("model"), dict) else 0
            )
            if isinstance(vocabulary, dict) and vocabulary:
                vocabulary[rng.choice(list(vocabulary))] = rng.choice((0, 39, 40, *SIZES))
        else:
            vary(rng, described)
    if rng.random() < 0.3:
        roles = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": token(0, "<pad>"),
            "add_bos_token": True,
        }
        for _ in range(rng.choice((0, 1, 2))):
            vary(rng, roles)
        place(rng, folder / "tokenizer_config.json", dumped(roles), rng.choice((*[None] * 20, *OF_FILES)))
    kind = rng.choice((*[None] * 40, *OF_FILES))
    place(rng, folder / "tokenizer.json", dumped(described), kind)
    return folder / "tokenizer.json"


# ---- routers ---------------------------------------------------------------------------------------------


def router(rng, folder):
    """A router's file."""
    units = rng.choice((0, 1, 3, 3, 3, 16))

    def numbers(*shape):
        if shape:
            return [numbers(*shape[1:]) for _ in range(shape[0])]
        return rng.gauss(0, 1)

    described = {
        "method": rng.choice(("router", "router", "learned_mixture", "opt", None)),
        "features": list(FEATURES),
        "hidden": numbers(len(FEATURES), units),
        "bias": numbers(units),
        "out": numbers(units),
        "about": {},
    }
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        if rng.random() < 0.3:
            name = rng.choice(("hidden", "bias", "out"))
            described[name] = rng.choice(
                (numbers(units, len(FEATURES)), numbers(1, units), numbers(), numbers(5))
            )
        elif rng.random() < 0.3:
            name = rng.choice(("bias", "out"))
            if isinstance(described.get(name), list) and described[name]:
                described[name][0] = rng.choice((*VALUES, 1e38, 1e39, -1e300, 1e6, "1", "nan"))
        else:
            vary(rng, described)
    kind = rng.choice((*[None] * 15, *OF_FILES))
    place(rng, folder / "router.json", dumped(described), kind)
    return folder / "router.json"


# ---- chat templates --------------------------------------------------------------------------------------

HARMLESS = (
    "{{ bos_token }}",
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}",
    "{% if add_generation_prompt %}<model>{% endif %}",
    "{% set x = messages | length %}{{ x }}",
    "{% generation %}{{ messages | tojson }}{% endgeneration %}",
    "{{ strftime_now('%Y') }}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}",
    "text \u6771\u4eac \U0001f99c",
)
HARMFUL = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 10 ** 5000 }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ '\\ud800' }}",
    "{{ raise_exception('\\ud800') }}",
    "{{ raise_exception('a\\nb') }}",
    "{{ raise_exception('x' * 10 ** 8) }}",
    "{{ raise_exception(3) }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('\\ud800') }}",
    "{{ strftime_now(3) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[5].content.x }}",
    "{{ 1 / 0 }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% import 'x' as y %}",
    "{% break %}",
    "{% for",
    "{{",
    "{% endif %}",
    "{{ x | no_such_filter }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{% set ns = namespace(x='x') %}{% for a in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "-" * 20_000 + "1 }}",
    "{{ messages.append(1) }}",
    "{{ range(10 ** 9) | list }}",
    "{{ lipsum(n=10 ** 6) }}",
    "{{ cycler() }}{{ joiner() }}{{ dict(a=1) }}",
)


def template(rng, folder):
    """A folder with a chat template in one of its places."""
    pieces = rng.choices(HARMLESS, k=rng.randint(1, 4))
    if rng.random() < 0.6:
        pieces.insert(rng.randint(0, len(pieces)), rng.choice(HARMFUL))
    text = "".join(pieces)
    if rng.random() < 0.2:
        text = text[: rng.randrange(len(text) + 1)]
    kind = rng.choice((*[None] * 15, *OF_FILES))
    if rng.random() < 0.5:
        place(rng, folder / "chat_template.jinja", text.encode("utf-8", "surrogatepass"), kind)
        return folder
    value = rng.choice(
        (
            text,
            text,
            [{"name": "default", "template": text}],
            [{"name": "rag", "template": text}],
            [
                {"name": rng.choice(VALUES), "template": text},
                {"name": "default", "template": rng.choice(VALUES)},
            ],
            [rng.choice(VALUES)],
            {"default": text},
            rng.choice(VALUES),
        )
    )
    name = rng.choice(("tokenizer_config.json", "chat_template.json"))
    place(rng, folder / name, dumped({"chat_template": value, "bos_token": rng.choice(VALUES)}), kind)
    return folder


# ---- API keys --------------------------------------------------------------------------------------------

KEYS = (
    "sk-1",
    "schl\u00fcssel",
    "\u6771\u4eac",
    "\U0001f99c",
    "a b",
    "x" * 300,
    "\t",
    "",
    "#",
    "\u00a0",
    "\u2028k",
)


def keys(rng, folder):
    """A file of keys."""
    lines = rng.choices(KEYS, k=rng.randint(0, 5))
    text = rng.choice(("\n", "\r\n", "\r")).join(lines)
    content = text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-8-sig")))
    if rng.random() < 0.2:
        content = text.encode("latin-1", "replace")
    place(rng, folder / "keys", content, rng.choice((*[None] * 8, *OF_FILES)))
    return folder / "keys"


FILES = {
    "tokenizer": (tokenizer, 200, 500),
    "router": (router, 40, 200),
    "template": (template, 10, 100),
    "keys": (keys, 40, 200),
}
"""What draws a file of each kind, and how many the quick and the full suite draw."""
