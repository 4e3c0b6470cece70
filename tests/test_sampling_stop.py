"""Stop strings: streaming in any pieces equals cutting the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m40llm.sampling import StopChecker


def cut(text: str, stops: list[str]) -> str:
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


def stream(pieces: list[str], stops: list[str]) -> tuple[str, StopChecker]:
    checker = StopChecker(stops)
    out = []
    for piece in pieces:
        emit, stopped = checker.push(piece)
        out.append(emit)
        if stopped:
            break
    out.append(checker.flush()[0])
    return "".join(out), checker


letters = st.text(alphabet="abc\né", max_size=5)


@settings(max_examples=1500, deadline=None)
@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters.filter(bool), max_size=4))
def test_equals_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    got, checker = stream(pieces, stops)
    assert got == cut(text, stops)
    assert checker.stopped == any(stop in text for stop in stops)
    by_character, other = stream(list(text), stops)
    assert by_character == got
    assert other.matched == checker.matched


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters.filter(bool), min_size=1, max_size=4))
def test_holds_back_only_what_may_still_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    seen = sent = ""
    for piece in pieces:
        emit, stopped = checker.push(piece)
        seen, sent = seen + piece, sent + emit
        if stopped:
            break
        held = seen[len(sent) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "emitted", "matched"),
    [
        (["Hello\n", "\nUser: hi"], ["\n\nUser:"], ["Hello", ""], "\n\nUser:"),
        (["a<", "b<", "|end|>c"], ["<|end|>"], ["a", "<b", ""], "<|end|>"),
        (["xab", "d"], ["b", "abc"], ["x", "a"], "b"),
        (["xab", "c"], ["b", "abc"], ["x", ""], "abc"),
        (["stop"], ["stop", "sto"], [""], "sto"),
        (["plain"], [], ["plain"], None),
    ],
)
def test_examples(pieces: list[str], stops: list[str], emitted: list[str], matched: str | None) -> None:
    checker = StopChecker(stops)
    assert [checker.push(piece)[0] for piece in pieces] == emitted
    assert checker.matched == matched
    assert checker.stopped is (matched is not None)


def test_flush_gives_what_was_held() -> None:
    checker = StopChecker(["abc"])
    assert checker.push("xab") == ("x", False)
    assert checker.flush() == ("ab", False)
    assert checker.flush() == ("", False)
    late = StopChecker(["b", "abc"])
    assert late.push("ab") == ("", False)
    assert late.flush() == ("a", True)
    assert late.push("more") == ("", True)


def test_end_of_generation_tokens() -> None:
    assert StopChecker([], [2, 7]).ends(7)
    assert not StopChecker([], [2, 7]).ends(3)
    assert not StopChecker([], [2, 7], ignore_eos=True).ends(7)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
