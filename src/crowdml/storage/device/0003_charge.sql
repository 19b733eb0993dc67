-- device/0003_charge.sql: what each release cost. Append-only: no charge is edited, none is refunded.
create table serial (
    id   integer primary key check (id = 0),
    next integer not null check (next >= 0)          -- every serial below it was handed out, over all tasks
) strict;
insert into serial (id, next) values (0, 0);
create trigger serial_never_goes_back before update on serial when new.next < old.next or new.id <> old.id
begin select raise(abort, 'a serial is never handed out twice'); end;
create trigger serial_is_never_deleted before delete on serial
begin select raise(abort, 'a serial is never handed out twice'); end;
create trigger serial_is_never_replaced before insert on serial when exists (select 1 from serial where id = new.id)
begin select raise(abort, 'a serial is never handed out twice'); end;

create table charge (
    id           integer primary key,
    task         blob    not null references task (hash),
    mechanism    text    not null,                   -- the row of the protocol's table
    loss         text    not null,                   -- 'pure 1/10', 'zcdp 3/1000', ...: what the noise proves, exact
    device_loss  text    not null,                   -- the same if all samples of the span are replaced
    unit         text    not null check (unit in ('sample', 'device')),
    adjacency    text    not null check (adjacency in ('replace-sample', 'replace-device')),
    observer     text    not null check (observer in ('anyone', 'aggregate', 'devices')),
    scope        text    not null check (scope = 'release'),  -- totals are computed, never stored
    first_sample integer not null check (first_sample >= 0),  -- serials of the samples it covers, both included
    last_sample  integer not null check (last_sample >= first_sample),
    level        integer not null check (level between 0 and 62),
    charged_at   text    not null,                   -- UTC, ISO 8601
    check (adjacency = 'replace-' || unit),
    -- bits of last - first: a span of this level that meets serial s begins after s - 2^level
    check ((last_sample - first_sample) >> level = 0),
    check (level = 0 or (last_sample - first_sample) >> (level - 1) = 1)
) strict;
create index charge_by_span on charge (level, first_sample, last_sample);
create trigger charge_is_never_edited before update on charge
begin select raise(abort, 'a charge is never edited'); end;
create trigger charge_is_never_deleted before delete on charge
begin select raise(abort, 'a charge is never refunded'); end;
create trigger charge_is_never_replaced before insert on charge when exists (select 1 from charge where id = new.id)
begin select raise(abort, 'a charge is never edited'); end;
