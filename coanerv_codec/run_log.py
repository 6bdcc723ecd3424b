"""The log of a training run, `log.jsonl` in its folder: one record a line."""

import json
from pathlib import Path

from coanerv_codec.atomic import write_whole
from coanerv_codec.errors import OutputError

LOG = "log.jsonl"


class RunLog:
    """The log, cut back to the step at which a run resumes, so that no part of the curve stands twice."""

    def __init__(self, path: Path, step: int):
        kept = [r for r in read_log(path) if r["step"] <= step] if path.exists() else []
        write_whole(path, "".join(json.dumps(r) + "\n" for r in kept))
        self.path = path

    def write(self, record: dict[str, float]) -> None:
        """Append one record."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({k: round(v, 7) for k, v in record.items()}) + "\n")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error


def read_log(path: Path) -> list[dict[str, float]]:
    """Read a log; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
