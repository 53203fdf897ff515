"""ROUGE against published examples, and against the package itself on texts that nobody chose."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from paceline.analysis.served import rouge

pytestmark = pytest.mark.skipif(find_spec("rouge_score") is None, reason="pip install 'paceline[accuracy]'")
TYPES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


def test_a_worked_example() -> None:
    """After Lin (2004), section 3.1: three of four words in order are 3/4, two of four 2/4."""
    reference = "police killed the gunman"
    assert rouge.score("police kill the gunman", reference).rouge_l == 1.0  # stemming: killed is kill
    assert rouge.score("police shot the gunman", reference).rouge_l == pytest.approx(3 / 4)
    assert rouge.score("the gunman shot police", reference).rouge_l == pytest.approx(2 / 4)
    assert rouge.score("the gunman shot police", reference).rouge2 == pytest.approx(1 / 3)


def test_equal_texts_and_nothing() -> None:
    assert rouge.score("One line.\nAnother one.", "One line. Another one.") == (1.0, 1.0, 1.0, 1.0)
    assert rouge.score("", "something") == (0.0, 0.0, 0.0, 0.0)
    assert rouge.score("something", "") == (0.0, 0.0, 0.0, 0.0)
    assert rouge.score("word", "word") == (1.0, 0.0, 1.0, 1.0)


def test_the_same_as_the_package_to_the_last_digit() -> None:
    from rouge_score import rouge_scorer

    draw = random.Random(7)
    words = [
        "".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) + draw.choice(("", "ing", "ed", "s", "ation"))
        for _ in range(60)
    ]

    def text() -> str:
        sentences = (
            draw.choices(words[: draw.choice((4, 60))], k=draw.randint(0, 20)) for _ in range(draw.randint(1, 5))
        )
        return "\n".join(map(" ".join, sentences))

    package = rouge_scorer.RougeScorer(TYPES, use_stemmer=True)
    for _ in range(60):
        answer, reference = text(), text()
        expected = package.score(reference, answer)
        assert rouge.score(answer, reference) == tuple(expected[name].fmeasure for name in TYPES)


def test_sentences_end_where_the_rule_says() -> None:
    text = 'Mr. Smith left the U.S. on Jan. 5. He said "No!" J. K. paid 3.5 dollars (twice.) Why?\nso it goes'
    assert rouge.sentences(text) == [
        "Mr. Smith left the U.S. on Jan. 5.",
        'He said "No!"',
        "J. K. paid 3.5 dollars (twice.)",
        "Why?",
        "so it goes",
    ]
