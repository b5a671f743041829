"""Texts from files: invalid ones are refused with their line before anything is decoded."""

import gzip
import io
import json

import pytest

from speccascade_jax.inference import inputs
from speccascade_jax.inference.inputs import check_text, parse_json, read_lines, read_texts

TEXTS = ["eins", "", "zwei\u2028drei", "\ufeffvier"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["", "gz"])
def test_a_byte_order_mark_is_no_part_of_the_text(mark, packed, tmp_path):
    """Only at the beginning: anywhere else it is a character."""
    end = ".gz" if packed is gzip.compress else ""
    plain, objects = tmp_path / f"in.txt{end}", tmp_path / f"in.jsonl{end}"
    plain.write_bytes(packed(mark + "\r\n".join(TEXTS).encode()))
    objects.write_bytes(packed(mark + "\n".join(json.dumps({"source": text}) for text in TEXTS).encode()))
    assert read_texts(str(plain)) == read_texts(str(objects)) == TEXTS


BAD_LINES = {
    "null": ('{"source": null}', "`source` is None; it must be a text"),
    "number": ('{"source": 3}', "`source` is 3; it must be a text"),
    "list": ('{"source": ["a"]}', "`source` is ['a']; it must be a text"),
    "missing": ('{"text": "a"}', "not a JSON object with a `source`"),
    "no object": ('["source"]', "not a JSON object with a `source`"),
    "half a character": ('{"source": "a\\ud800"}', r"`source` holds '\ud800', an unpaired surrogate"),
    "deep": ('{"source": "a", "x": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
    "long number": ('{"source": "a", "x": ' + "1" * 5000 + "}", "not JSON (Exceeds the limit"),
    "no JSON": ('{"source": "a"', "not JSON (Expecting"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(case, tmp_path):
    line, words = BAD_LINES[case]
    path = tmp_path / "in.jsonl"
    path.write_text('{"source": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        read_texts(str(path))
    assert str(error.value).startswith(f"{path}, line 2: ") and words in str(error.value)


def test_a_damaged_or_truncated_gzip_is_refused(tmp_path):
    whole = gzip.compress("".join(f"line {n}\n" for n in range(1000)).encode())
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 255
    path = tmp_path / "in.txt.gz"
    for data in (
        whole[: len(whole) // 2],
        bytes(changed),
        b"no gzip",
        whole[:10] + b"\xff" * 50,
        whole + b"x",
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"cannot read {path}: "):
            list(read_lines(path))
    path.write_bytes(whole)
    assert len(list(read_lines(path))) == 1000


def test_devices_that_never_end_are_refused():
    for device in ("/dev/zero", "/dev/full"):
        with pytest.raises(ValueError, match=f"cannot read {device}: it is a device"):
            list(read_lines(device))


class Endless(io.RawIOBase):
    """A stream that never ends, and how much of it was read."""

    def __init__(self, line):
        self.line, self.read_bytes = line, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        data = (self.line * (len(buffer) // len(self.line) + 1))[: len(buffer)]
        buffer[:] = data
        self.read_bytes += len(data)
        assert self.read_bytes < 2**20, "more of the file was read than is wanted"
        return len(data)


def test_no_more_of_a_file_is_read_than_is_wanted(monkeypatch):
    """A file that unpacks to six gigabytes used to be read entirely for its first line."""
    monkeypatch.setattr(inputs, "_opened", lambda path: io.BufferedReader(Endless(b"a line of it\n")))
    assert read_texts("in.txt", limit=2) == ["a line of it"] * 2
    endless = Endless(b"\n")
    monkeypatch.setattr(gzip, "GzipFile", lambda fileobj: io.BufferedReader(endless))
    assert read_texts("in.txt.gz", limit=3) == [""] * 3 and endless.read_bytes


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz"])
def test_a_line_has_a_longest_length(name, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST_LINE", 1000)
    packed = gzip.compress if name.endswith(".gz") else bytes
    path = tmp_path / name
    for end in (b"\n", b"\r\n"):
        path.write_bytes(packed(b"one" + end + b"x" * 1000 + end + b"three"))
        assert [len(line) for line in read_lines(path)] == [3, 1000, 5]
        path.write_bytes(packed(b"one" + end + b"x" * 1001 + end + b"three"))
        with pytest.raises(ValueError) as error:
            read_texts(str(path))
        assert str(error.value).startswith(f"{path}, line 2: ") and "1,000 bytes" in str(error.value)
        assert read_texts(str(path), limit=1) == ["one"]


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    """However long the line is, no more than the largest line is read."""
    monkeypatch.setattr(inputs, "LONGEST_LINE", 1000)
    monkeypatch.setattr(inputs, "_opened", lambda path: io.BufferedReader(Endless(b"x")))
    with pytest.raises(ValueError, match=r"in.txt, line 1: "):
        read_texts("in.txt")


def test_texts_that_utf8_cannot_encode_are_refused():
    assert check_text("Grüße \U0001f600", "it") == "Grüße \U0001f600"
    for bad in ("\udcff", "a\ud83d", None, 1, b"a"):
        with pytest.raises(ValueError, match=r"^it "):
            check_text(bad, "it")
    assert parse_json('{"a": [1]}', "it") == {"a": [1]}
