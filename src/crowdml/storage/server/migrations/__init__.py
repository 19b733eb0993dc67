"""Alembic's environment and the numbered migrations of the server's database. Forward only."""
