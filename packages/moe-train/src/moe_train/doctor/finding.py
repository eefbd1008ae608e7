"""One answer of the doctor."""

from typing import NamedTuple

GOOD, LACKS, BAD = "good", "lacks", "bad"


class Finding(NamedTuple):
    """One answer.

    Attributes:
        name: Of the question.
        state: ``good``; ``lacks`` for what a run does without; ``bad`` for what would stop one.
        found: What there is, with numbers.
        remedy: What to do, empty where nothing has to be done.
    """

    name: str
    state: str
    found: str
    remedy: str = ""

    def text(self) -> str:
        """Return the answer as a line for people."""
        remedy = f" - {self.remedy}" if self.remedy else ""
        return f"{self.state:5} {self.name:16} {self.found}{remedy}"


def gib(nbytes: float) -> str:
    """Return bytes as GiB, for people."""
    return f"{nbytes / 2**30:.1f} GiB"
