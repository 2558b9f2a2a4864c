-- Version 2. `rev` is the number of the commit that wrote a row, `proof` a checksum over all of it (NULL in
-- rows that version 1 wrote): a disk that flips a bit of a text is found out.
ALTER TABLE jobs ADD COLUMN rev INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN proof INTEGER;
ALTER TABLE events ADD COLUMN proof INTEGER;
ALTER TABLE nodes ADD COLUMN proof INTEGER;
ALTER TABLE settled ADD COLUMN proof INTEGER;

-- What the controller knows about its own memory.
CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
