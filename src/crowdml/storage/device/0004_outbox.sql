-- device/0004_outbox.sql: what may be sent, the same bytes until they are acknowledged. Then the bytes go, the row stays.
create table outbox (
    task         blob    not null references task (hash),
    seq          integer not null check (seq >= 0),
    body         blob,
    acknowledged integer not null default 0 check (acknowledged in (0, 1)),
    primary key (task, seq),
    check ((body is null) = (acknowledged = 1))
) strict;
create index outbox_waiting on outbox (task, seq) where acknowledged = 0;
create trigger outbox_bytes_never_change before update on outbox
when new.task <> old.task or new.seq <> old.seq or old.acknowledged = 1 or new.acknowledged = 0
begin select raise(abort, 'what was charged is sent as the same bytes'); end;
create trigger outbox_is_never_deleted before delete on outbox
begin select raise(abort, 'a sequence number is never used twice'); end;
create trigger outbox_is_never_replaced before insert on outbox
when exists (select 1 from outbox where task = new.task and seq = new.seq)
begin select raise(abort, 'a sequence number is never used twice'); end;
