-- device/0008_memory.sql: the samples of the last batches that a device gave, where it learns from them itself.
create table memory (                                -- they never leave: in no message, no log, no answer
    device integer not null check (device >= 0),
    task   blob    not null references task (hash),
    number integer not null check (number >= 0),     -- of the batch, as its message names it
    body   blob    not null,
    primary key (device, task, number)
) strict;
