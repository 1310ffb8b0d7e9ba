"""Corpora, the split, tokenizers, token files and the cache: real text in, token ids out, and a clear sentence for what cannot be used."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functrain.data import corpus, dataset, split
from functrain.data.cache import cache_folder
from functrain.data.corpus import Corpus, Piece, open_corpus, standard_library
from functrain.data.dataset import prepare
from functrain.data.errors import DataError
from functrain.data.token_file import open_tokens, write_tokens
from functrain.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

TEXT = "".join(f"def function_{i}(argument):\n    return argument + {i * i}\n\n\n" for i in range(200))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FUNCTRAIN_CACHE", str(folder))
    return folder


def documents(found: Corpus) -> list[str]:
    """The texts of a corpus, pieces joined."""
    texts, held = [], ""
    for piece in found.read():
        held += piece.text
        if piece.last:
            texts.append(held)
            held = ""
    assert not held
    return texts


def of_texts(*texts: str) -> Corpus:
    """A corpus whose documents come in pieces of seven characters."""

    def read() -> Iterator[Piece]:
        for text in texts:
            starts = range(0, len(text), 7)
            yield from (Piece(text[i : i + 7], last=i == starts[-1]) for i in starts)

    return Corpus("a few texts", read)


# ---- corpora


def test_the_default_corpus_is_the_standard_librarys_source() -> None:
    texts = documents(standard_library())
    assert sum(map(len, texts)) > 5e6
    assert any("class OrderedDict" in text for text in texts)
    assert not any("import pytest" in text for text in texts)
    assert documents(standard_library()) == texts


def test_a_folders_text_files_are_documents_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in {
        "b/two.txt": b"two",
        "a.txt": b"one",
        ".hidden": b"no",
        "c.bin": b"a\0b",
        "d.txt": b"\xff\xfe",
        "e.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "f.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four"}\n')
    assert documents(open_corpus(tmp_path)) == ["one", "two", "three", "four"]


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 100)
    (tmp_path / "long.txt").write_text(TEXT, newline="")
    pieces = list(open_corpus(tmp_path / "long.txt").read())
    assert len(pieces) > 50
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_json_lines_give_the_named_field(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert documents(open_corpus(tmp_path / "x.jsonl", field="body")) == ["yes"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or folder: .*missing"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("binary.txt", b"text\0more", "binary.txt is binary, not text"),
        ("latin.txt", b"caf\xe9 au lait", "latin.txt is not UTF-8 text.*0xe9"),
        ("blank.jsonl", b"\n\n", "blank.jsonl holds no text"),
        ("bad.jsonl", b'{"text": "a"}\n{"text\n', "bad.jsonl, line 2 is not JSON"),
        (
            "other.jsonl",
            b'{"body": "a", "id": 1}\n',
            "line 1 has no text in its field 'text' .it has: body, id.; name another with --field",
        ),
        ("list.jsonl", b"[1]\n", "line 1 has no text in its field 'text' .it has: list."),
        ("x.txt", b"x", "x.txt is too small to hold out text for validation"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, own_cache: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(tmp_path / name, tokenizer="bytes")
    assert "\n" not in str(caught.value)
    assert list(own_cache.iterdir()) == []  # nothing half-written


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no files"):
        prepare(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match="holds no text"):
        prepare(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anything")
def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        prepare(tmp_path / "a.txt")


# ---- the split


def divided(found: Corpus, fraction: float = 0.1) -> tuple[str, str]:
    """The text of both sides."""
    chosen = split.choose_split(split.survey(found), fraction)
    sides: dict[bool, list[str]] = {False: [], True: []}
    for held_out, piece in split.divide(found, chosen):
        sides[held_out].append(piece.text + ("|" if piece.last else ""))
    return "".join(sides[False]), "".join(sides[True])


def test_many_documents_are_held_out_whole_and_copies_stay_together() -> None:
    texts = [f"document {i % 40}, told again\n" for i in range(80)]
    train, validation = divided(of_texts(*texts))
    assert sorted(train.split("|")[:-1] + validation.split("|")[:-1]) == sorted(texts)
    assert not set(train.split("|")[:-1]) & set(validation.split("|")[:-1])
    assert 0.05 < len(validation) / (len(train) + len(validation)) < 0.15


def test_at_least_one_document_is_held_out() -> None:
    train, validation = divided(of_texts(*(f"document {i}" for i in range(30))), fraction=0.001)
    assert (train.count("|"), validation.count("|")) == (29, 1)


def test_the_choice_of_documents_depends_on_content_not_on_order() -> None:
    texts = [f"document {i} {'x' * (i % 7)}" for i in range(50)]
    sides = [divided(of_texts(*order)) for order in (texts, texts[::-1])]
    assert set(sides[0][1].split("|")) == set(sides[1][1].split("|"))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=15), fraction=st.floats(0.05, 0.5))
def test_of_few_documents_the_tail_is_held_out_and_nothing_is_lost(lengths: list[int], fraction: float) -> None:
    texts = ["".join(chr(97 + (i * 7 + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]
    train, validation = divided(of_texts(*texts), fraction)
    assert train + validation == "|".join(texts) + "|"
    assert abs(len(validation.replace("|", "")) - fraction * sum(lengths)) <= 1


def test_the_tail_starts_at_a_line() -> None:
    train, validation = divided(Corpus("lines", lambda: iter([Piece(TEXT, last=True)])))
    assert train.endswith("\n")
    assert train + validation == TEXT + "|"


# ---- tokenizers


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert ByteTokenizer().decode(ByteTokenizer().encode_batch([text])[0]) == text


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_byte_pairs_come_back(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = bpe()
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


@functools.cache
def bpe() -> Tokenizer:
    """A tokenizer of the text above, made once."""
    return train_bpe(iter([TEXT]), 300)


def test_byte_pairs_are_learned_and_the_end_of_text_is_never_read_from_text() -> None:
    tokenizer = bpe()
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode_batch([TEXT])[0]) < 0.5 * len(TEXT)
    assert tokenizer.end not in tokenizer.encode_batch([f"a {END_OF_TEXT} b"])[0]
    assert tokenizer.decode([tokenizer.end]) == END_OF_TEXT
    assert ByteTokenizer().decode([104, 105, 256, 33]) == f"hi{END_OF_TEXT}!"


@pytest.mark.parametrize("make", [ByteTokenizer, bpe])
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.end) == (tokenizer.vocab_size, tokenizer.end)
    np.testing.assert_array_equal(loaded.encode_batch([TEXT])[0], tokenizer.encode_batch([TEXT])[0])


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "is no tokenizer"), ("{}", "is no tokenizer"), ("[]", "is no")]
)
def test_a_damaged_tokenizer_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "t.json")


# ---- datasets and their cache


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_both_sides_decode_to_the_text(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    found = prepare(tmp_path / "a.txt", tokenizer=kind, vocab_size=300, fraction=0.1)
    assert found.tokenizer is not None
    assert found.tokenizer.decode(found.train) + found.tokenizer.decode(found.validation) == TEXT + END_OF_TEXT
    assert len(found.validation) / (len(found.train) + len(found.validation)) == pytest.approx(0.1, abs=0.03)
    assert found.train.max() < found.vocab_size == found.tokenizer.vocab_size
    assert found.split == "the last 10% of the text"


def test_the_tokenizer_learns_from_the_training_side_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd " * 900 + "zyxw " * 100)
    found = prepare(tmp_path / "a.txt", vocab_size=270, fraction=0.1)
    assert len(found.train) < 1500
    assert len(found.validation) > 400  # its words were never seen, so they stay bytes


def test_the_second_time_tokens_come_from_the_cache(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = prepare(tmp_path / "a.txt", vocab_size=300)
    monkeypatch.setattr(dataset, "train_bpe", None)
    second = prepare(tmp_path / "a.txt", vocab_size=300)
    np.testing.assert_array_equal(first.train, second.train)
    assert len(list(own_cache.iterdir())) == 1


def test_another_content_or_setting_is_another_entry_in_the_cache(tmp_path: Path, own_cache: Path) -> None:
    for text, changes in ((TEXT, {}), (TEXT + "x", {}), (TEXT, {"fraction": 0.2}), (TEXT, {"vocab_size": 301})):
        (tmp_path / "a.txt").write_text(text)
        prepare(tmp_path / "a.txt", **{"vocab_size": 300, **changes})  # type: ignore[arg-type]
    assert len(list(own_cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "tokenizer", "sidecar"])
def test_a_damaged_entry_of_the_cache_is_made_again(tmp_path: Path, own_cache: Path, damage: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    expected = np.array(prepare(tmp_path / "a.txt", tokenizer="bytes").train)
    (entry,) = own_cache.iterdir()
    if damage == "cut":
        (entry / "train.bin").write_bytes((entry / "train.bin").read_bytes()[:-2])
    elif damage == "sidecar":
        (entry / "train.json").unlink()
    else:
        (entry / "tokenizer.json").write_text("")
    np.testing.assert_array_equal(prepare(tmp_path / "a.txt", tokenizer="bytes").train, expected)


def test_a_failure_while_encoding_leaves_nothing_behind(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(dataset, "write_tokens", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device; set FUNCTRAIN_CACHE"):
        prepare(tmp_path / "a.txt", tokenizer="bytes")
    assert list(own_cache.iterdir()) == []


def test_the_cache_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == Path(os.environ["FUNCTRAIN_CACHE"])
    monkeypatch.delenv("FUNCTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "functrain"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokenizer": "words"}, "unknown tokenizer"), ({"fraction": 1.5}, "between 0 and 1"), ({"vocab_size": 100}, "at least 257")],
)
def test_wrong_settings_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(**changes)  # type: ignore[arg-type]


# ---- token files


@pytest.mark.parametrize("vocab_size", [300, 70000])
def test_a_token_file_comes_back_through_a_memory_map(tmp_path: Path, vocab_size: int) -> None:
    ids = np.arange(1000) % vocab_size
    assert write_tokens(tmp_path / "t.bin", [ids[:300], ids[300:]], vocab_size) == 1000
    found = open_tokens(tmp_path / "t.bin")
    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.dtype == (np.uint16 if vocab_size == 300 else np.uint32)
    np.testing.assert_array_equal(found.tokens, ids)
    assert found.vocab_size == vocab_size


def test_token_files_are_used_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000) % 50)
    found = prepare(tmp_path / "t.npy", fraction=0.1)
    assert (len(found.train), len(found.validation), found.vocab_size, found.tokenizer) == (900, 100, 50, None)
    np.testing.assert_array_equal(np.concatenate([found.train, found.validation]), np.arange(1000) % 50)


def test_a_token_file_may_name_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    write_tokens(tmp_path / "t.bin", ByteTokenizer().encode_batch([TEXT]), 257, "tokenizer.json")
    found = prepare(tmp_path / "t.bin")
    assert found.tokenizer is not None
    assert found.tokenizer.decode(found.train[:20]) == TEXT[:20]


@pytest.mark.parametrize(
    ("array", "about", "message"),
    [
        (np.array([1.0, np.nan]), {}, r"float64 of shape \[2\] \(position 1 is not even finite\); token ids are a one-dim"),
        (np.zeros((2, 2), int), {}, r"int64 of shape \[2, 2\]; token ids"),
        (np.array([1, -5]), {}, "the id -5 at position 1"),
        (np.array([1, 9, 2]), {"vocab_size": 9}, "the id 9 at position 1; ids are from 0 to 8"),
        (np.zeros(0, int), {}, "holds no tokens"),
        (np.arange(9), {"vocab_size": 9, "tokenizer": "../secret.json"}, "must lie in the same folder"),
        (np.arange(9), {"vocab_size": "many"}, "vocab_size is a positive number"),
    ],
)
def test_a_npy_file_that_cannot_be_used_is_an_error(tmp_path: Path, array: np.ndarray, about: dict[str, object], message: str) -> None:
    np.save(tmp_path / "t.npy", array)
    (tmp_path / "t.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "t.npy")


def test_a_file_that_only_pickle_could_read_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"is no \.npy file of numbers"):
        prepare(tmp_path / "t.npy")


@pytest.mark.parametrize(
    ("content", "about", "message"),
    [
        (b"\0" * 9, '{"dtype": "uint16", "count": 5, "vocab_size": 9}', "9 bytes, which are not 5 ids of uint16"),
        (b"\0" * 8, '{"dtype": "float32", "vocab_size": 9}', "token ids are integers"),
        (b"\0" * 8, '{"vocab_size": 9}', "names no dtype"),
        (b"\0" * 8, "{", "is not JSON"),
        (b"\0" * 8, "[]", "must be an object"),
        (b"\0" * 8, None, r'needs t\.json beside it, such as \{"dtype"'),
        (b"", '{"dtype": "uint16", "vocab_size": 9}', "holds no tokens"),
        (b"\x0a\0" * 4, '{"dtype": "uint16", "vocab_size": 9}', "the id 10 at position 0; ids are from 0 to 8"),
    ],
)
def test_a_bin_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: bytes, about: str | None, message: str) -> None:
    (tmp_path / "t.bin").write_bytes(content)
    if about is not None:
        (tmp_path / "t.json").write_text(about)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "t.bin")


def test_a_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such token file"):
        prepare(tmp_path / "t.npy")
