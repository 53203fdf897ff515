"""ROUGE-1, -2, -L and -Lsum of an answer against its reference: the F-measures of the package rouge-score with
stemming, to the last digit, in a fraction of its time.

The package takes a minute or more for 13,368 answers. Its tokenizer and stemmer are used unchanged, each word stemmed
once; the longest common subsequence is computed on the bits of integers (Hyyro, 2004) instead of cell by cell.

Lsum needs sentences, and the splitter behind published values has to be downloaded. The rule here needs nothing: a
sentence ends with its line, or after . ! or ? (and closing quotes or brackets) before white space, unless the full stop
belongs to a single capital letter or to one of ABBREVIATIONS.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import MissingPackageError

ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "sen", "rep", "gov", "gen", "lt", "col", "sgt", "capt", "rev", "hon"),
        *("jr", "sr", "inc", "co", "corp", "ltd", "vs", "etc", "e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "u.n"),
        *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
    )
)
_END = re.compile(r"([.!?][\"')\]\u2019\u201d]*)\s+")
_LAST_WORD = re.compile(r"[\w.]*$")

Words = Sequence[str]


class Scores(NamedTuple):
    """F-measures, 0 to 1."""

    rouge1: float
    rouge2: float
    rouge_l: float
    rouge_lsum: float


def score(answer: str, reference: str) -> Scores:
    """The scores of one answer. Surrounding white space does not count."""
    tokens = _tokeniser()
    answered, expected = (list(map(tokens, sentences(text))) for text in (answer, reference))
    # Sentences end at white space, so their words together are those of the whole text.
    said, wanted = ([word for sentence in side for word in sentence] for side in (answered, expected))
    return Scores(
        _f_measure(_shared_grams(said, wanted, 1), len(said), len(wanted)),
        _f_measure(_shared_grams(said, wanted, 2), len(said) - 1, len(wanted) - 1),
        _f_measure(_table(wanted, said)[-1].bit_count(), len(said), len(wanted)),
        _f_measure(_union_hits(answered, expected), sum(map(len, answered)), sum(map(len, expected))),
    )


@functools.cache
def _tokeniser() -> Callable[[str], Words]:
    try:
        from nltk.stem.porter import PorterStemmer
        from rouge_score import tokenize
    except ImportError:
        raise MissingPackageError("rouge-score", "ROUGE", "'paceline[accuracy]'") from None

    class Stemmer:
        stem = staticmethod(functools.cache(PorterStemmer().stem))

    return lambda text: list(tokenize.tokenize(text, Stemmer))


def sentences(text: str) -> list[str]:
    """Sentences by the rule at the top of this module; none is empty."""
    parts = []
    for line in text.splitlines():
        start = 0
        for end in _END.finditer(line):
            match = _LAST_WORD.search(line[start : end.start()])
            word = match[0] if match else ""
            # A full stop may belong to the word before it.
            abbreviated = word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper())
            if end[1] != "." or not abbreviated:
                parts.append(line[start : end.end(1)])
                start = end.end()
        parts.append(line[start:])
    return [sentence for sentence in map(str.strip, parts) if sentence]


# --- what two texts share ---


def _f_measure(shared: int, said: int, wanted: int) -> float:
    if shared <= 0:
        return 0.0
    precision, recall = shared / said, shared / wanted
    return 2 * precision * recall / (precision + recall)


def _shared_grams(said: Words, wanted: Words, size: int) -> int:
    ours, theirs = (Counter(zip(*(words[i:] for i in range(size)), strict=False)) for words in (said, wanted))
    return (ours & theirs).total()


def _table(rows: Words, columns: Words) -> list[int]:
    """Longest common subsequences: bit j of entry i is set if the length grows from column j to j + 1 among the first i
    rows."""
    positions: dict[str, int] = {}
    for j, word in enumerate(columns):
        positions[word] = positions.get(word, 0) | 1 << j
    every = (1 << len(columns)) - 1
    flat, table = every, [0]
    for word in rows:
        met = flat & positions.get(word, 0)
        flat = ((flat + met) | (flat - met)) & every
        table.append(every & ~flat)
    return table


def _subsequence(rows: Words, columns: Words) -> set[int]:
    """Rows of the longest common subsequence that rouge-score picks if several are equally long."""
    table = _table(rows, columns)
    i, j, picked = len(rows), len(columns), set()
    while i > 0 and j > 0 and table[i]:
        if rows[i - 1] == columns[j - 1]:
            i, j = i - 1, j - 1
            picked.add(i)
        elif (table[i] & ((1 << (j - 1)) - 1)).bit_count() > (table[i - 1] & ((1 << j) - 1)).bit_count():
            j -= 1
        else:
            i -= 1
    return picked


def _union_hits(said: Sequence[Words], wanted: Sequence[Words]) -> int:
    """Words of the expected sentences that some sentence of the answer has in order; no word counts twice."""
    left = [Counter(word for sentence in side for word in sentence) for side in (said, wanted)]
    hits = 0
    for sentence in wanted:
        for position in sorted(set().union(*(_subsequence(sentence, ours) for ours in said))):
            word = sentence[position]
            if all(counts[word] > 0 for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return hits
