-- Version 3. What is kept whole under its name: one table for every kind. Rows taken over have no proof.
CREATE TABLE documents (
    name     TEXT PRIMARY KEY,
    document TEXT NOT NULL,
    proof    INTEGER
) STRICT, WITHOUT ROWID;
INSERT INTO documents SELECT 'node/' || id, '{"node":' || document || '}', NULL FROM nodes;
INSERT INTO documents
    SELECT 'settled/' || replica, '{"settled":' || json_object('replica', replica, 'node', node) || '}', NULL FROM settled;
DROP TABLE nodes;
DROP TABLE settled;
