"""ROUGE-1, -2, -L and -Lsum of an answer against what a good one says: the F-measures of the package rouge-score with
stemming, to the last digit, in a fraction of its time.

13,368 answers take the package a minute or more. Its words and its stemmer are used as they are, each word stemmed
once; the longest common subsequence is found over bits of whole numbers (Hyyro, 2004) instead of cell by cell.

Lsum needs sentences, and the splitter that published values were made with has to be downloaded. The rule here needs
nothing: a sentence ends with its line, or after . ! or ? (and closing quotes or brackets) before white space, unless
the full stop belongs to a single capital letter or to one of ABBREVIATIONS.
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
    """Of one answer. White space around either does not count."""
    tokens = _tokeniser()
    spoken, asked = (list(map(tokens, sentences(text))) for text in (answer, reference))
    # Sentences part at white space, where words do too: theirs together are those of the whole text.
    said, wanted = ([word for sentence in side for word in sentence] for side in (spoken, asked))
    return Scores(
        _f_measure(_shared_grams(said, wanted, 1), len(said), len(wanted)),
        _f_measure(_shared_grams(said, wanted, 2), len(said) - 1, len(wanted) - 1),
        _f_measure(_count(_table(wanted, said)[-1]), len(said), len(wanted)),
        _f_measure(_union_hits(spoken, asked), sum(map(len, spoken)), sum(map(len, asked))),
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
    """By the rule at the top of this module; none is empty."""
    found = []
    for line in text.splitlines():
        start = 0
        for end in _END.finditer(line):
            if end[1] != "." or not _is_abbreviation(line[start : end.start()]):
                found.append(line[start : end.end(1)])
                start = end.end()
        found.append(line[start:])
    return [sentence for sentence in map(str.strip, found) if sentence]


def _is_abbreviation(before: str) -> bool:
    """Whether a full stop after this text may belong to its last word."""
    found = _LAST_WORD.search(before)
    word = found[0] if found else ""
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper())


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
    """The table of longest common subsequences: bit j of entry i says that its length grows from column j to j + 1
    among the first i rows."""
    places: dict[str, int] = {}
    for j, word in enumerate(columns):
        places[word] = places.get(word, 0) | 1 << j
    every = (1 << len(columns)) - 1
    flat, table = every, [0]
    for word in rows:
        met = flat & places.get(word, 0)
        flat = ((flat + met) | (flat - met)) & every
        table.append(every & ~flat)
    return table


def _count(bits: int) -> int:
    return bits.bit_count()


def _subsequence(rows: Words, columns: Words) -> set[int]:
    """Rows of the one longest common subsequence that rouge-score finds: where two are equally long, its choice."""
    table = _table(rows, columns)
    i, j, found = len(rows), len(columns), set()
    while i > 0 and j > 0 and table[i]:
        if rows[i - 1] == columns[j - 1]:
            i, j = i - 1, j - 1
            found.add(i)
        elif _count(table[i] & ((1 << (j - 1)) - 1)) > _count(table[i - 1] & ((1 << j) - 1)):
            j -= 1
        else:
            i -= 1
    return found


def _union_hits(said: Sequence[Words], wanted: Sequence[Words]) -> int:
    """Words of the wanted sentences that some sentence of the answer has in order; no word of either counts twice."""
    left = [Counter(word for sentence in side for word in sentence) for side in (said, wanted)]
    hits = 0
    for sentence in wanted:
        for place in sorted(set().union(*(_subsequence(sentence, ours) for ours in said))):
            word = sentence[place]
            if all(counts[word] > 0 for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return hits
