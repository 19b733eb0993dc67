-- device/0001_migration.sql: which migrations ran. Each writes its row in its own transaction.
create table migration (
    number integer primary key,
    name   text    not null
) strict;
create trigger migration_is_never_edited before update on migration
begin select raise(abort, 'the record of a migration is never edited'); end;
create trigger migration_is_never_deleted before delete on migration
begin select raise(abort, 'the record of a migration is never deleted'); end;
