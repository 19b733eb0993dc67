-- device/0006_sent.sql: what each message was, so that its receipt can be held against it when its bytes are gone.
-- Messages from before have neither hash.
alter table outbox add column hash blob check (hash is null or length(hash) = 32);        -- SHA-256 of the bytes
alter table outbox add column content blob check (content is null or length(content) = 32);  -- of the message in them
create trigger outbox_hashes_never_change before update on outbox
when new.hash is not old.hash or new.content is not old.content
begin select raise(abort, 'what was charged is sent as the same bytes'); end;
