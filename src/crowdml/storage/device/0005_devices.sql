-- device/0005_devices.sql: many devices in one file, the samples that wait, where a source was left, and receipts.
-- A device of its own file is device 0. What was per file is now per device; no rule changes.
alter table charge add column device integer not null default 0;
drop index charge_by_span;
create index charge_by_span on charge (device, level, first_sample, last_sample);
create index charge_by_device on charge (device);

create table counter (
    device integer primary key check (device >= 0),
    next   integer not null check (next >= 0)        -- every serial below it was handed out, over all tasks
) strict;
insert into counter (device, next) select id, next from serial;
drop table serial;
alter table counter rename to serial;
create trigger serial_never_goes_back before update on serial when new.next < old.next or new.device <> old.device
begin select raise(abort, 'a serial is never handed out twice'); end;
create trigger serial_is_never_deleted before delete on serial
begin select raise(abort, 'a serial is never handed out twice'); end;
create trigger serial_is_never_replaced before insert on serial
when exists (select 1 from serial where device = new.device)
begin select raise(abort, 'a serial is never handed out twice'); end;

create table standing (
    device integer not null check (device >= 0),
    task   blob    not null references task (hash),
    body   blob    not null,                         -- the protocol's own bytes after its last step
    primary key (device, task)
) strict;
insert into standing (device, task, body) select 0, task, body from state;
drop table state;
alter table standing rename to state;

create table leaving (
    device       integer not null check (device >= 0),
    task         blob    not null references task (hash),
    seq          integer not null check (seq >= 0),
    body         blob,
    acknowledged integer not null default 0 check (acknowledged in (0, 1)),
    receipt      blob,                               -- the server's, where it gave one
    primary key (device, task, seq),
    check ((body is null) = (acknowledged = 1)),
    check (receipt is null or acknowledged = 1)
) strict;
insert into leaving (device, task, seq, body, acknowledged)
select 0, task, seq, body, acknowledged from outbox order by rowid;
drop table outbox;
alter table leaving rename to outbox;
create index outbox_waiting on outbox (device, task, seq) where acknowledged = 0;
create trigger outbox_bytes_never_change before update on outbox
when new.device <> old.device or new.task <> old.task or new.seq <> old.seq or old.acknowledged = 1
  or new.acknowledged = 0
begin select raise(abort, 'what was charged is sent as the same bytes'); end;
create trigger outbox_is_never_deleted before delete on outbox
begin select raise(abort, 'a sequence number is never used twice'); end;
create trigger outbox_is_never_replaced before insert on outbox
when exists (select 1 from outbox where device = new.device and task = new.task and seq = new.seq)
begin select raise(abort, 'a sequence number is never used twice'); end;

create table waiting (                               -- samples that were sensed and not given yet: they never leave
    device integer not null check (device >= 0),
    task   blob    not null references task (hash),
    serial integer not null check (serial >= 0),
    body   blob    not null,
    primary key (device, serial)
) strict;

create table source (
    device integer not null check (device >= 0),
    name   text    not null,
    taken  integer not null check (taken >= 0),      -- samples read from its beginning: none is read twice
    primary key (device, name)
) strict;
create trigger source_never_goes_back before update on source when new.taken < old.taken
begin select raise(abort, 'a sample is never read twice'); end;
create trigger source_is_never_deleted before delete on source
begin select raise(abort, 'a sample is never read twice'); end;
