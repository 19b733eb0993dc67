"""What Alembic runs: the migrations, on the connection and in the transaction that `Database` hands over."""

from __future__ import annotations

from alembic import context

from crowdml.storage.server.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite too: our connections begin their transactions themselves
)
with context.begin_transaction():
    context.run_migrations()
