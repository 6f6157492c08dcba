"""Every broken dataset of the corpus ends in one clear error, at the time the documentation says."""

from __future__ import annotations

import pytest

from tests.data.broken import CORPUS, DOCUMENT, document, message_of


@pytest.mark.parametrize("name", CORPUS)
def test_one_clear_error(name, tmp_path):
    message, on_opening = message_of(name, tmp_path)
    lines = message.splitlines()
    assert on_opening != CORPUS[name].reading, message
    assert lines[0]
    assert lines[1].startswith("  where:"), message
    assert len(lines) > 2, message
    assert "Traceback" not in message


def test_the_documentation_shows_these_messages():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text), "run: python -m tests.data.broken"
