from __future__ import annotations

import gc

import pytest

from paceline.host.processes import collection_paused


def test_collection_is_paused_inside_and_only_inside() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled(), "whoever had paused it goes on pausing it"
    assert gc.isenabled()


def test_collection_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError("made up by a test")
    assert gc.isenabled()
