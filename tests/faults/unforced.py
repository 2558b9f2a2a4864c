"""Takes back what a node wrote and did not force to the disk, as a power cut may: `unforced.py STATE`.

Between the acceptance of a replica and its end, the steps in the journal are not forced; nor are the order and the mark
of the start in the job's directory.
"""

import json
import pathlib
import sqlite3
import sys

state = pathlib.Path(sys.argv[1])
journal = sqlite3.connect(state / "journal.db")
lost = 0
for id, text in journal.execute("SELECT id, record FROM replica").fetchall():
    record = json.loads(text)
    directory = state / "jobs" / id
    if record["ending"] is None and record.get("preempted") is None:
        record = json.loads((directory / "order.json").read_text())
        for mark in ("sealed", "sum"):
            del record[mark]
    elif record["outcome"] is not None:
        record.update(step="uploading", outcome=None, precious=False)
    lost += record != json.loads(text)
    journal.execute("UPDATE replica SET record = ?, sum = '' WHERE id = ?", (json.dumps(record), id))
    for name in ("order.json", "started"):
        file = directory / name
        if file.exists():
            file.write_bytes(b"")
journal.commit()
print(lost)
