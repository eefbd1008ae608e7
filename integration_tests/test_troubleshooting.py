"""Every message that the page explains is one that the stack gives."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OF_OTHERS = {"No space left on device", "CUDA out of memory"}
TABLES = PAGE.partition("## It runs")[0]
MESSAGES = [m for m in re.findall(r"(?m)^\| `([^`]+)`", TABLES) if m not in OF_OTHERS]


@pytest.fixture(scope="module")
def source() -> str:
    """All strings of the packages as they are joined, with their expressions as dots."""
    text = "\n".join(p.read_text() for p in sorted((ROOT / "packages").glob("*/src/**/*.py")))
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}", "…", text)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_source(message, source) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert parts
    pattern = ".{0,60}?".join(map(re.escape, parts))
    assert re.search(pattern, source), message


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 20
