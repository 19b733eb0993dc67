-- device/0007_masked.sql: what a masked release costs if everyone else colludes, and the round that a device is in.
alter table charge add column alone text check (alone is null or observer = 'aggregate');   -- a loss, as in `loss`
alter table charge add column device_alone text check ((device_alone is null) = (alone is null));
create index charge_alone on charge (device) where observer = 'aggregate';

create table round (
    device integer not null check (device >= 0),
    task   blob    not null references task (hash),
    number integer not null check (number >= 1),     -- the last round that this device ever began
    body   blob,                                     -- what it keeps of it, some of it secret; none when its part is over
    primary key (device, task)
) strict;
create trigger round_never_goes_back before update on round
when new.device <> old.device or new.task <> old.task or new.number < old.number
begin select raise(abort, 'a device takes part in each round once'); end;
create trigger round_never_begins_twice before update on round
when new.number = old.number and old.body is null and new.body is not null
begin select raise(abort, 'a device takes part in each round once'); end;
create trigger round_is_never_deleted before delete on round
begin select raise(abort, 'a device takes part in each round once'); end;
create trigger round_is_never_replaced before insert on round
when exists (select 1 from round where device = new.device and task = new.task and number > new.number)
begin select raise(abort, 'a device takes part in each round once'); end;
