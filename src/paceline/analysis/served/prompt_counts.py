"""Whether servers count prompts as they were sent: of token ids the number is known, whatever the server says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample


def notes(records: Sequence[RunRecord]) -> Iterator[str]:
    """One for each model of which some count differs, with the first that does."""
    for model in dict.fromkeys(record.spec.model_text for record in records):
        counted = [r for record in records if record.spec.model_text == model for r in record.requests if _is_known(r)]
        wrong = [request for request in counted if request.prompt_tokens != request.sent_ids]
        if wrong:
            first = wrong[0]
            yield (
                f"the server of {model} counts other prompt tokens than the token ids it was sent in {len(wrong):,} of "
                f"{len(counted):,} answers ({first.prompt_tokens:,} where {first.sent_ids:,} were sent): prompt tokens "
                "a second are by its count"
            )


def _is_known(request: RequestSample) -> bool:
    return request.error is None and request.prompt_tokens is not None and request.sent_ids is not None
