-- device/0002_task.sql: the tasks that this device has worked on, and where it stands in each.
create table task (
    hash blob primary key check (length(hash) = 32)  -- SHA-256 of the task file
) strict;
create trigger task_is_never_edited before update on task
begin select raise(abort, 'a task is never edited: an edited task is a new task'); end;
create trigger task_is_never_deleted before delete on task
begin select raise(abort, 'a task with charges is never forgotten'); end;

create table state (
    task blob primary key references task (hash),
    body blob not null                               -- the protocol's own bytes after its last step
) strict;
