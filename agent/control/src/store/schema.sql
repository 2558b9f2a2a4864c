-- Version 1. The documents are JSON; the columns beside them are what is searched for.
CREATE TABLE jobs (
    seq      INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    request  TEXT NOT NULL UNIQUE,
    active   INTEGER NOT NULL,
    document TEXT NOT NULL
) STRICT;
CREATE INDEX jobs_active ON jobs (seq) WHERE active = 1;

CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    job    TEXT NOT NULL REFERENCES jobs (id),
    at     INTEGER NOT NULL,
    epoch  INTEGER NOT NULL,
    node   TEXT,
    text   TEXT NOT NULL
) STRICT;
CREATE INDEX events_job ON events (job);

CREATE TABLE nodes (
    id       TEXT PRIMARY KEY,
    document TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Replicas whose outcome is in and that their node still holds: it is told to forget them.
CREATE TABLE settled (
    replica TEXT PRIMARY KEY,
    node    TEXT NOT NULL
) STRICT, WITHOUT ROWID;
