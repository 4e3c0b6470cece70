"""Byte-pair encoding by tiktoken, from the vocabulary and the merge list of a GGUF file.

tiktoken joins the adjacent pair whose *product* has the lowest rank; the file lists *pairs* in the order in which they are
joined. The two agree on every text if tiktoken knows exactly the tokens that the merge list can produce, ranked by the merge
that produces them:

* whether a token forms depends on its own bytes alone, as long as no merge crosses its borders; so a token that does not
  form when its bytes are the whole text never forms, and tiktoken must not know it;
* a token that does form is always formed by the same pair, so other pairs for it never act and its rank is that pair's.

``_reachable`` finds these tokens and pairs for the whole vocabulary at once. It needs a merge list in which the parts of a
pair are made by earlier merges, as every training run writes it; for any other list ``_merge_by_list`` joins the pieces one
by one as the file says.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat

import numpy as np
import tiktoken

from m40llm.text.errors import TokenizerError, quote

_MAX_CACHED_PIECES = 1 << 16
_MAX_CACHED_CHARS = 64


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte: printable Latin-1 stays, the rest becomes U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update((byte, chr(0x100 + n)) for n, byte in enumerate(others))
    return alphabet


BYTE_TO_CHAR = _byte_alphabet()
_TO_LATIN1 = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}
_TO_ALPHABET = dict(BYTE_TO_CHAR)
_ALPHABET = frozenset(BYTE_TO_CHAR.values())


def decode_byte_alphabet(token: str) -> bytes:
    """The bytes that a token in GPT-2's alphabet stands for; a character outside of it stands for its own UTF-8."""
    if _ALPHABET.issuperset(token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    parts = (
        bytes([_TO_LATIN1[ord(char)]]) if char in _ALPHABET else char.encode("utf-8", "surrogateescape")
        for char in token
    )
    return b"".join(parts)


def encode_byte_alphabet(data: bytes) -> str:
    """``data`` in GPT-2's alphabet, the inverse of :func:`decode_byte_alphabet`."""
    return data.decode("latin-1").translate(_TO_ALPHABET)


class BytePairEncoder:
    """Token ids of pre-tokenized pieces.

    Args:
        token_ids: token text in GPT-2's alphabet → id, for the whole vocabulary.
        merges: ``"left right"`` in the order in which pairs are joined.
        ignore_merges: a piece that is a token as a whole is that token.

    Raises:
        TokenizerError: a merge that is not two parts.
    """

    def __init__(self, token_ids: dict[str, int], merges: Sequence[str], *, ignore_merges: bool) -> None:
        self._token_ids = token_ids
        self._ignore_merges = ignore_merges
        symbols, left, right, product = _number_symbols(token_ids, merges)
        self._symbols = symbols
        self._names = list(symbols)
        self._cache: dict[str, list[int]] = {}
        self._pair_ranks: dict[tuple[int, int], tuple[int, int]] | None = None
        self._encoding: tiktoken.Encoding | None = None
        lengths = np.fromiter(map(len, self._names), np.int64, len(symbols))
        single = [symbols[char] for char in BYTE_TO_CHAR.values()]
        formed = _reachable(lengths, single, left, right, product)
        if formed is None:
            self._pair_ranks = {}
            for rank, (a, b, c) in enumerate(zip(left.tolist(), right.tolist(), product.tolist(), strict=True)):
                self._pair_ranks.setdefault((a, b), (rank, c))
        else:
            self._encoding, self._rank_to_symbol = self._tiktoken_encoding(formed)

    def _tiktoken_encoding(self, formed: np.ndarray) -> tuple[tiktoken.Encoding, list[int]]:
        ranks = {bytes([byte]): byte for byte in range(256)}
        ordered = formed.tolist()
        ranks.update(
            zip(_decode_all([self._names[symbol] for symbol in ordered]), range(256, 256 + len(ordered)), strict=True)
        )
        # The pattern takes a piece as it is: pieces come from PreTokenizer, whose passes tiktoken cannot express.
        encoding = tiktoken.Encoding("gguf", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={})
        return encoding, [self._symbols[BYTE_TO_CHAR[byte]] for byte in range(256)] + ordered

    def encode(self, pieces: list[str]) -> list[int]:
        """Token ids of ``pieces``, each encoded on its own. Bytes that the vocabulary lacks are dropped, as in llama.cpp."""
        cache = self._cache
        ids: list[int] = []
        for piece in pieces:
            found = cache.get(piece)
            if found is None:
                found = self._encode_piece(piece)
                if len(piece) <= _MAX_CACHED_CHARS:
                    if len(cache) >= _MAX_CACHED_PIECES:
                        cache.clear()
                    cache[piece] = found
            ids += found
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        if self._ignore_merges:
            whole = self._token_ids.get(encode_byte_alphabet(piece.encode()))
            if whole is not None:
                return [whole]
        if self._encoding is not None:
            symbols = [self._rank_to_symbol[rank] for rank in self._encoding.encode_ordinary(piece)]
        else:
            symbols = self._merge_by_list([self._symbols[char] for char in encode_byte_alphabet(piece.encode())])
        size = len(self._token_ids)
        if max(symbols) < size:
            return symbols
        # A merge may produce a text that is no token: llama.cpp then falls back to tokens of its single ASCII characters.
        ids = []
        for symbol in symbols:
            parts = (
                [symbol] if symbol < size else [self._token_ids.get(c, -1) for c in self._names[symbol] if c.isascii()]
            )
            ids += [part for part in parts if part >= 0]
        return ids

    def _merge_by_list(self, symbols: list[int]) -> list[int]:
        """Joins the pair of lowest rank, the leftmost first, until none is left: O(n log n) with a heap and a linked list."""
        assert self._pair_ranks is not None
        pair_ranks = self._pair_ranks
        n = len(symbols)
        after = [*range(1, n), -1]
        before = list(range(-1, n - 1))
        heap: list[tuple[int, int, int, int, int]] = []

        def push(i: int, j: int) -> None:
            found = pair_ranks.get((symbols[i], symbols[j]))
            if found is not None:
                heapq.heappush(heap, (found[0], i, symbols[i], symbols[j], found[1]))

        for i in range(n - 1):
            push(i, i + 1)
        while heap:
            _, i, a, b, merged = heapq.heappop(heap)
            j = after[i] if symbols[i] == a else -1
            if j < 0 or symbols[j] != b:
                continue  # one of the two has been joined to something else since
            symbols[i], symbols[j] = merged, -1
            after[i] = after[j]
            if after[i] >= 0:
                before[after[i]] = i
                push(i, after[i])
            if before[i] >= 0:
                push(before[i], i)
        return [symbol for symbol in symbols if symbol >= 0]


def _decode_all(names: list[str]) -> list[bytes]:
    """:func:`decode_byte_alphabet` of many names that hold characters of the alphabet only."""
    table = np.zeros(max(_TO_LATIN1) + 1, np.uint8)
    table[list(_TO_LATIN1)] = list(_TO_LATIN1.values())
    joined = table[np.frombuffer("".join(names).encode("utf-32-le"), np.uint32)].tobytes()
    ends = list(accumulate(map(len, names)))
    return [joined[start:end] for start, end in pairwise([0, *ends])]


def _number_symbols(
    token_ids: dict[str, int], merges: Sequence[str]
) -> tuple[dict[str, int], np.ndarray, np.ndarray, np.ndarray]:
    """Every text that takes part in a merge, numbered: tokens by their id, then bytes and merge parts that are no token.

    Returns:
        symbols (text → number, in order of numbers), and (M,) int64 numbers of left part, right part and product per merge.
    """
    symbols = dict(token_ids)
    for char in BYTE_TO_CHAR.values():
        symbols.setdefault(char, len(symbols))
    left_names, right_names = _split_merges(merges)
    names = [left_names, right_names, [a + b for a, b in zip(left_names, right_names, strict=True)]]
    try:
        left, right, product = (np.fromiter(map(symbols.__getitem__, part), np.int64, len(part)) for part in names)
    except KeyError:
        for part in names:
            for name in part:
                symbols.setdefault(name, len(symbols))
        left, right, product = (np.fromiter(map(symbols.__getitem__, part), np.int64, len(part)) for part in names)
    return symbols, left, right, product


def _split_merges(merges: Sequence[str]) -> tuple[list[str], list[str]]:
    """Left and right parts of all merges."""
    joined = "\n".join(merges)
    flat = joined.replace(" ", "\n").split("\n")
    if len(flat) == 2 * len(merges) and "" not in flat and all(map(str.__contains__, merges, repeat(" "))):
        return flat[0::2], flat[1::2]
    left, right = [], []
    for at, merge in enumerate(merges):
        # llama.cpp looks for the space from the second character on, so a leading space belongs to the left part.
        space = merge.find(" ", 1)
        if space < 0 or space == len(merge) - 1:
            raise TokenizerError(
                f"tokenizer.ggml.merges[{at}] is {quote(merge)}: a merge is two parts with a space between. "
                "The file is damaged; convert or download it again"
            )
        left.append(merge[:space])
        right.append(merge[space + 1 :])
    return left, right


def _reachable(
    lengths: np.ndarray, single: list[int], left: np.ndarray, right: np.ndarray, product: np.ndarray
) -> np.ndarray | None:
    """Numbers of the products that form from their own bytes, in the order in which their merges act.

    Args:
        lengths: (N,) characters of each symbol.
        single: numbers of the 256 symbols that text is made of before any merge.
        left, right, product: (M,) symbol numbers of each merge, in the file's order.

    Returns:
        (P,) int64, or None if a part of a usable merge is made by a later merge, so that ranks cannot say the order.
    """
    n_symbols = len(lengths)
    keys, rank_of_key = np.unique(
        left * n_symbols + right, return_index=True
    )  # of a pair listed twice, the first counts
    order = np.sort(rank_of_key)
    order = order[np.argsort(lengths[product[order]], kind="stable")]
    bounds = np.flatnonzero(np.diff(lengths[product[order]], prepend=-1, append=-1))
    part_left = np.full(n_symbols, -1, np.int64)
    part_right = np.full(n_symbols, -1, np.int64)
    rank = np.full(n_symbols, -1, np.int64)
    forms = np.zeros(n_symbols, bool)
    forms[single] = True
    for start, stop in pairwise(bounds):
        merges = order[start:stop]
        merges = merges[forms[left[merges]] & forms[right[merges]]]
        if (np.maximum(rank[left[merges]], rank[right[merges]]) >= merges).any():
            return None
        merges = merges[_undisturbed(merges, left, right, part_left, part_right, rank, keys, rank_of_key)]
        made = product[merges]
        part_left[made], part_right[made], rank[made], forms[made] = left[merges], right[merges], merges, True
    products = np.flatnonzero(rank >= 0)
    return products[np.argsort(rank[products])]


def _undisturbed(
    merges: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    part_left: np.ndarray,
    part_right: np.ndarray,
    rank: np.ndarray,
    keys: np.ndarray,
    rank_of_key: np.ndarray,
) -> np.ndarray:
    """Whether each merge's two parts both form before any merge across the border between them.

    Goes back in time: ``u | v`` are the symbols at the border; the one that formed later is taken apart; the pair that then
    meets at the border must not have acted before that one formed. Of two equal merges the left one acts first.
    """
    undisturbed = np.ones(len(merges), bool)
    at = np.arange(len(merges))
    u, v = left[merges], right[merges]
    while True:
        open_ = (rank[u] >= 0) | (rank[v] >= 0)
        at, u, v = at[open_], u[open_], v[open_]
        if not len(at):
            return undisturbed
        split_v = rank[v] >= rank[u]
        formed = np.where(split_v, rank[v], rank[u])
        u, v = np.where(split_v, u, part_right[u]), np.where(split_v, part_left[v], v)
        wanted = u * len(rank) + v
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        crossing = rank_of_key[found]
        disturbed = (keys[found] == wanted) & (crossing < formed + split_v)
        undisturbed[at[disturbed]] = False
        at, u, v = at[~disturbed], u[~disturbed], v[~disturbed]
