"""Pre-tokenization of BPE vocabularies: which text a merge may never cross.

``tokenizer.ggml.pre`` names the rule. The rules are those of llama.cpp (``src/llama-vocab.cpp`` and ``src/unicode.cpp``),
which is the oracle for token ids: a rule is one or more passes, and each pass cuts every piece of the pass before it, on its
own. A pattern therefore sees the end of a piece as the end of the text, which is why ``smollm``'s digit pass changes where
GPT-2's ``\\s+(?!\\S)`` stops, and why several passes are not one alternation. llama.cpp has no sub-categories of letters
beyond ASCII (``\\p{Lu}`` and ``\\p{Ll}`` are any letter there), so the patterns below say ``\\p{L}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import regex  # type: ignore[import-untyped]

log = logging.getLogger(__name__)

Pass = str | Callable[[str], list[str]]

_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_SPACE_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}|{_SPACE_TAIL}"
_POWERS_OF_SPACE = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|\s*[\r\n]+|{_POWERS_OF_SPACE}"
_CJK_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
# The range from U+0800 holds white space, which llama.cpp replaces by U+000B before it matches a literal class. U+FFFE: see
# _unassigned.
_CJK_AND_HANGUL = r"(?:(?!\s)[一-龥\u0800-一가-\uD7FF\uFFFE])+"
_ASCII_PUNCTUATED_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE_TAIL}"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK_AND_KANA, _DEEPSEEK3_WORDS)
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1F7D"
    r"ᾀ-ᾴᾶ-ᾼ\u1FBEῂ-ῄῆ-ῌῐ-\u1FD3ῖ-\u1FDBῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212A-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    r"ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


def _cased_words(letters: str, suffix: str, digits: str) -> str:
    """The o200k shape: ASCII case changes end a word; any non-ASCII letter is both upper and lower case."""
    upper, lower = rf"(?:(?![a-z]){letters})", rf"(?:(?![A-Z]){letters})"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE_TAIL}"


_GPT4O = _cased_words(r"\p{L}", f"(?:{_CONTRACTION})?", r"\p{N}{1,3}")
_MARKED_LETTER = r"[\p{L}\p{M}]"
_UNCASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_MARKED_LETTER}+(?:{_CONTRACTION})?"
_HAN = r"[\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\U00020000-\U0002A6DF\U0002A700-\U0002EBEF\U0002F800-\U0002FA1F]"
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+(?:{_CONTRACTION})?"

_DIGIT_RUN = regex.compile(r"\p{N}+")
_ASCII_DIGIT_RUN = regex.compile(r"[0-9]+")


def _thousands_after_text(piece: str) -> list[str]:
    """Digit runs in groups of three from the right; the first group stays joined to the text before it, as in llama.cpp."""
    cuts = [0]
    for run in _DIGIT_RUN.finditer(piece):
        first = (run.end() - run.start()) % 3 or 3
        cuts.extend(range(run.start() + first, run.end() + 1, 3))
    if cuts[-1] < len(piece):
        cuts.append(len(piece))
    return [piece[a:b] for a, b in pairwise(cuts)]


def _ascii_thousands(piece: str) -> list[str]:
    """Cuts before every position that a multiple of three ASCII digits follows, up to the end of their run."""
    cuts = [0]
    for run in _ASCII_DIGIT_RUN.finditer(piece):
        cuts.extend(range(run.start() + (run.end() - run.start()) % 3, run.end(), 3))
    cuts.append(len(piece))
    return [piece[a:b] for a, b in pairwise(cuts) if a < b]


# Code points assigned after Unicode 15, in hexadecimal. llama.cpp's tables (Unicode 15) call them unassigned; `regex` follows
# the newest Unicode version. Without this, a new letter would be split differently by every new release of `regex`.
_NEW_CODE_POINTS = """
558 58B-58C 5C8-5C9 88F 897 B53-B54 C5C CDC 1ACF-1AF0 1B4E-1B4F 1B7F 1C89-1C8A 208F 209D-209F 20C1-20C4 2427-2429 2B96
2E60-2E63 31E4-31E5 A7CB-A7CF A7D2 A7D4 A7DA-A7F1 AB6C-AB6D FBC3-FBD2 FD90-FD91 FDC8-FDCE 105C0-105F3 107BB-107BF
10940-10959 10D40-10D8F 10EC2-10EFC 11380-113E2 116D0-116E3 11B0A-11BF9 11DB0-11DF1 11F5A 1246F 12475-1247F 12550-12686
13460-143FA 16100-16139 16D40-16D79 16EA0-16ED3 16FF2-16FF6 187F8-187FF 18CD6-18CFF 18D09-191D2 1B123-1B128 1B168
1CC00-1CEFD 1D127-1D128 1D1EB-1D1FF 1D250-1D281 1D6A6 1DB00-1DB1C 1DF1F-1DF24 1DF2B-1DFFF 1E5D0-1E6FF 1F1AE 1F6D8-1F6D9
1F777-1F77A 1F7DA-1F7DB 1F7F1-1F7FF 1F8B2-1F8D8 1FA54-1FA57 1FA89-1FA8F 1FABE 1FAC6-1FACD 1FADC-1FADF 1FAE9-1FAEF
1FAF9-1FAFA 1FBCB-1FBEF 1FBFA 2B73A-2B73F 2B81E 2CEA2-2CEAD 323B0-3FC3F
"""
_AFTER_UNICODE_15 = regex.compile(
    "["
    + "".join("-".join(f"\\U{int(end, 16):08X}" for end in item.split("-")) for item in _NEW_CODE_POINTS.split())
    + "]"
)


def _unassigned(match: regex.Match[str]) -> str:
    """A noncharacter (unassigned in every version of Unicode); U+FFFE keeps what lies in the range U+0800 to U+4E00."""
    return "\ufffe" if "\u0800" <= match[0] <= "\u4e00" else "\uffff"


@dataclass(frozen=True)
class PreTokenizer:
    """One pre-tokenization rule.

    Attributes:
        passes: patterns (or functions), applied in turn to every piece of the pass before.
        ignore_merges: a piece that is a token as a whole is that token, whatever the merges say.
        add_bos: whether a prompt starts with BOS when the file does not say.
    """

    passes: tuple[Pass, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def split(self, text: str) -> list[str]:
        """The pieces of ``text`` in order; their concatenation is ``text``. No piece is empty."""
        if text.isascii() or not _AFTER_UNICODE_15.search(text):
            return self._split(text)
        pieces, start = [], 0
        for piece in self._split(_AFTER_UNICODE_15.sub(_unassigned, text)):
            pieces.append(text[start : start + len(piece)])
            start += len(piece)
        return pieces

    def _split(self, text: str) -> list[str]:
        first, *others = self._cutters
        pieces = first(text)
        for cut in others:
            pieces = [part for piece in pieces for part in cut(piece)]
        return pieces

    @cached_property
    def _cutters(self) -> tuple[Callable[[str], list[str]], ...]:
        return tuple(_cutter(step) if isinstance(step, str) else step for step in self.passes)


def _cutter(pattern: str) -> Callable[[str], list[str]]:
    """Matches of ``pattern`` and the text between them."""
    with_gaps = regex.compile(f"({pattern})").split
    matches = regex.compile(pattern).findall

    def cut(piece: str) -> list[str]:
        return [part for part in with_gaps(piece) if part]

    def cut_all(piece: str) -> list[str]:
        parts = matches(piece)
        return parts if sum(map(len, parts)) == len(piece) else cut(piece)

    # A pattern that ends so matches every character as a rule, and then findall has half the work.
    return cut_all if pattern.endswith(r"|\s+") else cut


_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_RULES: dict[str, PreTokenizer] = {}


def _rule(names: str, *passes: Pass, ignore_merges: bool = False, add_bos: bool = False) -> None:
    rule = PreTokenizer(passes, ignore_merges, add_bos)
    _RULES.update((name, rule) for name in names.split())


_rule("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_rule(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    _LLAMA3,
    ignore_merges=True,
    add_bos=True,
)
_rule("dbrx smaug-bpe chatglm-bpe", _LLAMA3)
_rule("glm4 glm5", _LLAMA3, ignore_merges=True)
_rule("jais-2", _JAIS2)
_rule("minicpm5", r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"), ignore_merges=True)
_rule("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2)
_rule("laguna", r"[^\n]+|\n+", _QWEN2)
_rule("ufakzeka", rf"{_WORD}|\p{{N}}|{_OTHER}|{_SPACE_TAIL}")
_rule(
    "qwen35",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_MARKED_LETTER}+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE_TAIL}",
)
_rule("seed-coder", rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE_TAIL}")
_rule(
    "bailingmoe bailingmoe2 llada-moe",
    rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_OTHER}|\s*[\r\n]|\s+(?!\S)|\s+",
)
_rule(
    "exaone-moe",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
_rule(
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
    " roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
    _GPT2,
)
_rule("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", *_DIGIT_THEN_GPT2)
_rule("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
_rule(
    "deepseek-llm",
    r"[\r\n]",
    _DEEPSEEK_LETTERS,
    r"\s?[!-/:-~！-／：-～‘-‟、。]+",  # the original range starts at U+3000: white space, see _CJK_AND_HANGUL
    r"(?<!\s)\s++\Z",  # \s+$ without trying every start in a run of spaces
    _CJK_AND_HANGUL,
    r"\p{N}+",
)
_rule("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")
_rule("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3)
_rule(
    "spark2_5",
    r"\p{N}{1,3}",
    _CJK_AND_KANA,
    rf"{_ASCII_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_rule("poro-chat bloom gpt3-finnish", r" ?[^(\s|.,!?…。，、।۔،)]+")
_rule("viking", r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")
_rule("tekken", _cased_words(r"\p{L}", "", r"\p{N}"), ignore_merges=True, add_bos=True)
_rule("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O)
_rule(
    "granite-embed-multi-97m", _cased_words(_MARKED_LETTER, f"(?:{_CONTRACTION})?", r"\p{N}{1,3}"), ignore_merges=True
)
_rule(
    "tiny_aya cohere2moe",
    _thousands_after_text,
    rf"{_UNCASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE_TAIL}",
)
_rule(
    "youtu",
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    rf"{_UNCASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE_TAIL}",
    ignore_merges=True,
)
_rule("kimi-k2", rf"{_HAN}+|{_KIMI_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_SPACE_TAIL}")
_rule("superbpe", r"\p{N}+", _ascii_thousands)
_rule(
    "afmoe",
    _thousands_after_text,
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK3_WORDS,
)
_rule(
    "chameleon",
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
    add_bos=True,
)


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rule that ``tokenizer.ggml.pre`` names; an unknown or missing name warns and gives ``default``."""
    rule = _RULES.get(name or "")
    if rule is None:
        named = "names no pre-tokenizer" if not name else f"names an unknown pre-tokenizer, {name[:60]!r}"
        log.warning("the vocabulary %s; using 'default': text may be split differently than in training", named)
        return _RULES["default"]
    return rule
